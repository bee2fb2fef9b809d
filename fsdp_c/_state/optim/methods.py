"""The methods of FullyShardedDataParallel for optimizer state dicts."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp.api import (
    FullOptimStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    StateDictType,
)

from fsdp_c._state.kinds import follow_mesh, get_state_dict_type
from fsdp_c._state.optim.keys import keys_of_input, warn_of_input
from fsdp_c._state.optim.load import load
from fsdp_c._state.optim.local import load_local, save_local
from fsdp_c._state.optim.rekey import rekey_optim_state_dict
from fsdp_c._state.optim.save import save
from fsdp_c._units.base import sharded_modules

OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter] | None


def _warn_of_name(name: str, new: str, optim_input: OptimInput = None) -> None:
    warnings.warn(
        f"FullyShardedDataParallel.{name} is deprecated, as in torch: use "
        f"FullyShardedDataParallel.{new} with set_state_dict_type",
        FutureWarning,
        stacklevel=3,
    )
    warn_of_input(optim_input, stacklevel=4)


def _settings(model: nn.Module) -> tuple[StateDictType, OptimStateDictConfig]:
    """Return the kind and config that are set; see :func:`follow_mesh`."""
    settings = get_state_dict_type(model)
    for module in sharded_modules(model):
        config = module._optim_state_dict_config
        follow_mesh(module, settings.state_dict_type, config)
    return settings.state_dict_type, settings.optim_state_dict_config


class OptimStateMethods:
    """Optimizer states: whole, sharded or local, and back into any sharding."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the state dict of ``optim`` by parameter names.

        ``set_state_dict_type`` decides the form:

        * FULL: whole tensors in the parameters' shapes, on all ranks or, with
          ``rank0_only``, on rank 0.
        * SHARDED: ShardedTensors or DTensors of rows, like those of ``state_dict()``.
        * LOCAL: this rank's tensors as they are; loads at the same number of ranks
          and wrapping. Without communication.

        All ranks must call it. Each unit takes one exchange between the ranks; the
        memory beyond the result is one unit's small tensors. The result owns its
        memory, in host memory with ``offload_to_cpu``.

        Args:
            model: A wrapped module, or one that contains wrapped modules.
            optim: Steps parameters of ``model``.
            optim_state_dict: Its state dict; ``optim.state_dict()`` if None.
            group: Whose rank 0 is meant by ``rank0_only``; if None, the first of
                the ranks that ``model`` is sharded (and replicated) over.

        Returns:
            ``{"state": {name: {...}}, "param_groups": [...]}``; ``{}`` on the ranks
            that ``rank0_only`` leaves out. Parameters without state have no entry.

        Raises:
            RuntimeError: The ranks' optimizers do not fit together.
            ValueError: Nothing in ``model`` is wrapped, ``optim`` is of other
                parameters, or state has one value per element on some ranks only
                (LOCAL saves that).

        Source:
            ``FullyShardedDataParallel.optim_state_dict`` (torch 2.13).
        """
        kind, config = _settings(model)
        if kind is StateDictType.LOCAL_STATE_DICT:
            return save_local(
                model,
                optim,
                offload_to_cpu=config.offload_to_cpu,
                state_dict=optim_state_dict,
            )
        return save(model, optim, config, group=group, state_dict=optim_state_dict)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return what ``optim.load_state_dict`` takes on this rank.

        ``optim_state_dict`` may come from any number of ranks, wrapping and
        ``use_orig_params`` (LOCAL: from the same), or from an unsharded model, see
        :meth:`rekey_optim_state_dict`. Everything is checked before anything is
        moved. Whole tensors that every rank has cost no communication; with
        ``rank0_only`` rank 0 passes each rank its parts, one exchange a unit.

        Args:
            model: A wrapped module, or one that contains wrapped modules.
            optim: Will load it.
            optim_state_dict: What :meth:`optim_state_dict` returned, with the same
                StateDictType; ignored where ``rank0_only`` leaves this rank out.
            is_named_optimizer: ``optim`` keys its states by names.
            load_directly: Also call ``optim.load_state_dict``.
            group: As for :meth:`optim_state_dict`.

        Raises:
            RuntimeError: It failed on another rank.
            TypeError: ``optim_state_dict`` is no dictionary.
            ValueError: Parameters, shapes or groups do not fit; nothing was changed.

        Source:
            ``FullyShardedDataParallel.optim_state_dict_to_load`` (torch 2.13).
        """
        kind, config = _settings(model)
        if kind is StateDictType.LOCAL_STATE_DICT:
            result = load_local(
                model, optim, optim_state_dict, is_named=is_named_optimizer
            )
        else:
            result = load(
                model,
                optim,
                optim_state_dict,
                is_sharded=kind is StateDictType.SHARDED_STATE_DICT,
                rank0_only=getattr(config, "rank0_only", False),
                is_named=is_named_optimizer,
                group=group,
            )
        if load_directly:
            optim.load_state_dict(result)
        return result

    rekey_optim_state_dict = staticmethod(rekey_optim_state_dict)

    # Older names ------------------------------------------------------------

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: OptimInput = None,
        rank0_only: bool = True,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return :meth:`optim_state_dict` as FULL, in host memory.

        ``optim_input`` is what ``optim`` was constructed with, and deprecated.
        """
        _warn_of_name("full_optim_state_dict", "optim_state_dict", optim_input)
        keys = None if optim_input is None else keys_of_input(model, optim_input)
        config = FullOptimStateDictConfig(rank0_only=rank0_only)
        return save(model, optim, config, group=group, keys=keys)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return :meth:`optim_state_dict` as SHARDED, in host memory."""
        _warn_of_name("sharded_optim_state_dict", "optim_state_dict")
        return save(model, optim, ShardedOptimStateDictConfig(), group=group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Return what an optimizer loads, of a full state dict that all ranks have.

        See :meth:`optim_state_dict_to_load`. The optimizer is ``optim``, or was
        constructed with ``optim_input``, or with ``model.parameters()``.
        """
        old, new = "shard_full_optim_state_dict", "optim_state_dict_to_load"
        _warn_of_name(old, new, optim_input)
        return load(model, optim, full_optim_state_dict, optim_input=optim_input)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return what an optimizer loads, of a full state dict that rank 0 has.

        Otherwise as :meth:`shard_full_optim_state_dict`; collective.
        """
        old, new = "scatter_full_optim_state_dict", "optim_state_dict_to_load"
        _warn_of_name(old, new, optim_input)
        return load(
            model,
            optim,
            full_optim_state_dict,
            rank0_only=True,
            group=group,
            optim_input=optim_input,
        )

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim: torch.optim.Optimizer,
    ) -> dict[str, Any]:
        """Return what ``optim`` loads, of a sharded state dict; collective."""
        _warn_of_name("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        return load(model, optim, sharded_optim_state_dict, is_sharded=True)
