"""Which modules of a model become units: what --wrap says, and what to suggest."""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from fsdp_c.tools.plan._errors import PlanError

AUTO = "auto"
NONE = "none"
_SIZE = "size:"


@dataclass(frozen=True)
class Wrapping:
    """A policy, in words."""

    text: str  # as for --wrap
    why: str = ""  # why these modules

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes that it wraps, if it is by class."""
        if self.text == NONE or self.text.startswith(_SIZE):
            return ()
        return tuple(name.strip() for name in self.text.split(","))

    @property
    def code(self) -> str:
        """The constructor's argument that does the same."""
        if self.text == NONE:
            return "auto_wrap_policy=None"
        if self.text.startswith(_SIZE):
            return (
                "auto_wrap_policy=partial(size_based_auto_wrap_policy, "
                f"min_num_params={self.text.removeprefix(_SIZE)})"
            )
        return f"auto_wrap_policy=ModuleWrapPolicy({{{', '.join(self.classes)}}})"

    @property
    def calls(self) -> str:
        """The calls of fully_shard() that do the same, in words."""
        if self.text == NONE:
            return "fully_shard(model)"
        units = f"each {' and '.join(self.classes)}" if self.classes else "each unit"
        return f"fully_shard() of {units}, the innermost first, then of the model"

    def policy(self, model: nn.Module) -> Any:
        """Return the policy for ``model``, or None.

        Raises:
            PlanError: A class is not in the model, or the size is not a number.
        """
        if self.text == NONE:
            return None
        if self.text.startswith(_SIZE):
            return _size_policy(self.text.removeprefix(_SIZE))
        wanted = set(self.classes)
        found = {type(m) for m in model.modules() if type(m).__name__ in wanted}
        missing = wanted - {each.__name__ for each in found}
        if missing:
            counts = Counter(type(module).__name__ for module in model.modules())
            names = ", ".join(f"{name} ({n})" for name, n in sorted(counts.items()))
            raise PlanError(
                f"--wrap: no module of the model is a {sorted(missing)[0]!r}; its "
                f"classes are {names}; or write auto, none or size:NUMEL"
            )
        return ModuleWrapPolicy(found)


def _size_policy(text: str) -> Callable[..., bool]:
    if not text.isdecimal() or int(text) < 1:
        raise PlanError(
            f"--wrap size:{text}: write the least number of elements of a unit, such "
            "as size:100000000"
        )
    policy: Callable[..., bool] = functools.partial(
        size_based_auto_wrap_policy, min_num_params=int(text)
    )
    return policy


def wrappings(text: str, model: nn.Module) -> list[Wrapping]:
    """Return what ``--wrap text`` means for ``model``, then what else to compare."""
    if text != AUTO:
        return [Wrapping(text, "as --wrap says")]
    blocks, why = _blocks(model)
    one = Wrapping(NONE, "everything is one unit, unsharded throughout a step")
    if not blocks:
        return [one]
    usual = Wrapping(",".join(blocks), why)
    if any(type(module) is nn.Embedding for module in model.modules()):
        names = ",".join((*blocks, nn.Embedding.__name__))
        both = Wrapping(
            names,
            "blocks and embeddings: the root, unsharded throughout a step, is smaller",
        )
        return [usual, both, one]
    return [usual, one]


def _blocks(model: nn.Module) -> tuple[tuple[str, ...], str]:
    """Return the names of the classes of the model's blocks, and how that is known."""
    named = getattr(model, "_no_split_modules", None) or ()
    present = {type(module).__name__ for module in model.modules()}
    known = tuple(sorted(name for name in named if name in present))
    if known:
        return known, "the model's blocks (its _no_split_modules)"
    repeated = _repeated(model)
    if repeated:
        return (repeated,), "the class that is repeated in a list and holds the most"
    return (), ""


def _repeated(model: nn.Module) -> str:
    """Return the class whose repeated modules hold most parameters, or ""."""
    numels: Counter[str] = Counter()
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        kinds = Counter(type(child) for child in module)
        for child in module:
            if kinds[type(child)] > 1 and type(child) is not type(module):
                numel = sum(param.numel() for param in child.parameters())
                numels[type(child).__name__] += numel
    if not numels:
        return ""
    name, numel = max(numels.items(), key=lambda item: item[1])
    return name if numel > 0 else ""
