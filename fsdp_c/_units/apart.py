"""Which parameters of a module are units apart: Note [Units apart] in apart.c."""

from collections.abc import Sequence

from torch import nn

from fsdp_c._units.owner import owners_of

# Elements of a parameter that is worth a gather and a reduction of its own, and how
# many of a module's may be apart: each is one more call around its forward.
MIN_NUMEL = 4 << 20
MOST = 4


def have_units_inside(modules: Sequence[nn.Module]) -> bool:
    """Return whether other units run between the first and the last gradient."""
    inside = {each for module in modules for each in module.modules()}
    return any(owners_of(each) for each in inside.difference(modules))


def choose_apart(numels: Sequence[int]) -> list[int]:
    """Return the indices of the parameters that are apart from the others, in order.

    Args:
        numels: Elements of the trainable parameters of a module that has units inside,
            and 0 for a frozen one, which has no gradient.
    """
    large = [i for i, numel in enumerate(numels) if numel >= MIN_NUMEL]
    if len(large) < 2:
        return []
    are_all = len(large) == len(numels)  # then the first is the module's main unit
    return large[1:][-MOST:] if are_all else large[-MOST:]
