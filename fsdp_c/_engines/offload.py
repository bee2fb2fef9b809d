"""Activations that wait in host memory, for models of either API."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from fsdp_c._engines.engine import engine_listeners
from fsdp_c._units.base import require_owners
from fsdp_c._units.owner import owners_in


@dataclass(frozen=True)
class _Settings:
    """What the units of one model are told; ``min_bytes`` 0: nothing is copied."""

    min_bytes: int
    keep_last: int

    def apply(self, model: nn.Module) -> None:
        """Tell the units of ``model`` that are made."""
        for owner in owners_in(model):
            if owner.made_unit is not None:
                owner.made_unit.offload_activations(self.min_bytes, self.keep_last)


# Units may be made later, and anew: each new engine is told.
_settings: WeakKeyDictionary[nn.Module, _Settings] = WeakKeyDictionary()


def offload_activations(
    model: nn.Module,
    enabled: bool = True,
    *,
    min_bytes: int = 1 << 20,
    keep_last: int = 1,
) -> None:
    """Keep in host memory what forward saves for backward, unit by unit.

    While a unit computes, what the unit before it saved is copied to pinned host
    memory and leaves the device. In backward it comes back while the unit after it
    computes. Results are the same to the bit.

    Parameters, tensors that are alive anyway and small tensors are not copied. Under
    activation checkpointing only what that saves is: the inputs of its blocks. Host
    memory is used again in every step.

    On the CPU nothing happens: there is no other memory. Forwards without gradients,
    and those of the outermost unit inside somebody else's hooks for saved tensors
    (``torch.autograd.graph.save_on_cpu``), save nothing here either.

    Args:
        model: A sharded module, of either API, or one that contains some. It needs
            several units: the last ones stay on the device.
        enabled: False: tensors that forwards save from now on stay on the device.
        min_bytes: Storages with fewer bytes stay on the device, >= 1.
        keep_last: How many units stay on the device, >= 1: those with which
            backward begins.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: Nothing in ``model`` is sharded, or a number is too small.

    Example:
        >>> fsdp_c.offload_activations(model)  # doctest: +SKIP
        >>> model(batch).sum().backward()  # doctest: +SKIP
        >>> fsdp_c.memory_stats(model)["num_downloads"]  # doctest: +SKIP
        31
    """
    require_owners(model)
    for name, value in (("min_bytes", min_bytes), ("keep_last", keep_last)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    _settings[model] = _Settings(min_bytes if enabled else 0, keep_last)
    _settings[model].apply(model)


def is_offloading(model: nn.Module) -> bool:
    """Return whether units in ``model`` were asked to offload activations."""
    modules = set(model.modules())
    return any(
        settings.min_bytes > 0 and not modules.isdisjoint(each.modules())
        for each, settings in _settings.items()
    )


def _tell_new_engine(root: nn.Module) -> None:
    """Tell the units in ``root``, whose engine was made."""
    modules = set(root.modules())
    for model, settings in list(_settings.items()):
        if not modules.isdisjoint(model.modules()):
            settings.apply(model)


engine_listeners.append(_tell_new_engine)
