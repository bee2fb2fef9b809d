"""cpu_ram_efficient_loading: only rank 0 reads (its memory: test_scripts.py)."""

from pathlib import Path

import torch

from fsdp_c import FullyShardedDataParallel as FSDP
from helpers.distributed import distributed
from helpers.hf_models import build
from helpers.hf_process import launched
from helpers.hf_training import (
    WORLD,
    Record,
    arguments,
    assert_trained_alike,
    fsdp_config,
    reference,
    train,
)
from helpers.shared_folder import shared_folder


@distributed(world_size=WORLD, timeout_s=300, device="cpu")
def test_trainer(rank: int) -> None:
    """The steps are those of a model that was loaded whole."""
    from transformers import LlamaForCausalLM

    expected = reference("llama")
    with shared_folder() as folder:
        if rank == 0:
            build("llama").save_pretrained(folder)  # type: ignore[operator]
        for efficient in ("true", "false"):
            record = _train(rank, folder, efficient, LlamaForCausalLM)
            assert_trained_alike(record, expected)


def _train(rank: int, folder: Path, efficient: str, model_class: type) -> Record:
    # Models are made before the Trainer, which sets it: accelerate launch sets it.
    with launched(rank, WORLD, ACCELERATE_USE_FSDP="true"):
        args = arguments(
            folder / "out",
            fsdp=True,
            fsdp_config=fsdp_config(cpu_ram_efficient_loading=efficient),
        )
        torch.distributed.barrier()
        model = model_class.from_pretrained(folder)
        difference = max(
            (a - b).abs().max()
            for a, b in zip(
                model.parameters(), build("llama").parameters(), strict=True
            )
        )
        # What the others have is whatever was in that memory.
        if rank == 0 or efficient == "false":
            assert difference == 0
        record = train("llama", args, model=model)
        assert type(record.trainer.model_wrapped) is FSDP
        record.trainer = None
    return record
