"""Which device a unit computes on."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from fsdp_c._units.foreign_groups import ForeignGroup

CPU = torch.device("cpu")


def device_from_id(device_id: Any) -> torch.device | None:
    """Return the device that ``device_id`` names; None for None.

    ``cpu:N`` means ``cpu``. An int names a device of the current accelerator, an
    accelerator without an index its current device, with a warning. Raises TypeError or
    ValueError.
    """
    if device_id is None:
        return None
    if isinstance(device_id, bool) or not isinstance(
        device_id, (int, str, torch.device)
    ):
        raise TypeError(
            f"device_id must be an int, a str or a torch.device, got {device_id!r}"
        )
    if isinstance(device_id, int):
        accelerator = current_accelerator()
        if accelerator is None:
            raise ValueError(
                f"device_id={device_id} names an accelerator and this machine has "
                "none: pass device_id='cpu', or leave it out"
            )
        device = torch.device(accelerator.type, device_id)
    else:
        try:
            device = torch.device(device_id)
        except RuntimeError as error:
            raise ValueError(
                f"device_id={device_id!r} is not a device: {error}"
            ) from error
    if device.type == "cpu":
        return CPU
    if device.type == "meta":
        raise ValueError(
            "device_id='meta' holds no data: pass the device to compute on, meta "
            "parameters are materialised there"
        )
    if device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
        warnings.warn(
            f"device_id={device_id!r} does not have an explicit index: {device}, the "
            "current device, is used. If that is another rank's, call "
            "torch.accelerator.set_device_index() before wrapping, or pass the index",
            stacklevel=4,
        )
    return device


def current_accelerator() -> torch.device | None:
    """Return the accelerator that is present, as ``cuda``, or None."""
    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_accelerator()


def wait_for_uploads(modules: Iterable[Any]) -> None:
    """Wait for all devices of sharded modules that keep their shards on the host.

    Before the host writes shards: a forward that had no backward may have left copies
    that still read them.
    """
    synchronize(
        each.compute_device for each in modules if each.cpu_offload.offload_params
    )


def note_use(tensor: torch.Tensor) -> None:
    """Let its memory be reused when the current stream has come here, not before."""
    if tensor.device.type not in ("cpu", "meta"):
        tensor.record_stream(torch.accelerator.current_stream())


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for all work on devices; the host is one without."""
    for device in set(devices) - {CPU}:
        torch.accelerator.synchronize(device)


def choose_device(
    device_id: torch.device | None,
    named_params: Iterable[tuple[str, nn.Parameter]],
    units_within: Iterable[torch.device],
    process_group: ProcessGroup,
) -> torch.device:
    """Return the device to compute on.

    Without ``device_id`` it is the parameters' own device; a module without parameters
    of its own takes the device of the units within it. Parameters on the CPU
    (or on meta) go to the current accelerator, as in FSDP1, if the group has a
    backend of its own for that (NCCL); with gloo alone they stay on the CPU.
    """
    first: dict[torch.device, str] = {}
    for name, param in named_params:
        first.setdefault(param.device, name)
    first.pop(torch.device("meta"), None)
    others = {device: name for device, name in first.items() if device.type != "cpu"}

    if device_id is not None:
        for device, name in others.items():
            if device != device_id:
                raise ValueError(
                    f"Inconsistent devices, {device} vs {device_id}: parameter "
                    f"{name!r} is on the first one, and device_id is the second: move "
                    "the module there before wrapping it, or pass its device"
                )
        return device_id
    if len(first) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in first.items())
        raise RuntimeError(
            f"FSDP only supports single device modules, and this one is on several "
            f"({places}): please pass in device_id, or move it to one device before "
            "wrapping it"
        )
    if others:
        return next(iter(others))
    within = None if first else next(iter(units_within), None)
    return within or _accelerator_of_group(process_group) or CPU


def _accelerator_of_group(process_group: ProcessGroup) -> torch.device | None:
    accelerator = current_accelerator()
    if accelerator is None or isinstance(process_group, ForeignGroup):
        return None
    backends = backends_of(process_group)
    backend = backends.get(accelerator.type)
    if backend is None or backend == backends.get("cpu"):
        return None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def backends_of(group: ProcessGroup) -> dict[str, str]:
    pairs = dist.get_backend_config(group).split(",")  # as "cpu:gloo,cuda:nccl"
    return dict(pair.split(":", 1) for pair in pairs if ":" in pair)
