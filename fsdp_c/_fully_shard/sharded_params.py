"""The sharded parameters of a group, and what modules see in their places.

Outside a step modules have the sharded parameters registered: DTensors. While the
parameters are whole, modules see plain ones, or DTensors of a tensor parallel mesh
only; while a small group keeps a part of each, DTensors over that part. The unit
registers the others, from the lists that :meth:`ShardedParams.bind` gives it.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_c import _native
from fsdp_c._fully_shard.arguments import Arguments
from fsdp_c._fully_shard.extension import Extension, is_extended
from fsdp_c._fully_shard.rows import plain_param
from fsdp_c._torch_compat import interpreted_with_callees, outside_transforms
from fsdp_c._units.cuts import (
    Cut,
    as_dtensor,
    like_dtensor,
    local_grad,
    local_of,
    parallel_param,
)
from fsdp_c._units.uses import check_is_parameter, mark_replaced

# Not the parameters: one with a weak reference cannot be swapped.
_living: "weakref.WeakSet[ShardedParams]" = weakref.WeakSet()


def sharded_names() -> dict[nn.Parameter, str]:
    """Return the names of all parameters that groups have sharded."""
    return {
        each.sharded[place.param]: place.fqn
        for each in _living
        for place in each.places
    }


class Place(NamedTuple):
    """Where a module has a parameter of the group."""

    module: nn.Module
    name: str  # in the module
    fqn: str  # from the module that was passed
    param: int  # in ShardedParams.sharded


class ShardedParams:
    """The parameters of one group.

    Attributes:
        owner: The class of their module, for errors.
        places: Where the modules have them.
        sharded: The sharded parameters, as last seen; see :meth:`current`.
        cuts: How each is cut.
        plain: What the unit gathers; empty without a unit.
    """

    def __init__(
        self,
        owner: str,
        arguments: Arguments,
        places: Sequence[Place],
        sharded: Sequence[nn.Parameter],
        cuts: Sequence[Cut],
    ) -> None:
        """Take what fully_shard() made."""
        self.owner = owner
        self._arguments = arguments
        self.places = tuple(places)
        self.sharded = list(sharded)
        self._made = [_identity_of(param) for param in sharded]
        self.cuts = tuple(cuts)
        self._unit: _native.Unit | None = None
        _living.add(self)
        self.plain: list[nn.Parameter] = []
        self._shown: list[nn.Parameter] = []
        self._parts: list[nn.Parameter | None] = []
        self._extensions: dict[int, Extension] = {}

    @property
    def has_parallel(self) -> bool:
        """Whether one is a DTensor of a tensor parallel mesh."""
        return any(cut.parallel is not None for cut in self.cuts)

    @property
    def extended(self) -> list[bool]:
        """Whether each has fsdp_pre_all_gather."""
        return [index in self._extensions for index in range(len(self.plain))]

    def layout(self) -> _native.Layout:
        """Return the layout that the unit will have: a segment for each parameter."""
        return _native.Layout(
            [
                (cut.local_shape.numel(), param.dtype, param.requires_grad)
                for param, cut in zip(self.sharded, self.cuts, strict=True)
            ],
            self._arguments.data.num_shards,
            align_params=False,
            align_shards=False,
            row_numels=[
                cut.local_shape.numel() // max(cut.local_shape[cut.dim], 1)
                for cut in self.cuts
            ],
        )

    def current(self) -> list[nn.Parameter]:
        """Return the sharded parameters, with what the user registered instead."""
        if self._unit is None:
            self._take_registered()
        else:
            self._adopt_replaced()
        return self.sharded

    def current_in(self, modules: Collection[nn.Module]) -> list[nn.Parameter]:
        """Return those of :meth:`current` that ``modules`` have, not their children."""
        sharded = self.current()
        found = {place.param for place in self.places if place.module in modules}
        return [sharded[index] for index in sorted(found)]

    def put_into(
        self, state_dict: dict[str, Any], prefix: str, module: nn.Module
    ) -> None:
        """Put the sharded parameters in the places of what ``module`` shows instead."""
        for place in self.places:
            key = prefix + place.name
            if place.module is not module or key not in state_dict:
                continue
            param = self.sharded[place.param]
            keeps_vars = isinstance(state_dict[key], nn.Parameter)
            state_dict[key] = param if keeps_vars else param.detach()

    def _take_registered(self) -> None:
        for place in self.places:
            param = place.module._parameters.get(place.name)
            self._check_replacement(place, param)
            assert isinstance(param, nn.Parameter)
            self.sharded[place.param] = param
        self._merge_tied()

    def _merge_tied(self) -> None:
        """Keep once what was tied after fully_shard(): a parameter of two places."""
        first: dict[nn.Parameter, int] = {}
        for index, param in enumerate(self.sharded):
            first.setdefault(param, index)
        if len(first) == len(self.sharded):
            return
        self.places = tuple(
            place._replace(param=first[self.sharded[place.param]])
            for place in self.places
        )
        self._keep(first.values())

    def _keep(self, indices: Iterable[int]) -> None:
        """Keep the parameters at ``indices``, which are those that places have."""
        kept = list(indices)
        number = {index: new for new, index in enumerate(kept)}
        self.places = tuple(
            place._replace(param=number[place.param]) for place in self.places
        )
        self._made = [self._made[index] for index in kept]
        self.cuts = tuple(self.cuts[index] for index in kept)
        self.sharded = [self.sharded[index] for index in kept]

    def leave(self, places: Collection[Place]) -> None:
        """Leave ``places`` to another group, before there is a unit."""
        self.places = tuple(each for each in self.places if each not in places)
        self._keep(sorted({place.param for place in self.places}))

    def take(
        self, param: nn.Parameter, cut: Cut, uses: Iterable[tuple[nn.Module, str, str]]
    ) -> None:
        """Take a parameter of other groups, before there is a unit.

        ``uses`` are the module, the name there, and from the module that was passed.
        """
        new = (Place(*use, len(self.sharded)) for use in uses)
        self.places = (*self.places, *new)
        self.sharded.append(param)
        self._made.append(_identity_of(param))
        self.cuts = (*self.cuts, cut)

    def _check_replacement(self, place: Place, param: Any) -> None:
        old = self.sharded[place.param]
        if (
            isinstance(param, nn.Parameter)
            and isinstance(param, DTensor)
            and param.shape == old.shape
            and param.placements == self.cuts[place.param].placements
        ):
            return
        check_is_parameter(param, f"parameter {place.fqn!r} of {self.owner}")
        raise RuntimeError(
            f"parameter {place.fqn!r} of {self.owner} is no longer "
            f"the DTensor of shape {tuple(old.shape)} that fully_shard() registered: "
            "replace it by one with the same placements, or copy values into it"
        )

    def check_memory(self, prefix: str) -> None:
        """Check that every parameter has memory where the group computes.

        ``prefix`` is that of names in messages.

        Raises:
            RuntimeError: One has none yet, or is elsewhere.
        """
        on_meta = [
            prefix + place.fqn
            for place in self.places
            if self.sharded[place.param].is_meta
        ]
        if on_meta:  # torch's first words
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before "
                f"training, but the following were still on meta device: {on_meta}\n"
                "For example, call module.to_empty(device) to materialize to device "
                "and call module.reset_parameters() on each module to initialize "
                "values."
            )
        arguments = self._arguments
        device = torch.device("cpu") if arguments.offloads else arguments.device
        elsewhere = [
            (prefix + place.fqn, local_of(self.sharded[place.param]).device)
            for place in self.places
            if local_of(self.sharded[place.param]).device.type != device.type
        ]
        if elsewhere and arguments.offloads:  # torch's words
            raise RuntimeError(
                "FSDP parameters should be materialized on CPU when enabling CPU "
                "offloading. For example, load a CPU state dict or call "
                'module.to_empty(device="cpu"). Found following parameters on non-CPU '
                f"device: {elsewhere}"
            )
        if elsewhere:
            fqn, other = elsewhere[0]
            raise RuntimeError(
                f"parameter {fqn!r} is on {other}, but its group keeps its shards on "
                f"{device}: move the module there"
            )

    def _check_data(self, prefix: str) -> None:
        """Check that nobody set ``data``; later the unit does.

        Raises:
            ValueError: That of a parameter was.
        """
        for place in self.places:
            local, own = _identity_of(self.sharded[place.param])
            old_local, old_own = self._made[place.param]
            self._made[place.param] = (local, own)  # the user knows it now
            if local() is old_local() and own._cdata != old_own._cdata:
                raise ValueError(
                    f"the data of parameter {prefix + place.fqn!r} was set, which does "
                    "not change the values of a DTensor; write them into it: with "
                    "torch.no_grad(): param.copy_(value)"
                )

    # A unit's life ---------------------------------------------------------

    def prepare(self, prefix: str) -> None:
        """Make the plain parameters of a new unit, of those registered now.

        ``prefix`` is that of names in messages.

        Raises:
            RuntimeError: A parameter has no memory yet, or is elsewhere.
            ValueError: The data of one was set.
        """
        self._take_registered()
        self.check_memory(prefix)
        self._check_data(prefix)
        self.plain = [
            plain_param(sharded, cut)
            for sharded, cut in zip(self.sharded, self.cuts, strict=True)
        ]
        self._extensions = self._find_extensions()

    def bind(self, unit: _native.Unit, *, keeps_part: bool) -> None:
        """Let the unit's shard be their memory, and the unit register what is shown."""
        for param in self.sharded:
            # torch.utils.swap_tensors(), as in to(), leaves autograd without them.
            hooks = param._post_accumulate_grad_hooks
            if hooks is not None:
                param._post_accumulate_grad_hooks = hooks
        self._unit = unit
        indices = range(len(self.plain))
        self._shown = [self._show(unit, index) for index in indices]
        self._parts = [
            self._part_of(unit, index) if keeps_part else None for index in indices
        ]
        for place in self.places:
            for whole in (self._shown[place.param], self._parts[place.param]):
                if whole is not None:
                    mark_replaced(whole, place.fqn)  # an optimizer of it trains nothing
        for index in indices:
            self._bind_sharded(unit, index)
        self._bind_rows(unit)

    def unbind(self) -> None:
        """Let the unit go: the sharded parameters keep their memory."""
        self._unit = None
        self.plain = []
        self._shown = []
        self._parts = []
        self._extensions = {}

    def _bind_sharded(self, unit: _native.Unit, index: int) -> None:
        sharded = self.sharded[index]
        unit.bind_sharded(index, sharded, local_of(sharded))

    def _bind_rows(self, unit: _native.Unit) -> None:
        owner = weakref.ref(self)  # the unit must not keep this object
        cuts, extensions = self.cuts, self._extensions
        patterns: dict[int, DTensor] = {}  # of gradients, without memory

        def make_grad(index: int, local: Tensor) -> tuple[Tensor, Tensor]:
            pattern = patterns.get(index)
            if pattern is None or pattern.dtype != local.dtype:
                cut = cuts[index]
                empty = torch.empty(local.shape, dtype=local.dtype, device="meta")
                pattern = as_dtensor(empty, cut.shape, cut.mesh, cut.placements)
                patterns[index] = pattern
            grad = like_dtensor(local, pattern)
            return grad, local_of(grad)

        def take_local_grad(index: int, grad: Tensor) -> Tensor:
            return local_grad(grad, cuts[index])

        @interpreted_with_callees
        def extend(index: int, stage: int) -> Any:
            return extensions[index].run(stage)

        @interpreted_with_callees
        def on_replaced() -> None:
            params = owner()
            if params is not None:
                with outside_transforms():
                    params._adopt_replaced()

        unit.bind_rows(
            [
                (
                    place.module._parameters,
                    place.name,
                    self.sharded[place.param],
                    self._shown[place.param],
                    self._parts[place.param],
                    None if has_plain_setattr(place.module) else place.module,
                )
                for place in self.places
            ],
            make_grad,
            on_replaced,
            take_local_grad if self.has_parallel else None,
            extend if extensions else None,
        )

    def _adopt_replaced(self) -> None:
        """Go on with sharded parameters that the user registered instead."""
        assert self._unit is not None
        new: dict[int, nn.Parameter] = {}
        for place in self.places:
            param = place.module._parameters.get(place.name)
            if param is self._shown[place.param] or param is self.sharded[place.param]:
                continue
            self._check_replacement(place, param)
            assert isinstance(param, nn.Parameter)
            tied_to = sharded_names().get(param)
            if tied_to is not None:
                raise ValueError(
                    f"parameter {place.fqn!r} of {self.owner} was tied to {tied_to!r}, "
                    "which is sharded, too: tie parameters before the first forward"
                )
            new[place.param] = param
        for index, param in new.items():
            self.sharded[index] = param
            if index in self._extensions:
                self._extensions[index].sharded = param
            self._bind_sharded(self._unit, index)
        self._bind_rows(self._unit)

    # What is shown ---------------------------------------------------------

    def _show(self, unit: _native.Unit, index: int) -> nn.Parameter:
        """Return what modules see of a parameter while it is whole."""
        plain, cut = self.plain[index], self.cuts[index]
        if cut.parallel is None:
            return plain
        dtype = self._arguments.precision.param_dtype
        if dtype is None or not plain.is_floating_point():
            dtype = plain.dtype
        shown = parallel_param(plain, cut, dtype)
        unit.bind_parallel(index, shown, local_of(shown))
        return shown

    def _part_of(self, unit: _native.Unit, index: int) -> nn.Parameter | None:
        """Return what modules see of it while a small group keeps a part."""
        mesh = self._arguments.part_mesh
        if mesh is None:
            return None
        placements = (Replicate(), Shard(self.cuts[index].dim))
        local = unit.part_of(index)
        sharded = self.sharded[index]
        part = as_dtensor(local, sharded.shape, mesh, placements)
        return nn.Parameter(part, sharded.requires_grad)

    def _find_extensions(self) -> dict[int, Extension]:
        """Return the parameters that have fsdp_pre_all_gather."""
        found: dict[int, Extension] = {}
        for place in self.places:
            index, local = place.param, local_of(self.sharded[place.param])
            if index in found:
                continue
            if not is_extended(local):
                if is_traceable_wrapper_subclass(local):
                    raise RuntimeError(
                        f"parameter {place.fqn!r} is a {type(local).__name__}, which "
                        "has no fsdp_pre_all_gather and fsdp_post_all_gather: define "
                        "them, or list it in ignored_params"
                    )
                continue
            if self.cuts[index].dim != 0 or self.cuts[index].parallel is not None:
                raise ValueError(
                    f"parameter {place.fqn!r} has fsdp_pre_all_gather: it can be cut "
                    "along dimension 0 only, and not be tensor parallel"
                )
            found[index] = Extension(
                place.fqn,
                place.module,
                self.sharded[index],
                self._arguments.data.shard_mesh,
                self._arguments.device,
                self._arguments.precision,
                self._shows_instead(index),
            )
        return found

    def _shows_instead(self, index: int) -> Callable[[nn.Parameter], None]:
        """Return a function that lets modules see what the first gather made."""
        owner = weakref.ref(self)

        def show(param: nn.Parameter) -> None:
            params = owner()
            if params is None or params._unit is None:
                return
            old, params._shown[index] = params._shown[index], param
            for place in params.places:
                if place.module._parameters.get(place.name) is old:
                    register(place.module, place.name, param)
            params._bind_rows(params._unit)

        return show


def _identity_of(
    param: nn.Parameter,
) -> tuple[weakref.ref[Tensor], torch.UntypedStorage]:
    """Return what tells whether ``param.data`` was set: the second changes alone.

    They are its local tensor, and the empty storage of its own.
    """
    return weakref.ref(local_of(param)), param.untyped_storage()


def has_plain_setattr(module: nn.Module) -> bool:
    """Whether ``module`` uses nn.Module's ``__setattr__``; an RNN has its own."""
    return type(module).__setattr__ is nn.Module.__setattr__


def register(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Register ``param``, the cheap way where nobody notices it."""
    if has_plain_setattr(module):
        module._parameters[name] = param
    else:  # an RNN keeps lists of its parameters
        setattr(module, name, param)
