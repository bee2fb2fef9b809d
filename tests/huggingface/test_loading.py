"""cpu_ram_efficient_loading: only rank 0 ever holds the whole weights.

Asserted in bytes: of the storages of the parameters after from_pretrained, and of what
torch's CPU allocator handed out while the model was wrapped.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fsdp_c
from fsdp_c import FullyShardedDataParallel as FSDP
from helpers.distributed import distributed
from helpers.hf_models import EOS, PAD, VOCABULARY
from helpers.hf_process import launched, single_process
from helpers.hf_training import WORLD, arguments, shared_folder, train, whole_weights

TIMEOUT_S = 300
SLACK_NBYTES = 64 * 1024

# What accelerate launch sets from a YAML of FSDP version 1.
ENV = {
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "1",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_USE_ORIG_PARAMS": "true",
}


def _save(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    """Save a Llama of 8 blocks for from_pretrained; return its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    with single_process():
        torch.manual_seed(3)
        model = LlamaForCausalLM(config)
        if rank == 0:
            model.save_pretrained(folder)
    dist.barrier()
    return {name: value.clone() for name, value in model.state_dict().items()}


def _held_nbytes(model: nn.Module) -> int:
    """Return the bytes of the parameters' storages, meta ones aside."""
    storages = {
        param.untyped_storage().data_ptr(): param.untyped_storage().nbytes()
        for param in model.parameters()
        if not param.is_meta
    }
    return sum(storages.values())


@contextmanager
def _peak() -> Iterator[list[int]]:
    """Yield a list that holds, at the end, the most bytes that were allocated."""
    result: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield result
    assert profiler.profiler is not None
    now = most = 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    result.append(most)


@pytest.mark.parametrize("use_orig_params", ["true", "false"])
@distributed(world_size=WORLD, timeout_s=TIMEOUT_S, device="cpu")
def test_accelerator(rank: int, world_size: int, use_orig_params: str) -> None:
    from accelerate import Accelerator
    from transformers import LlamaForCausalLM

    env = {**ENV, "FSDP_USE_ORIG_PARAMS": use_orig_params}
    with shared_folder(rank) as folder:
        weights = _save(folder, rank)
        with launched(rank, world_size, **env):
            accelerator = Accelerator()
            model: Any = LlamaForCausalLM.from_pretrained(folder)
            whole = sum(4 * value.numel() for value in weights.values())
            assert _held_nbytes(model) == (whole if rank == 0 else 0)
            largest = max(
                sum(4 * param.numel() for param in module.parameters())
                for module in (*model.model.layers, model.lm_head)
            )
            with _peak() as peak:
                model = accelerator.prepare(model)
            held = fsdp_c.explain(model).shard_nbytes
            assert held <= whole / WORLD + SLACK_NBYTES
            if rank > 0:
                # A unit, once whole and once on its way in the broadcast.
                assert peak[0] <= held + 2 * largest + SLACK_NBYTES, (peak, whole)
                assert peak[0] < 0.9 * whole
            assert type(model) is FSDP
            actual = whole_weights(model)
            assert all(torch.equal(actual[name], weights[name]) for name in weights)
            del model, accelerator


@distributed(world_size=WORLD, timeout_s=TIMEOUT_S, device="cpu")
def test_trainer(rank: int, world_size: int) -> None:
    """The same through fsdp_config: the steps are those of a model loaded whole."""
    from transformers import LlamaForCausalLM

    def losses(folder: Path, efficient: str, env: dict[str, str]) -> list[float]:
        with launched(rank, world_size, **env):
            args = arguments(
                folder / "out",
                fsdp=True,
                fsdp_config={"version": 1, "cpu_ram_efficient_loading": efficient},
            )
            model: Any = LlamaForCausalLM.from_pretrained(folder)
            lacks = any(param.is_meta for param in model.parameters())
            assert lacks is (efficient == "true" and rank > 0)
            record = train("llama", args, model=model)
            assert type(record.trainer.model_wrapped) is FSDP
            record.trainer = None
        return record.losses

    with shared_folder(rank) as folder:
        _save(folder, rank)
        # Models are made before the Trainer, which sets these: accelerate launch does.
        env = {"ACCELERATE_USE_FSDP": "true"}
        assert losses(folder, "true", env) == losses(folder, "false", {})
