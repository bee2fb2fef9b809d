"""summon_full_params: whole parameters and gradients, with every option."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.distributed import STRATEGIES, TEST_DEVICE, distributed, every_strategy
from helpers.groups import hybrid_groups
from helpers.impl import (
    FSDP,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    assert_idle,
    fsdp,
)
from helpers.models import DIM, Block
from helpers.reference import Differential, assert_same


class Outer(nn.Module):
    """A unit with a unit in it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.75))
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.gate


class Idle(nn.Module):
    """A unit that never runs: it has no gradient on any rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))


class Odd(nn.Module):
    """A scalar, an empty parameter, a shared and an unused one; nested units."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.randn(2, 3))
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)
        self.second.weight = self.first.weight
        self.outer = Outer()
        self.idle = Idle()
        self.register_buffer("shift", torch.linspace(0, 1, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x))) + self.empty.sum()
        x = x + self.shift.to(x.dtype)
        return self.outer(x) * self.scale


UNITS = (Outer, Block, Idle)


def _is_roots_own(name: str) -> bool:
    return not name.startswith(("outer.", "idle."))


def _make(strategy: str, **kwargs: Any) -> Differential:
    # The scalar comes close to 0, where the default is below fp32's rounding.
    kwargs.setdefault("tolerance", 1e-4)
    return Differential.of_units(Odd, UNITS, strategy=strategy, **kwargs)


class _Look:
    """One summon with one set of options: looks, writes, and is compared."""

    def __init__(self, differential: Differential, options: dict[str, bool]) -> None:
        self.differential = differential
        self.options = options
        self.params = differential.reference_params
        strategy = differential.model.sharding_strategy
        is_sharded = strategy is not ShardingStrategy.NO_SHARD
        group = differential.model.process_group
        self.shows = (
            not options["rank0_only"] or not is_sharded or dist.get_rank(group) == 0
        )
        # What every rank holds whole anyway is shown as it is, as in FSDP1.
        self.is_resident = not is_sharded
        on_host = options["offload_to_cpu"] and TEST_DEVICE != "cpu"
        self.keeps = options["writeback"] or (
            self.is_resident and not options["rank0_only"] and not on_host
        )
        # Only the first rank's values count with rank0_only.
        self.factor = 0.9
        if options["rank0_only"] and differential.rank > 0:
            self.factor = 0.7

    def run(self) -> None:
        """Summon, compare, write, leave; the reference keeps what must be kept."""
        before = [id(p) for p in self.differential.model.parameters()]
        with FSDP.summon_full_params(self.differential.model, **self.options):
            self.inside()
        assert [id(p) for p in self.differential.model.parameters()] == before
        if self.keeps:
            self.write_reference()

    def selected(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the reference's parameters that are summoned."""
        for name, param in self.params.items():
            if self.options["recurse"] or _is_roots_own(name):
                yield name, param

    def inside(self) -> None:
        """Compare names, values and gradients; write into them."""
        model = self.differential.model
        names = [name for name, _ in model.named_parameters()]
        assert not any("_fsdp" in name for name in names), names
        assert [name for name, _ in model.named_buffers()] == ["shift"]
        if not self.shows:
            self.inside_sharded()
            return
        if self.options["recurse"]:
            assert names == list(self.params)
        mine = dict(model.named_parameters())
        for name, param in self.selected():
            assert_same(name, mine[name].detach(), param.detach(), 1e-4)
            assert mine[name].requires_grad
            if self.options["with_grads"]:
                self.look_at_grad(name, mine[name], param)
        net = model.module
        assert net.first.weight is net.second.weight
        with torch.no_grad():
            for name, _ in self.selected():
                if self.keeps or not self.is_resident:
                    mine[name].mul_(self.factor)
                grad = mine[name].grad
                if self.options["with_grads"] and grad is not None:
                    grad.mul_(self.factor)

    def look_at_grad(self, name: str, mine: nn.Parameter, param: nn.Parameter) -> None:
        """Compare one whole gradient; zeros may stand for none beside others."""
        if param.grad is None:
            assert mine.grad is None or not mine.grad.any(), name
            if name.startswith("idle."):
                assert mine.grad is None
            return
        assert mine.grad is not None, name
        assert mine.grad.dtype == mine.dtype
        assert mine.grad.device == mine.device
        assert_same(f"gradient {name}", mine.grad, param.grad, 1e-4)

    def inside_sharded(self) -> None:
        """See no more elements than the shards have."""
        model = self.differential.model
        for param in model.parameters():
            assert param.ndim == 1
            assert param.grad is None or param.grad.shape == param.shape
        total = sum(param.numel() for _, param in self.selected())
        shown = sum(
            param.numel()
            for name, param in model.named_parameters()
            if self.options["recurse"] or _is_roots_own(name)
        )
        assert shown < total

    def write_reference(self) -> None:
        """Do to the reference what the first rank did."""
        with torch.no_grad():
            for _, param in self.selected():
                param.mul_(0.9)
                if self.options["with_grads"] and param.grad is not None:
                    param.grad.mul_(0.9)


_OPTIONS = ("recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads")


def _check_every_combination(differential: Differential) -> None:
    for values in itertools.product([True, False], repeat=len(_OPTIONS)):
        options = dict(zip(_OPTIONS, values, strict=True))
        try:
            differential.zero_grad()
            differential.forward_backward()
            _Look(differential, options).run()
            assert_idle(differential.model)
            differential.checked_step()
        except AssertionError as error:
            msg = f"{error}\noptions: {options}"
            raise AssertionError(msg) from error
    differential.train(1)


@pytest.mark.trap(16)
@pytest.mark.trap(24)
@every_strategy
@distributed(world_size=(2, 3))
def test_every_combination(strategy: str, use_orig_params: bool) -> None:
    """Values, gradients, names; what was written is kept, or is not."""
    differential = _make(strategy, use_orig_params=use_orig_params)
    _check_every_combination(differential)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_every_combination_with_offload(use_orig_params: bool) -> None:
    """The same where shards and gradients live on the host."""
    _check_every_combination(
        _make(
            "FULL_SHARD",
            use_orig_params=use_orig_params,
            cpu_offload=CPUOffload(offload_params=True),
        )
    )


@pytest.mark.trap(14)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@distributed(world_size=4)
def test_every_combination_of_replicas(strategy: str, use_orig_params: bool) -> None:
    """With rank0_only and writeback all replicas get the first one's values."""
    with hybrid_groups(2, 2) as groups:
        differential = _make(
            strategy, use_orig_params=use_orig_params, process_group=groups
        )
        _check_every_combination(differential)
        del differential


@every_strategy
@distributed(world_size=2)
def test_gradients_set_to_none(rank: int, strategy: str, use_orig_params: bool) -> None:
    """One of a unit becomes zeros, all of them become none."""
    differential = _make(strategy, use_orig_params=use_orig_params)
    model, params = differential.model, differential.reference_params
    for gone in (["outer.gate"], ["first.weight", "outer.inner.fc1.weight"], None):
        for rank0_only in (False, True):
            differential.zero_grad()
            differential.forward_backward()
            with FSDP.summon_full_params(model, with_grads=True, rank0_only=rank0_only):
                if not rank0_only or rank == 0 or strategy == "NO_SHARD":
                    mine = dict(model.named_parameters())
                    for name in gone or mine:
                        mine[name].grad = None
            for name in gone or params:
                params[name].grad = None
            differential.check()
            if gone is None:
                assert all(p.grad is None for p in model.parameters())
            assert_idle(model)
            differential.forward_backward()
            differential.checked_step()


@pytest.mark.parametrize("clears", ["first", "others"])
@distributed(world_size=2)
def test_first_replica_clears_gradients(rank: int, clears: str) -> None:
    """With rank0_only and writeback its gradients count, also those it has not."""
    differential = _make("NO_SHARD", use_orig_params=True)
    model = differential.model
    differential.forward_backward()
    with FSDP.summon_full_params(model, with_grads=True, rank0_only=True):
        if (rank == 0) == (clears == "first"):
            for param in model.parameters():
                param.grad = None
    if clears == "first":
        differential.reference.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    differential.check()
    differential.zero_grad()
    differential.train(1)


@every_strategy
@distributed(world_size=2)
def test_gradients_made_inside(strategy: str, use_orig_params: bool) -> None:
    """New tensors in place of the gradients that are shown."""
    differential = _make(strategy, use_orig_params=use_orig_params)
    model = differential.model
    differential.forward_backward()
    with FSDP.summon_full_params(model, with_grads=True):
        for param in model.parameters():
            if param.grad is not None:
                param.grad = torch.full_like(param, 0.25)
    for param in differential.reference.parameters():
        if param.grad is not None:
            param.grad = torch.full_like(param, 0.25)
    # Beside others a parameter without gradient has zeros, which may be filled.
    differential.reference_params["unused"].grad = None
    mine, _ = differential.gather()
    assert mine.keys() == differential.reference_params.keys()
    _, grads = differential.gather()
    for name, param in differential.reference_params.items():
        if param.grad is not None:
            assert_same(f"gradient {name}", grads[name], param.grad)
    differential.zero_grad()
    differential.train(1)


@every_strategy
@distributed(world_size=2)
def test_cleared_gradient_stays_none(strategy: str, use_orig_params: bool) -> None:
    """An optimizer with weight decay would step a parameter with zeros."""
    differential = _make(strategy, use_orig_params=use_orig_params)
    model = differential.model
    differential.forward_backward()
    params = list(model.parameters())
    params[0].grad = None
    before = [param.grad is None for param in params]
    for writeback in (True, False):
        with FSDP.summon_full_params(model, writeback=writeback, with_grads=True):
            pass
        assert [param.grad is None for param in params] == before


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("gone_on", [0, 1])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@distributed(world_size=(2, 3))
def test_gradients_none_on_one_rank(
    rank: int, strategy: str, gone_on: int, use_orig_params: bool
) -> None:
    """That rank's part is zeros; nobody waits for a rank without gradients."""
    differential = _make(strategy, use_orig_params=use_orig_params)
    model = differential.model
    differential.forward_backward()
    if rank == gone_on:
        for param in model.parameters():
            param.grad = None
    _, expected = differential.gather()
    with FSDP.summon_full_params(model, with_grads=True):
        for name, param in model.named_parameters():
            if name.startswith("idle."):
                assert param.grad is None
            elif expected[name].any():
                assert param.grad is not None, name
                assert_same(f"gradient {name}", param.grad, expected[name])
    _, after = differential.gather()
    for name, grad in after.items():
        assert_same(f"gradient {name}", grad, expected[name])
    differential.zero_grad()
    differential.train(2)


@pytest.mark.trap(10)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("with_grads", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=2)
def test_between_no_sync_backwards(
    strategy: str, with_grads: bool, use_orig_params: bool
) -> None:
    """Gradients that were not reduced stay for the next backward."""
    differential = _make(strategy, use_orig_params=use_orig_params)
    model = differential.model
    for _ in range(2):
        differential.zero_grad()
        for _ in range(2):
            with model.no_sync():
                differential.forward_backward()
            with FSDP.summon_full_params(model, with_grads=with_grads):
                mine = dict(model.named_parameters())
                for name, param in differential.reference_params.items():
                    assert_same(name, mine[name].detach(), param.detach())
        differential.forward_backward()
        differential.checked_step()


@pytest.mark.parametrize("offload_to_cpu", [False, True])
@distributed(world_size=(2, 3))
def test_flat_parameters_are_whole(rank: int, offload_to_cpu: bool) -> None:
    """The same objects; what is written through them counts; shards afterwards."""
    model = fsdp(Block(), use_orig_params=False)
    flat_param = model._handle.flat_param
    shard_numel = flat_param.numel()
    numels = flat_param._numels_with_padding  # an accelerator aligns parameters
    numel = sum(numels)
    is_gap = flat_param._is_padding_mask
    params_numel = sum(param.numel() for param in Block().parameters())
    gap_numel = sum(each for each, gap in zip(numels, is_gap, strict=True) if gap)
    assert numel - gap_numel == params_numel
    assert TEST_DEVICE != "cpu" or gap_numel == 0
    for writeback in (True, False):
        with FSDP.summon_full_params(
            model, writeback=writeback, offload_to_cpu=offload_to_cpu
        ):
            assert model._handle.flat_param is flat_param
            assert flat_param.shape == (numel,)
            with torch.no_grad():
                flat_param.copy_(torch.arange(numel) + (0.0 if writeback else 0.5))
            params = [param.detach().flatten() for param in model.parameters()]
            pieces = zip(flat_param.detach().split(numels), is_gap, strict=True)
            flat = torch.cat([piece for piece, gap in pieces if not gap])
            assert_same("whole", torch.cat(params), flat)
        assert flat_param.shape == (shard_numel,)
        begin = rank * shard_numel
        expected = torch.arange(begin, min(begin + shard_numel, numel)).float()
        assert_same("shard", flat_param.detach()[: expected.numel()], expected)
    with FSDP.summon_full_params(model, rank0_only=True, writeback=False):
        assert flat_param.shape == (numel if rank == 0 else shard_numel,)
    model.zero_grad()
    model(torch.ones(2, DIM)).sum().backward()
    assert flat_param.grad is not None
    assert flat_param.grad.shape == (shard_numel,)


@distributed(world_size=(2, 3))
def test_views_of_flat_parameters_are_whole(world_size: int) -> None:
    """With use_orig_params too, padding included; the same objects while held."""
    inner = fsdp(Block(), use_orig_params=True)
    model = fsdp(nn.Sequential(inner, nn.Linear(DIM, 3)), use_orig_params=True)
    views = [each._handle.flat_param for each in (model, inner)]
    shard_numels = [view.numel() for view in views]
    with FSDP.summon_full_params(model, recurse=False):
        assert model._handle.flat_param is views[0]
        assert views[0].numel() == shard_numels[0] * world_size
        assert views[1].numel() == shard_numels[1]
    with FSDP.summon_full_params(model), torch.no_grad():
        assert [view.numel() for view in views] == [
            numel * world_size for numel in shard_numels
        ]
        views[1].fill_(0.25)
        assert all(bool((param == 0.25).all()) for param in inner.parameters())
    assert [view.numel() for view in views] == shard_numels
    assert all(bool((param == 0.25).all()) for param in inner.parameters())
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@distributed(world_size=2)
def test_no_shard_keeps_what_is_written(
    param_dtype: torch.dtype | None, use_orig_params: bool
) -> None:
    """Without a write-back too, as FSDP1: with a cast, and gradients as well."""
    model = fsdp(
        Block(),
        strategy="NO_SHARD",
        mixed_precision=MixedPrecision(param_dtype=param_dtype),
        use_orig_params=use_orig_params,
    )
    model(torch.ones(2, DIM)).sum().backward()
    before = {}
    with (
        FSDP.summon_full_params(model, writeback=False, with_grads=True),
        torch.no_grad(),
    ):
        for name, param in model.named_parameters():
            before[name] = param.clone()
            param.add_(1.0)
            param.grad.fill_(3.0)
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        for name, param in model.named_parameters():
            assert_same(name, param.detach(), before[name] + 1.0)
            assert bool((param.grad == 3.0).all()), name
    for param in model.parameters():
        assert param.grad is not None
        assert bool((param.grad[param.grad != 0] == 3.0).all())


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("writeback", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=2)
def test_exception_inside(
    strategy: str, writeback: bool, use_orig_params: bool
) -> None:
    """The summon ends as it would have, and training goes on."""
    differential = _make(strategy, use_orig_params=use_orig_params)
    model = differential.model
    differential.train(1)

    def fails() -> None:
        with (
            FSDP.summon_full_params(model, writeback=writeback, with_grads=True),
            torch.no_grad(),
        ):
            if writeback or strategy != "NO_SHARD":  # which keeps writes
                for param in model.parameters():
                    param.mul_(0.5)
            msg = "wrong inside"
            raise KeyError(msg)

    with pytest.raises(KeyError, match="wrong inside"):
        fails()
    if writeback:
        with torch.no_grad():
            for param in differential.reference.parameters():
                param.mul_(0.5)
    assert_idle(model)
    assert any("_fsdp" in name for name, _ in model.named_parameters())
    differential.check()
    differential.train(2)


@every_strategy
@distributed(world_size=2)
def test_mixed_precision(strategy: str, use_orig_params: bool) -> None:
    """What is shown has the master dtype, and none of compute's rounding."""
    differential = _make(
        strategy,
        use_orig_params=use_orig_params,
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32),
        tolerance=4e-2,
    )
    model = differential.model
    differential.train(1)
    expected, grads = differential.gather()
    with FSDP.summon_full_params(model, with_grads=use_orig_params):
        for name, param in model.named_parameters():
            assert param.dtype == torch.float32
            assert_same(name, param.detach(), expected[name], 0.0)
            if use_orig_params and param.grad is not None:
                assert param.grad.dtype == torch.float32
                assert_same(f"gradient {name}", param.grad, grads[name], 0.0)
    differential.train(1)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_a_part_of_the_model(use_orig_params: bool) -> None:
    """A nested unit, or a plain module around units; the others stay sharded."""
    differential = _make("FULL_SHARD", use_orig_params=use_orig_params)
    differential.train(1)
    outer = differential.model.module.outer
    params = differential.reference_params
    with FSDP.summon_full_params(outer), torch.no_grad():
        mine = dict(outer.named_parameters())
        assert list(mine) == [
            name.removeprefix("outer.") for name in params if name.startswith("outer.")
        ]
        for name, param in mine.items():
            assert_same(name, param, params[f"outer.{name}"].detach())
            param.mul_(0.5)
    for name, param in params.items():
        if name.startswith("outer."):
            param.data.mul_(0.5)
    differential.check()
    plain = nn.ModuleList([differential.model])
    with FSDP.summon_full_params(plain):
        shapes = {tuple(param.shape) for param in plain.parameters()}
        assert shapes == {tuple(param.shape) for param in params.values()}
    differential.train(1)


@distributed(world_size=2)
def test_nested_summons() -> None:
    """Refused in FSDP1's words, and what was open stays as it was."""
    words = "^Cannot manually unshard parameters when already unsharding .* nested"
    differential = _make("FULL_SHARD", use_orig_params=True)
    model = differential.model
    with FSDP.summon_full_params(model):
        for inner in (model, model.module.outer):
            with (
                pytest.raises(RuntimeError, match=words),
                contextlib.ExitStack() as s,
            ):
                s.enter_context(FSDP.summon_full_params(inner))
        assert [tuple(p.shape) for p in model.parameters()] == [
            tuple(p.shape) for p in differential.reference.parameters()
        ]
    assert_idle(model)
    differential.train(1)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_forward_inside(use_orig_params: bool) -> None:
    """An evaluation with the summoned parameters, if it is not refused."""
    differential = _make("FULL_SHARD", use_orig_params=use_orig_params)
    differential.train(1)
    with (
        FSDP.summon_full_params(differential.model, writeback=False),
        contextlib.suppress(RuntimeError, ValueError),
    ):
        differential.evaluate()
    differential.model.train()
    differential.reference.train()
    assert torch.is_grad_enabled()
    differential.train(1)
