"""A test worker as a process that torchrun or accelerate started, for a while."""

import contextlib
import os
from collections.abc import Iterator

import torch

from helpers.distributed import TEST_DEVICE

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# from_pretrained loads in threads, which may outlive it.
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")

ON_CPU = TEST_DEVICE == "cpu"

# What launchers and accelerate's classes write; taken back after each test.
_PREFIXES = ("ACCELERATE_", "FSDP_", "FORK_LAUNCHED", "MASTER_")
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _is_launchers(name: str) -> bool:
    return name in _NAMES or (
        name.startswith(_PREFIXES) and not name.startswith("FSDP_C_")
    )


def reset_accelerate() -> None:
    """Forget accelerate's state of the process; the process group stays."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread that outlives the test
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {n: v for n, v in os.environ.items() if _is_launchers(n)}
    for name in before:
        del os.environ[name]
    os.environ.update(values)
    reset_accelerate()
    try:
        yield
    finally:
        for name in [n for n in os.environ if _is_launchers(n) or n in values]:
            del os.environ[name]
        os.environ.update(before)
        reset_accelerate()


@contextlib.contextmanager
def launched(rank: int, world_size: int, **env: str) -> Iterator[None]:
    """Be rank ``rank`` of ``world_size``, with fsdp_c installed.

    Args:
        rank: This process's rank.
        world_size: Ranks, all on this host.
        env: More of the environment: what ``accelerate launch`` would set.
    """
    from fsdp_c.integrations.huggingface import installed

    values = {
        "RANK": str(rank),
        # Which GPU to take; ranks may share one.
        "LOCAL_RANK": str(rank if ON_CPU else torch.cuda.current_device()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        **env,
    }
    with _environment(values), installed():
        yield


@contextlib.contextmanager
def single_process() -> Iterator[None]:
    """Be a process that no launcher started, without fsdp_c installed."""
    with _environment({}):
        yield
