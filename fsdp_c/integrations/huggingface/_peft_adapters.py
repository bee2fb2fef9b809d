"""peft's get_ and set_peft_model_state_dict: adapters of wrapped models.

Seen in peft 0.21.2, ``utils/save_and_load.py`` and ``tuners/tuners_utils.py``:

* Names of modules lose ``_fsdp_wrapped_module.`` only where they begin with it. With
  units inside the model no key fits any more, and an empty adapter is saved.
* The loaded keys lose ``base_model.model.``, because no name of a parameter of the
  wrapped model begins with it. Nothing is loaded, and nothing said.
* The keys to load are looked up in ``model.state_dict()``, which is empty on the other
  ranks with ``rank0_only``. They load nothing.

Both functions get a view of the model here that has the unwrapped model's names.
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
                yield _without_wrappers(name), module

    def named_parameters(self, **_: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters' names, with tensors of their shapes."""
        yield from _named_params(self._model)

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state dict, or its keys alone."""
        if not self._knows_keys:
            return self._model.state_dict()
        buffers = {
            clean_name(name): buffer.detach().to("meta")
            for name, buffer in self._model.named_buffers()
        }
        return {**dict(_named_params(self._model)), **buffers}


def _without_wrappers(name: str) -> str:
    """Return a module's clean name, also where a wrapper's child is its last part."""
    return clean_name(f"{name}.").removesuffix(".")


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


def _is_wrapped(model: object) -> bool:
    return isinstance(model, nn.Module) and any(True for _ in sharded_modules(model))


def _viewing(original: Function, *, knows_keys: bool) -> Function:
    signature = inspect.signature(original)

    def with_view(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        model = call.arguments["model"]
        model = getattr(model, "_orig_mod", model)
        if _is_wrapped(model):
            call.arguments["model"] = CleanView(model, knows_keys=knows_keys)
        return original(*call.args, **call.kwargs)

    return with_view


def _wrap_get(original: Function) -> Function:
    return _viewing(original, knows_keys=False)


def _wrap_set(original: Function) -> Function:
    return _viewing(original, knows_keys=True)


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
)
