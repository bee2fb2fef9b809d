"""Collects what this rank will write, and what it adds to the manifest."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_c._fully_shard.row_parts import is_in_unit, parts_in
from fsdp_c._state.optim.classes import describe_state, optimizer_name, refusal
from fsdp_c._state.optim.states import OptimStates, ParamState, give_values
from fsdp_c._state.optim.states import collect as collect_states
from fsdp_c.checkpoint._contents import Contents, find_contents
from fsdp_c.checkpoint._dtypes import dtype_name
from fsdp_c.checkpoint._files import FileItem
from fsdp_c.checkpoint._manifest import Manifest, OptimSpec, StateSpec, UnitSpec
from fsdp_c.checkpoint._parallel_parts import with_rows
from fsdp_c.checkpoint._plain import encode, encode_name, without_constants
from fsdp_c.checkpoint._random_states import random_states
from fsdp_c.checkpoint._rank_entry import model_key, state_key
from fsdp_c.checkpoint._ranks import Ranks
from fsdp_c.checkpoint._special import make_record


@dataclass
class Collected:
    """What one rank saves."""

    # Its tensors; views of the model's and the optimizer's own.
    items: list[FileItem] = field(default_factory=list)
    # Encoded optimizer state that is not element-wise, by parameter.
    plain: dict[str, Any] = field(default_factory=dict)
    # What the optimizer holds for the parameters of `items`.
    states: dict[str, StateSpec] = field(default_factory=dict)
    random_states: Any = None  # encoded
    rank_extra: Any = None  # encoded
    # Records of tensors of classes of their own, by key.
    special: dict[str, Any] = field(default_factory=dict)
    manifest: Manifest | None = None  # of rank 0 only; its states are those of rank 0
    units: tuple[UnitSpec, ...] = ()

    def put_tensor(self, tensor: Tensor) -> str:
        """Add a tensor that is part of a plain value; return its key."""
        key = f"plain/{len(self.items)}"
        self.items.append(FileItem(key, 0, tensor.detach()))
        return key

    def encoded(self, value: Any, what: str) -> Any:
        """Return a plain value as JSON; its tensors are added."""
        return encode(value, what, self.put_tensor)

    def put_special(self, key: str, what: str, tensor: Tensor) -> None:
        """Add a tensor of a class of its own.

        Raises:
            TypeError: Its class does not say what it wraps.
        """
        record = make_record(tensor, what, self.put_tensor)
        if record is None:
            raise TypeError(refusal(what, tensor))
        self.special[key] = record

    def to_host(self) -> None:
        """Copy all tensors to memory of their own on the host."""
        self.items = [
            item._replace(tensor=item.tensor.to("cpu", copy=True))
            for item in self.items
        ]


def collect(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    ranks: Ranks,
    *,
    scheduler: Any,
    extra: Any,
    rank_extra: Any,
    with_random_states: bool,
) -> Collected:
    """Return what this rank saves.

    Communicates nothing and copies no tensor, except as Note [Rows in files] says.

    Raises:
        RuntimeError: The model is in the middle of a step.
        TypeError: A checkpoint cannot hold a value.
        ValueError: It cannot hold a dtype; or the model is sharded over other ranks.
    """
    contents = find_contents(model)
    units = contents.units(ranks)
    collected = Collected(units=units)
    mine = _saved_here(contents, units, ranks)
    for name, place in contents.places.items():
        home, key = place.home, model_key(name)
        if home.opaque is not None:
            if name in mine:
                collected.put_special(key, f"parameter {name!r}", home.opaque)
        elif name in mine or home.communicates:
            part = home.values()
            if not is_in_unit(place):
                part = part.reshape(place.shape)
            if name in mine:
                collected.items.append(FileItem(key, place.begin, part))
    if ranks.rank == 0:
        for buffer in contents.buffers:
            collected.items.append(
                FileItem(model_key(buffer.names[0]), 0, buffer.tensor.to(buffer.dtype))
            )
    states = None
    if optim is not None:
        states = collect_states(model, optim, parts=parts_in(model))
        give_values(optim, states.states, lambda state: _is_mixed(contents, state))
        for name, state in with_rows(states.states, contents.places, ranks).items():
            # No rank holds elements of an empty parameter: rank 0 saves its state.
            is_mine = name in mine or (_is_empty(state) and ranks.rank == 0)
            if is_mine and state.has_state:
                _add_state(collected, optim, name, state)
    if with_random_states:
        collected.random_states = collected.encoded(random_states(), "random states")
    collected.rank_extra = collected.encoded(rank_extra, "rank_extra")
    if ranks.rank == 0:
        collected.manifest = _manifest(
            collected, contents, ranks, optim, states, scheduler, extra
        )
    return collected


def _is_empty(state: ParamState) -> bool:
    return state.part.shape.numel() == 0


def _is_mixed(contents: Contents, state: ParamState) -> bool:
    """Whether what is saved of a parameter is not what the optimizer's state is of."""
    home = contents.places[state.part.fqn].home
    return home.is_flat or home.communicates


def _saved_here(
    contents: Contents, units: tuple[UnitSpec, ...], ranks: Ranks
) -> set[str]:
    """Return the parameters whose part this rank writes.

    Of replicas only the one that contains rank 0 writes.
    """
    writes = {param.name: 0 in unit.ranks for unit in units for param in unit.params}
    return {
        name
        for name, place in contents.places.items()
        if place.part_numel > 0
        and (ranks.rank == 0 if place.shard_group is None else writes[name])
    }


def _add_state(
    collected: Collected, optim: torch.optim.Optimizer, name: str, state: ParamState
) -> None:
    where = f"optimizer state of {name!r}"
    for key in (*state.special, *state.sharded):
        if not isinstance(key, str):
            raise TypeError(f"{where} has the name {key!r}, which is not a string")
    pieces = {} if _is_empty(state) else state.sharded
    specials = {} if _is_empty(state) else state.special
    collected.states[name] = StateSpec(
        {
            key: dtype_name(value.dtype, f"{where}, {key!r},")
            for key, value in sorted({**state.special, **state.sharded}.items())
        },
        tuple(encode_name(key, where) for key in state.plain),
        tuple(specials),
    )
    for key, special in specials.items():
        if key not in state.sharded:
            what = describe_state(optim, key, repr(name))
            collected.put_special(state_key(name, key), what, special)
    for key, value in pieces.items():
        item = FileItem(state_key(name, key), state.part.begin, value)
        collected.items.append(item)
    if state.plain:
        collected.plain[name] = {
            encode_name(key, where): collected.encoded(value, f"{where}, {key!r},")
            for key, value in state.plain.items()
        }


def _manifest(
    collected: Collected,
    contents: Contents,
    ranks: Ranks,
    optim: torch.optim.Optimizer | None,
    states: OptimStates | None,
    scheduler: Any,
    extra: Any,
) -> Manifest:
    encoded = collected.encoded
    optim_spec = None
    if optim is not None and states is not None:
        optim_spec = OptimSpec(
            optimizer_name(optim),
            [
                encoded(without_constants(group), f"parameter group {number}")
                for number, group in enumerate(states.param_groups or [])
            ],
            encoded(states.others, "other state of the optimizer"),
            {},
        )
    return Manifest(
        save_id="",
        world_size=ranks.world_size,
        units=collected.units,
        wholes=contents.wholes(),
        modules={
            key: encoded(module.get_extra_state(), f"extra state {key!r}")
            for key, module in contents.stateful.items()
        },
        optim=optim_spec,
        scheduler=None
        if scheduler is None
        else encoded(scheduler.state_dict(), "scheduler"),
        extra=encoded(extra, "extra"),
        has_random_states=collected.random_states is not None,
        has_rank_extra=collected.rank_extra is not None,
    )


def fingerprint(units: tuple[UnitSpec, ...]) -> str:
    """Return a digest of the units, without their ranks, to compare."""
    same = [replace(unit, ranks=(len(unit.ranks),)) for unit in units]
    return hashlib.sha256(repr(same).encode()).hexdigest()


def merge_states(
    names: Iterable[str], states_of_rank: list[dict[str, StateSpec]]
) -> tuple[dict[str, StateSpec], list[str]]:
    """Return the states of all ranks in the order of ``names``, and contradictions."""
    merged: dict[str, StateSpec] = {}
    problems = []
    for states in states_of_rank:
        for name, state in states.items():
            known = merged.setdefault(name, state)
            special = dict.fromkeys((*known.special, *state.special))
            merged[name] = replace(known, special=tuple(special))
            if replace(known, special=()) != replace(state, special=()):
                problems.append(
                    f"the ranks hold different optimizer state for {name!r}: "
                    f"{merged[name]} and {state}"
                )
    return {name: merged[name] for name in names if name in merged}, problems
