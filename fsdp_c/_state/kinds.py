"""Which kind of state dict the wrapped modules of a tree give and take."""

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

from fsdp_c._units.base import require_sharded

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


def make_settings(
    kind: StateDictType,
    config: StateDictConfig | None,
    optim_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    """Return the settings of ``kind``; a config that is None is the default one.

    Raises:
        TypeError: ``kind`` is no StateDictType.
        RuntimeError: A config is not of the class that belongs to ``kind``.
    """
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
    state_dict_config: StateDictConfig | None,
    optim_state_dict_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    """Set the type for all wrapped modules in ``module``.

    Returns:
        The settings before, of the outermost one.

    Raises:
        RuntimeError: A config is not of the type's own class.
        TypeError: ``state_dict_type`` is no StateDictType.
        ValueError: Nothing in ``module`` is wrapped.

    Source:
        The classes of errors: ``set_state_dict_type`` (torch 2.13).
    """
    settings = make_settings(
        state_dict_type, state_dict_config, optim_state_dict_config
    )
    modules = require_sharded(module)
    before = modules[0]._state_dict_settings
    for each in modules:
        each.change_state_dict_settings(settings)
    return before


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return the type and configs of all wrapped modules in ``module``.

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
    kind: StateDictType,
    state_dict_config: StateDictConfig | None,
    optim_state_dict_config: OptimStateDictConfig | None,
) -> Iterator[None]:
    """Set the type for a while; each wrapped module gets its own settings back."""
    settings = make_settings(kind, state_dict_config, optim_state_dict_config)
    before = [(each, each._state_dict_settings) for each in require_sharded(module)]
    for each, _ in before:
        each.change_state_dict_settings(settings)
    try:
        yield
    finally:
        for each, own in before:
            each.change_state_dict_settings(own)
