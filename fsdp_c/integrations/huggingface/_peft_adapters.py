"""peft's get_ and set_peft_model_state_dict: adapters of wrapped models.

Seen in peft 0.21.2, ``utils/save_and_load.py``, ``utils/other.py`` and
``tuners/tuners_utils.py``:

* Names of modules lose ``_fsdp_wrapped_module.`` only where they begin with it. With
  units inside the model no key fits any more, and an empty adapter is saved.
  Nor do those of fully_shard(), if the Trainer's activation_checkpointing wraps layers.
* The loaded keys lose ``base_model.model.``, because no name of a parameter of the
  wrapped model begins with it. Nothing is loaded, and nothing said.
* The keys to load are looked up in ``model.state_dict()``, which is empty on the other
  ranks with ``rank0_only``. They load nothing.
* The names of what is in ``modules_to_save`` are those in the ``state_dict()`` of these
  modules. If they are wrapped, all ranks gather it, but the Trainer and
  ``save_pretrained`` save on rank 0 alone, which waits for the others. If a flat
  parameter of a unit around them has their parameters, it is empty.

Both functions get a view of the model here that has the unwrapped model's names, and
names alone are found without communication.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_c._torch_compat import ActivationWrapper
from fsdp_c._units.base import ShardedModule, sharded_modules
from fsdp_c._units.names import clean_name
from fsdp_c._units.tree import Tree
from fsdp_c._units.uses import is_taken
from fsdp_c.integrations._patch import Function, Patch


class CleanView:
    """A view of a wrapped model with the names of the unwrapped one.

    Everything else is the model's own.

    Args:
        model: The model, with wrapped modules in it.
        knows_keys: Whether ``state_dict()`` gives the keys without the values, on the
            meta device: on all ranks, and without communication.
    """

    def __init__(self, model: nn.Module, *, knows_keys: bool) -> None:
        self._model = model
        self._knows_keys = knows_keys

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The model's class, for isinstance()."""
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute."""
        return getattr(self._model, name)

    def named_modules(self, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules under their names in the unwrapped model; no wrappers."""
        for name, module in self._model.named_modules(**options):
            if not isinstance(module, (ShardedModule, ActivationWrapper)):
                yield clean_name(name), module

    def named_parameters(self, **_: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters' names, with tensors of their shapes."""
        yield from _named_params(self._model)

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state dict, or its keys alone."""
        if not self._knows_keys:
            return self._model.state_dict()
        return {**dict(_named_params(self._model)), **dict(_named_buffers(self._model))}


def _named_params(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.named_modules():
        if isinstance(module, ShardedModule):
            prefix = clean_name(f"{name}.") if name else ""
            for key, use in Tree.of(module).named_uses(module):
                whole = torch.empty(use.shape, dtype=use.param.dtype, device="meta")
                yield f"{prefix}{key}", whole
    for name, param in model.named_parameters():
        if not is_taken(param):
            yield clean_name(name), param.detach().to("meta")


def _named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield those that a state dict has."""
    for name, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                prefix = f"{name}." if name else ""
                yield clean_name(f"{prefix}{key}"), buffer.detach().to("meta")


def _is_wrapped(model: object) -> bool:
    return isinstance(model, nn.Module) and any(True for _ in sharded_modules(model))


def _hidden_names(module: nn.Module) -> Iterator[str]:
    """Yield names of parameters that flat parameters stand for, of any unit."""
    for name, inner in module.named_modules():
        for key, value in vars(inner).items():
            if isinstance(value, nn.Parameter) and is_taken(value):
                yield clean_name(f"{name}.{key}" if name else key)


def _is_sharded(module: nn.Module) -> bool:
    """Return whether the module's own ``state_dict()`` is not to be asked for names."""
    return _is_wrapped(module) or any(True for _ in _hidden_names(module))


def _has_wrappers(model: object) -> bool:
    """Return whether names of modules are not those in its state dict."""
    return _is_wrapped(model) or (
        isinstance(model, nn.Module)
        and any(isinstance(module, ActivationWrapper) for module in model.modules())
    )


def _viewing(original: Function, *, knows_keys: bool) -> Function:
    is_viewed = _is_wrapped if knows_keys else _has_wrappers
    signature = inspect.signature(original)

    def with_view(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        model = call.arguments["model"]
        model = getattr(model, "_orig_mod", model)
        if is_viewed(model):
            call.arguments["model"] = CleanView(model, knows_keys=knows_keys)
        return original(*call.args, **call.kwargs)

    return with_view


def _wrap_get(original: Function) -> Function:
    return _viewing(original, knows_keys=False)


def _wrap_set(original: Function) -> Function:
    return _viewing(original, knows_keys=True)


def _in_state_dict(adapter_name: str) -> str:
    """Return what comes before names of ``modules_to_save`` in a state dict."""
    return f"modules_to_save.{adapter_name}."


def _wrap_saved(original: Function) -> Function:
    def adapter_state_dict(
        self: Any, adapter_name: str, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        if not _is_sharded(self):
            return original(self, adapter_name, state_dict)  # type: ignore[no-any-return]
        prefix = _in_state_dict(adapter_name)
        return {
            name.removeprefix(prefix): value
            for name, value in state_dict.items()
            if name.startswith(prefix)
        }

    return adapter_state_dict


def _wrap_to_load(original: Function) -> Function:
    def adapter_state_dict_load_map(self: Any, adapter_name: str) -> dict[str, str]:
        if not _is_sharded(self) or adapter_name not in self.modules_to_save:
            return original(self, adapter_name)  # type: ignore[no-any-return]
        prefix = _in_state_dict(adapter_name)
        module = self.modules_to_save[adapter_name]
        names = CleanView(module, knows_keys=True).state_dict()
        return {name: f"{prefix}{name}" for name in (*names, *_hidden_names(module))}

    return adapter_state_dict_load_map


PATCHES = (
    Patch(
        module="peft.utils.save_and_load",
        function="get_peft_model_state_dict",
        purpose="adapters of wrapped models are saved",
        parameters="model state_dict adapter_name",
        mentions="named_modules _get_adapter_state_dict",
        wrap=_wrap_get,
    ),
    Patch(
        module="peft.utils.save_and_load",
        function="set_peft_model_state_dict",
        purpose="adapters of wrapped models are loaded",
        parameters="model peft_model_state_dict adapter_name",
        mentions="named_parameters _remap_adapter_state_dict_for_load strict",
        wrap=_wrap_set,
    ),
    Patch(
        module="peft.utils.other",
        function="ModulesToSaveWrapper.adapter_state_dict",
        purpose="modules_to_save of wrapped models are saved by rank 0 alone",
        parameters="self adapter_name state_dict",
        mentions="modules_to_save state_dict",
        wrap=_wrap_saved,
    ),
    Patch(
        module="peft.utils.other",
        function="ModulesToSaveWrapper.adapter_state_dict_load_map",
        purpose="modules_to_save of wrapped models are loaded",
        parameters="self adapter_name",
        mentions="modules_to_save state_dict",
        wrap=_wrap_to_load,
    ),
)
