"""Groups: the modules of one fully_shard() call, whose parameters are one unit.

Note [Life of a group]
Sharding the parameters makes DTensors with memory of their own. The unit is made when
a module of the group is needed first: it takes their rows over, and the DTensors'
local tensors become views of its shard. What changes the DTensors themselves, as
``to()``, ``to_empty()`` and a load that swaps them do, dissolves the unit before; the
next use makes another.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.__future__ import get_swap_module_params_on_conversion

from fsdp_c import _native
from fsdp_c._fully_shard.arguments import Arguments
from fsdp_c._fully_shard.comms import Comms
from fsdp_c._fully_shard.several import Runs
from fsdp_c._fully_shard.sharded_params import Place, ShardedParams
from fsdp_c._fully_shard.ties import settle_ties
from fsdp_c._torch_compat import is_replicated
from fsdp_c._units.cuts import Cut
from fsdp_c._units.owner import Owner, UnitFacts, owners_in, owners_of

# Of torch's ShardingStrategy: by whether there are replicas, and whether the unit
# reshards after forward.
_STRATEGIES = {
    (False, True): "FULL_SHARD",
    (False, False): "SHARD_GRAD_OP",
    (True, True): "HYBRID_SHARD",
    (True, False): "_HYBRID_SHARD_ZERO2",
}

_Refs = Sequence["weakref.ref[Group]"]


@dataclass(frozen=True)
class GroupSettings:
    """What the methods of FSDPModule set on a group; change() replaces it whole."""

    reshards: bool | None  # after forward; None: unless it is the root
    keeps_part: bool  # of the parameters until backward, in a group of a few ranks
    syncs: bool = True
    all_reduces: bool = True
    divisor: float = 0.0  # of gradients; 0: the number of ranks
    unshards_in_backward: bool = True
    reshards_after_backward: bool = True  # if that does not reduce
    fills_unused: bool = False
    prefetches: tuple[_Refs, _Refs] = ((), ())  # in forward, in backward
    # Of the root's group, for its whole engine:
    is_last_backward: bool = True
    finalizes_by_hand: bool = False


class Group(Owner):
    """The modules, their sharded parameters and the unit.

    Attributes:
        modules: As passed to fully_shard().
        apart: The name of its parameter in the module, if its unit is apart from that
            of the group before it (Note [Units apart] in csrc/core/runtime/apart.c).
        arguments: Likewise.
        params: Their parameters.
        settings: What was set since; :meth:`change` changes it.
        comms: The collectives of the user's own.
        runs: Of these modules in a forward.
        unit: None until the first use, and after a conversion.
        several: Of the root: the groups of several modules in its engine.
        before_run: Called with a module and its inputs before it runs, or None.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        arguments: Arguments,
        places: Sequence[Place],
        sharded: Sequence[nn.Parameter],
        cuts: Sequence[Cut],
        apart: str = "",
    ) -> None:
        self.modules = tuple(modules)
        self.apart = apart
        self.arguments = arguments
        owner = type(self.modules[0]).__name__
        self.params = ShardedParams(owner, arguments, places, sharded, cuts)
        keeps_part = arguments.part_mesh is not None and not self.params.has_parallel
        self.settings = GroupSettings(arguments.reshards, keeps_part)
        self.comms = Comms()
        self.runs = Runs(modules)
        self.unit: _native.Unit | None = None
        self.several: list[weakref.ref[Group]] = []
        self.before_run: Callable[[nn.Module, Any], object] | None = None
        self._running = self._follower = None
        self._requested = ""  # the unit's state before a new engine, if unshard()ed
        self._prepare_for_state_dicts(place.module for place in places)

    # The unit --------------------------------------------------------------

    @property
    def made_unit(self) -> _native.Unit | None:
        """The unit; None until the first use, and after a conversion."""
        return self.unit

    def settle_ties(self, owners: Iterable[Owner]) -> None:
        """Give each parameter that was tied over several calls to one group."""
        settle_ties(owner for owner in owners if isinstance(owner, Group))

    def prepare_unit(self, name: str) -> _native.Unit:
        """Return the unit, made if there is none, and resharded.

        Args:
            name: Of the module in the root; empty for the root itself.

        Raises:
            RuntimeError: A parameter has no memory yet, or is elsewhere.
        """
        if self.unit is None:
            self.params.prepare(f"{name}." if name else "")
            extended = self.params.extended
            if any(extended):
                self.settings = replace(self.settings, keeps_part=False)
            self._bind_unit(self._make_unit(name, extended))
        assert self.unit is not None
        self._requested = self.unit.state if self.unit.is_requested else ""
        self.unit.reshard()  # the old engine has the memory
        return self.unit

    def _bind_unit(self, unit: _native.Unit) -> None:
        """Let the parameters be those of a new unit, all of them or none."""
        try:
            self.unit = unit
            self.comms.apply(unit)
            self.params.bind(unit, keeps_part=self.settings.keeps_part)
            self.follow_reductions(self._follower)
        except BaseException:  # an interrupt, too: the next call makes another
            self._drop_unit()
            raise

    def _drop_unit(self) -> None:
        if self.unit is not None:
            self.unit.leave_params()
        self.unit = None
        self.params.unbind()

    def _make_unit(self, name: str, extended: list[bool]) -> _native.Unit:
        arguments, settings = self.arguments, self.settings
        precision, data = arguments.precision, arguments.data
        shard_group, replica_group = (
            group if group is not None and group.size() > 1 else None
            for group in (data.shard_group, data.replica_group)
        )
        return _native.Unit(
            self.unit_name(name),
            self.params.plain,
            arguments.device,
            shard_group=shard_group,
            replica_group=replica_group,
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            reshard_after_forward=settings.reshards is not False,
            cast_forward_inputs=precision.cast_forward_inputs,
            cast_root_forward_inputs=precision.cast_forward_inputs,
            offloads=arguments.offloads,
            shard_dims=[cut.dim for cut in self.params.cuts],
            part_group=arguments.part_group if settings.keeps_part else None,
            extended=extended,
            is_apart=bool(self.apart),
        )

    def dissolve(self) -> None:
        """Let the unit go: the sharded parameters keep their memory.

        Raises:
            RuntimeError: In the middle of a step, or gradients wait to be reduced.
        """
        if self.unit is None:
            return
        self._check_between_steps()
        if self.accumulates:
            raise RuntimeError(
                f"unit {self.unit.name!r} cannot be converted or moved while its model "
                "holds gradients that no backward has reduced: let the next backward "
                "reduce them, or drop them with fsdp_c.reset(model)"
            )
        self.release_engine()
        self._drop_unit()

    @property
    def accumulates(self) -> bool:
        """Whether a unit of its engine has gradients that no backward has reduced."""
        members = () if self._running is None else self._running.members
        units = [owner.made_unit for ref in members if (owner := ref()) is not None]
        return any(unit is not None and unit.holds_grads for unit in units)

    def _check_between_steps(self) -> None:
        if self.unit is not None and self.is_in_step:
            raise RuntimeError(
                f"unit {self.unit.name!r} cannot be converted or moved in the middle "
                "of a step: do it between backward and forward"
            )

    @contextmanager
    def spared(self, fn: Callable[[Tensor], Tensor]) -> Iterator[bool]:
        """Convert the parameters by ``fn``, if it leaves them the objects they are.

        Yields whether it does; then modules are without them inside the context, so
        that torch's conversion leaves them to the unit.

        Raises:
            RuntimeError: In the middle of a step.
        """
        self._check_between_steps()
        self.hide_kept()
        taken = [
            (place.module._parameters, place.name, param)
            for place in self.params.places
            if (param := place.module._parameters[place.name]) is not None
        ]
        with torch.no_grad():
            is_left = all(fn(param) is param for _, _, param in taken)
        try:
            for params, name, _ in taken if is_left else ():
                params[name] = None
            yield is_left
        finally:
            for params, name, param in taken if is_left else ():
                params[name] = param

    def take(
        self, param: nn.Parameter, cut: Cut, uses: Sequence[tuple[nn.Module, str, str]]
    ) -> None:
        """Take a parameter of other groups; ``uses`` as in ShardedParams.take()."""
        self.params.take(param, cut, uses)
        self._prepare_for_state_dicts(module for module, _, _ in uses)

    def label(self, name: str) -> str:
        """Return the unit's name; ``name`` is its module's, which may have several."""
        if self.apart:
            return f"{name}.{self.apart}".lstrip(".")
        groups = owners_of(self.modules[0])
        number = groups.index(self) if self in groups else 0
        if number == 0:
            return name
        dims = self.arguments.data.mesh.mesh_dim_names or (str(number),)
        return f"{name} ({'_'.join(dims)})".lstrip()

    def unit_name(self, name: str) -> str:
        """Return the unit's name, which is never empty."""
        is_named = name or self.apart
        return self.label(name if is_named else type(self.modules[0]).__name__)

    def unit_facts(self, name: str) -> UnitFacts:
        """Return what tools ask of the unit; ``name`` is that of its module."""
        arguments = self.arguments
        # A module's further groups have none of their own.
        its_modules = self.modules if group_of(self.modules[0]) is self else ()
        reshards = self.settings.reshards
        if reshards is None:
            is_root = not name if self._running is None else self._is_root
            reshards = not is_root
        return UnitFacts(
            name=self.label(name),
            strategy=_STRATEGIES[arguments.has_replicas, reshards],
            device=arguments.device,
            shard_group=arguments.data.shard_group,
            replica_group=arguments.data.replica_group,
            segments=(
                self.params.layout() if self.unit is None else self.unit
            ).segments,
            param_dtype=arguments.precision.param_dtype,
            reduce_dtype=arguments.precision.reduce_dtype,
            buffer_dtype=None,
            buffer_dtypes=tuple(
                buffer.dtype
                for _, module in own_modules(its_modules)
                for buffer in module.buffers(recurse=False)
            ),
            forward_prefetch=bool(self.settings.prefetches[0]),
            backward_prefetch="BACKWARD_PRE",
        )

    def stepped_params(self) -> list[nn.Parameter]:
        """Return the sharded parameters, registered from now on."""
        self.hide_kept()
        return self.params.current()

    # Where it is -------------------------------------------------------------

    def begin_in_engine(self) -> None:
        """Tell the unit what was set, and gather what was unshard()ed before."""
        assert self.unit is not None
        self.several = []
        if self._running is not None and self._running.root() is self:
            groups = [each() for each in self._running.members]
            self.several = [
                weakref.ref(group)
                for group in groups
                if isinstance(group, Group) and len(group.modules) > 1
            ]
        self.apply_settings()
        if self._requested:
            self.unit.unshard()
        if self._requested == "UNSHARDED":
            self.unit.wait_unshard()

    def leave_engine(self) -> None:
        """Run in no engine until the next call."""
        if self.unit is not None:
            self.unit.reshard()  # the engine has the memory
        super().leave_engine()

    @property
    def unit_modules(self) -> tuple[nn.Module, ...]:
        """Those passed to fully_shard()."""
        return self.modules

    @property
    def _is_root(self) -> bool:
        """Whether its modules are the root of its engine."""
        root = None if self._running is None else self._running.root()
        return isinstance(root, Group) and root.modules == self.modules

    @property
    def shows_kept(self) -> bool:
        """Whether modules have registered what is kept for backward, or unshard()ed."""
        if self.unit is None or self.is_in_step:
            return False
        return self.unit.state in ("PARTED", "UNSHARDED")

    def hide_kept(self) -> None:
        """Have modules register the sharded parameters, if they are between steps."""
        if self.shows_kept:
            assert self.unit is not None
            self.unit.reshard()

    def _prepare_for_state_dicts(self, modules: Iterable[nn.Module]) -> None:
        owner = weakref.ref(self)

        def reshard(*_: Any) -> None:
            group = owner()
            if group is not None:
                group.hide_kept()

        def before_load(*args: Any) -> None:
            reshard(*args)
            _native.expect_writes()
            group = owner()
            # torch.utils.swap_tensors() takes parameters that no unit holds.
            if group is not None and get_swap_module_params_on_conversion():
                group.dissolve()

        def show_sharded(
            module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any
        ) -> None:
            group = owner()
            if group is not None and group.is_in_step:
                group.params.put_into(state_dict, prefix, module)

        for module in dict.fromkeys(modules):
            add: Any = module.register_state_dict_pre_hook
            add(reshard)
            add = module._register_state_dict_hook
            handle = add(show_sharded)
            # Before those of others, which may rename what they find.
            hooks: Any = module._state_dict_hooks
            hooks.move_to_end(handle.id, last=False)
            add = module._register_load_state_dict_pre_hook
            add(before_load)

    # GroupSettings --------------------------------------------------------------

    @property
    def reshards_after_forward(self) -> bool:
        """What was set, or what follows from being the root."""
        reshards = self.settings.reshards
        return not self._is_root if reshards is None else reshards

    def change(self, **settings: Any) -> None:
        """Change some of the settings."""
        self.settings = replace(self.settings, **settings)
        self.apply_settings()

    def apply_settings(self) -> None:
        """Tell the unit what was set; after each change, and in a new engine."""
        if self.unit is None:
            return
        settings, running = self.settings, self._running
        if not settings.syncs:
            sync = _native.SYNC_NONE
        elif not settings.all_reduces and self.arguments.has_replicas:
            sync = _native.SYNC_SHARD
        else:
            sync = _native.SYNC_REDUCE
        self.unit.set(
            sync=sync,
            reshard_after_forward=self.reshards_after_forward,
            keeps_for_inference=settings.reshards is False,
            divisor=settings.divisor,
            unshard_in_backward=settings.unshards_in_backward,
            keeps_part=settings.keeps_part,
            reshard_after_backward=settings.reshards_after_backward,
            fills_unused=settings.fills_unused,
        )
        if running is None:
            return
        if running.root() is self:
            running.engine.wait_for_reduces(settings.is_last_backward)
        for in_backward, refs in enumerate(settings.prefetches):
            others = [ref() for ref in refs]
            units = [
                other.unit
                for other in others
                if other and other.unit and other._running is running
            ]
            self.unit.set_prefetches(bool(in_backward), units)

    def set_comm(self, **changes: Any) -> None:
        """Set attributes of ``comms``.

        Raises:
            RuntimeError: Its engine runs forward or backward.
        """
        if self.is_in_step:
            raise RuntimeError(
                f"the collectives of unit {type(self.modules[0]).__name__!r} cannot be "
                "changed in the middle of a step: do it between backward and forward"
            )
        for name, value in changes.items():
            setattr(self.comms, name, value)
        if self.unit is not None:
            self.comms.apply(self.unit)


def group_of(module: Any) -> Group | None:
    """Return the first group of a module; None: fully_shard() did not shard it."""
    groups = (each for each in owners_of(module) if isinstance(each, Group))
    return next(groups, None)


def own_modules(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of one call, and what is in them and in no other group.

    As with torch's fully_shard, what replicate() replicates is not sharded.
    """
    inside = {each for module in modules for each in module.modules()}
    seen = {each for each in inside.difference(modules) if owners_of(each)}
    seen.update(filter(is_replicated, inside))
    for module in modules:
        yield from module.named_modules(seen)


def groups_in(module: nn.Module) -> dict[Group, str]:
    """Return the groups among the owners in ``module``; see owners_in()."""
    owners = owners_in(module).items()
    return {each: name for each, name in owners if isinstance(each, Group)}
