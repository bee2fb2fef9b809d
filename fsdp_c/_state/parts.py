"""Parts: which elements of each parameter this rank holds, and which the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fsdp_c import _native
from fsdp_c._native import Placement
from fsdp_c._units.base import ShardedModule, find_fully_shard, require_sharded
from fsdp_c._units.cuts import Cut
from fsdp_c._units.names import clean_name
from fsdp_c._units.tree import Tree
from fsdp_c._units.uses import ParamUse, is_flat_param, is_taken, sharding_unit


class Spread:
    """How the parameters of one unit, or one alone, can lie over the ranks of a group.

    ``layout`` is None where each rank has the whole. Placements are made once.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        layout: _native.Layout | None,
        world_size: int,
    ) -> None:
        self.shapes = shapes
        self._layout = layout
        self._segments = [] if layout is None else [slot[0] for slot in layout.slots]
        self._world_size = world_size
        self._made: dict[object, Placement] = {}

    def sharded(self, param: int) -> Placement:
        """Return where ``param`` lies as its unit shards it."""
        if self._layout is None:
            return self.whole(0, self._world_size)
        segment = self._segments[param]
        if segment not in self._made:
            self._made[segment] = Placement.flat(self._layout, segment)
        return self._made[segment]

    def whole(self, begin: int, end: int) -> Placement:
        """Return the placement in which each of the ranks ``[begin, end)`` has all."""
        if (begin, end) not in self._made:
            numels = [shape.numel() for shape in self.shapes]
            self._made[begin, end] = Placement.on_ranks(numels, begin, end)
        return self._made[begin, end]

    def rows(self, param: int) -> Placement:
        """Return where ``param`` lies in rows; all of it on each rank if it has none.

        See :mod:`fsdp_c._state.sharded_tensors`.
        """
        if not self.shapes[param]:
            return self.whole(0, self._world_size)
        if "rows" not in self._made:
            self._made["rows"] = Placement.rows(self.shapes, self._world_size)
        return self._made["rows"]


@dataclass(frozen=True, eq=False)
class Home:
    """Elements [begin, end) of a flattened parameter, and where this rank has them.

    Here they are alone, or in ``param`` from ``offset`` on. Checkpoints have others:
    see fsdp_c/_fully_shard/row_parts.py.
    """

    param: nn.Parameter  # what the optimizer steps: it, or the flat parameter
    begin: int
    end: int  # `begin`, if this rank has none
    offset: int
    shard_group: ProcessGroup | None  # over which it is sharded; None: all is here
    state_shape: torch.Size  # of what an optimizer has for the elements

    @property
    def communicates(self) -> bool:
        """Whether returning and putting values are collectives."""
        return False

    @cached_property
    def is_flat(self) -> bool:
        """Whether the optimizer steps a flat parameter that contains them."""
        return is_flat_param(self.param)

    @property
    def is_stepped(self) -> bool:
        """Whether a step on this rank gives an optimizer state for them."""
        return self.is_flat or self.end > self.begin or self.shard_group is None

    def values(self) -> Tensor:
        """Return the elements, 1-D, without gradient; a view where it can be."""
        return self.part_in(self.param.detach())

    def part_in(self, values: Tensor) -> Tensor:
        """Return those of ``values`` that are of the elements, as :meth:`values`.

        ``values`` has one for each element of ``param``, in its shape.
        """
        numel = self.end - self.begin
        if values.dim() == 1 and values.numel() == numel:
            return values
        return values.reshape(-1).narrow(0, self.offset, numel)

    def part_of_local(self, values: Tensor) -> Tensor:
        """Return :meth:`part_in` of the tensor of which this rank has ``values``."""
        return self.part_in(values)

    def as_state(self, values: Tensor) -> Tensor:
        """Return an optimizer's state for the elements, of its 1-D values."""
        return values.reshape(self.state_shape)

    @property
    def memory(self) -> Tensor | None:
        """The tensor whose contiguous memory :meth:`values` shows; None: it copies."""
        return self.param if self.param.is_contiguous() else None

    @property
    def opaque(self) -> Tensor | None:
        """What this rank has of it, if its class has no values; see has_values()."""
        return None

    def put(self, values: Tensor) -> None:
        """Copy 1-D values of the elements into place, if they are not there."""
        with torch.no_grad():
            if self.memory is None:
                self._put_back(values)
                return
            here = self.values()
            if here.data_ptr() != values.data_ptr():
                here.copy_(values)

    def _put_back(self, values: Tensor) -> None:
        """Copy them into what :meth:`values` copies."""
        self.param.copy_(values.reshape(self.param.shape))


@dataclass(frozen=True, eq=False)  # one object for each parameter
class ParamPart:
    """A parameter of the model, and the part of it that this rank holds."""

    fqn: str  # its first name in the unwrapped model
    names: tuple[str, ...]  # all there; several for a shared parameter
    shape: torch.Size  # unsharded
    home: Home  # of this rank's elements
    module: ShardedModule | None  # whose unit shards it; None outside of all units
    # Over whose group it is exchanged; None in a model of fully_shard(): torch does.
    over: ShardedModule
    index: int  # in that unit; 0 outside
    spread: Spread  # of the unit's parameters over ranks, by index
    # Of a tensor parallel parameter, whose local tensor all of this is about.
    cut: Cut | None = None

    @property
    def param(self) -> nn.Parameter:
        return self.home.param

    @property
    def begin(self) -> int:
        return self.home.begin

    @property
    def end(self) -> int:
        return self.home.end

    @property
    def shard_group(self) -> ProcessGroup | None:
        return self.home.shard_group

    @property
    def part_numel(self) -> int:
        return self.end - self.begin

    @property
    def is_flat(self) -> bool:
        return self.home.is_flat

    @property
    def is_stepped(self) -> bool:
        """Whether a step on this rank gives an optimizer state for it."""
        return self.home.is_stepped or self.shape.numel() == 0

    @cached_property
    def owners(self) -> list[int]:
        """Ranks of ``shard_group`` that hold elements of it."""
        placement = self.spread.sharded(self.index)
        ranks = range(self.over.world_size)
        return [rank for rank in ranks if placement.numel(self.index, rank) > 0]

    def write(self, whole: Tensor) -> None:
        """Copy this rank's part of ``whole`` into place."""
        with torch.no_grad():
            if not self.is_flat and self.param.shape == whole.shape:
                self.param.copy_(whole)
            elif self.part_numel > 0:
                values = whole.reshape(-1)[self.begin : self.end]
                self.home.values().copy_(values)


def find_parts(model: nn.Module) -> dict[str, ParamPart]:
    """Return the parts of all parameters in ``model`` by first name.

    Units come one after the other, parents first, and their parameters in the
    unit's order; then the parameters that no unit shards. The order of the former
    is the same on all ranks.
    """
    outermost = require_sharded(model)[0]
    parts: list[ParamPart] = []
    known: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        if isinstance(module, ShardedModule):
            module._sharded.originals.check()
            module._sharded.unit.show_kept(False)
            its_parts = unit_parts(module, clean_name(f"{name}.") if name else "")
            parts += its_parts
            known.update(part.param for part in its_parts)
            known.update(use.param for use in module._sharded.uses)
    for param, names in names_of_params(model).items():
        if param in known:
            continue
        if is_taken(param):
            raise ValueError(
                f"parameter {names[0]!r} is sharded by unit "
                f"{sharding_unit(param)!r}, which is not in this "
                f"{type(model).__name__}: pass the model that contains it"
            )
        if isinstance(param, DTensor) and find_fully_shard(model) is not None:
            raise ValueError(
                f"parameter {names[0]!r} is sharded by fully_shard(), and this "
                f"{type(model).__name__} has modules of FullyShardedDataParallel, too: "
                "save and load the modules of each by themselves"
            )
        parts.append(whole_part(param, names, outermost))
    return {part.fqn: part for part in parts}


def names_of_params(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return the names of each registered parameter in the unwrapped model."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(clean_name(name))
    return names


def whole_part(
    param: nn.Parameter, names: Sequence[str], outermost: ShardedModule | None
) -> ParamPart:
    """Return the part of a parameter that is in no unit: all of it."""
    shape = param.shape
    num_ranks = 1 if outermost is None else outermost.world_size
    return ParamPart(
        fqn=names[0],
        names=tuple(names),
        shape=shape,
        home=Home(param, 0, shape.numel(), 0, None, shape),
        module=None,
        over=cast("ShardedModule", outermost),
        index=0,
        spread=Spread([shape], None, num_ranks),
    )


def uses_in_order(module: ShardedModule) -> list[ParamUse]:
    """Return a use of each of a unit's parameters, in the unit's order."""
    uses = {use.slot: use for use in module._sharded.uses}
    return [uses[slot] for slot in range(len(uses))]


def spread_of(module: ShardedModule) -> Spread:
    """Return how the parameters of a unit can lie, in the unit's order."""
    shapes = [use.shape for use in uses_in_order(module)]
    is_sharded = module._sharded.groups.shard_group is not None
    layout = module._sharded.unit.layout if is_sharded else None
    return Spread(shapes, layout, module.world_size)


def unit_values(module: ShardedModule) -> list[Tensor]:
    """Return what this rank has of each of a unit's parameters, in the unit's order.

    In any shape; its gradient is not meant.
    """
    if module._sharded.originals.flat_params():
        return [part.home.values() for part in unit_parts(module)]
    return [use.param for use in uses_in_order(module)]


def unit_parts(
    module: ShardedModule, prefix: str = "", *, as_shown: bool = False
) -> list[ParamPart]:
    """Return the parts of one unit in its order; their names begin with ``prefix``.

    ``as_shown``: while the unit is summoned, ``param`` is what the user sees, the
    original parameter, of which the whole is here.
    """
    originals, unit = module._sharded.originals, module._sharded.unit
    uses: dict[int, list[ParamUse]] = {}
    for use in originals.uses:
        uses.setdefault(use.slot, []).append(use)
    flat_params = originals.flat_params()
    if as_shown and unit.is_summoned:
        flat_params = []
    slots, cuts = unit.slots, originals.parallel.cuts
    group, rank = module._sharded.groups.shard_group, module.shard_rank
    spread = spread_of(module)
    shapes = spread.shapes
    parts = []
    for index, its_uses in uses.items():
        names = tuple(prefix + use.fqn for use in its_uses)
        begin, end, offset, _ = unit.intersect(index, rank)
        param = original = its_uses[0].param
        if flat_params:
            param = flat_params[slots[index][0]]
        else:
            offset = begin  # where forward, or a summon, shows the whole
        state_shape = shapes[index] if group is None else torch.Size([end - begin])
        parts.append(
            ParamPart(
                fqn=names[0],
                names=names,
                shape=shapes[index],
                home=Home(param, begin, end, offset, group, state_shape),
                module=module,
                over=module,
                index=index,
                spread=spread,
                cut=cuts.get(original) if cuts else None,
            )
        )
    return parts


def named_parts(module: ShardedModule) -> dict[str, ParamPart]:
    """Return the parts of one unit as they are shown, by all names in its module."""
    in_order = unit_parts(module, as_shown=True)
    uses = Tree.of(module).named_uses(module)
    return {name: in_order[use.slot] for name, use in uses}
