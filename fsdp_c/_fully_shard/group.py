"""Groups: the modules of one fully_shard() call, whose parameters are one unit.

Note [Life of a group]
Sharding the parameters makes DTensors with memory of their own. The unit is made when
a module of the group is needed first: it takes their rows over, and the DTensors'
local tensors become views of its shard. What changes the DTensors themselves, as
``to()`` and ``to_empty()`` do, dissolves the unit before; the next use makes another.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from fsdp_c import _native
from fsdp_c._engines.optimizer_in_backward import FollowedUnit
from fsdp_c._fully_shard.arguments import Arguments
from fsdp_c._fully_shard.comms import Comms
from fsdp_c._fully_shard.settings import GroupSettings
from fsdp_c._fully_shard.several import Runs
from fsdp_c._fully_shard.sharded_params import Place, ShardedParams
from fsdp_c._torch_compat import interpreted_with_callees
from fsdp_c._units.cuts import Cut


class SharedEngine(NamedTuple):
    """An engine, the group of its root, all groups, and those of several modules."""

    engine: _native.Engine
    root: "weakref.ref[Group]"
    groups: "list[weakref.ref[Group]]"
    several: "list[weakref.ref[Group]]"


class Group:
    """The modules, their sharded parameters and the unit.

    Attributes:
        modules: As passed to fully_shard().
        arguments: Likewise.
        params: Their parameters.
        settings: What was set since; :meth:`change` changes it.
        comms: The collectives of the user's own.
        runs: Of these modules in a forward.
        unit: None until the first use, and after a conversion.
        running: The engine that it is part of; None until the first call.
        before_run: Called with a module and its inputs before it runs, or None.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        arguments: Arguments,
        places: Sequence[Place],
        sharded: Sequence[nn.Parameter],
        cuts: Sequence[Cut],
    ) -> None:
        self.modules = tuple(modules)
        self.arguments = arguments
        owner = type(self.modules[0]).__name__
        self.params = ShardedParams(owner, arguments, places, sharded, cuts)
        keeps_part = arguments.part_mesh is not None and not self.params.has_parallel
        self.settings = GroupSettings(arguments.reshards, keeps_part)
        self.comms = Comms()
        self.runs = Runs(modules)
        self.unit: _native.Unit | None = None
        self.running: SharedEngine | None = None
        self.before_run: Callable[[nn.Module, Any], object] | None = None
        self._follower: Callable[[], object] | None = None
        self._hide_kept_from_state_dicts()

    # The unit --------------------------------------------------------------

    def ensure_unit(self, name: str) -> _native.Unit:
        """Return the unit, made if there is none.

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
            self.unit = self._make_unit(name, extended)
            self.comms.apply(self.unit)
            self.params.bind(self.unit, keeps_part=self.settings.keeps_part)
            self._follow(self._follower)
        return self.unit

    def _make_unit(self, name: str, extended: list[bool]) -> _native.Unit:
        arguments, settings = self.arguments, self.settings
        precision, data = arguments.precision, arguments.data
        shard_group, replica_group = (
            group if group is not None and group.size() > 1 else None
            for group in (data.shard_group, data.replica_group)
        )
        return _native.Unit(
            self.label(name or type(self.modules[0]).__name__),
            self.params.plain,
            shard_group=shard_group,
            replica_group=replica_group,
            device=arguments.device,
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            use_orig_params=True,
            reshard_after_forward=settings.reshards is not False,
            shows_kept=True,
            reshard_after_backward_without_sync=True,
            backward_prefetch=_native.PREFETCH_PRE,
            forward_prefetch=False,
            cast_forward_inputs=precision.cast_forward_inputs,
            cast_root_forward_inputs=precision.cast_forward_inputs,
            keep_low_precision_grads=False,
            offloads=arguments.offloads,
            shard_dims=[cut.dim for cut in self.params.cuts],
            part_group=arguments.part_group if settings.keeps_part else None,
            extended=extended,
        )

    def dissolve(self) -> None:
        """Let the unit go: the sharded parameters keep their memory.

        Raises:
            RuntimeError: In the middle of a step.
        """
        if self.unit is None:
            return
        if self.running is not None:
            if self.is_in_step:
                raise RuntimeError(
                    f"unit {self.unit.name!r} cannot be converted or moved in the "
                    "middle of a step: do it between backward and forward"
                )
            for group in self.running.groups:
                other = group()
                if other is not None and other.unit is not None:
                    other.unit.reshard()  # its engine goes
                    other.running = None
        self.unit = None
        self.params.unbind()

    def label(self, name: str) -> str:
        """Return the unit's name; ``name`` is its module's, which may have several."""
        groups = groups_of(self.modules[0])
        number = groups.index(self) if self in groups else 0
        if number == 0:
            return name
        dims = self.arguments.data.mesh.mesh_dim_names or (str(number),)
        return f"{name} ({'_'.join(dims)})".lstrip()

    def followed(self, name: str) -> FollowedUnit:
        """Return what an optimizer needs; ``name`` is that of the module."""
        label = self.label(name or type(self.modules[0]).__name__)
        has_optimizer = self._follower is not None
        return FollowedUnit(label, self.params.current(), has_optimizer, self._follow)

    def _follow(self, function: Callable[[], object] | None) -> None:
        """Run ``function`` after each reduction, of a later unit too."""
        self._follower = function
        if self.unit is None or function is None:
            return
        owner = weakref.ref(self)  # the function may lead back to the group

        @interpreted_with_callees
        def run() -> None:
            group = owner()
            if group is not None and group._follower is not None:
                group._follower()

        self.unit.follow_reductions(run)

    # Where it is -------------------------------------------------------------

    @property
    def is_root(self) -> bool:
        """Whether its modules are the root of its engine."""
        root = None if self.running is None else self.running.root()
        return root is not None and root.modules == self.modules

    @property
    def is_in_step(self) -> bool:
        """Whether its engine runs forward or backward."""
        running = self.running
        return running is not None and (
            running.engine.in_forward or running.engine.in_backward
        )

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

    def _hide_kept_from_state_dicts(self) -> None:
        owner = weakref.ref(self)

        def reshard(*_: Any) -> None:
            group = owner()
            if group is not None:
                group.hide_kept()

        for module in dict.fromkeys(place.module for place in self.params.places):
            add: Any = module.register_state_dict_pre_hook
            add(reshard)
            add = module._register_load_state_dict_pre_hook
            add(reshard)

    # GroupSettings --------------------------------------------------------------

    @property
    def reshards_after_forward(self) -> bool:
        """What was set, or what follows from being the root."""
        reshards = self.settings.reshards
        return not self.is_root if reshards is None else reshards

    def change(self, **settings: Any) -> None:
        """Change some of the settings."""
        self.settings = replace(self.settings, **settings)
        self.apply_settings()

    def apply_settings(self) -> None:
        """Tell the unit what was set; after each change, and in a new engine."""
        if self.unit is None:
            return
        settings, running = self.settings, self.running
        if not settings.syncs:
            sync = _native.SYNC_NONE
        elif not settings.all_reduces and self.arguments.has_replicas:
            sync = _native.SYNC_SHARD
        else:
            sync = _native.SYNC_REDUCE
        self.unit.set(
            sync=sync,
            reshard_after_forward=self.reshards_after_forward,
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
                if other and other.unit and other.running is running
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


@interpreted_with_callees
def groups_of(module: Any) -> tuple[Group, ...]:
    """Return the groups of a module that fully_shard() was called on.

    Several, if its parameters are on several meshes.
    """
    groups: tuple[Group, ...] = getattr(module, "__dict__", {}).get(
        "_fsdp_c_groups", ()
    )
    return groups


def group_of(module: Any) -> Group | None:
    """Return the first of them; None: it was not called on the module."""
    return next(iter(groups_of(module)), None)


def own_modules(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of one call, and what is in them and in no other group."""
    seen = set()
    stack = [("", module) for module in reversed(modules)]
    while stack:
        prefix, module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        yield prefix, module
        stack.extend(
            (f"{prefix}.{name}" if prefix else name, child)
            for name, child in reversed(list(module.named_children()))
            if group_of(child) is None
        )


def groups_in(module: nn.Module) -> dict[Group, str]:
    """Return the groups in ``module``, parents first, with the names of modules."""
    groups: dict[Group, str] = {}
    for name, submodule in module.named_modules():
        for group in groups_of(submodule):
            groups.setdefault(group, name)
    return groups
