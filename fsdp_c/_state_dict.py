"""FULL_STATE_DICT: saving and loading, one unit gathered at a time.

The keys are those of the unwrapped module: a wrapped module passes its own prefix
on to the module inside it. While a unit is saved or loaded, the units that contain
it are gathered too, because hooks of their modules may look at their parameters.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from fsdp_c._base import ShardedModule, sharded_modules
from fsdp_c._engines import ensure_engine
from fsdp_c._names import WRAPPED_PREFIX, clean_name
from fsdp_c._params import own_modules
from fsdp_c._summon import summoned

# Type -----------------------------------------------------------------------


def _check_settings(settings: StateDictSettings) -> None:
    kind = settings.state_dict_type
    if not isinstance(kind, StateDictType):
        raise TypeError(f"state_dict_type must be a StateDictType, got {kind!r}")
    if kind is not StateDictType.FULL_STATE_DICT:
        raise ValueError(
            f"state_dict_type={kind.name} is not available in this version: use "
            "StateDictType.FULL_STATE_DICT"
        )
    for argument, config, expected in (
        ("state_dict_config", settings.state_dict_config, FullStateDictConfig),
        (
            "optim_state_dict_config",
            settings.optim_state_dict_config,
            FullOptimStateDictConfig,
        ),
    ):
        if type(config) is not expected:
            raise TypeError(
                f"{argument} must be a {expected.__name__} for {kind.name}, got "
                f"{config!r}"
            )


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None,
    optim_state_dict_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    """Set the type for all wrapped modules in ``module``; return the old one.

    Raises:
        TypeError: A config is not of the type's own class.
        ValueError: The type is not available in this version, or nothing in
            ``module`` is wrapped.
    """
    settings = StateDictSettings(
        state_dict_type,
        FullStateDictConfig() if state_dict_config is None else state_dict_config,
        FullOptimStateDictConfig()
        if optim_state_dict_config is None
        else optim_state_dict_config,
    )
    _check_settings(settings)
    before = get_state_dict_type(module)
    for each in sharded_modules(module):
        each._state_dict_type = settings.state_dict_type
        each._state_dict_config = settings.state_dict_config
        each._optim_state_dict_config = settings.optim_state_dict_config
    return before


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return the type and configs of all wrapped modules in ``module``.

    Raises:
        ValueError: They differ, or nothing in ``module`` is wrapped.
    """
    found: StateDictSettings | None = None
    for each in sharded_modules(module):
        settings = StateDictSettings(
            each._state_dict_type,
            each._state_dict_config,
            each._optim_state_dict_config,
        )
        if found is not None and settings != found:
            raise ValueError(
                f"wrapped modules differ in their state dict settings: {found} and "
                f"{settings}; set one for all with set_state_dict_type(root, ...)"
            )
        found = settings
    if found is None:
        raise ValueError(
            f"there is no FullyShardedDataParallel module in this "
            f"{type(module).__name__}: pass the wrapped model"
        )
    return found


@contextmanager
def state_dict_type(
    module: nn.Module,
    kind: StateDictType,
    state_dict_config: StateDictConfig | None,
    optim_state_dict_config: OptimStateDictConfig | None,
) -> Iterator[None]:
    """Set the type for a while."""
    before = set_state_dict_type(
        module, kind, state_dict_config, optim_state_dict_config
    )
    try:
        yield
    finally:
        set_state_dict_type(
            module,
            before.state_dict_type,
            before.state_dict_config,
            before.optim_state_dict_config,
        )


# Save -----------------------------------------------------------------------


def save(
    module: ShardedModule,
    destination: dict[str, Any] | None,
    prefix: str,
    keep_vars: bool,
) -> dict[str, Any]:
    """Return the full state dict of ``module``, its keys beginning with ``prefix``.

    All ranks must call it. The tensors own their memory; with ``offload_to_cpu``
    they are on the CPU. With ``rank0_only`` the other ranks get nothing.
    """
    if destination is None:
        destination = OrderedDict()
        cast("Any", destination)._metadata = OrderedDict()
    ensure_engine(module)
    module._originals.check()
    config = cast("FullStateDictConfig", module._state_dict_config)
    is_wanted = not config.rank0_only or module.rank == 0
    target = destination if is_wanted else OrderedDict()

    for pre_hook in module._state_dict_pre_hooks.values():
        pre_hook(module, prefix, keep_vars)
    with torch.no_grad(), summoned(module, writeback=False):
        module.wrapped.state_dict(
            destination=target, prefix=prefix, keep_vars=keep_vars
        )
        if is_wanted:
            _own_memory(module, target, prefix, config.offload_to_cpu)
    local_metadata = {"version": module._version}
    for hook in module._state_dict_hooks.values():
        result = hook(module, destination, prefix, local_metadata)
        if result is not None:
            destination = cast("dict[str, Any]", result)
    return destination


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _own_memory(
    module: ShardedModule, target: dict[str, Any], prefix: str, offload_to_cpu: bool
) -> None:
    """Copy what lies in memory of the unit or of its modules' buffers.

    Nested units have copied theirs, ignored parameters stay what they are. Tensors
    that were one tensor (shared parameters) stay one. Buffers get back the dtype
    that they had before ``buffer_dtype``.
    """
    buffers = module._unit_buffers
    dtypes = {} if buffers is None else buffers.original_dtypes
    storages = {_storage_of(use.param) for use in module._originals.uses}
    for _, current in own_modules(module.wrapped, module._ignored_modules):
        storages.update(_storage_of(b) for b in current.buffers(recurse=False))
    copies: dict[tuple[Any, ...], Tensor] = {}
    for key, value in target.items():
        if (
            not key.startswith(prefix)
            or not isinstance(value, Tensor)
            or _storage_of(value) not in storages
        ):
            continue
        place = (value.data_ptr(), value.dtype, value.shape, value.stride())
        copy = copies.get(place)
        if copy is None:
            device = torch.device("cpu") if offload_to_cpu else value.device
            dtype = dtypes.get(clean_name(key[len(prefix) :]), value.dtype)
            copy = value.detach().to(device, dtype, copy=True)
            copies[place] = copy.requires_grad_(value.requires_grad)
        target[key] = copy


# Load -----------------------------------------------------------------------


def begin_load(
    module: ShardedModule,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    error_msgs: list[str],
) -> None:
    """Prepare ``module`` for torch's recursion into it: gather, rename keys.

    Called before the module's own loading; :func:`finish_load` ends it, after
    that of all that is in it.

    Raises:
        ValueError: ``assign=True``, which would replace the sharded parameters.
    """
    if local_metadata.get("assign_to_params_buffers", False):
        raise ValueError(
            "load_state_dict(assign=True) would replace the sharded parameters: "
            "pass assign=False"
        )
    ensure_engine(module)
    module._originals.check()
    stack = ExitStack()
    stack.enter_context(summoned(module, writeback=True))
    module._loading = (stack, error_msgs)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        name = key[len(prefix) :]
        state_dict[f"{prefix}{WRAPPED_PREFIX}{name}"] = state_dict.pop(key)


def finish_load(module: nn.Module, incompatible_keys: Any) -> None:
    """End what :func:`begin_load` began, and clean the names in messages."""
    assert isinstance(module, ShardedModule)
    if module._loading is None:
        return
    _, error_msgs = module._loading
    module.end_load()
    for names in (
        incompatible_keys.missing_keys,
        incompatible_keys.unexpected_keys,
        error_msgs,
    ):
        names[:] = [clean_name(name) for name in names]


def with_wrapped_metadata(module: nn.Module, state_dict: Any) -> Any:
    """Return ``state_dict`` with module versions under the wrapped names as well.

    torch looks the version of a module up by its name in the module tree.
    """
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is None:
        return state_dict
    extended = OrderedDict(state_dict)
    names = OrderedDict(metadata)
    for name, _ in module.named_modules():
        clean = clean_name(f"{name}.")[:-1]
        if clean in metadata:
            names[name] = metadata[clean]
    cast("Any", extended)._metadata = names
    return extended
