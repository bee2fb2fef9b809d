"""Parameters that were tied after ``fully_shard()``, over several calls of it.

transformers shards a model before it reads the weights, and ties embedding and head
after that. torch gathers such a parameter once for each group. Here it becomes a
parameter of the closest group around all its places, as if it had been tied from the
beginning: one gather, one reduction.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from fsdp_c._fully_shard.sharded_params import Place

if TYPE_CHECKING:
    from fsdp_c._fully_shard.group import Group

_Uses = list[tuple["Group", Place]]


def settle_ties(groups: "Iterable[Group]") -> None:
    """Give each tied parameter to one group.

    Args:
        groups: Of a model, parents first.

    Raises:
        RuntimeError: In the middle of a step, or gradients wait to be reduced.
        ValueError: The groups differ in mesh, precision or offloading.
    """
    groups = list(groups)
    found: dict[nn.Parameter, _Uses] = {}
    for group in groups:
        is_whole = group.shows_kept
        for place in group.params.places:
            param = place.module._parameters.get(place.name)
            if is_whole:
                param = group.params.sharded[place.param]
            if param is not None:
                found.setdefault(param, []).append((group, place))
    for param, uses in found.items():
        users = dict.fromkeys(group for group, _ in uses)
        home = _home_of(uses, groups) if len(users) > 1 else None
        if home is not None:
            _give(param, uses, home)


def _home_of(uses: _Uses, groups: "list[Group]") -> "Group | None":
    """Return the closest group around all places, one that has the parameter if it can.

    The root's is around all; None: the root is not among ``groups``.
    """
    users = dict.fromkeys(group for group, _ in uses)
    for around in reversed(groups):
        inside = {sub for module in around.modules for sub in module.modules()}
        if not all(place.module in inside for _, place in uses):
            continue
        call = [each for each in groups if each.modules == around.modules]
        homes = [each for each in call if each in users] + call
        for home in homes:
            if all(_are_alike(home, each) for each in users):
                return home
        break
    else:
        return None
    fqns = " and ".join(
        f"{place.fqn!r} of {group.params.owner}" for group, place in uses
    )
    raise ValueError(
        f"parameters {fqns} were tied after calls of fully_shard that differ in mesh, "
        "precision or offloading: tie them before, and pass the modules that share the "
        "parameter in one list, or call fully_shard only on a module that contains both"
    )


def _are_alike(group: "Group", other: "Group") -> bool:
    first, second = group.arguments, other.arguments
    return (first.data, first.device, first.precision, first.offloads) == (
        second.data,
        second.device,
        second.precision,
        second.offloads,
    )


def _give(param: nn.Parameter, uses: _Uses, home: "Group") -> None:
    """Let all places of ``param`` be those of ``home``."""
    cut = uses[0][0].params.cuts[uses[0][1].param]
    names = {
        module: f"{prefix}." if prefix else ""
        for each in home.modules
        for prefix, module in each.named_modules()
    }
    moved = [place for group, place in uses if group is not home]
    for group in dict.fromkeys((home, *(group for group, _ in uses))):
        group.dissolve()
        if group is not home:
            group.params.leave(moved)
    home.take(
        param,
        cut,
        [(each.module, each.name, names[each.module] + each.name) for each in moved],
    )
