"""torch.compile of the block inside a unit: one graph, no recompiles, same numbers."""

import contextlib
import copy
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

from fsdp_c import fully_shard
from helpers.distributed import TEST_DEVICE, distributed
from helpers.impl import MixedPrecision, ShardingStrategy, fsdp
from helpers.models import MLP, Block, TransformerBlock, loss_of, vectors
from helpers.reference import Differential
from helpers.rows import Rows, in_either_api, shard_units
from helpers.seeds import seeded

TIMEOUT_S = 240.0


def _counter(backend: str) -> Any:
    """Return the backend, which counts what it is asked to compile.

    Collecting tests does not import the compiler, which takes a second.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend(backend)


def _counted(what: str) -> Any:
    """Return what dynamo has counted."""
    return torch._dynamo.utils.counters[what]


@contextlib.contextmanager
def _dynamo() -> Iterator[None]:
    """Begin and end without compiled code; count from zero; start no threads.

    Inductor's kernels are scalar: looking for vector units takes it compiler runs.
    """
    import torch._inductor.config

    with contextlib.suppress(ImportError):
        import tqdm

        tqdm.tqdm.monitor_interval = 0
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        with torch._inductor.config.patch({"compile_threads": 1, "cpp.simdlen": 0}):
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


def _train_compiled(differential: Differential, counter: Any) -> int:
    """Train; fail unless the first step alone compiles. Return the number of frames."""
    differential.train(1)
    num_frames: int = counter.frame_count
    assert num_frames >= 1
    differential.train(2)
    assert counter.frame_count == num_frames, "recompiled after the first step"
    return num_frames


@pytest.mark.bookkeeping
@pytest.mark.parametrize(
    ("strategy", "use_orig_params", "backend"),
    [
        ("FULL_SHARD", True, "aot_eager"),
        ("SHARD_GRAD_OP", False, "aot_eager"),
        pytest.param("NO_SHARD", True, "eager", marks=pytest.mark.only_full),
    ],
)
@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_block_inside_a_unit(
    strategy: str, use_orig_params: bool, backend: str
) -> None:
    """One graph serves all blocks and all steps; gradients equal the reference's."""
    with _dynamo():
        counter = _counter(backend)
        differential = Differential.of_model(
            "mlp", strategy=strategy, use_orig_params=use_orig_params
        )
        _compile_blocks(differential, counter)
        num_frames = _train_compiled(differential, counter)
        differential.run("znsu")
        assert counter.frame_count == num_frames, "recompiled after the first step"
        assert not _counted("graph_break")
        del differential


@pytest.mark.bookkeeping
@pytest.mark.parametrize(
    ("place", "strategy"),
    [("before wrapping", "FULL_SHARD"), ("torch.compile", "SHARD_GRAD_OP")],
)
@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_compiled_module_is_wrapped(place: str, strategy: str) -> None:
    """Compiled first, by compile() or torch.compile(), then made a unit."""
    counter = _counter("aot_eager")
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
        _train_compiled(differential, counter)
        del differential


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_mixed_precision() -> None:
    """The graph is made for the bf16 parameters that forward sees."""
    with _dynamo():
        counter = _counter("aot_eager")
        differential = Differential.of_model(
            "transformer", mixed_precision=MixedPrecision(torch.bfloat16, torch.float32)
        )
        _compile_blocks(differential, counter, block=TransformerBlock)
        _train_compiled(differential, counter)
        del differential


@pytest.mark.bookkeeping
@pytest.mark.only_full
@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_evaluation_between_steps() -> None:
    """Grad mode and training mode are guarded: one more graph, then none."""
    with _dynamo():
        counter = _counter("aot_eager")
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


@pytest.mark.cpu_only("the fake CUDA runs no code of inductor")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "api",
    [
        "FSDP",
        pytest.param("FSDP flat", marks=pytest.mark.only_full),
        pytest.param("fully_shard", marks=pytest.mark.only_full),
    ],
)
@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_inductor(api: str) -> None:
    """Compiled kernels read and write the unsharded memory of every step."""
    with _dynamo():
        counter = _counter("inductor")
        both = in_either_api(api, MLP, {Block}, strategy=None)
        _compile_blocks(both, counter)
        _train_compiled(both, counter)
        del both


@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_fully_shard() -> None:
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


@pytest.mark.bookkeeping
@pytest.mark.parametrize(
    "is_compiled",
    [pytest.param("at once", marks=pytest.mark.only_full), "after a step"],
)
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
        return tuple(x.to(dtype) for x in vectors(seeded(0)))

    with _dynamo():
        both = Rows(MLP, shard, vectors)
        keys = [f"_orig_mod.{name}" for name in both.reference.state_dict()]
        assert list(both.model.state_dict()) == keys
        both.train(3)
        del both


class Straight(nn.Module):
    """Work between the units. Not in a loop, in which nothing would be compiled."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.first = Block(4)
        self.second = Block(4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the units."""
        x = self.first(x * 2).tanh()
        if self.checkpoints:
            x = checkpoint(self.second, x, use_reentrant=False)
        else:
            x = self.second(x)
        return self.last(x.sigmoid()).tanh()


def _counts(
    shard: Callable[[nn.Module], Any],
    place: str,
    backend: str,
    *,
    checkpoints: bool = False,
) -> tuple[int, int, int]:
    """Train beside the unsharded model; return frames, operations, graph breaks.

    After the first step nothing more may be compiled.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = seeded(3)
    torch.manual_seed(1)
    with _dynamo():
        counter = _counter(backend)
        model = Straight(checkpoints=checkpoints).double()
        reference = copy.deepcopy(model)
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        for block in blocks if place == "blocks before" else ():
            block.compile(backend=counter)
        sharded = run = shard(model)
        for block in blocks if place == "blocks after" else ():
            block.compile(backend=counter)
        if place == "root":
            sharded.compile(backend=counter)
        if place == "torch.compile":
            run = torch.compile(sharded, backend=counter)
        optimizers = [
            torch.optim.SGD(each.parameters(), lr=0.1) for each in (sharded, reference)
        ]
        frames = set()
        for _ in range(4):
            batches = torch.randn(
                world_size, 3, 4, generator=generator, dtype=torch.double
            )
            outputs = [reference(batch) for batch in batches]
            output = run(batches[rank])
            torch.testing.assert_close(output, outputs[rank], rtol=1e-8, atol=1e-8)
            output.pow(2).sum().backward()
            (torch.stack(outputs).pow(2).sum() / world_size).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            frames.add(counter.frame_count)
        assert len(frames) == 1, "recompiled after the first step"
        assert not _counted("recompiles")
        return counter.frame_count, counter.op_count, _counted("graph_break").total()


@pytest.mark.parametrize(
    ("place", "backend", "reshards", "checkpoints"),
    [
        pytest.param(
            "torch.compile", "aot_eager", True, False, marks=pytest.mark.only_full
        ),
        ("torch.compile", "eager", False, True),
        pytest.param("root", "aot_eager", True, True, marks=pytest.mark.only_full),
        pytest.param(
            *("blocks before", "aot_eager", False, False), marks=pytest.mark.only_full
        ),
        pytest.param("blocks after", "eager", True, False, marks=pytest.mark.only_full),
        pytest.param(
            *("torch.compile", "inductor", True, False),
            marks=[
                pytest.mark.only_full,  # test_inductor has both APIs
                pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler"),
            ],
        ),
    ],
)
@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_fully_shard_compiles_what_it_does_under_torch(
    place: str, backend: str, reshards: bool, checkpoints: bool
) -> None:
    """As many frames and operations, and no more breaks; none after the first step."""

    def counts_of(function: Any) -> tuple[int, int, int]:
        def shard(model: nn.Module) -> Any:
            for module in (*model.children(), model):
                function(module, reshard_after_forward=reshards)
            return model

        return _counts(shard, place, backend, checkpoints=checkpoints)

    ours = counts_of(fully_shard)
    assert ours[0] > 0
    assert ours == counts_of(torch_fully_shard)


@pytest.mark.parametrize(
    "place", ["torch.compile", pytest.param("root", marks=pytest.mark.only_full)]
)
@distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_fsdp_compiles_what_it_does_under_torch(place: str) -> None:
    """The same of FullyShardedDataParallel, with use_orig_params=True."""

    def counts_of(wrap: Any) -> tuple[int, int, int]:
        def shard(model: nn.Module) -> Any:
            options = {"use_orig_params": True, "device_id": torch.device(TEST_DEVICE)}
            model.first = wrap(model.first, **options)
            model.second = wrap(model.second, **options)
            return wrap(model, **options)

        return _counts(shard, place, "eager")

    ours = counts_of(fsdp)
    theirs = counts_of(TorchFSDP)
    assert ours[0] > 0
    assert ours[:2] == theirs[:2]
    assert ours[2] <= theirs[2]
