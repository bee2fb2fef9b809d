"""accelerate's load_fsdp_optimizer: state of sharded checkpoints is not lost.

Seen in accelerate 1.15.0, ``utils/fsdp_utils.py``: it reads from a sharded checkpoint
only the state that the new optimizer has. Before its first step an optimizer has none,
so accelerate reads nothing, without a warning.
"""

import contextlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp.api import StateDictType
from torch.optim import Optimizer

from fsdp_c._fsdp1.sharded_module import FullyShardedDataParallel
from fsdp_c._state.optim.save import STATE_CLASSES
from fsdp_c.integrations._patch import Function, IntegrationWarning, Patch


def make_state(optimizer: Optimizer) -> None:
    """Create an optimizer's state as its first step would; parameters do not change.

    Does nothing if the optimizer has state, or its parameters have gradients.

    Raises:
        RuntimeError: Its step fails without a loss.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    trainable = [param for param in params if param.requires_grad]
    if optimizer.state or any(param.grad is not None for param in params):
        return
    rates = [group.get("lr") for group in optimizer.param_groups]
    values = [param.detach().clone() for param in trainable]
    try:
        for param in trainable:
            param.grad = torch.zeros_like(param)
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"] = torch.zeros_like(group["lr"])
            elif "lr" in group:
                group["lr"] = 0.0
        # Of the class: a learning rate scheduler counts the instance's.
        type(optimizer).step(optimizer)
    except Exception as error:
        raise RuntimeError(
            f"the state of {type(optimizer).__name__} cannot be made before it is "
            f"loaded, its step without a loss fails: {error}. Take one step before "
            "loading, or use FULL_STATE_DICT"
        ) from error
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        with torch.no_grad():
            for param, value in zip(trainable, values, strict=True):
                param.grad = None
                param.copy_(value)


def _keep_saved(state: dict[str, Any], saved: set[str]) -> dict[str, Any]:
    """Leave out the state of parameters that have none in the checkpoint.

    They had no gradient before it was saved.
    """
    return {
        name: kept
        for name, values in state.items()
        if (
            kept := {
                key: value
                for key, value in values.items()
                if f"optimizer.state.{name}.{key}" in saved
            }
        )
    }


def _names_of_state(keys: Mapping[str, Any]) -> set[str]:
    return {key for key in keys if key.startswith("optimizer.state.")}


def load_sharded(model: Any, optimizer: Any, folder: Path) -> None:
    """Load an optimizer's state from a checkpoint of torch.distributed.checkpoint.

    Args:
        model: The wrapped model; its state dict type is set.
        optimizer: accelerate's optimizer, or one of torch.
        folder: Where the checkpoint is.
    """
    make_state(getattr(optimizer, "optimizer", optimizer))
    template = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    template.pop(STATE_CLASSES, None)  # those that the optimizer has by now
    reader = FileSystemReader(folder)
    saved = _names_of_state(reader.read_metadata().state_dict_metadata)
    template["state"] = _keep_saved(template["state"], saved)
    left = saved - {
        f"optimizer.state.{name}.{key}"
        for name, values in template["state"].items()
        for key in values
    }
    if left:
        warnings.warn(
            f"{len(left)} entries of the optimizer's state in {folder} are not loaded, "
            f"as {min(left)!r}: the optimizer has no such state",
            IntegrationWarning,
            stacklevel=4,
        )
    state: dict[str, Any] = {"optimizer": template}
    # torch's planner would drop a ShardedTensor without a part on this rank, then take
    # the checkpoint for one of an old version, with other keys.
    planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
    load(state, storage_reader=reader, planner=planner)
    flat = FullyShardedDataParallel.optim_state_dict_to_load(
        model, getattr(optimizer, "optimizer", optimizer), state["optimizer"]
    )
    optimizer.load_state_dict(flat)


def _wrap_load(original: Function) -> Function:
    def load_fsdp_optimizer(
        fsdp_plugin: Any,
        accelerator: Any,
        optimizer: Any,
        model: Any,
        input_dir: Any,
        optimizer_index: int = 0,
        adapter_only: bool = False,
        use_dcp: bool = True,
    ) -> None:
        is_ours = isinstance(model, FullyShardedDataParallel)
        is_full = fsdp_plugin.state_dict_type is StateDictType.FULL_STATE_DICT
        if not is_ours or is_full or not use_dcp:
            original(
                fsdp_plugin,
                accelerator,
                optimizer,
                model,
                input_dir,
                optimizer_index=optimizer_index,
                adapter_only=adapter_only,
                use_dcp=use_dcp,
            )
            return
        accelerator.wait_for_everyone()
        name = f"{original.__globals__['OPTIMIZER_NAME']}_{optimizer_index}"
        folder = Path(input_dir)
        settings: contextlib.AbstractContextManager[Any] = (
            FullyShardedDataParallel.state_dict_type(
                model,
                fsdp_plugin.state_dict_type,
                fsdp_plugin.state_dict_config,
                fsdp_plugin.optim_state_dict_config,
            )
        )
        with settings:
            load_sharded(
                model, optimizer, folder if folder.name == name else folder / name
            )
        accelerator.wait_for_everyone()

    return load_fsdp_optimizer


PATCHES = (
    Patch(
        module="accelerate.utils.fsdp_utils",
        function="load_fsdp_optimizer",
        purpose="optimizer state of SHARDED_STATE_DICT checkpoints is loaded",
        parameters=(
            "fsdp_plugin accelerator optimizer model input_dir optimizer_index "
            "adapter_only use_dcp"
        ),
        mentions="optim_state_dict_to_load FileSystemReader",
        wrap=_wrap_load,
    ),
)
