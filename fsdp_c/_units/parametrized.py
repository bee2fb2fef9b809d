"""Weights that modules compute of their parameters, wherever they are read.

``layer.weight`` of ``torch.nn.utils.parametrizations`` runs a ParametrizationList. Of
shards it would have other numbers, and torch's kernel of weight_norm writes past the
end of a part: the process ends.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from fsdp_c._units.uses import ParamUse


def refuse_computing_of_shards(uses: Sequence[ParamUse]) -> None:
    """Let each ParametrizationList that holds one of the parameters look at them."""
    found: dict[nn.Module, dict[str, tuple[str, torch.Size]]] = {}
    for use in uses:
        if isinstance(use.module, ParametrizationList):
            found.setdefault(use.module, {})[use.name] = use.fqn, use.shape
    for module, whole in found.items():
        module.register_forward_pre_hook(functools.partial(_check, whole))


def _check(whole: dict[str, tuple[str, torch.Size]], module: nn.Module, _: Any) -> None:
    for name, (fqn, shape) in whole.items():
        param = getattr(module, name)
        if param.dim() == 1 and param.shape != shape:
            read, _, _ = fqn.replace("parametrizations.", "").rpartition(".")
            raise RuntimeError(
                f"{read!r} cannot be computed of shards: its {name!r} of shape "
                f"{list(shape)} is {list(param.shape)} on this rank. Read it in the "
                "unit's forward, or within FSDP.summon_full_params(model)"
            )
