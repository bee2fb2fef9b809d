"""Owners: what holds a unit of either API, and which engine runs it.

A wrapped module owns its unit; of ``fully_shard()`` a group of modules does.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup

from fsdp_c import _native
from fsdp_c._torch_compat import interpreted_with_callees
from fsdp_c._units.names import clean_name


class Running(NamedTuple):
    """An engine and the owners of its units, in its order; the root's is the first."""

    engine: _native.Engine
    members: "tuple[weakref.ref[Owner], ...]"

    def root(self) -> "Owner | None":
        return self.members[0]()


@dataclass(frozen=True)
class UnitFacts:
    """One unit of a model, and how it was asked to run.

    Attributes:
        name: Of its module in the unwrapped model, empty for the root; of a unit apart,
            that of its parameter.
        strategy: Name of the ShardingStrategy that does the same.
        device: Where it computes.
        shard_group: The ranks that its parameters are sharded over; None for one.
        replica_group: The ranks that hold the same shard; None for one.
        segments: As ``_native.Unit.segments``.
        param_dtype, reduce_dtype, buffer_dtype: Asked for; None: the parameters' own.
        buffer_dtypes: Of its own buffers.
        forward_prefetch: Whether forward gathers ahead.
        backward_prefetch: Name of the BackwardPrefetch; empty for none.
    """

    name: str
    strategy: str
    device: torch.device
    shard_group: ProcessGroup | None
    replica_group: ProcessGroup | None
    segments: list[tuple[torch.dtype, bool, int, int, int, int]]
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None
    buffer_dtypes: tuple[torch.dtype, ...]
    forward_prefetch: bool
    backward_prefetch: str


class Owner:
    """Base of FullyShardedDataParallel and of the groups of fully_shard().

    The names of the methods are long because they hide those of a wrapped module.
    """

    _running: Running | None  # None until the first call
    # Runs after each reduction; see fsdp_c._engines.in_backward.
    _follower: Callable[[], object] | None

    # What each API says ------------------------------------------------------

    @property
    def made_unit(self) -> _native.Unit | None:
        """The unit; None until it is made."""
        raise NotImplementedError

    @property
    def unit_modules(self) -> tuple[nn.Module, ...]:
        """The user's modules whose forwards run in the unit."""
        raise NotImplementedError

    def unit_name(self, name: str) -> str:
        """Return the unit's name; ``name`` is that of its module in the model."""
        raise NotImplementedError

    def unit_facts(self, name: str) -> UnitFacts:
        """Return what tools ask of the unit; ``name`` as there."""
        raise NotImplementedError

    def stepped_params(self) -> Sequence[nn.Parameter]:
        """Return the parameters that an optimizer steps, registered from now on."""
        raise NotImplementedError

    def settle_ties(self, owners: "Iterable[Owner]") -> None:
        """Of the root, before units are made: settle what was tied since, if need be.

        Each parameter is to be one owner's; ``owners`` are all, parents first.
        """

    def prepare_unit(self, name: str) -> _native.Unit:
        """Return the unit for a new engine, made if need be; ``name`` as there."""
        raise NotImplementedError

    def begin_in_engine(self) -> None:
        """After all owners have joined an engine: tell the unit what was set."""
        raise NotImplementedError

    # The engine --------------------------------------------------------------

    def join_engine(self, running: Running) -> None:
        self._running = running

    def leave_engine(self) -> None:
        """Run in no engine until the next call."""
        self._running = None

    def release_engine(self) -> None:
        """Let the engine go, for all its units; the next call makes one."""
        for ref in () if self._running is None else self._running.members:
            member = ref()
            if member is not None:
                member.leave_engine()

    @property
    def _engine(self) -> _native.Engine | None:
        return None if self._running is None else self._running.engine

    @property
    def is_in_step(self) -> bool:
        """Whether its engine runs forward or backward."""
        engine = self._engine
        return engine is not None and (engine.in_forward or engine.in_backward)

    @property
    def _is_root(self) -> bool | None:
        """FSDP1's name; None until the first call."""
        return None if self._running is None else self._running.root() is self

    # An optimizer in backward ------------------------------------------------

    @property
    def has_optimizer(self) -> bool:
        return self._follower is not None

    def follow_reductions(self, function: Callable[[], object] | None) -> None:
        """Let an optimizer's ``function()`` run when the unit has been reduced."""
        self._follower = function
        unit = self.made_unit
        if unit is None:
            return
        owner = weakref.ref(self)  # the function may lead back to the owner

        @interpreted_with_callees
        def run() -> None:
            followed = owner()
            if followed is not None and followed._follower is not None:
                followed._follower()

        unit.follow_reductions(None if function is None else run)


def owners_of(module: Any) -> tuple[Owner, ...]:
    """Return the owners of the units that a call of ``module`` runs.

    Of fully_shard() several, if its parameters are on several meshes or some are units
    apart.
    """
    if isinstance(module, Owner):
        return (module,)
    owners: tuple[Owner, ...] = getattr(module, "__dict__", {}).get(
        "_fsdp_c_groups", ()
    )
    return owners


def owners_in(model: nn.Module) -> dict[Owner, str]:
    """Return the owners in ``model``, parents first.

    With the names that their modules have in the unwrapped model.
    """
    owners: dict[Owner, str] = {}
    for name, module in model.named_modules():
        for owner in owners_of(module):
            owners.setdefault(owner, clean_name(name))
    return owners
