"""The optimizer's part of a load: states by name, into whatever form it needs."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_c._fully_shard.row_parts import parts_in
from fsdp_c._state.optim.classes import (
    StateClasses,
    copy_of,
    describe_state,
    optimizer_name,
    steps_wholes,
)
from fsdp_c._state.optim.groups import groups_for_optimizer
from fsdp_c._state.optim.keys import ParamKeys, keys_of_optimizer, uses_names
from fsdp_c._state.optim.states import ParamState, assemble, load_keeping_dtypes
from fsdp_c._state.optim.states import collect as collect_states
from fsdp_c._state.parts import ParamPart
from fsdp_c.checkpoint._dtypes import dtype_named
from fsdp_c.checkpoint._manifest import OptimSpec, StateSpec, TensorSpec
from fsdp_c.checkpoint._memory import is_direct
from fsdp_c.checkpoint._parallel_parts import held_of_rows, rows_to_read
from fsdp_c.checkpoint._plain import decode, decode_name, tensor_keys, without_constants
from fsdp_c.checkpoint._plan import Plain, find_plain, plan_reads
from fsdp_c.checkpoint._source import Source
from fsdp_c.checkpoint._special import SpecialState


class OptimLoad:
    """Loads an optimizer: plan, then decode, then, when all is checked, install.

    Raises:
        ValueError: The optimizer steps parameters that are not in the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: torch.optim.Optimizer,
        source: Source,
        spec: OptimSpec,
    ) -> None:
        self._model = model
        self._optim = optim
        self._source = source
        self._spec = spec
        collected = collect_states(model, optim, parts=parts_in(model))
        self._held = collected.states
        self._current = rows_to_read(model, collected.states)
        self._current_groups = collected.param_groups or []
        self._fqns = {
            name: fqn
            for fqn, state in self._current.items()
            for name in state.part.names
        }
        self._states: dict[str, ParamState] = {}
        self._plain: dict[str, Plain] = {}
        self._special: dict[tuple[str, str], SpecialState] = {}
        self._flat_states: dict[tuple[nn.Parameter, str, torch.dtype], Tensor] = {}
        self._groups: list[dict[str, Any]] = []
        self._others: Any = {}
        self.missing: list[str] = []
        self.unexpected: list[str] = []

    # Plan -------------------------------------------------------------------

    def plan(self) -> None:
        """Plan all reads; problems go to the source."""
        saved = {self._fqns.get(name) for name in self._names_in_groups()}
        for fqn in self._current:
            if fqn not in saved:  # its state stays
                self.missing.append(fqn)
                self._states[fqn] = self._held[fqn]
        empty: dict[str, tuple[TensorSpec, StateSpec]] = {}
        for name, state_spec in self._spec.states.items():
            spec = self._source.holders.spec(name)
            assert spec is not None  # the manifest was checked
            found = [self._fqns[n] for n in spec.names if n in self._fqns]
            if not found:
                self.unexpected.append(name)
                continue
            fqn = found[0]
            if fqn in self._states:
                self._source.problems.append(
                    f"the checkpoint has two optimizer states for parameter {fqn!r}"
                )
            elif spec.shape == tuple(self._current[fqn].part.shape):
                place = self._current[fqn].part
                has_state = place.is_stepped and not place.is_flat
                if place.part_numel == 0 and not has_state:
                    # What the optimizer made for no element may stay.
                    self._states[fqn] = self._current[fqn]
                    empty[fqn] = spec, state_spec
                else:
                    self._plan_state(fqn, spec, state_spec)
        self._plan_flat_params(empty)
        rank = self._source.rank(0)
        if rank is not None:
            for key in tensor_keys([self._spec.groups, self._spec.others]):
                rank.want_tensor(key)

    def differences(self) -> list[str]:
        """Return what else a strict load refuses, as sentences."""
        name = optimizer_name(self._optim)
        if name == self._spec.name:
            return []
        return [f"the optimizer was a {self._spec.name} and is a {name} now"]

    def _names_in_groups(self) -> list[str]:
        names = []
        for group in self._spec.groups:
            members = group.get("params") if isinstance(group, dict) else None
            if not isinstance(members, list) or any(
                not isinstance(name, str) for name in members
            ):
                raise ValueError("the parameter groups in the manifest are damaged")
            names += members
        return names

    def _plan_state(self, fqn: str, spec: TensorSpec, state_spec: StateSpec) -> None:
        current = self._current[fqn]
        place = current.part
        state = self._states[fqn] = ParamState(place, has_state=True)
        elements = place.begin, place.end
        for key, name in state_spec.sharded.items():
            if key in state_spec.special:
                self._plan_special(fqn, spec, key, name)
                continue
            tensor = current.sharded.get(key)
            if (
                tensor is None
                or tensor.dtype != dtype_named(name)
                or not is_direct(tensor)
            ):
                tensor = self._new_state(place, key, dtype_named(name))
            state.sharded[key] = tensor
            what = f"optimizer state {key!r} of {fqn!r}"
            plan_reads(self._source, what, spec, elements, tensor, (key, name))
        if state_spec.plain:
            if spec.numel == 0:
                elements = 0, 0
            elif place.part_numel == 0:
                # Any will do: a rank without elements has a state as the others have.
                held = next(iter(self._source.holders.holders(spec.name, 0, 1)))
                elements = held.part_begin, held.part_end
            plain = find_plain(
                self._source,
                spec,
                state_spec.plain,
                elements,
                is_of_whole=steps_wholes(self._optim),
            )
            if plain is not None:
                self._plain[fqn] = plain
                for key in tensor_keys(plain.values):
                    plain.rank.want_tensor(key)

    def _plan_flat_params(
        self, empty: Mapping[str, tuple[TensorSpec, StateSpec]]
    ) -> None:
        """Plan an ``empty`` one for flat parameters that would have no state here.

        This rank may hold padding alone, or parameters without a saved state. The state
        is zeros here then, with the step of the others.
        """
        with_state = {
            state.part.param
            for state in self._states.values()
            if state.has_state and state.part.part_numel
        }
        for fqn, (spec, state_spec) in empty.items():
            part = self._current[fqn].part
            if part.is_flat and part.shape.numel() and part.param not in with_state:
                with_state.add(part.param)
                self._plan_state(fqn, spec, state_spec)

    def _plan_special(self, fqn: str, spec: TensorSpec, key: str, dtype: str) -> None:
        place = self._current[fqn].part
        what = describe_state(self._optim, key, repr(fqn))
        make = partial(self._new_state, place, key, dtype_named(dtype))
        special = SpecialState.plan(self._source, what, spec, dtype, key, place, make)
        self._special[fqn, key] = special
        self._states[fqn].sharded[key] = special.values

    def _new_state(self, place: ParamPart, key: str, dtype: torch.dtype) -> Tensor:
        """Return memory for a part; parts of a flat parameter lie in one tensor."""
        param = place.param
        if not place.is_flat:
            return torch.empty(place.part_numel, dtype=dtype, device=param.device)
        whole = self._flat_states.get((param, key, dtype))
        if whole is None:
            whole = torch.zeros(param.shape, dtype=dtype, device=param.device)
            self._flat_states[param, key, dtype] = whole
        return place.home.part_in(whole)

    # Decode -----------------------------------------------------------------

    def decode(self) -> None:
        """Decode what is plain, and try whether the optimizer can take it.

        Raises:
            ValueError: It cannot, or something is damaged.
        """
        device_of = {fqn: s.part.param.device for fqn, s in self._states.items()}
        for fqn, plain in self._plain.items():
            self._states[fqn].plain = {
                decode_name(key): _on_device(
                    decode(value, plain.rank.tensor), device_of[fqn], key
                )
                for key, value in plain.values.items()
            }
        classes = StateClasses(self._optim)
        for (fqn, key), special in self._special.items():
            special.prepare(classes)
            self._states[fqn].sharded[key] = special.values
        self._complete_flat_params()
        first = self._source.rank(0)
        assert first is not None  # it was read, or there would be a problem
        groups = decode(self._spec.groups, first.tensor)
        self._groups = [
            {**group, "params": [n for n in group["params"] if n in self._fqns]}
            for group in groups
        ]
        self._add_missing()
        self._others = decode(self._spec.others, first.tensor)
        if not isinstance(self._others, dict):
            raise ValueError("the optimizer's other state is damaged")
        self._try()

    def _add_missing(self) -> None:
        """Add parameters that the checkpoint lacks to the saved form of their group."""
        for group in self._current_groups:
            missing = [name for name in group["params"] if name in self.missing]
            members = {self._fqns[name] for name in group["params"]}
            for saved in self._groups if missing else []:
                if any(self._fqns[name] in members for name in saved["params"]):
                    saved["params"] += missing
                    break
            else:
                if missing:
                    self._groups.append({**group, "params": missing})

    def _complete_flat_params(self) -> None:
        """Give parameters without elements here the state of their flat parameter."""
        of_flat: dict[nn.Parameter, list[ParamState]] = {}
        for state in self._states.values():
            if state.part.is_flat:
                of_flat.setdefault(state.part.param, []).append(state)
        for states in of_flat.values():
            having = [state for state in states if state.has_state]
            held = max(having, key=lambda s: s.part.part_numel > 0, default=None)
            for state in states:
                # What the checkpoint lacks must fit, wherever its elements are.
                is_missing = state.part.fqn in self.missing
                if state.part.part_numel == 0 and not is_missing:
                    empty = ParamState(state.part, has_state=held is not None)
                    if held is not None:
                        empty.plain = dict(held.plain)
                        empty.sharded = {k: v[:0] for k, v in held.sharded.items()}
                    self._states[state.part.fqn] = empty

    def _try(self) -> None:
        """Let a copy of the optimizer load states that need no memory."""
        on_meta = {
            fqn: ParamState(
                state.part,
                {key: value.to("meta") for key, value in state.sharded.items()},
                state.plain,
                state.has_state,
            )
            for fqn, state in self._states.items()
        }
        _, trial_dict = self._state_dict(on_meta)
        if (
            type(self._optim).load_state_dict
            is not torch.optim.Optimizer.load_state_dict
        ):
            return  # it may hold another one inside
        trial = copy_of(self._optim)
        trial_dict["state"] = {
            key: {n: _without_memory(v) for n, v in each.items()}
            for key, each in trial_dict["state"].items()
        }
        trial_dict["state"].update(self._others)
        try:
            trial.load_state_dict(trial_dict)
        except Exception as error:
            raise ValueError(
                f"{type(self._optim).__name__} does not take the state that "
                f"{self._spec.name} saved ({error!r:.200})"
            ) from None

    def _state_dict(
        self, states: Mapping[str, ParamState]
    ) -> tuple[ParamKeys, dict[str, Any]]:
        """Return the optimizer's keys, and what it loads; without other state."""
        current = self._optim.state_dict()
        keys = keys_of_optimizer(self._model, self._optim, is_named=uses_names(current))
        parts = {fqn: state.part for fqn, state in self._held.items()}
        keys = keys.with_parts(parts)
        target = current["param_groups"]
        groups = groups_for_optimizer(self._groups, keys, target=target)
        for group, own in zip(groups, target, strict=True):
            kept = own.keys() - without_constants(own).keys()
            group.update((name, own[name]) for name in kept)
        held = held_of_rows(states, self._held)
        return keys, {"state": assemble(keys, held), "param_groups": groups}

    # Install ----------------------------------------------------------------

    def install(self) -> None:
        """Put the states that were read into the optimizer, in their own dtypes."""
        keys, state_dict = self._state_dict(self._states)
        states = state_dict["state"]
        states.update(self._others)
        load_keeping_dtypes(self._optim, state_dict, keys.param_of_key)
        for (_, name), special in self._special.items():
            param = special.part.param
            state = states.get(keys.key_of_param[param], {})
            if name in state:
                self._optim.state[param][name] = special.finished(state[name])


def _without_memory(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_meta:
        return torch.zeros((), dtype=value.dtype, device="cpu").expand(value.shape)
    return value


def _on_device(value: Any, device: torch.device, key: str) -> Any:
    """Move a tensor to its parameter's device; torch.optim places ``step`` itself."""
    if isinstance(value, Tensor) and key != "step":
        return value.to(device)
    return value
