"""torch's FullyShardedDataParallel as a base class, without its behaviour.

Note [torch's class as a base]
Frameworks, and torch itself, test ``isinstance(module, torch's class)``. So torch's
class, and with it torch's ``_FSDPState``, is a base of fsdp_c's. This also satisfies
``issubclass``, which a metaclass or a false ``__class__`` would not, and changes
nothing in torch. But the methods of torch's class are FSDP1's runtime, over fields that
our modules do not have. ``TorchClass`` stands between the two classes and overrides
every name of torch's:

* with ``nn.Module``'s own method, where torch's class overrides one, so that
  ``super().f()`` in fsdp_c is ``nn.Module.f()``;
* with an error otherwise. A method of fsdp_c with that name comes earlier in the method
  resolution order.

The names are read from torch's classes at import: a method that a newer torch adds
raises instead of running. ``tests/lint/test_torch_class.py`` fails until somebody
decides: our own, nn.Module's, or an entry in ``REFUSED``.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from fsdp_c._torch_compat import TorchFSDP

# Methods that fsdp_c does not have, and what to use instead.
REFUSED = {
    "_deregister_orig_params_ctx": "FullyShardedDataParallel.summon_full_params()",
    "_is_using_optim_input": "the `optim` argument in place of `optim_input`",
    "_low_precision_hook_enabled": "register_comm_hook(), which takes any hook",
    "_optim_state_dict_impl": "FullyShardedDataParallel.optim_state_dict()",
    "_optim_state_dict_to_load_impl": (
        "FullyShardedDataParallel.optim_state_dict_to_load()"
    ),
    "_unshard": "FullyShardedDataParallel.summon_full_params()",
    "_use_training_state": "FullyShardedDataParallel.summon_full_params()",
    "_wait_unshard_streams_on_current_stream": (
        "nothing: the engine orders its streams itself"
    ),
    "_warn_legacy_optim_state_dict": "warnings.warn()",
    "_warn_optim_input": "warnings.warn()",
}

# Every class has these.
_OF_CLASSES = frozenset(
    {
        "__annotate__",
        "__annotate_func__",
        "__annotations__",
        "__annotations_cache__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__parameters__",
        "__static_attributes__",
        "__weakref__",
    }
)


def names_of_torch() -> list[str]:
    """Return all names that torch's class and its bases below nn.Module define."""
    classes = [
        each for each in TorchFSDP.__mro__ if each not in nn.Module.__mro__
    ]  # FullyShardedDataParallel, _FSDPState, _State
    names = {name for each in classes for name in vars(each)}
    return sorted(names - _OF_CLASSES)


def _refusal(name: str) -> Callable[..., NoReturn]:
    instead = REFUSED.get(name, "what docs/guide/migrate.md names")

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"FullyShardedDataParallel.{name} belongs to torch's FSDP1 runtime, but "
            f"fsdp_c runs this module: use {instead}"
        )

    refuse.__name__ = name
    refuse.__doc__ = f"Raise: {name} is torch's own."
    return refuse


if TYPE_CHECKING:

    class TorchClass(nn.Module):
        """torch's class, without its behaviour."""

else:
    _known = frozenset(dir(nn.Module))
    _overrides = {
        name: getattr(nn.Module, name) if name in _known else _refusal(name)
        for name in names_of_torch()
    }
    TorchClass = type("TorchClass", (TorchFSDP,), _overrides)
    TorchClass.__doc__ = "torch's class, without its behaviour."
