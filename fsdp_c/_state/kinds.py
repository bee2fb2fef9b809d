"""Which kind of state dict the wrapped modules of a tree give and take.

The functions whose names FSDP1 has are methods of FullyShardedDataParallel.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from fsdp_c._units.base import ShardedModule, require_sharded

_CONFIGS: dict[
    StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]
] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (
        ShardedStateDictConfig,
        ShardedOptimStateDictConfig,
    ),
}


def _settings(
    kind: StateDictType,
    config: StateDictConfig | None,
    optim_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    """Return the settings of ``kind``; a config that is None is the default one."""
    if not isinstance(kind, StateDictType):
        raise TypeError(
            f"state_dict_type must be a StateDictType, got {kind!r}: use "
            "StateDictType.FULL_STATE_DICT, SHARDED_STATE_DICT or LOCAL_STATE_DICT"
        )
    expected, expected_optim = _CONFIGS[kind]
    config = expected() if config is None else config
    optim_config = expected_optim() if optim_config is None else optim_config
    for argument, value, cls in (
        ("state_dict_config", config, expected),
        ("optim_state_dict_config", optim_config, expected_optim),
    ):
        if type(value) is not cls:
            raise RuntimeError(
                f"Expected {argument} of type {cls} but got {type(value)}: "
                f"{kind.name} takes a {cls.__name__}"
            )
    return StateDictSettings(kind, config, optim_config)


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set what ``state_dict()`` of all wrapped modules in ``module`` returns.

    * FULL_STATE_DICT: whole parameters, under the keys of the unwrapped model.
    * SHARDED_STATE_DICT: under the same keys, each rank's rows as a ShardedTensor,
      or a DTensor with a device mesh; for torch.distributed.checkpoint.
    * LOCAL_STATE_DICT: each unit's shards as they lie, under ``_flat_param``.

    Args:
        module: A wrapped module, or one that contains wrapped modules.
        state_dict_type: One of these.
        state_dict_config: Of the type's own class; the default one if None.
        optim_state_dict_config: Likewise, for the optimizer's state.

    Returns:
        The settings before, of the outermost wrapped module.

    Raises:
        RuntimeError: A config is not of the type's own class.
        TypeError: ``state_dict_type`` is not a StateDictType.
        ValueError: Nothing in ``module`` is wrapped.
    """
    settings = _settings(state_dict_type, state_dict_config, optim_state_dict_config)
    modules = require_sharded(module)
    before = modules[0]._state_dict_settings
    for each in modules:
        each.change_state_dict_settings(settings)
    return before


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return the settings of all wrapped modules in ``module``.

    Raises:
        AssertionError: They differ.
        ValueError: Nothing in ``module`` is wrapped.
    """
    modules = require_sharded(module)
    first = modules[0]._state_dict_settings
    for each in modules:
        settings = each._state_dict_settings
        if settings != first:
            raise AssertionError(
                "All FSDP modules must have the same state dict settings, but unit "
                f"{modules[0]._sharded.name!r} has {first} and unit "
                f"{each._sharded.name!r} {settings}: set one for all with "
                "set_state_dict_type(root, ...)"
            )
    return first


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Set the settings for a while; see :meth:`set_state_dict_type`."""
    before = [(each, each._state_dict_settings) for each in require_sharded(module)]
    set_state_dict_type(
        module, state_dict_type, state_dict_config, optim_state_dict_config
    )
    try:
        yield
    finally:
        for each, own in before:
            each.change_state_dict_settings(own)


def follow_mesh(
    module: ShardedModule,
    kind: StateDictType,
    config: StateDictConfig | OptimStateDictConfig,
) -> None:
    """With a device mesh, make sharded tensors DTensors and note it in ``config``.

    Source:
        ``_set_use_dtensor`` (torch 2.13, ``fsdp/_state_dict_utils.py``),
        ``_set_optim_use_dtensor`` (``fsdp/_optim_utils.py``).
    """
    if module._sharded.config.device_mesh is None:
        return
    if kind is StateDictType.LOCAL_STATE_DICT:
        raise RuntimeError(
            "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with "
            "LOCAL_STATE_DICT. Please set state_dict_type to SHARDED_STATE_DICT to get "
            "DTensor state_dict."
        )
    if isinstance(config, (ShardedStateDictConfig, ShardedOptimStateDictConfig)):
        config._use_dtensor = True
