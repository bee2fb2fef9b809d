"""Modules that end the process if they run with shards, and refuse to do so.

Most operators raise an error for a weight of another shape. torch's kernels of LSTM and
of weight_norm write past the end of a part. ``layer.weight`` of
``torch.nn.utils.parametrizations`` runs a ParametrizationList, wherever it is read.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.weight_norm import WeightNorm

from fsdp_c._units.uses import ParamUse


def refuse_running_with_shards(uses: Sequence[ParamUse]) -> None:
    """Let such modules, of those that hold the parameters, look at their shapes."""
    found: dict[nn.Module, dict[str, tuple[str, torch.Size]]] = {}
    for use in uses:
        if _ends_the_process(use.module):
            found.setdefault(use.module, {})[use.name] = use.fqn, use.shape
    for module, whole in found.items():
        # Before the hook of torch.nn.utils.weight_norm, which computes the weight.
        module.register_forward_pre_hook(functools.partial(_check, whole), prepend=True)


def _ends_the_process(module: nn.Module) -> bool:
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, (ParametrizationList, nn.LSTM)) or any(
        isinstance(hook, WeightNorm) for hook in hooks
    )


def _check(whole: dict[str, tuple[str, torch.Size]], module: nn.Module, _: Any) -> None:
    for name, (fqn, shape) in whole.items():
        param = getattr(module, name)
        if param.dim() == 1 and param.shape != shape:
            path, _, _ = fqn.replace("parametrizations.", "").rpartition(".")
            what = path or type(module).__name__
            raise RuntimeError(
                f"{what!r} needs whole parameters: its {name!r} of shape "
                f"{list(shape)} is {list(param.shape)} on this rank. "
                "Use it in the unit's forward, or within FSDP.summon_full_params(model)"
            )
