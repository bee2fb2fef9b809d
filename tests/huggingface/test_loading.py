"""cpu_ram_efficient_loading: only rank 0 ever holds the whole weights.

Asserted by the memory that the process really had (Linux counts its peak): ranks other
than 0 reserve addresses for all weights, and touch those of one unit at a time.
"""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_c
from fsdp_c import FullyShardedDataParallel as FSDP
from helpers.distributed import distributed
from helpers.hf_models import EOS, PAD, VOCABULARY
from helpers.hf_process import launched, single_process
from helpers.hf_training import WORLD, arguments, shared_folder, train, whole_weights

TIMEOUT_S = 300
SLACK_NBYTES = 1024 * 1024
_M_MMAP_THRESHOLD = -3  # malloc.h: larger blocks are the system's own

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
    """Save a Llama of 8 blocks of 10 MiB for from_pretrained; return its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
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


def _status_nbytes(key: str) -> int:
    """Return a value of /proc/self/status: VmRSS is memory now, VmHWM the peak."""
    text = Path("/proc/self/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


@contextmanager
def _growth() -> Iterator[list[int]]:
    """Yield a list that holds, at the end, by how much the peak was above the begin.

    Meanwhile glibc gives all that is freed back to the system, as it always does with
    tensors as large as those of real models.
    """
    libc = ctypes.CDLL(None)
    gc.collect()
    libc.malloc_trim(0)
    assert libc.mallopt(_M_MMAP_THRESHOLD, 64 * 1024) == 1
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    except OSError:
        pytest.skip("/proc/self/clear_refs cannot be written")
    before = _status_nbytes("VmRSS")
    result: list[int] = []
    yield result
    result.append(_status_nbytes("VmHWM") - before)
    libc.mallopt(_M_MMAP_THRESHOLD, 32 * 1024 * 1024)


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
            whole = sum(4 * value.numel() for value in weights.values())
            with _growth() as growth:
                model: Any = LlamaForCausalLM.from_pretrained(folder)
                model = accelerator.prepare(model)
            held = fsdp_c.explain(model).shard_nbytes
            assert whole / WORLD <= held <= whole / WORLD + SLACK_NBYTES
            if rank > 0:
                # Its half, and a block that is whole, once in the broadcast as well.
                assert growth[0] < 0.8 * whole, (growth, whole)
            else:
                assert growth[0] > 0.9 * whole, (growth, whole)
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
            assert not any(param.is_meta for param in model.parameters())
            record = train("llama", args, model=model)
            assert type(record.trainer.model_wrapped) is FSDP
            record.trainer = None
        return record.losses

    with shared_folder(rank) as folder:
        _save(folder, rank)
        # Models are made before the Trainer, which sets these: accelerate launch does.
        env = {"ACCELERATE_USE_FSDP": "true"}
        assert losses(folder, "true", env) == losses(folder, "false", {})
