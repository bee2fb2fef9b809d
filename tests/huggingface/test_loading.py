"""cpu_ram_efficient_loading: only rank 0 reads (its memory: test_scripts.py)."""

from pathlib import Path

import pytest
import torch

from helpers.distributed import distributed
from helpers.groups import groups_destroyed
from helpers.hf_models import build
from helpers.hf_process import launched
from helpers.hf_training import (
    WORLD,
    Record,
    arguments,
    assert_trained_alike,
    fsdp_config,
    reference,
    root,
    train,
)
from helpers.shared_folder import shared_folder


@pytest.mark.parametrize("version", [1, 2])
@distributed(world_size=WORLD, timeout_s=300)
def test_trainer(rank: int, version: int) -> None:
    """The steps are those of a model that was loaded whole."""
    from transformers import LlamaForCausalLM

    expected = reference("llama")
    with shared_folder() as folder, groups_destroyed():
        if rank == 0:
            build("llama").save_pretrained(folder)  # type: ignore[operator]
        for efficient in ("true", "false"):
            record = _train(rank, folder, efficient, LlamaForCausalLM, version)
            assert_trained_alike(record, expected)


def _train(
    rank: int, folder: Path, efficient: str, model_class: type, version: int
) -> Record:
    # Models are made before the Trainer, which sets it: accelerate launch sets it.
    with launched(rank, WORLD, ACCELERATE_USE_FSDP="true"):
        args = arguments(
            folder / "out",
            fsdp=True,
            fsdp_config=fsdp_config(
                cpu_ram_efficient_loading=efficient, version=version
            ),
        )
        torch.distributed.barrier()
        model = model_class.from_pretrained(folder)
        difference = max(
            (a.cpu() - b).abs().max()
            for a, b in zip(
                model.parameters(), build("llama").parameters(), strict=True
            )
        )
        # What the others have is whatever was in that memory.
        if rank == 0 or efficient == "false":
            assert difference == 0
        record = train("llama", args, model=model)
        root(record)  # checks its class
        record.trainer = None
    return record
