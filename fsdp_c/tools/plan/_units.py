"""Wraps a model on meta as training would, and returns its units without tensors."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp.api import ShardingStrategy

from fsdp_c._native import Layout
from fsdp_c._units.apart import choose_apart
from fsdp_c._units.base import ShardedModule, ShardedUnit
from fsdp_c._units.config import DEFAULTS, Config, make_config
from fsdp_c._units.groups import HYBRID
from fsdp_c._units.ignored import find_ignored
from fsdp_c._units.keep_whole import Kept, kept_of
from fsdp_c._units.names import WRAPPED_MODULE, clean_name
from fsdp_c._units.params import collect_uses
from fsdp_c._units.uses import ParamUse, mark_sharded
from fsdp_c._units.wrap import auto_wrap
from fsdp_c.tools.plan._ledger import plain_tensor


class _PlannedGroup:
    """Ranks that do not communicate: enough for the constructor's checks."""

    def rank(self) -> int:
        """Return this process's rank."""
        return 0

    def size(self) -> int:
        """Return a number of ranks: more than one, since the plan knows how many."""
        return 2


@dataclass(frozen=True)
class ParamInfo:
    """One parameter of a unit."""

    name: str  # in the unwrapped model
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    kept: Kept | None  # by keep_whole()

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.shape.numel()

    @property
    def row_numel(self) -> int:
        """Elements of a row of it."""
        return self.shape[1:].numel()


@dataclass(frozen=True)
class PlannedUnit:
    """One unit: what training would flatten together, and how."""

    name: str  # of the module in the unwrapped model; empty for the root
    kind: str  # the module's class
    config: Config
    params: tuple[ParamInfo, ...]  # each once, in the order of flattening
    main: str | None = None  # the name of the unit that it is apart from

    @property
    def numel(self) -> int:
        """Elements of its parameters."""
        return sum(param.numel for param in self.params)


class SegmentDtypes(NamedTuple):
    """The dtypes of a segment; see fsdp_segment_options."""

    param: torch.dtype
    reduce: torch.dtype
    held: torch.dtype
    grad: torch.dtype


class PlacedUnit(NamedTuple):
    """A unit on ranks."""

    unit: PlannedUnit
    layout: Layout  # over the ranks that shard it
    dtypes: list[SegmentDtypes]  # of each segment
    replicas: int  # how many ranks have each shard
    offloads: bool  # whether shards are in host memory, and the device computes


_NONE: Any = None  # what is planned has no native unit


class _PlannedModule(ShardedModule):
    """Stands for a wrapped module: its place in the tree, without a native unit."""

    def __init__(
        self,
        module: nn.Module,
        arguments: Mapping[str, Any],
        _name: str,
        left_out: frozenset[nn.Parameter],
    ) -> None:
        nn.Module.__init__(self)
        config = make_config(arguments)
        ignored = find_ignored(module, config)
        auto_wrap(module, config, arguments, ignored, _PlannedModule)
        uses = collect_uses(module, ignored_params=ignored.params, left_out=left_out)
        self._sharded = ShardedUnit(_NONE, config, _NONE, ignored, _NONE)
        self.params: dict[nn.Parameter, ParamUse] = {}  # first uses, in their order
        for use in uses:
            self.params.setdefault(use.param, use)
            mark_sharded(use.param, type(module).__name__)
        self.register_module(WRAPPED_MODULE, module)


def find_units(model: nn.Module, arguments: Mapping[str, Any]) -> list[PlannedUnit]:
    """Wrap ``model`` and return its units, parents first: the engine's order.

    The same code as in training decides which modules become units, which
    parameters they hold and with which options. The model is wrapped in place and
    its parameters are marked, so it cannot be wrapped again.

    ``arguments`` are those of FullyShardedDataParallel, without groups.

    Raises:
        TypeError, ValueError: As FullyShardedDataParallel raises them.
    """
    strategy = arguments.get("sharding_strategy")
    group: Any = (
        (_PlannedGroup(), _PlannedGroup()) if strategy in HYBRID else _PlannedGroup()
    )
    given = {**DEFAULTS, **arguments, "process_group": group}
    root = _PlannedModule(model, given, "", frozenset())
    units = []
    for path, module in root.named_modules():
        if isinstance(module, _PlannedModule):
            name = clean_name(path)
            prefix = f"{name}." if name else ""
            params = tuple(
                ParamInfo(
                    prefix + use.fqn,
                    plain_tensor(param).shape,
                    param.dtype,
                    param.requires_grad,
                    kept_of(use.module, use.name),
                )
                for param, use in module.params.items()
            )
            kind = type(module.wrapped).__name__
            units.append(PlannedUnit(name, kind, module._sharded.config, params))
    return units


def with_apart(units: Sequence[PlannedUnit]) -> list[PlannedUnit]:
    """Return the units that fully_shard() makes: some parameters are units apart."""
    found = []
    for unit in units:
        inside = f"{unit.name}." if unit.name else ""
        has_inside = any(
            other is not unit and other.name.startswith(inside) for other in units
        )
        numels = [p.numel if p.requires_grad else 0 for p in unit.params]
        chosen = choose_apart(numels) if has_inside else []
        rest = [p for i, p in enumerate(unit.params) if i not in chosen]
        found.append(replace(unit, params=tuple(rest)))
        for index in chosen:
            param = unit.params[index]
            found.append(
                replace(unit, name=param.name, params=(param,), main=unit.name)
            )
    return found


def groups_of(
    config: Config, world_size: int, mesh: tuple[int, int] | None
) -> tuple[int, int]:
    """Return how many ranks shard a unit, and how many replicate each shard.

    For the hybrid strategies ``mesh`` is (replicas, shards).

    Source:
        :func:`fsdp_c._units.groups.choose_groups`.
    """
    if config.sharding_strategy in HYBRID:
        assert mesh is not None
        return mesh[1], mesh[0]
    if config.sharding_strategy is ShardingStrategy.NO_SHARD:
        return 1, world_size
    return world_size, 1


@contextmanager
def without_warnings() -> Iterator[None]:
    """Print no warnings: training gives them, a plan of many world sizes would too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
