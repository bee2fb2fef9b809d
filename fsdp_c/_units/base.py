"""What a wrapped module knows of itself; all that changes it is here.

Everything else reads: the frozen value :class:`ShardedUnit`, which engine runs the
module, and the load that it is in.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictSettings,
    StateDictType,
)

from fsdp_c import _native
from fsdp_c._units.buffers import UnitBuffers
from fsdp_c._units.config import Config
from fsdp_c._units.groups import Groups
from fsdp_c._units.names import WRAPPED_MODULE
from fsdp_c._units.originals import Originals
from fsdp_c._units.owner import Owner, owners_in
from fsdp_c._units.uses import ParamUse


class Ignored(NamedTuple):
    """Modules with all that is in them, and parameters, theirs included."""

    modules: frozenset[nn.Module]
    params: frozenset[nn.Parameter]


@dataclass(frozen=True, slots=True)
class ShardedUnit:
    """One wrapped module's unit, and what was decided when it was made.

    Only a conversion of the module replaces it, as a whole.
    """

    unit: _native.Unit  # has the layout: segments, slots, shards
    config: Config  # the constructor's arguments; process groups are in it
    originals: Originals  # and the flat parameters
    ignored: Ignored  # what the module leaves alone
    buffers: UnitBuffers  # those that are cast for compute

    @property
    def name(self) -> str:
        return self.unit.name

    @property
    def groups(self) -> Groups:
        return self.config.groups

    @property
    def uses(self) -> tuple[ParamUse, ...]:
        """Where its parameters are, in its order."""
        return self.originals.uses


@dataclass(slots=True)
class Load:
    """One module's part of a load_state_dict()."""

    modules: "tuple[ShardedModule, ...]"  # all of the call, the outermost first
    is_checked: bool  # the state dict fits all of them
    left: frozenset[str]  # clean keys of what stays as it is, and is not missing
    # Puts back what loading into the module's unit changed.
    stack: ExitStack = field(default_factory=ExitStack)
    error_msgs: list[str] | None = None  # torch's list; None until the module's turn


class ShardedModule(Owner, nn.Module):
    """Base of FullyShardedDataParallel: the fields, and the methods that change them.

    The names of the methods are long because they hide those of the wrapped module.
    """

    rank: int
    world_size: int
    compute_device: torch.device
    process_group: ProcessGroup
    _sharded: ShardedUnit
    _state_dict_load: Load | None  # None outside of load_state_dict()
    # FSDP1's names for what register_comm_hook was given.
    _comm_hook: Callable[..., Any] | None
    _comm_hook_state: Any
    # Methods that run like forward; see fsdp_c._fsdp1.forward_methods.
    _forward_methods: frozenset[str]
    _state_dict_settings: StateDictSettings
    # What stands in for the device mesh where a DTensor needs one.
    _group_mesh: DeviceMesh | None
    # Where to() would have put shards that stay in host memory; None: nowhere.
    _moved_to: torch.device | None

    def adopt_module(self, module: nn.Module, sharded: ShardedUnit) -> None:
        """Become the wrapper of ``module``, of which ``sharded`` is the unit."""
        self._comm_hook = self._comm_hook_state = self._follower = None
        self._forward_methods = frozenset()
        self._state_dict_settings = StateDictSettings(
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(),
            FullOptimStateDictConfig(),
        )
        self._group_mesh = self._moved_to = None
        self.adopt_unit(module, sharded)

    def adopt_unit(self, module: nn.Module, sharded: ShardedUnit) -> None:
        """Go on with the unit of ``module``, in no engine and no load."""
        self._modules[WRAPPED_MODULE] = module
        self._sharded = sharded
        self._running = self._state_dict_load = None
        unit, config = sharded.unit, sharded.config
        unit.full_precision = config.full_precision_in_eval and not module.training
        if self._comm_hook is not None:
            unit.set_reduce_hook(self._comm_hook_state, self._comm_hook)
        if self._follower is not None:
            self.follow_reductions(self._follower)

    def replace_unit(self, make_unit: Callable[[], _native.Unit]) -> None:
        """Adopt a unit over the same parameters, of another dtype or device.

        The old unit is destroyed before ``make_unit()`` runs, since its end makes the
        parameters views of its shards. A graph may keep it longer.
        """
        self._sharded.unit.leave_params()
        sharded = replace(self._sharded, unit=None)  # type: ignore[arg-type]
        self.end_state_dict_load()
        sharded.originals.unbind()
        del self._sharded
        unit = make_unit()
        self.adopt_unit(self.wrapped, replace(sharded, unit=unit))
        sharded.originals.rebind(unit)

    def prepare_unit(self, name: str) -> _native.Unit:
        """Return the unit; RuntimeError if a parameter was replaced or moved."""
        self._sharded.originals.check()
        if self._moved_to is not None:
            raise RuntimeError(  # in torch's words
                "An FSDP-managed module with parameter CPU offloading enabled has "
                f"parameters on {self._moved_to}. Make sure to not move the module "
                "from CPU when offloading parameters. It was moved by to() or cuda() "
                f"after wrapping: move it back by to('cpu') (unit {name!r})"
            )
        return self._sharded.unit

    def note_move(self, device: torch.device | None) -> None:
        """Refuse to run, as the shards stay on the host; None: run again."""
        self.release_engine()  # whoever makes the next one asks for the unit
        self._moved_to = device

    def begin_in_engine(self) -> None:
        """Cast the buffers."""
        self._sharded.buffers.activate()

    def adopt_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Let ``hook`` reduce the unit's gradients."""
        # Not by setattr(): a module among them would become a child.
        vars(self).update(_comm_hook=hook, _comm_hook_state=state)
        self._sharded.unit.set_reduce_hook(state, hook)

    def add_forward_method(self, name: str) -> None:
        self._forward_methods |= {name}

    def change_state_dict_settings(self, settings: StateDictSettings) -> None:
        self._state_dict_settings = settings

    def begin_state_dict_load(self, load: Load) -> None:
        """Take part in a load_state_dict(); an earlier one has ended."""
        self.end_state_dict_load()
        self._state_dict_load = load

    def end_state_dict_load(self) -> None:
        """Keep what was loaded, if the module is in a load."""
        load, self._state_dict_load = self._state_dict_load, None
        if load is not None:
            load.stack.close()

    # Looking ---------------------------------------------------------------

    @property
    def made_unit(self) -> _native.Unit:
        """The unit."""
        return self._sharded.unit

    @property
    def unit_modules(self) -> tuple[nn.Module]:
        """The wrapped module."""
        return (self.wrapped,)

    def unit_name(self, name: str) -> str:
        """Return the name that the unit was made with."""
        return self._sharded.name

    def stepped_params(self) -> list[nn.Parameter]:
        """Return the flat parameters, or the original ones."""
        originals = self._sharded.originals
        return list(originals.flat_params()) or list(
            dict.fromkeys(use.param for use in originals.uses)
        )

    @property
    def wrapped(self) -> nn.Module:
        """The registered child: the user's module, or a wrapper around it."""
        module = self._modules[WRAPPED_MODULE]
        assert module is not None
        return module

    @property
    def shard_rank(self) -> int:
        """This rank in the sharding group; 0 where nothing is sharded."""
        return self._sharded.groups.shard_rank

    @property
    def dtensor_mesh(self) -> DeviceMesh:
        """The device mesh, or a 1-D one over the sharding group."""
        if self._sharded.config.device_mesh is not None:
            return self._sharded.config.device_mesh
        if self._group_mesh is None:
            self._group_mesh = DeviceMesh.from_group(
                self.process_group, self.compute_device.type
            )
        return self._group_mesh

    _state_dict_type = property(attrgetter("_state_dict_settings.state_dict_type"))
    _state_dict_config = property(attrgetter("_state_dict_settings.state_dict_config"))
    _optim_state_dict_config = property(
        attrgetter("_state_dict_settings.optim_state_dict_config")
    )
    _device_mesh = property(attrgetter("_sharded.config.device_mesh"))
    _ignored_params = property(attrgetter("_sharded.ignored.params"))
    _ignored_modules = property(attrgetter("_sharded.ignored.modules"))


def require_sharded(model: nn.Module) -> list[ShardedModule]:
    """Return the wrapped modules in ``model``, parents first; there must be one."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    modules = list(sharded_modules(model))
    if not modules:
        if (name := find_fully_shard(model)) is not None:
            raise ValueError(
                f"module {name!r} is one of fully_shard(), which this function of "
                "FullyShardedDataParallel does not take: pass a model that it wraps"
            )
        raise ValueError(
            "there is no FullyShardedDataParallel module in this "
            f"{type(model).__name__}: pass the wrapped model"
        )
    return modules


def require_owners(model: nn.Module) -> dict[Owner, str]:
    """Return the owners in ``model``, of either API, by owners_in(); at least one."""
    owners = owners_in(model) if isinstance(model, nn.Module) else {}
    if not owners:
        require_sharded(model)  # raises
    return owners


def find_fully_shard(model: nn.Module) -> str | None:
    """Return the name of the first module of the other API; None: there is none."""
    name: str
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            return name
    return None


def sharded_modules(module: nn.Module) -> Iterator[ShardedModule]:
    """Yield the wrapped modules in ``module``, itself included, parents first."""
    for submodule in module.modules():
        if isinstance(submodule, ShardedModule):
            yield submodule
