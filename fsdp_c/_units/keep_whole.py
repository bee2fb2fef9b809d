"""keep_whole(): blocks of parameters that no two ranks share.

What is asked for stands on the modules that hold the parameters, since programs make
parameters anew before they shard a model. See csrc/core/layout/blocks.h for the rest.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_c import _native
from fsdp_c._units.names import clean_name
from fsdp_c._units.owner import owners_in
from fsdp_c._units.uses import ParamUse, is_taken

# The attribute of a module: what it keeps whole, by the name of its parameter.
_ATTRIBUTE = "_fsdp_c_kept_whole"


class Kept(NamedTuple):
    """What is asked for a parameter."""

    numel: int  # of a block
    max_padding: float


def keep_whole(
    model: nn.Module,
    choose: Callable[[str, torch.Size], int | None],
    *,
    max_padding: float = 0.05,
) -> None:
    """Let each whole parameter, row or block lie on one rank.

    Call it before :class:`fsdp_c.FullyShardedDataParallel` wraps the model. Shards stay
    equal in size: parameters lie in another order, with some padding between them.
    State dicts do not change. A further call replaces what this one chose.

    Args:
        model: Not sharded yet, on any device.
        choose: Is given name and shape of each parameter. It returns True for a
            parameter that is to be whole; a number of elements for one whose blocks of
            so many are, as ``shape[1:].numel()`` for rows; and False or 0 for one that
            may be cut anywhere.
        max_padding: Wrapping a unit with whole blocks fails if its padding is more
            than this part of its parameters.

    Raises:
        TypeError: ``model`` is not a module, or ``choose`` returns something else.
        ValueError: The model is sharded, nothing is chosen, or a number is negative.

    Example:
        >>> is_matrix = lambda name, shape: len(shape) == 2
        >>> fsdp_c.keep_whole(model, is_matrix)  # doctest: +SKIP
        >>> model = FSDP(model, use_orig_params=True)  # doctest: +SKIP
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    if owners_in(model) or any(is_taken(param) for param in model.parameters()):
        raise ValueError("the model is sharded: call keep_whole() before sharding it")
    if not max_padding >= 0:
        raise ValueError(f"max_padding is {max_padding}, need >= 0")
    found: dict[nn.Module, dict[str, Kept]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            if param is not None:
                fqn = clean_name(f"{prefix}.{name}" if prefix else name)
                numel = _block_numel(choose(fqn, param.shape), fqn, param.shape)
                if numel > 0:
                    kept = Kept(numel, max_padding)
                    found.setdefault(module, {})[name] = kept
    if not found:
        raise ValueError("choose() chose no parameter of the model")
    for module in model.modules():
        vars(module).pop(_ATTRIBUTE, None)
        if module in found:
            vars(module)[_ATTRIBUTE] = found[module]


def _block_numel(chosen: Any, fqn: str, shape: torch.Size) -> int:
    if chosen is None or isinstance(chosen, bool):
        return shape.numel() if chosen else 0
    if not isinstance(chosen, int):
        raise TypeError(
            "choose() must return True, False or a number of elements, got "
            f"{chosen!r} for parameter {fqn!r}"
        )
    if chosen < 0:
        raise ValueError(
            f"choose() returned {chosen} for parameter {fqn!r}: need the number of "
            "elements of a block, or 0"
        )
    return chosen


def kept_of(module: nn.Module, name: str) -> Kept | None:
    """Return what is asked for a module's parameter."""
    kept: Kept | None = vars(module).get(_ATTRIBUTE, {}).get(name)
    return kept


def block_numels(kept: Sequence[Kept | None], num_shards: int) -> list[int] | None:
    """Return the blocks of a unit's parameters; None: nothing can cut them."""
    if num_shards == 1 or not any(kept):
        return None
    return [0 if each is None else each.numel for each in kept]


def keeps_blocks(uses: Sequence[ParamUse], num_shards: int) -> bool:
    """Whether a unit with these parameters keeps blocks whole."""
    kept = [kept_of(use.module, use.name) for use in uses]
    return block_numels(kept, num_shards) is not None


def check_padding(
    params: Sequence[tuple[str, int, Kept | None]], layout: _native.Layout
) -> None:
    """Refuse a layout of parameters, (name, numel, what is asked), with much padding.

    Raises:
        ValueError: It has; the message says how much, by which parameter, and what to
            do.
    """
    blocks = [(kept, name, numel) for name, numel, kept in params if kept is not None]
    limit = min(kept.max_padding for kept, _, _ in blocks)
    numel = sum(segment[3] for segment in layout.segments)
    padding = sum(segment[5] for segment in layout.segments) - numel
    if padding <= limit * numel:
        return
    block, name = max((min(kept.numel, numel), name) for kept, name, numel in blocks)
    raise ValueError(
        f"keep_whole() pads {numel:,} elements by {padding:,} on {layout.world_size} "
        f"ranks, which is {padding / numel:.1%}, and max_padding is {limit:.1%}: the "
        f"largest block is of parameter {name!r} and has {block:,} elements, where a "
        f"rank's share of all is {numel // layout.world_size:,}. Keep less of it "
        "whole, such as rows: shape[1:].numel(); shard more parameters in one unit; "
        "or raise max_padding"
    )
