"""Places: which part of every parameter of a model this rank's optimizer steps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_c._units.base import ShardedModule
from fsdp_c._units.names import clean_name
from fsdp_c._units.uses import is_flat_param, sharding_unit


@dataclass(frozen=True, eq=False)  # one object for each parameter
class Place:
    """A parameter of the model, and where this rank's part of it lies.

    Attributes:
        fqn: Its first name in the unwrapped model.
        names: All its names there; several for a shared parameter.
        shape: Its unsharded shape.
        param: What the optimizer steps: the parameter, or the flat parameter.
        begin: This rank's part begins at this element of the flattened parameter.
        end: It ends before this one; ``begin == end`` if the rank holds nothing.
        offset: The part's first element in ``param``, flattened.
        module: The module whose unit shards it; None outside of all units.
        index: The parameter's index in that unit; -1 outside.
    """

    fqn: str
    names: tuple[str, ...]
    shape: torch.Size
    param: nn.Parameter
    begin: int
    end: int
    offset: int
    module: ShardedModule | None
    index: int

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return self.shape.numel()

    @property
    def part_numel(self) -> int:
        """Elements of this rank's part."""
        return self.end - self.begin

    @cached_property
    def is_flat(self) -> bool:
        """Whether the optimizer steps a flat parameter that contains it."""
        return is_flat_param(self.param)

    @property
    def shard_group(self) -> ProcessGroup | None:
        """The group over which it is sharded; None if each rank has the whole."""
        return None if self.module is None else self.module._config.groups.shard_group

    @cached_property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's part as a tensor: 1-D, unless it is the whole."""
        if self.shard_group is None:
            return self.shape
        return torch.Size([self.part_numel])

    @cached_property
    def parts(self) -> list[tuple[int, int]]:
        """``(begin, end)`` of what each rank of ``shard_group`` holds."""
        assert self.module is not None  # sharded, so by a unit
        return self.module._unit.parts(self.index)

    def parts_over(self, group: ProcessGroup) -> list[tuple[int, int]]:
        """Return ``(begin, end)`` of what each rank of the unit's group holds."""
        if self.shard_group is None:
            return [(0, self.numel)] * group.size()
        return self.parts

    def part_in(self, values: Tensor) -> Tensor:
        """Return this rank's part of ``values``, 1-D, a view if it can be.

        Args:
            values: One value per element of ``param``, in its shape.
        """
        if values.dim() == 1 and values.numel() == self.part_numel:
            return values
        return values.reshape(-1).narrow(0, self.offset, self.part_numel)


def find_places(model: nn.Module) -> dict[str, Place]:
    """Return the places of all parameters in ``model`` by first name.

    Units come one after the other, parents first, and their parameters in the
    unit's order; then the parameters that no unit shards. The order of the former
    is the same on all ranks.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: Nothing in it is wrapped, or a parameter in it is sharded by a
            unit outside of it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    places: dict[str, Place] = {}
    has_units = False
    known: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        if isinstance(module, ShardedModule):
            has_units = True
            for place in _unit_places(module, clean_name(f"{name}.") if name else ""):
                places[place.fqn] = place
                known.add(place.param)
            known.update(use.param for use in module._originals.uses)
    if not has_units:
        raise ValueError(
            f"there is no FullyShardedDataParallel module in this "
            f"{type(model).__name__}: pass the wrapped model"
        )
    for place in _outside_places(model, known):
        places[place.fqn] = place
    return places


def _unit_places(module: ShardedModule, prefix: str) -> Iterator[Place]:
    originals = module._originals
    originals.check()
    unit = module._unit
    group = module._config.groups.shard_group
    rank = 0 if group is None else group.rank()
    uses: dict[int, list[int]] = {}
    for use, param in enumerate(unit.param_of_use):
        uses.setdefault(param, []).append(use)
    flat_params = originals.flat_params()
    slots = unit.slots
    for index, its_uses in sorted(uses.items()):
        names = tuple(prefix + originals.uses[use].fqn for use in its_uses)
        begin, end, offset, _ = unit.intersect(index, rank)
        yield Place(
            fqn=names[0],
            names=names,
            shape=originals.shapes[its_uses[0]],
            param=flat_params[slots[index][0]]
            if flat_params
            else originals.uses[its_uses[0]].param,
            begin=begin,
            end=end,
            offset=offset if flat_params else 0,
            module=module,
            index=index,
        )


def _outside_places(model: nn.Module, known: set[nn.Parameter]) -> Iterator[Place]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param in known:
            continue
        if is_flat_param(param) or sharding_unit(param) is not None:
            raise ValueError(
                f"parameter {clean_name(name)!r} is sharded by unit "
                f"{sharding_unit(param)!r}, which is not in this "
                f"{type(model).__name__}: pass the model that contains it"
            )
        names.setdefault(param, []).append(clean_name(name))
    for param, its_names in names.items():
        yield Place(
            fqn=its_names[0],
            names=tuple(its_names),
            shape=param.shape,
            param=param,
            begin=0,
            end=param.numel(),
            offset=0,
            module=None,
            index=-1,
        )


def places_of_params(
    places: Mapping[str, Place],
) -> dict[nn.Parameter, list[Place]]:
    """Return the places by the parameter that the optimizer steps.

    Those of a flat parameter are in the order of their elements.
    """
    found: dict[nn.Parameter, list[Place]] = {}
    for place in places.values():
        found.setdefault(place.param, []).append(place)
    for its_places in found.values():
        if len(its_places) > 1:
            its_places.sort(key=_element_order)
    return found


def _element_order(place: Place) -> int:
    assert place.module is not None  # only flat parameters have several
    return place.module._unit.slots[place.index][1]
