"""A tree of modules with wrapped ones in it, walked once."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from fsdp_c._units.base import ShardedModule
from fsdp_c._units.names import clean_name
from fsdp_c._units.uses import ParamUse


@dataclass(frozen=True)
class Tree:
    """What is in a wrapped module, itself included; parents come first.

    Prefixes of names are empty or end with a dot. There are no names of wrapped modules
    in them.
    """

    # The wrapped modules, and the prefix of the first place of each.
    prefixes: dict[ShardedModule, str] = field(default_factory=dict)
    # The modules in each that are neither wrapped nor in a wrapped one inside it.
    own: dict[ShardedModule, dict[nn.Module, None]] = field(default_factory=dict)
    # The prefixes of all places of each module, clean.
    places: dict[nn.Module, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, module: ShardedModule, prefix: str = "") -> "Tree":
        """Return the tree of ``module``, whose names begin with ``prefix``."""
        tree = cls()
        tree._add(module, prefix, {})
        return tree

    def _add(self, module: nn.Module, prefix: str, own: dict[nn.Module, None]) -> None:
        if isinstance(module, ShardedModule):
            self.prefixes.setdefault(module, prefix)
            own = self.own.setdefault(module, {})
            self._add(module.wrapped, prefix, own)
            return
        own[module] = None
        self.places.setdefault(module, []).append(clean_name(prefix))
        for name, child in module._modules.items():
            if child is not None:
                self._add(child, f"{prefix}{name}.", own)

    @property
    def modules(self) -> list[ShardedModule]:
        """The wrapped modules."""
        return list(self.prefixes)

    def named_uses(self, module: ShardedModule) -> Iterator[tuple[str, ParamUse]]:
        """Yield every place of the parameters of ``module``: its clean name, and use.

        A module that is registered in several places stands here for each of them, as
        in the state dict of the unwrapped model; the names begin at ``module``.
        """
        own_prefix = clean_name(self.prefixes[module])
        begin = len(own_prefix)
        for use in module._sharded.uses:
            for place in self.places.get(use.module, ()):
                if place.startswith(own_prefix):
                    yield place[begin:] + use.name, use
