"""Groups: the modules of one fully_shard() call, whose parameters are one unit.

Note [Life of a group]
Sharding the parameters makes DTensors with memory of their own. The unit is made when
a module of the group is needed first: it takes their rows over, and the DTensors'
local tensors become views of its shard. What changes the DTensors themselves, as
``to()`` and ``to_empty()`` do, dissolves the unit before; the next use makes another.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_c import _native
from fsdp_c._engines.engine import engine_listeners
from fsdp_c._engines.optimizer_in_backward import (
    FollowedUnit,
    adopt_in_backward_optimizers,
)
from fsdp_c._fully_shard.arguments import Arguments
from fsdp_c._fully_shard.comms import Comms
from fsdp_c._fully_shard.extension import Extension, is_extended
from fsdp_c._fully_shard.rows import plain_param
from fsdp_c._fully_shard.several import Runs, end_runs
from fsdp_c._torch_compat import interpreted, interpreted_with_callees
from fsdp_c._units.cuts import (
    Cut,
    as_dtensor,
    local_grad,
    local_of,
    parallel_param,
)


class Place(NamedTuple):
    """Where a module has a parameter of the group."""

    module: nn.Module
    name: str  # in the module
    fqn: str  # from the module that was passed
    param: int  # in Group.sharded


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
        runs: Of these modules in a forward.
        places: Where the modules have them.
        sharded: The sharded parameters.
        cuts: How each is cut.
        unit: None until the first use, and after a conversion.
        running: The engine that it is part of; None until the first call.
        prefetches: The groups to gather ahead, in forward and in backward.
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
        self.sharded = list(sharded)
        self.unit: _native.Unit | None = None
        self.running: SharedEngine | None = None
        self.reshards = arguments.reshards
        self.syncs = self.all_reduces = True
        self.divisor = 0.0
        self.prefetches: tuple[Sequence[weakref.ref[Group]], ...] = ((), ())
        self.unshards_in_backward = True
        self.is_last_backward = True
        self.finalizes_by_hand = False
        self.reshards_after_backward = True
        self.fills_unused = False
        self.keeps_part = arguments.part_mesh is not None and all(
            cut.parallel is None for cut in cuts
        )
        self.places = tuple(places)
        self.cuts = tuple(cuts)
        self.comms = Comms()
        self._plain: list[nn.Parameter] = []
        self._parts: list[nn.Parameter | None] = []
        self._shown: list[nn.Parameter] = []
        self._extensions: dict[int, Extension] = {}
        self.runs = Runs(modules)
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
            self._take_registered()
            self.check_memory(f"{name}." if name else "")
            precision = self.arguments.precision
            data = self.arguments.data
            groups = [
                group if group is not None and group.size() > 1 else None
                for group in (data.shard_group, data.replica_group)
            ]
            self._plain = [
                plain_param(sharded, cut)
                for sharded, cut in zip(self.sharded, self.cuts, strict=True)
            ]
            self._extensions = self._find_extensions()
            self.unit = _native.Unit(
                self.label(name or type(self.modules[0]).__name__),
                self._plain,
                shard_group=groups[0],
                replica_group=groups[1],
                device=self.arguments.device,
                param_dtype=precision.param_dtype,
                reduce_dtype=precision.reduce_dtype,
                use_orig_params=True,
                reshard_after_forward=self.reshards is not False,
                shows_kept=True,
                reshard_after_backward_without_sync=True,
                backward_prefetch=_native.PREFETCH_PRE,
                forward_prefetch=False,
                cast_forward_inputs=precision.cast_forward_inputs,
                cast_root_forward_inputs=precision.cast_forward_inputs,
                keep_low_precision_grads=False,
                offloads=self.arguments.offloads,
                shard_dims=[cut.dim for cut in self.cuts],
                part_group=self.arguments.part_group if self.keeps_part else None,
                extended=[i in self._extensions for i in range(len(self._plain))],
            )
            self.comms.apply(self.unit)
            self._shown = [self._show(index) for index in range(len(self._plain))]
            self._parts = [self._part_of(each) for each in range(len(self._plain))]
            self._bind(range(len(self.sharded)))
            self._follow(self._follower)
        return self.unit

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
            found[index] = self._make_extension(place)
        if found:
            self.keeps_part = False
        return found

    def _make_extension(self, place: Place) -> Extension:
        owner = weakref.ref(self)

        def show(param: nn.Parameter) -> None:
            group = owner()
            if group is not None:
                group._show_instead(place.param, param)

        return Extension(
            place.fqn,
            place.module,
            self.sharded[place.param],
            self.arguments.data.shard_mesh,
            self.arguments.device,
            self.arguments.precision,
            show,
        )

    def _show_instead(self, index: int, param: nn.Parameter) -> None:
        """Let modules see ``param`` from now on, which the first gather made."""
        old, self._shown[index] = self._shown[index], param
        for place in self.places:
            if place.module._parameters.get(place.name) is not old:
                continue
            if _has_plain_setattr(place.module):
                place.module._parameters[place.name] = param
            else:
                setattr(place.module, place.name, param)
        self._bind(())

    def _show(self, index: int) -> nn.Parameter:
        """Return what the modules see in forward of a parameter."""
        assert self.unit is not None
        plain, cut = self._plain[index], self.cuts[index]
        if cut.parallel is None:
            return plain
        dtype = self.arguments.precision.param_dtype
        if dtype is None or not plain.is_floating_point():
            dtype = plain.dtype
        shown = parallel_param(plain, cut, dtype)
        self.unit.bind_parallel(index, shown, local_of(shown))
        return shown

    def label(self, name: str) -> str:
        """Return the unit's name; ``name`` is its module's, which may have several."""
        groups = groups_of(self.modules[0])
        number = groups.index(self) if self in groups else 0
        if number == 0:
            return name
        dims = self.arguments.data.mesh.mesh_dim_names or (str(number),)
        return f"{name} ({'_'.join(dims)})".lstrip()

    @property
    def is_root(self) -> bool:
        """Whether its modules are the root of its engine."""
        root = None if self.running is None else self.running.root()
        return root is not None and root.modules == self.modules

    def params(self) -> list[nn.Parameter]:
        """Return the sharded parameters, with what the user registered instead."""
        if self.unit is None:
            self._take_registered()
        else:
            self._adopt_replaced()
        return self.sharded

    @property
    def is_in_step(self) -> bool:
        """Whether its engine runs forward or backward."""
        running = self.running
        return running is not None and (
            running.engine.in_forward or running.engine.in_backward
        )

    def _take_registered(self) -> None:
        for place in self.places:
            param = place.module._parameters.get(place.name)
            self._check_replacement(place, param)
            assert isinstance(param, nn.Parameter)
            self.sharded[place.param] = param

    def _check_replacement(self, place: Place, param: Any) -> None:
        old = self.sharded[place.param]
        if (
            isinstance(param, nn.Parameter)
            and isinstance(param, DTensor)
            and param.shape == old.shape
            and param.placements == self.cuts[place.param].placements
        ):
            return
        raise RuntimeError(
            f"parameter {place.fqn!r} of {type(self.modules[0]).__name__} is no longer "
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
        arguments = self.arguments
        device = torch.device("cpu") if arguments.offloads else arguments.device
        for place in self.places:
            param = self.sharded[place.param]
            if local_of(param).device.type != device.type:
                raise RuntimeError(
                    f"parameter {prefix + place.fqn!r} is on "
                    f"{local_of(param).device}, its group computes on "
                    f"{arguments.device}: move the module there"
                )

    def _bind(self, params: Sequence[int]) -> None:
        """Let the unit's shard be the memory of sharded parameters."""
        assert self.unit is not None
        for index in params:
            sharded = self.sharded[index]
            self.unit.bind_sharded(index, sharded, local_of(sharded))
        owner = weakref.ref(self)  # the unit must not keep the group
        cuts = self.cuts
        is_parallel = any(cut.parallel is not None for cut in cuts)

        def make_grad(index: int, local: Tensor) -> tuple[Tensor, Tensor]:
            cut = cuts[index]
            grad = as_dtensor(local, cut.shape, cut.mesh, cut.placements)
            return grad, local_of(grad)

        def take_local_grad(index: int, grad: Tensor) -> Tensor:
            return local_grad(grad, cuts[index])

        extensions = self._extensions

        @interpreted_with_callees
        def extend(index: int, stage: int) -> Any:
            return extensions[index].run(stage)

        @interpreted_with_callees
        def on_replaced() -> None:
            group = owner()
            if group is not None:
                group._adopt_replaced()

        self.unit.bind_rows(
            [
                (
                    place.module._parameters,
                    place.name,
                    self.sharded[place.param],
                    self._shown[place.param],
                    self._parts[place.param],
                    None if _has_plain_setattr(place.module) else place.module,
                )
                for place in self.places
            ],
            make_grad,
            on_replaced,
            take_local_grad if is_parallel else None,
            extend if self._extensions else None,
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

        for module in dict.fromkeys(place.module for place in self.places):
            add: Any = module.register_state_dict_pre_hook
            add(reshard)
            add = module._register_load_state_dict_pre_hook
            add(reshard)

    def _part_of(self, index: int) -> nn.Parameter | None:
        """Make what modules show of a parameter while a small group keeps it."""
        mesh = self.arguments.part_mesh
        if mesh is None or self.unit is None or not self.keeps_part:
            return None
        placements = (Replicate(), Shard(self.cuts[index].dim))
        local = self.unit.part_of(index)
        sharded = self.sharded[index]
        part = as_dtensor(local, sharded.shape, mesh, placements)
        return nn.Parameter(part, sharded.requires_grad)

    def _adopt_replaced(self) -> None:
        """Go on with sharded parameters that the user registered instead."""
        new: dict[int, nn.Parameter] = {}
        for place in self.places:
            param = place.module._parameters.get(place.name)
            if param is self._shown[place.param] or param is self.sharded[place.param]:
                continue
            self._check_replacement(place, param)
            assert isinstance(param, nn.Parameter)
            new[place.param] = param
        for index, param in new.items():
            self.sharded[index] = param
            if index in self._extensions:
                self._extensions[index].sharded = param
        self._bind(list(new))

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
        self._plain = []
        self._parts = []
        self._shown = []
        self._extensions = {}

    def followed(self, name: str) -> FollowedUnit:
        """Return what an optimizer needs; ``name`` is that of the module."""
        label = self.label(name or type(self.modules[0]).__name__)
        has_optimizer = self._follower is not None
        return FollowedUnit(label, self.params(), has_optimizer, self._follow)

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

    # Settings --------------------------------------------------------------

    def apply_settings(self) -> None:
        """Tell the unit what was set; after each change, and in a new engine."""
        if self.unit is None:
            return
        if not self.syncs:
            sync = _native.SYNC_NONE
        elif not self.all_reduces and self.arguments.has_replicas:
            sync = _native.SYNC_SHARD
        else:
            sync = _native.SYNC_REDUCE
        self.unit.set(
            sync=sync,
            reshard_after_forward=self.reshards_after_forward(),
            divisor=self.divisor,
            unshard_in_backward=self.unshards_in_backward,
            keeps_part=self.keeps_part,
            reshard_after_backward=self.reshards_after_backward,
            fills_unused=self.fills_unused,
        )
        if self.running is None:
            return
        if self.running.root() is self:
            self.running.engine.wait_for_reduces(self.is_last_backward)
        for in_backward, refs in enumerate(self.prefetches):
            others = [ref() for ref in refs]
            units = [
                other.unit
                for other in others
                if other and other.unit and other.running is self.running
            ]
            self.unit.set_prefetches(bool(in_backward), units)

    def set_comm(self, **changes: Any) -> None:
        """Set attributes of ``comms``; raises in the middle of a step.

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

    # SharedEngine ---------------------------------------------------------------

    @interpreted
    def run(
        self,
        module: nn.Module,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run ``function``, the forward of ``module``, with whole parameters.

        The group is the first one of its modules, and the others run with it: their
        units are around each other, as if of nested modules.
        """
        if self.running is None:
            ensure_engine(module, self)
        assert self.unit is not None
        for group in groups_of(module)[1:]:
            assert group.unit is not None
            function = functools.partial(_run_unit, group.unit, function)
        if len(self.modules) > 1:
            for group in groups_of(module):
                group._note_run(module)
        output = self.unit.forward(function, args, kwargs)
        if self.running is not None and self.running.several and self.is_root:
            end_runs(self.running.several)
        if self.arguments.precision.output_dtype is None:
            return output
        return self.arguments.cast_output(output)

    def reshards_after_forward(self) -> bool:
        """Return what was set, or what follows from being the root."""
        return not self.is_root if self.reshards is None else self.reshards

    @interpreted_with_callees
    def _note_run(self, module: nn.Module) -> None:
        """Keep the parameters until the last module of the group has run."""
        assert self.unit is not None
        is_last = self.runs.begin(module)
        self.unit.set(reshard_after_forward=self.reshards_after_forward() and is_last)


def _has_plain_setattr(module: nn.Module) -> bool:
    """Whether nobody notices that a parameter is registered: an RNN would."""
    return type(module).__setattr__ is nn.Module.__setattr__


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


@interpreted
def _run_unit(
    unit: _native.Unit, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return unit.forward(function, args, kwargs)


@interpreted_with_callees
def ensure_engine(module: nn.Module, group: Group) -> None:
    """Make an engine over all groups in ``module``, whose root it becomes.

    A module that contains it and is called later makes another one; see Note [Roots] in
    fsdp_c._engines.engine.

    Raises:
        RuntimeError: A group is in the middle of a step with another engine, or has
            parameters without memory.
        ValueError: The groups are on several devices.
    """
    if group.running is not None:
        return
    groups = groups_in(module)
    units = [each.ensure_unit(name) for each, name in groups.items()]
    for each, name in groups.items():
        adopt_in_backward_optimizers(each.followed(name))
    requested = [(unit, unit.state) for unit in units if unit.is_requested]
    for unit in units:
        unit.reshard()  # the old engine has the memory
    engine = _native.Engine(units)
    engine.check_order(c10d.get_debug_level() != c10d.DebugLevel.OFF)
    refs = {each: weakref.ref(each) for each in groups}
    several = [ref for each, ref in refs.items() if len(each.modules) > 1]
    running = SharedEngine(engine, refs[group], [*refs.values()], several)
    for each in groups:
        each.running = running
    for each in groups:
        each.apply_settings()
    for unit, state in requested:
        unit.unshard()
        if state == "UNSHARDED":
            unit.wait_unshard()
    for listener in engine_listeners:
        listener(module)
