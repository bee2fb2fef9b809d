"""register_comm_hook: the user's function in place of the gradient reduction."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks

from fsdp_c import reset
from helpers.distributed import STRATEGIES, distributed, every_strategy, varied
from helpers.groups import hybrid_groups
from helpers.impl import FSDP, CPUOffload, MixedPrecision, assert_idle, fsdp
from helpers.models import Block, vectors
from helpers.reference import Differential, with_model
from helpers.seeds import seeded

NUM_UNITS = 4  # of the model "mlp"; each is one segment

Hook = Callable[..., None]


@dataclass
class Call:
    """What one call of a hook got."""

    ndim: int
    dtype: torch.dtype
    numel: int
    output_numel: int | None


@dataclass
class Record:
    """The state of the hooks below."""

    scale: float = 1.0
    calls: list[Call] = field(default_factory=list)
    raises_at: int = -1

    def add(self, grad: Tensor, output: Tensor | None) -> None:
        """Note a call, or raise in its place."""
        if len(self.calls) == self.raises_at:
            self.raises_at = -1
            msg = "the hook has had enough"
            raise KeyError(msg)
        if output is not None:
            assert output.dtype == grad.dtype
            assert output.ndim == 1
        self.calls.append(
            Call(
                grad.ndim,
                grad.dtype,
                grad.numel(),
                None if output is None else output.numel(),
            )
        )


def mean(state: Record, grad: Tensor, output: Tensor | None = None) -> None:
    """Give ``state.scale`` times the mean over the ranks."""
    state.add(grad, output)
    if output is None:
        dist.all_reduce(grad)
    else:
        dist.reduce_scatter_tensor(output, grad)
    result = grad if output is None else output
    result.mul_(state.scale / dist.get_world_size())


def compressed(state: Record, grad: Tensor, output: Tensor | None = None) -> None:
    """Communicate in bf16, and point the tensors at new memory."""
    state.add(grad, output)
    grad.data = grad.data.to(torch.bfloat16)
    if output is None:
        dist.all_reduce(grad)
        grad.data = grad.data.to(torch.float32) / dist.get_world_size()
    else:
        output.data = output.data.to(torch.bfloat16)
        dist.reduce_scatter_tensor(output, grad)
        output.data = output.data.to(torch.float32) / dist.get_world_size()


def _train(differential: Differential) -> None:
    """Run steps, then accumulate in both ways."""
    differential.train(2)
    for no_sync in (False, True):
        differential.zero_grad()
        differential.accumulate(3, no_sync=no_sync)
        differential.checked_step()
    if differential.param_dtype is None:
        differential.clip(0.1)


@every_strategy
@distributed(world_size=(2, 3, 4))
@with_model("uneven")
def test_default_hooks(differential: Differential, strategy: str) -> None:
    """The hooks of torch give the mean over the ranks."""
    is_whole = strategy == "NO_SHARD"
    hook: Hook = (
        default_hooks.allreduce_hook if is_whole else default_hooks.reduce_scatter_hook
    )
    state = default_hooks.DefaultState(process_group=dist.group.WORLD)
    differential.model.register_comm_hook(state, hook)
    _train(differential)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=(2, 3))
def test_own_hook(
    world_size: int, strategy: str, offloads: bool, use_orig_params: bool
) -> None:
    """It sees each unit's gradient once per backward; what it gives is taken."""
    differential = Differential.of_model(
        "mlp",
        strategy=strategy,
        use_orig_params=use_orig_params,
        cpu_offload=CPUOffload(offload_params=offloads),
    )
    record = Record(scale=3.0)
    differential.model.register_comm_hook(record, mean)
    numels = sorted(
        sum(p.numel() for p in unit.parameters()) for unit in _units(differential)
    )
    for _ in range(2):
        record.calls.clear()
        differential.zero_grad()
        differential.forward_backward()
        differential.scale_reference_grads(3.0)
        differential.checked_step()

        assert len(record.calls) == NUM_UNITS
        for call, numel in zip(
            sorted(record.calls, key=lambda c: c.numel), numels, strict=True
        ):
            assert call.ndim == 1
            assert call.dtype == torch.float32
            if strategy == "NO_SHARD":
                assert call.output_numel is None
                assert call.numel >= numel
            else:
                assert call.output_numel is not None
                assert call.output_numel * world_size == call.numel
                assert call.numel >= numel
    assert_idle(differential.model)


def _units(differential: Differential) -> list[nn.Module]:
    """Return modules with the parameters of each unit of the reference."""
    reference = differential.reference
    blocks = [m for m in reference.modules() if isinstance(m, Block)]
    root = nn.ModuleList(m for m in reference.children() if isinstance(m, nn.Linear))
    return [root, *blocks]


@every_strategy
@distributed(world_size=(2, 3))
@with_model()
def test_not_called_in_no_sync(differential: Differential) -> None:
    """The first backward after no_sync() hands it the sum."""
    record = Record()
    model = differential.model
    model.register_comm_hook(record, mean)
    differential.train(1)
    assert len(record.calls) == NUM_UNITS
    differential.zero_grad()
    with model.no_sync():
        differential.forward_backward()
        differential.forward_backward()
    assert len(record.calls) == NUM_UNITS
    differential.forward_backward()
    assert len(record.calls) == 2 * NUM_UNITS
    differential.check()
    differential.forward_backward()
    assert len(record.calls) == 3 * NUM_UNITS
    differential.check()
    differential.evaluate()
    assert len(record.calls) == 3 * NUM_UNITS


@varied(strategy=STRATEGIES)
@distributed(world_size=(2, 3))
@with_model()
def test_sharded_no_sync(differential: Differential) -> None:
    """no_sync(sharded=True) accumulates what the reference has."""
    record = Record()
    differential.model.register_comm_hook(record, mean)
    differential.run("zppsu zppsu")


@every_strategy
@distributed(world_size=2)
@with_model(tolerance=4e-2)
def test_compression(differential: Differential) -> None:
    """A hook may communicate in bf16 and replace the data of its tensors."""
    record = Record()
    differential.model.register_comm_hook(record, compressed)
    differential.train(3)
    assert {call.dtype for call in record.calls} == {torch.float32}


@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=2)
def test_reduce_dtype(strategy: str, reduce_dtype: torch.dtype) -> None:
    """The gradient comes in reduce dtype, whatever the parameters are in."""
    differential = Differential.of_model(
        "mlp",
        strategy=strategy,
        mixed_precision=MixedPrecision(torch.bfloat16, reduce_dtype),
    )
    record = Record()
    differential.model.register_comm_hook(record, mean)
    differential.train(2)
    assert {call.dtype for call in record.calls} == {reduce_dtype}
    assert len(record.calls) == 2 * NUM_UNITS


@varied(model=["mixed_dtype", "frozen", "unused", "called_twice"], strategy=STRATEGIES)
@distributed(world_size=2)
@with_model()
def test_segments(differential: Differential, model: str) -> None:
    """Once per trainable segment: one of each dtype, none that is frozen."""
    record = Record()
    differential.model.register_comm_hook(record, mean)
    num_calls = {"mixed_dtype": 2, "frozen": 2, "called_twice": 3}
    for _ in range(2):
        record.calls.clear()
        differential.train(1)
        if model != "unused":  # whether a unit without gradients is reduced is free
            assert len(record.calls) == num_calls[model]
    if model == "mixed_dtype":
        assert {c.dtype for c in record.calls} == {torch.float32, torch.bfloat16}


@every_strategy
@pytest.mark.parametrize("raises_at", [0, 2, NUM_UNITS - 1])
@distributed(world_size=2)
@with_model()
def test_exception(differential: Differential, raises_at: int) -> None:
    """It reaches the user as it is; after reset() training goes on."""
    record = Record()
    differential.model.register_comm_hook(record, mean)
    differential.train(1)
    differential.zero_grad()
    record.raises_at = len(record.calls) + raises_at
    _, loss = differential.forward()
    with pytest.raises(KeyError, match="had enough"):
        loss.backward()
    del loss
    reset(differential.model)
    differential.zero_grad()
    assert_idle(differential.model)
    differential.check()
    differential.train(2)


def _no_hook(state: Any, grad: Tensor, output: Tensor | None = None) -> None:
    """Stand in where no hook is called."""


@pytest.mark.bookkeeping
@varied(strategy=STRATEGIES)
@distributed(world_size=2)
@with_model()
def test_bad_registrations(differential: Differential) -> None:
    """Not on the root, twice, not callable; each leaves the model as it was."""
    model = differential.model
    differential.train(1)
    with pytest.raises(AssertionError, match="root"):
        model.blocks[0].register_comm_hook(None, _no_hook)
    with pytest.raises(ValueError, match="callable"):
        model.register_comm_hook(None, "mean")
    differential.train(1)
    record = Record()
    model.register_comm_hook(record, mean)
    with pytest.raises(AssertionError, match="already"):
        model.register_comm_hook(None, _no_hook)
    differential.train(1)
    assert len(record.calls) == NUM_UNITS


@distributed(world_size=2)
@with_model()
def test_registration_in_accumulation(differential: Differential) -> None:
    """Whole gradients from before would be scaled by another rule."""
    with differential.model.no_sync():
        differential.forward_backward()
    with pytest.raises(RuntimeError, match="no_sync"):
        differential.model.register_comm_hook(Record(), mean)
    differential.forward_backward()
    differential.check()


@pytest.mark.bookkeeping
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@distributed(world_size=4)
def test_hybrid_is_refused(rank: int, strategy: str) -> None:
    """A hook over one group cannot reduce over two; training stays possible."""
    with hybrid_groups(2, 2) as groups:
        model = fsdp(
            Block(), process_group=groups, strategy=strategy, use_orig_params=True
        )
        with pytest.raises(AssertionError, match="hybrid"):
            model.register_comm_hook(None, _no_hook)
        model(*vectors(seeded(rank))).sum().backward()
        del model


@pytest.mark.bookkeeping
@distributed(world_size=2)
def test_what_is_registered_can_be_seen() -> None:
    """Under FSDP1's names, on every unit; a module stays out of the children."""
    model = fsdp(nn.Sequential(Block(), fsdp(Block())))
    state = nn.Linear(2, 2)
    names = [name for name, _ in model.named_modules()]
    assert all(each._comm_hook is None for each in FSDP.fsdp_modules(model))
    model.register_comm_hook(state, default_hooks.allreduce_hook)
    for each in FSDP.fsdp_modules(model):
        assert each._comm_hook is default_hooks.allreduce_hook
        assert each._comm_hook_state is state
    assert [name for name, _ in model.named_modules()] == names
