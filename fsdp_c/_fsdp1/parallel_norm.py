"""clip_grad_norm_ where units have tensor parallel parameters.

Such a parameter counts once: what its tensor parallel ranks cut is summed over them,
what they replicate is not. FSDP1 sums over the data parallel ranks only, so each tensor
parallel rank clips by a norm of its own there.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fsdp_c._state.parts import ParamPart
from fsdp_c._torch_compat import is_cut
from fsdp_c._units.cuts import local_of


def clip_parallel(
    parts: Iterable[ParamPart], max_norm: float, norm_type: float
) -> Tensor:
    """Clip the gradients of all ``parts``; return the norm. Collective."""
    terms: dict[tuple[ProcessGroup, ...], Tensor] = {}
    parallel_groups: dict[ProcessGroup, None] = {}
    holders: dict[Tensor, None] = {}
    dtype = torch.float32
    parts = [part for part in parts if part.param.requires_grad]
    if any(part.param.dtype.to_real() is torch.float64 for part in parts):
        dtype = torch.float64
    for part in parts:
        groups = _groups_of(part)
        parallel_groups |= dict.fromkeys(_parallel_groups(part))
        if groups not in terms:
            terms[groups] = torch.zeros((), dtype=dtype, device=part.param.device)
        grad = part.param.grad
        if grad is None or part.part_numel == 0:
            continue
        holders[local_of(grad)] = None
        own = local_of(grad) if isinstance(grad, DTensor) else part.home.part_in(grad)
        if own.is_complex():
            own = own.abs()
        norm = torch.linalg.vector_norm(own, norm_type, dtype=dtype)
        if math.isinf(norm_type):
            terms[groups] = torch.maximum(terms[groups], norm)
        else:
            terms[groups] += norm.pow(norm_type)
    total = _total(terms, norm_type)
    # Tensor parallel ranks added a replicated parameter's elements in other parts.
    for group in parallel_groups:
        dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
    if holders:
        scale = (max_norm / (total + 1e-6)).clamp_max(1.0)
        torch._foreach_mul_(list(holders), scale)
    return total


def _groups_of(part: ParamPart) -> tuple[ProcessGroup, ...]:
    """Return the groups over which the ranks hold other elements of a parameter."""
    groups = [] if part.shard_group is None else [part.shard_group]
    groups += [group for group, cuts in _parallel_groups(part).items() if cuts]
    return tuple(group for group in groups if group.size() > 1)


def _parallel_groups(part: ParamPart) -> dict[ProcessGroup, bool]:
    """Return the groups of the parameter's mesh; True for those that cut it."""
    parallel = None if part.cut is None else part.cut.parallel
    if isinstance(part.param, DTensor):  # an ignored one
        parallel = part.param.device_mesh, tuple(part.param.placements)
    if parallel is None:
        return {}
    mesh, placements = parallel
    return {
        mesh.get_group(mesh_dim): is_cut(placement)
        for mesh_dim, placement in enumerate(placements)
    }


def _total(terms: dict[tuple[ProcessGroup, ...], Tensor], norm_type: float) -> Tensor:
    is_max = math.isinf(norm_type)
    op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    for groups, value in terms.items():
        for group in groups:
            dist.all_reduce(value, op, group=group)
    stacked = torch.stack(list(terms.values())) if terms else torch.zeros(1)
    return stacked.max() if is_max else stacked.sum().pow(1.0 / norm_type)
