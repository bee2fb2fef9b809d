"""What a captured step asks of the model and the optimizer."""

import os
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_c import _native
from fsdp_c._engines.models import engines_in, units_in
from fsdp_c._engines.offload import is_offloading
from fsdp_c._state.optim.classes import steps_wholes
from fsdp_c._units.cuts import local_of


def check_model(model: nn.Module) -> None:
    """Refuse what cannot be captured. Reshards what forwards left unsharded.

    Raises:
        RuntimeError: With the reason and a remedy.
    """
    devices = {unit.device for unit in units_in(model)}
    if len(devices) > 1:
        raise RuntimeError(
            f"units on {sorted(map(str, devices))} cannot be captured in one graph: "
            "capture a step of each device's model"
        )
    for engine in engines_in(model):
        engine.run_capture_stage(_native.BEGIN_CAPTURE)  # refuses
        engine.run_capture_stage(_native.END_CAPTURE)
    device = devices.pop()
    if not hasattr(torch.get_device_module(device), "CUDAGraph"):
        raise RuntimeError(
            f"torch has no graphs for {device}: train on a CUDA device, or without "
            "capture_step"
        )
    if is_offloading(model):
        raise RuntimeError(
            "a step that keeps activations in host memory cannot be captured in a "
            "graph: call offload_activations(model, enabled=False)"
        )


def check_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    """Refuse an optimizer whose steps a graph would freeze.

    Raises:
        TypeError: It is no optimizer.
        RuntimeError: With the reason and a remedy.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if steps_wholes(optimizer):
        raise RuntimeError(
            "a whole_parameter_optimizer moves parameters between ranks from the host, "
            "which a graph cannot repeat: train without capture_step"
        )
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if group.get("capturable", True) is False:
            raise RuntimeError(
                f"{name} counts its steps on the host, and every replay of a graph "
                f"would use the same count: construct {name}(..., capturable=True)"
            )
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.device.type != device.type:
                raise RuntimeError(
                    f"{key!r} of {name} is a tensor on {value.device}, and a graph "
                    f"would keep its value: put it on {device}"
                )


def check_optimizer_state(optimizer: Optimizer, device: torch.device) -> None:
    """Refuse state from the first steps that a graph would not update.

    Raises:
        RuntimeError: With the reason and a remedy.
    """
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.device.type != device.type:
                raise RuntimeError(
                    f"{type(optimizer).__name__} keeps {key!r} of its state on "
                    f"{value.device}, and a graph would not update it: use an "
                    "optimizer that has capturable=True, such as AdamW"
                )


def groups_that_step(model: nn.Module) -> list[ProcessGroup]:
    """Return the groups whose ranks replay with this one, in one order everywhere."""
    found: dict[str, ProcessGroup] = {}
    for unit in units_in(model):
        for group in (unit.shard_group, unit.replica_group):
            if group is not None:
                found[group.group_name] = group
    for param in model.parameters():
        if isinstance(param, DTensor):
            for group in param.device_mesh.get_all_groups():
                found[group.group_name] = group
    return list(found.values())


def prepare_nccl() -> None:
    """Keep NCCL from registering the buffers of captured collectives.

    It reads the variable at the first of them. It would register a buffer by one
    handle, and an expandable segment of torch's allocator has many
    (pytorch#158029). Over several nodes, replays with registered buffers may hang
    (nccl#2389).
    """
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return what a graph has frozen of the param_groups: tensors by their address."""
    return [
        {
            key: value.data_ptr() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        | {"params": [id(param) for param in group["params"]]}
        for group in optimizer.param_groups
    ]


def memory_of(params: list[nn.Parameter]) -> list[int]:
    """Return the addresses of the parameters' memory on this rank."""
    return [local_of(param).data_ptr() for param in params]
