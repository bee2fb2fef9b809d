"""The reference of helpers.reference beside a model under ``fully_shard``."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_c import FSDPModule, fully_shard
from fsdp_c._units import apart
from helpers.impl import fsdp
from helpers.models import CASES, Inputs, vectors
from helpers.reference import (
    Differential,
    assert_same,
    clean_name,
    parts_of_all_ranks,
    sgd,
)

# fp64 on both sides.
TOLERANCE = 1e-8


def shard_units(
    model: nn.Module, classes: Iterable[type[nn.Module]], **options: Any
) -> Any:
    """Call ``fully_shard`` on the modules of ``classes``, then on ``model``."""
    for module in reversed(list(model.modules())):
        if isinstance(module, tuple(classes)) and module is not model:
            fully_shard(module, **options)
    return fully_shard(model, **options)


def small_apart() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which units apart are made of small parameters, too."""
    return mock.patch.object(apart, "MIN_NUMEL", 1)


def as_double(inputs: Inputs) -> Inputs:
    """Return the inputs with floating tensors in fp64."""
    return tuple(t.double() if t.is_floating_point() else t for t in inputs)


def whole_of(values: Sequence[Any]) -> list[Tensor]:
    """Put the parts of DTensors together, in one exchange.

    Not by full_tensor(), whose answer is to be judged.
    """
    all_parts = parts_of_all_ranks(value.to_local() for value in values)
    ranks = {mesh: mesh.mesh for mesh in {value.device_mesh for value in values}}
    return [
        _put_together(ranks[value.device_mesh], value.placements, parts).to(value.dtype)
        for value, parts in zip(values, all_parts, strict=True)
    ]


def _put_together(ranks: Tensor, placements: Any, parts: Sequence[Tensor]) -> Tensor:
    """Undo the cuts, the last one first.

    They were made from the first dimension of the mesh to the last, but for a
    _StridedShard: it divides what all the others left.
    """
    order = sorted(
        range(len(placements)),
        key=lambda dim: isinstance(placements[dim], _StridedShard),
    )
    return _undo(ranks.permute(order), [placements[dim] for dim in order], parts)


def _undo(ranks: Tensor, placements: Any, parts: Sequence[Tensor]) -> Tensor:
    if not placements:
        return parts[int(ranks)]
    pieces = [_undo(each, placements[1:], parts) for each in ranks.unbind(0)]
    if not isinstance(placements[0], Replicate):
        return torch.cat(pieces, placements[0].dim)
    for piece in pieces:
        torch.testing.assert_close(piece, pieces[0], rtol=1e-12, atol=1e-12)
    return pieces[0]


def gather_rows(
    named: Mapping[str, nn.Parameter],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return whole parameters and gradients; only frozen ones may be no DTensors."""
    wholes: list[dict[str, Tensor]] = [{}, {}]
    values: dict[tuple[int, str], DTensor] = {}
    for name, param in named.items():
        wholes[0][name] = param.detach()
        wholes[1][name] = torch.zeros(param.shape, dtype=param.dtype)
        if not isinstance(param, DTensor):
            assert not param.requires_grad, name
            continue
        values[0, name] = param
        if param.grad is not None:
            assert isinstance(param.grad, DTensor), name
            assert param.grad.placements == param.placements, name
            assert param.grad.dtype == param.dtype, name
            values[1, name] = param.grad
    gathered = whole_of(list(values.values()))
    for (index, name), value in zip(values, gathered, strict=True):
        wholes[index][name] = value
    return wholes[0], wholes[1]


class Rows(Differential):
    """A model under ``fully_shard`` and the unsharded one, both in fp64."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        shard: Callable[[nn.Module], Any],
        inputs: Callable[[torch.Generator], Inputs],
        **options: Any,
    ) -> None:
        super().__init__(
            lambda: build().double(),
            shard,
            lambda generator: as_double(inputs(generator)),
            use_orig_params=True,
            tolerance=TOLERANCE,
            **options,
        )
        self.sharded = dict(self.model.named_parameters())

    @classmethod
    def of(cls, model: str, **options: Any) -> "Rows":
        """Shard the units of ``CASES[model]``; ``options`` go to ``fully_shard``."""
        case = CASES[model]
        return cls(
            case.build,
            lambda module: shard_units(module, case.unit_classes, **options),
            case.inputs,
        )

    def gather(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return whole parameters and gradients; check that objects stay the same."""
        named = dict(self.model.named_parameters())
        assert named.keys() == self.sharded.keys()
        for name, param in named.items():
            assert param is self.sharded[name], name
            assert isinstance(param, DTensor), name
        return gather_rows({clean_name(name): p for name, p in named.items()})

    def check(self) -> None:
        """Compare also which gradients are None."""
        super().check()
        for name, param in self.sharded.items():
            expected = self.reference_params[clean_name(name)].grad
            assert (param.grad is None) == (expected is None), name

    @contextlib.contextmanager
    def no_sync(
        self, is_quiet: bool = True, *, sharded: bool = False
    ) -> Iterator[None]:
        """Let backwards reduce nothing, if ``is_quiet``; sharded sums are FSDP1's."""
        self.model.set_requires_gradient_sync(not is_quiet)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def accumulate_in_shards(self, num_micro_batches: int) -> None:
        """Run micro batches, of which only the last one all-reduces; check them."""
        for index in range(num_micro_batches):
            is_last = index == num_micro_batches - 1
            self.model.set_requires_all_reduce(is_last)
            self.forward_backward()
        self.check()

    def clip(self, max_norm: float, norm_type: float = 2.0) -> None:
        """Clip both models' gradients with torch's function; compare the norms."""
        expected = nn.utils.clip_grad_norm_(
            self.reference.parameters(), max_norm, norm_type
        )
        norm: Any = nn.utils.clip_grad_norm_(
            self.model.parameters(), max_norm, norm_type
        )
        assert_same("norm", norm.full_tensor(), expected, 1e-6)

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[None]:
        """Have whole parameters registered everywhere."""
        modules = [m for m in self.model.modules() if isinstance(m, FSDPModule)]
        for module in modules:
            module.unshard()
        yield
        for module in modules:
            module.reshard()


APIS = ("FSDP", "FSDP flat", "fully_shard")


def shard_by(
    api: str,
    module: nn.Module,
    units: Iterable[type[nn.Module]],
    *,
    strategy: str | None = None,
    mesh: DeviceMesh | None = None,
    keeps_root: bool = False,
    **options: Any,
) -> Any:
    """Shard by "FSDP" (with original parameters), "FSDP flat" or "fully_shard".

    ``fully_shard`` reshards where ``strategy`` does. With ``keeps_root`` the root does
    not, so what autograd saved of its parameters is there in backward. ``options`` go
    to the wrapper or to ``fully_shard``.
    """
    if api != "fully_shard":
        return fsdp(
            module,
            units=units,
            strategy=strategy,
            device_mesh=mesh,
            use_orig_params=api == "FSDP",
            **options,
        )
    reshards = strategy in ("FULL_SHARD", "HYBRID_SHARD")
    if strategy is not None and not (keeps_root and reshards):
        options["reshard_after_forward"] = reshards
    return shard_units(module, units, mesh=mesh, **options)


def in_either_api(
    api: str,
    build: Callable[[], nn.Module],
    units: Iterable[type[nn.Module]],
    make_batch: Callable[[torch.Generator], Inputs] = vectors,
    *,
    strategy: str | None = "FULL_SHARD",
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = sgd,
    shard: Callable[[nn.Module], Any] | None = None,
    kinds: tuple[type[Differential], type[Rows]] = (Differential, Rows),
    **options: Any,
) -> Differential:
    """Return the model that ``shard_by()`` makes and the unsharded one, in fp64.

    ``shard`` makes it in its place. ``kinds`` are the classes of either API.
    """
    if shard is None:
        shard = functools.partial(
            shard_by, api, units=units, strategy=strategy, **options
        )

    if api == "fully_shard":
        return kinds[1](build, shard, make_batch, optimizer=optimizer)
    return kinds[0](
        lambda: build().double(),
        shard,
        lambda generator: as_double(make_batch(generator)),
        use_orig_params=api == "FSDP",
        optimizer=optimizer,
    )
