"""torch.compile of the block inside a unit: one graph, no recompiles, same numbers."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from helpers.distributed import distributed
from helpers.impl import MixedPrecision, ShardingStrategy, fsdp
from helpers.models import MLP, Block, TransformerBlock, loss_of, vectors
from helpers.reference import Differential
from helpers.rows import Rows, shard_units

TIMEOUT_S = 240.0


@contextlib.contextmanager
def _dynamo() -> Iterator[None]:
    """Begin and end without compiled code; count from zero; start no threads."""
    with contextlib.suppress(ImportError):
        import tqdm

        tqdm.tqdm.monitor_interval = 0
    torch._dynamo.reset()
    counters.clear()
    try:
        with torch._inductor.config.patch(compile_threads=1):
            yield
    finally:
        torch._dynamo.reset()


def _compile_blocks(
    differential: Differential, backend: Any, *, block: type[nn.Module] = Block
) -> None:
    """Compile the forward of every block of the sharded model, in place."""
    for module in list(differential.model.modules()):
        if isinstance(module, block):
            module.compile(backend=backend, fullgraph=True, dynamic=False)


@pytest.mark.parametrize(
    ("strategy", "use_orig_params", "backend"),
    [
        ("FULL_SHARD", True, "aot_eager"),
        ("SHARD_GRAD_OP", False, "aot_eager"),
        ("NO_SHARD", True, "eager"),
    ],
)
@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_block_inside_a_unit(
    strategy: str, use_orig_params: bool, backend: str
) -> None:
    """One graph serves all blocks and all steps; gradients equal the reference's."""
    with _dynamo():
        counter = CompileCounterWithBackend(backend)
        differential = Differential.of_model(
            "mlp", strategy=strategy, use_orig_params=use_orig_params
        )
        _compile_blocks(differential, counter)
        differential.train(1)
        num_frames = counter.frame_count
        assert num_frames >= 1
        differential.train(3)
        differential.zero_grad()
        differential.accumulate(2, no_sync=True)
        differential.check()
        differential.step()
        assert counter.frame_count == num_frames, "recompiled after the first step"
        assert not counters["graph_break"]
        del differential


@pytest.mark.bookkeeping
@pytest.mark.parametrize(
    ("place", "strategy"),
    [("before wrapping", "FULL_SHARD"), ("torch.compile", "SHARD_GRAD_OP")],
)
@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_compiled_module_is_wrapped(place: str, strategy: str) -> None:
    """Compiled first, by compile() or torch.compile(), then made a unit."""
    counter = CompileCounterWithBackend("aot_eager")
    kwargs = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": True}

    def wrap(model: nn.Module) -> Any:
        assert isinstance(model, MLP)
        for index, block in enumerate(model.blocks):
            compiled: Any = block
            if place == "torch.compile":
                compiled = torch.compile(block, backend=counter, fullgraph=True)
            else:
                block.compile(backend=counter, fullgraph=True)
            model.blocks[index] = fsdp(compiled, **kwargs)
        return fsdp(model, **kwargs)

    with _dynamo():
        differential = Differential(MLP, wrap, vectors, use_orig_params=True)
        differential.train(1)
        num_frames = counter.frame_count
        assert num_frames >= 1
        differential.train(2)
        assert counter.frame_count == num_frames
        del differential


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_mixed_precision() -> None:
    """The graph is made for the bf16 parameters that forward sees."""
    with _dynamo():
        counter = CompileCounterWithBackend("aot_eager")
        differential = Differential.of_model(
            "transformer",
            param_dtype=torch.bfloat16,
            mixed_precision=MixedPrecision(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            ),
        )
        _compile_blocks(differential, counter, block=TransformerBlock)
        differential.train(1)
        num_frames = counter.frame_count
        assert num_frames >= 1
        differential.train(2)
        assert counter.frame_count == num_frames
        del differential


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_evaluation_between_steps() -> None:
    """Grad mode and training mode are guarded: one more graph, then none."""
    with _dynamo():
        counter = CompileCounterWithBackend("aot_eager")
        differential = Differential.of_model("mlp")
        _compile_blocks(differential, counter)
        for _ in range(2):
            differential.train(1)
            differential.evaluate()
        num_frames = counter.frame_count
        for _ in range(2):
            differential.train(1)
            differential.evaluate()
        assert counter.frame_count == num_frames
        del differential


@pytest.mark.cpu_only("inductor generates no code for the simulated device")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "use_orig_params", [True, pytest.param(False, marks=pytest.mark.only_full)]
)
@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_inductor(use_orig_params: bool) -> None:
    """Compiled kernels read and write the unsharded memory of every step."""
    with _dynamo():
        counter = CompileCounterWithBackend("inductor")
        differential = Differential.of_model("mlp", use_orig_params=use_orig_params)
        _compile_blocks(differential, counter)
        differential.train(1)
        num_frames = counter.frame_count
        assert num_frames >= 1
        differential.train(2)
        assert counter.frame_count == num_frames
        del differential


@pytest.mark.bookkeeping
@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_whole_model_breaks_at_units(rank: int) -> None:
    """torch.compile of the wrapped root: graphs break at units, results are right."""
    with _dynamo():
        differential = Differential.of_units(lambda: MLP(2), {Block})
        sharded = differential.model
        compiled = torch.compile(sharded, backend="aot_eager")
        for _ in range(3):
            differential.zero_grad()
            batches = differential.batches()
            mean, expected = differential.reference_forward(batches)
            loss = loss_of(compiled(*batches[rank]))
            differential.check_loss(loss, expected)
            mean.backward()
            loss.backward()
            differential.check()
            differential.step()
        del differential, sharded, compiled, loss, mean


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_fully_shard(rank: int, world_size: int) -> None:
    """Module.compile() before fully_shard, of blocks, and after it, of the root."""

    def shard(model: nn.Module) -> Any:
        for module in model.modules():
            if isinstance(module, Block):
                module.compile(backend="aot_eager")
        sharded = shard_units(model, [Block])
        sharded.compile(backend="aot_eager")
        return sharded

    with _dynamo():
        both = Rows(MLP, shard, vectors)
        both.train(2)


@pytest.mark.parametrize("is_compiled", ["at once", "after a step"])
@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_whole_model_under_fully_shard(is_compiled: str) -> None:
    """torch.compile of the root: graphs break at its units, keys are torch's."""

    def shard(model: nn.Module) -> Any:
        sharded = shard_units(model, [Block])
        if is_compiled == "after a step":
            loss_of(sharded(*vectors_of(sharded))).backward()
            sharded.zero_grad()
        return torch.compile(sharded, backend="aot_eager")

    def vectors_of(model: nn.Module) -> Any:
        dtype = next(model.parameters()).dtype
        return tuple(x.to(dtype) for x in vectors(torch.Generator()))

    with _dynamo():
        both = Rows(MLP, shard, vectors)
        keys = [f"_orig_mod.{name}" for name in both.reference.state_dict()]
        assert list(both.model.state_dict()) == keys
        both.train(3)
        del both
