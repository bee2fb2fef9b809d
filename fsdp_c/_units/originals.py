"""Original and flat parameters of a unit: which of them the module registers."""

import operator
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from fsdp_c import _native
from fsdp_c._torch_compat import (
    interpreted,
    interpreted_with_callees,
    outside_transforms,
)
from fsdp_c._units.config import Config
from fsdp_c._units.flat_param_facts import FlatParamFacts, find_facts
from fsdp_c._units.names import flat_param_name
from fsdp_c._units.parallel import ParallelParams
from fsdp_c._units.uses import (
    ParamUse,
    check_is_parameter,
    mark_replaced,
    mark_sharded,
)

# "1": a module's own __setattr__ is never called. FSDP1's name.
UNSAFE_SETATTR = "FSDP_USE_UNSAFE_SETATTR"


class FlatParameter(FlatParamFacts, nn.Parameter):
    """A segment's shard as one parameter, with use_orig_params=False.

    Its shape is ``[shard_numel]``, padding included. torch's own FlatParameter
    recognises it in ``isinstance`` by ``_is_flat_param``.

    Attributes:
        _fqns: Names of the parameters in it, in the order of their elements.
        _shapes: Their shapes.
        _numels: Their numels.
    """

    _is_flat_param = True

    def __new__(cls, shard: torch.Tensor, requires_grad: bool, *_: Any) -> Any:
        return super().__new__(cls, shard, requires_grad)

    def __init__(
        self, _shard: torch.Tensor, _requires_grad: bool, facts: dict[str, Any]
    ) -> None:
        self.take_facts(facts)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FlatParameter":
        shard = self.detach().clone()
        result = FlatParameter(shard, self.requires_grad, self._facts)
        memo[id(self)] = result
        return result

    def become(self, other: "FlatParameter") -> None:
        """Take over the shard of ``other``, and what it holds."""
        self.data = other.data
        self._seen_shard = None  # or the old shard stays in memory
        self.requires_grad_(other.requires_grad)
        self.take_facts(other._facts)


class Originals:
    """A unit's original parameters, and what stands in for them.

    With use_orig_params=True the module keeps them registered and nothing here
    changes that. Otherwise they are *hidden*: moved from ``module._parameters``
    to ``module.__dict__``, the same objects, so that ``module.weight`` still
    finds them; and a flat parameter per segment is registered on the wrapped
    ``module``.
    """

    def __init__(
        self,
        module: nn.Module,
        unit: _native.Unit,
        config: Config,
        uses: Sequence[ParamUse],
        parallel: ParallelParams,
    ) -> None:
        self._rank = config.groups.shard_rank
        self._module = module
        self.uses = tuple(uses)
        self.parallel = parallel
        self._hides = not config.use_orig_params
        for use in uses if self._hides else ():
            mark_replaced(use.param, use.fqn)
        self._num_shows = 0
        holders = dict.fromkeys(use.module for use in uses)  # each once
        self._order = {holder: tuple(holder._parameters) for holder in holders}
        self._flat_params: dict[str, FlatParameter] = {}
        is_unsafe = os.environ.get(UNSAFE_SETATTR) == "1"
        # Modules with a __setattr__ of their own.
        self.listeners = frozenset(
            use.module
            for use in uses
            if not is_unsafe
            and type(use.module).__setattr__ is not nn.Module.__setattr__
        )
        self.rebind(unit)

    def unbind(self) -> None:
        """Let go of the unit; :meth:`rebind` must follow."""
        del self._unit

    def rebind(self, unit: _native.Unit) -> None:
        """Go on with ``unit``, which shards the parameters, maybe in another form.

        Flat parameters stay the same objects, unless their number changes.
        """
        self._unit = unit
        self.parallel.bind(unit, self.uses)
        if self._hides:
            new, old = self.make_flat_params(), self.flat_params()
            if len(old) == len(new):
                for flat_param, like in zip(old, new, strict=True):
                    flat_param.become(like)
                new = old
            for name in self._flat_params:
                self._module._parameters.pop(name, None)
            self._flat_params = {
                flat_param_name(segment): param for segment, param in enumerate(new)
            }
            unit.bind_flat_params(new)
        self._arrange()
        self._watch()

    def make_flat_params(self) -> list[FlatParameter]:
        return [
            FlatParameter(
                shard,
                segment[1],
                find_facts(
                    self._unit,
                    index,
                    self.uses,
                    rank=self._rank,
                    use_orig_params=not self._hides,
                ),
            )
            for index, (shard, segment) in enumerate(
                zip(self._unit.shards, self._unit.segments, strict=True)
            )
        ]

    def flat_params(self) -> list[FlatParameter]:
        return list(self._flat_params.values())

    # Replaced parameters ----------------------------------------------------

    @interpreted
    def call_announced(
        self, module: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Set parameters on modules with their own __setattr__, then call ``module``.

        FSDP1 sets the whole parameters as attributes in every forward, so that
        modules that override ``__setattr__`` see them. Here each attribute is set to
        the object that it holds already.
        """
        is_hidden = self._hides and self._num_shows == 0
        for use in self.uses:
            if use.module not in self.listeners:
                continue
            shown = self.parallel.shown(use.param)
            setattr(use.module, use.name, shown)
            registered = use.module._parameters
            if is_hidden and registered.get(use.name) is shown:
                vars(use.module)[use.name] = registered.pop(use.name)
        return module(*args, **kwargs)

    def _watch(self) -> None:
        """Let the unit notice, before its forward, parameters that were replaced.

        Behind a flat parameter nobody would: there it is the flat one.
        """
        if not self.uses:
            return
        owner = weakref.ref(self)  # the unit must not keep this object

        @interpreted_with_callees
        def check() -> None:
            originals = owner()
            if originals is not None:
                with outside_transforms():
                    originals.check()

        flat = [
            (self._module._parameters, name, param)
            for name, param in self._flat_params.items()
        ]
        self._unit.watch(
            flat
            or [
                (use.module._parameters, use.name, use.param)
                for use in self.uses
                if use.param not in self.parallel.cuts
            ],
            check,
        )

    def check(self) -> None:
        """Take over parameters that the user replaced by other objects.

        Their values are copied into the shard, and they become views of it. It is an
        error to replace a parameter behind a flat parameter, to remove one, or to
        replace one with another dtype or size.
        """
        is_hidden = self._hides and self._num_shows == 0
        self.hide_again()
        for name, param in self._flat_params.items() if is_hidden else ():
            now = self._module._parameters.get(name)
            check_is_parameter(now, f"parameter {name!r} of unit {self._unit.name!r}")
            if now is not param:
                raise self._not_taken(name)
        current: list[nn.Parameter | None] = [
            (vars(use.module) if is_hidden else use.module._parameters).get(use.name)
            for use in self.uses
        ]
        if self.parallel:
            current = [
                use.param if self.parallel.stands_for(now, use.param) else now
                for now, use in zip(current, self.uses, strict=True)
            ]
        if any(map(operator.is_not, current, (use.param for use in self.uses))):
            self._take_over(current)

    def hide_again(self) -> None:
        """Hide originals that were set as attributes, which registers a Parameter.

        torch.func.functional_call on a module inside of the unit puts them back so.
        """
        if not self._hides or self._num_shows > 0:
            return
        if any(use.module._parameters.get(use.name) is use.param for use in self.uses):
            self._arrange()

    def _take_over(self, current: Sequence[nn.Parameter | None]) -> None:
        new: dict[int, nn.Parameter] = {}
        for now, use in zip(current, self.uses, strict=True):
            if (
                self._hides
                or (now is not use.param and use.param in self.parallel.cuts)
                or not isinstance(now, nn.Parameter)
                or new.setdefault(use.slot, now) is not now
            ):
                check_is_parameter(
                    now, f"parameter {use.fqn!r} of unit {self._unit.name!r}"
                )
                raise self._not_taken(use.fqn)
        self._unit.show_kept(False)
        _native.expect_writes()
        for use in {use.slot: use for use in reversed(self.uses)}.values():
            now = new[use.slot]
            if now is not use.param:
                try:
                    self._unit.replace_param(use.slot, now)
                except ValueError as error:
                    raise RuntimeError(
                        f"Cannot writeback to parameter {use.fqn!r} of unit "
                        f"{self._unit.name!r}, which was replaced: {error}"
                    ) from error
                mark_sharded(now, self._unit.name)
        self.uses = tuple(use._replace(param=new[use.slot]) for use in self.uses)
        self._watch()

    def _not_taken(self, name: str) -> RuntimeError:
        return RuntimeError(
            f"Cannot writeback to parameter {name!r} of unit {self._unit.name!r}: it "
            "was removed after wrapping, or replaced in one of the places that share "
            "it; change the module before wrapping it, or copy new values into the "
            "parameter inside FullyShardedDataParallel.summon_full_params()"
        )

    # What is registered -----------------------------------------------------

    @contextmanager
    def shown(self, *, as_dtensors: bool = False) -> Iterator[None]:
        """Register the original parameters, in their old order, for a while.

        ``as_dtensors``: those that were DTensors as such; they are summoned.
        """
        self._num_shows += 1
        if self._num_shows == 1:
            self._arrange()
        try:
            with self.parallel.whole(self.uses) if as_dtensors else nullcontext():
                yield
        finally:
            self._num_shows -= 1
            if self._num_shows == 0:
                self._arrange()

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Register neither the original nor the flat parameters, for a while.

        ``module.weight`` still finds them.
        """
        if not self._hides:  # the user may have changed it
            self._order = {module: tuple(module._parameters) for module in self._order}
        self._arrange(is_absent=True)
        try:
            yield
        finally:
            self._arrange()

    def _arrange(self, *, is_absent: bool = False) -> None:
        """Register what is to be seen now: originals, flat parameters, or neither."""
        shows = (not self._hides or self._num_shows > 0) and not is_absent
        for name in self._flat_params:
            self._module._parameters.pop(name, None)
        changed = set()
        for module, name, _, param, _, _ in self.uses:
            registered, hidden = module._parameters, module.__dict__
            if shows and hidden.get(name) is param:
                del hidden[name]
                registered[name] = param
                changed.add(module)
            elif not shows and registered.get(name) is param:
                del registered[name]
                hidden[name] = param
        for module in changed:
            params, order = module._parameters, dict.fromkeys(self._order[module])
            known = [name for name in order if name in params]
            for name in (*known, *(name for name in params if name not in order)):
                params[name] = params.pop(name)  # to the end
        if not shows and not is_absent:
            self._module._parameters.update(self._flat_params)
        if self.parallel:
            self.parallel.place(self._unit, self.uses)
