"""Compare a sharded model with the unsharded one, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def gather(shards: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Join all ranks' pieces of each tensor, flattened, in CPU memory.

    With ``use_orig_params=True`` a rank holds a piece of some parameters, all of others
    and nothing of the rest. Joined in the order of ranks they are whole.
    """
    mine = {
        # torch's own FSDP leaves its wrapper in the names, fsdp_c does not.
        name.replace("_fsdp_wrapped_module.", ""): (
            torch.empty(0) if shard is None else shard.detach().cpu().flatten()
        )
        for name, shard in shards.items()
    }
    pieces: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(pieces, mine)
    return {name: torch.cat([piece[name] for piece in pieces]) for name in mine}


def largest_differences(
    unsharded: nn.Module,
    sharded: Any,
    batches: Sequence[Sequence[Batch]],
    *,
    max_grad_norm: float,
) -> dict[str, float]:
    """Train both models, the unsharded one on all ranks' data, and compare them.

    Uses SGD, because Adam divides by the gradient: it turns the rounding error of a
    near-zero gradient into a full step.

    Args:
        unsharded: Equal to ``sharded`` at the start; both are modified.
        sharded: The same model in FSDP with ``use_orig_params=True``.
        batches: Inputs and targets of each rank, of equal sizes, for each step.
        max_grad_norm: Both clip their gradients to this norm.

    Returns:
        The largest absolute difference of losses, gradients and parameters, and
        the largest relative difference of the gradients' norm.
    """
    largest = dict.fromkeys(("loss", "gradient", "gradient norm", "parameter"), 0.0)

    def note(what: str, a: Tensor, b: Tensor) -> None:
        difference = (
            (a.detach().cpu().flatten() - b.detach().cpu().flatten()).abs().max().item()
        )
        # max() alone could lose a NaN.
        largest[what] = max(
            largest[what], math.inf if math.isnan(difference) else difference
        )

    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.5) for model in (unsharded, sharded)
    ]
    for per_rank in batches:
        inputs, targets = (torch.cat(part) for part in zip(*per_rank, strict=True))
        unsharded_loss = unsharded(inputs, targets)
        unsharded_loss.backward()
        loss = sharded(*per_rank[dist.get_rank()])
        loss.backward()

        mean_loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean_loss)
        note("loss", unsharded_loss, mean_loss)
        gradients = gather({n: p.grad for n, p in sharded.named_parameters()})
        for name, param in unsharded.named_parameters():
            if param.grad is not None:
                note("gradient", param.grad, gradients[name])
        # After the comparison: clipping would hide a wrong scale.
        norm = nn.utils.clip_grad_norm_(unsharded.parameters(), max_grad_norm)
        ratio = sharded.clip_grad_norm_(max_grad_norm) / norm
        note("gradient norm", ratio, torch.ones(()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        params = gather(dict(sharded.named_parameters()))
        for name, param in unsharded.named_parameters():
            note("parameter", param, params[name])
    return largest
