"""What a wrapped model holds on this rank, by names of the unwrapped model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdp_c import _native
from fsdp_c._fully_shard.group import Group, groups_in
from fsdp_c._fully_shard.row_parts import Rows, is_in_unit
from fsdp_c._state.parts import ParamPart
from fsdp_c._units.base import ShardedModule, sharded_modules
from fsdp_c._units.names import clean_name
from fsdp_c.checkpoint._dtypes import dtype_name
from fsdp_c.checkpoint._manifest import ParamSpec, SegmentSpec, UnitSpec, WholeSpec
from fsdp_c.checkpoint._parallel_parts import parts_for_files
from fsdp_c.checkpoint._ranks import Ranks

_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True)
class Buffer:
    """A persistent buffer, in the dtype that it has in state dicts."""

    names: tuple[str, ...]
    dtype: torch.dtype
    tensor: Tensor


@dataclass(frozen=True)
class Contents:
    """A model: its parameters, buffers, and the extra state of its modules."""

    model: nn.Module
    places: dict[str, ParamPart]  # all parameters, with this rank's parts
    buffers: tuple[Buffer, ...]  # all persistent ones
    # Modules that have an extra state of their own, by its key.
    stateful: dict[str, nn.Module]

    def wholes(self) -> tuple[WholeSpec, ...]:
        """Return what rank 0 saves: buffers, and parameters that no unit shards."""
        params = [
            WholeSpec(
                place.fqn,
                place.names[1:],
                tuple(place.shape),
                dtype_name(place.param.dtype, f"parameter {place.fqn!r}"),
                is_param=True,
            )
            for place in self.places.values()
            if not is_in_unit(place)
        ]
        buffers = [
            WholeSpec(
                buffer.names[0],
                buffer.names[1:],
                tuple(buffer.tensor.shape),
                dtype_name(buffer.dtype, f"buffer {buffer.names[0]!r}"),
                is_param=False,
            )
            for buffer in self.buffers
        ]
        return (*params, *buffers)

    def units(self, ranks: Ranks) -> tuple[UnitSpec, ...]:
        """Return how the units are sharded.

        Raises:
            ValueError: Over ranks that are not among ``ranks``.
        """
        places: dict[Group | nn.Module, list[ParamPart]] = {}
        for place in self.places.values():
            home = place.home
            owner = home.owner if isinstance(home, Rows) else place.module
            if owner is not None:
                places.setdefault(owner, []).append(place)
        names: dict[Group | nn.Module, str] = {
            module: clean_name(name) for name, module in self.model.named_modules()
        }
        for group, name in groups_in(self.model).items():
            names[group] = group.label(clean_name(name))
        return tuple(
            _unit(name, places[owner], ranks)
            for owner, name in names.items()
            if owner in places
        )


def find_contents(model: nn.Module) -> Contents:
    """Return what ``model`` holds; the tensors are its own.

    Raises:
        RuntimeError: It is inside forward, backward or summon_full_params.
        TypeError: ``model`` is not a module.
        ValueError: Nothing in it is sharded.
    """
    places = parts_for_files(model)
    for group in groups_in(model):
        if group.is_in_step and group.unit is not None:
            raise RuntimeError(
                f"unit {group.unit.name!r} is inside forward or backward: save and "
                "load between steps"
            )
    for module in sharded_modules(model):
        if (
            module._sharded.unit.is_summoned
            or module._state_dict_load is not None
            or module.is_in_step
        ):
            raise RuntimeError(
                f"unit {module._sharded.name!r} is inside forward, backward, "
                "summon_full_params() or load_state_dict(): save and load between "
                "steps"
            )
    return Contents(model, places, tuple(_buffers(model)), _stateful(model))


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules by clean prefixes such as ``"blocks.0."``, under all their names.

    A wrapper comes before the module in it, with the same prefix.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        yield clean_name(f"{name}.") if name else "", module


def _buffers(model: nn.Module) -> Iterator[Buffer]:
    dtypes: dict[str, torch.dtype] = {}
    names: dict[Tensor, list[str]] = {}
    for prefix, module in _named_modules(model):
        if isinstance(module, ShardedModule):
            for name, dtype in module._sharded.buffers.original_dtypes.items():
                dtypes[prefix + name] = dtype
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                names.setdefault(buffer, []).append(prefix + name)
    for tensor, its_names in names.items():
        yield Buffer(
            tuple(its_names), dtypes.get(its_names[0], tensor.dtype), tensor.detach()
        )


def _stateful(model: nn.Module) -> dict[str, nn.Module]:
    return {
        f"{prefix}{_EXTRA_STATE}": module
        for prefix, module in _named_modules(model)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _unit(name: str, places: Sequence[ParamPart], ranks: Ranks) -> UnitSpec:
    places = sorted(places, key=lambda place: place.index)
    group, module = places[0].shard_group, places[0].module
    by_rows = isinstance(places[0].home, Rows)
    if by_rows or module is None:
        layout = _layout_of_rows(places)
    else:
        layout = module._sharded.unit.layout
    segments = layout.segments
    params = []
    for place, (segment, offset, _) in zip(places, layout.slots, strict=True):
        dtype, requires_grad, *_ = segments[segment]
        params.append(
            ParamSpec(
                name=place.fqn,
                aliases=place.names[1:],
                shape=tuple(place.shape),
                dtype=dtype_name(dtype, f"parameter {place.fqn!r}"),
                requires_grad=requires_grad,
                segment=segment,
                offset=offset,
            )
        )
    return UnitSpec(
        name=name,
        ranks=tuple([0] if group is None else ranks.positions(group)),
        alignment=layout.alignment,
        segments=tuple(
            SegmentSpec(dtype_name(dtype, f"unit {name!r}"), requires_grad, shard_numel)
            for dtype, requires_grad, _, _, shard_numel, _ in segments
        ),
        params=tuple(params),
        by_rows=by_rows,
        is_placed=layout.is_placed,
    )


def _layout_of_rows(places: Sequence[ParamPart]) -> _native.Layout:
    group = places[0].shard_group
    return _native.Layout(
        [(p.shape.numel(), p.param.dtype, p.param.requires_grad) for p in places],
        1 if group is None else group.size(),
        itemsize=1,
        align_params=False,
        align_shards=False,
        row_numels=[place.shape[1:].numel() for place in places],
    )
