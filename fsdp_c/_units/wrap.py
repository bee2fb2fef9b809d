"""auto_wrap_policy: decides which modules become units, and wraps them."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from fsdp_c._torch_compat import Policy, run_policy
from fsdp_c._units.base import Ignored, ShardedModule
from fsdp_c._units.config import Config
from fsdp_c._units.full_precision import keep_full_precision
from fsdp_c._units.names import clean_name
from fsdp_c._units.params import unsharded_params

_Chosen = dict[nn.Module, dict[str, Any]]

# Wraps a module, with these arguments of the constructor; its name, and the parameters
# in it that belong to a unit around it.
MakeSharded = Callable[
    [nn.Module, Mapping[str, Any], str, frozenset[nn.Parameter]], ShardedModule
]


def auto_wrap(
    root: nn.Module,
    config: Config,
    arguments: Mapping[str, Any],
    ignored: Ignored,
    make: MakeSharded,
) -> None:
    """Wrap the modules in ``root`` that its policy chooses; never ``root``.

    Children come before their parents. A module that is registered in several
    places is wrapped once and replaced in all of them.

    A parameter that is used in several units goes to the lowest unit that
    contains all its uses (FSDP1 does not support it); a warning says which.
    ``config`` are the checked ``arguments``, most of which the children get, too.

    Source:
        ``_auto_wrap`` (torch 2.13, ``fsdp/_wrap_utils.py``), ``_recursive_wrap``,
        ``_post_order_apply`` (``fsdp/wrap.py``).
    """
    policy = config.auto_wrap_policy
    if policy is None:
        return
    for name, module in root.named_modules():
        if isinstance(module, ShardedModule):
            raise ValueError(  # as FSDP1 does
                "FSDP auto wrapping requires modules to not already have FSDP applied "
                f"but found {name} in\n{root}\n: wrap it either with auto_wrap_policy "
                "or by hand"
            )
    for_children = {
        **arguments,
        "auto_wrap_policy": None,
        "ignored_modules": None,
        "ignored_states": list(ignored.params),
    }
    _Wrapper(root, config, for_children, ignored, make).run(policy)


class _Wrapper:
    """One run of :func:`auto_wrap`."""

    def __init__(
        self,
        root: nn.Module,
        config: Config,
        arguments: Mapping[str, Any],
        ignored: Ignored,
        make: MakeSharded,
    ) -> None:
        self._root = root
        self._arguments = dict(arguments)
        self._ignored = ignored
        self._make = make
        # Modules of these classes become units in full precision.
        self._full_precision: tuple[type[nn.Module], ...] = ()
        if arguments["mixed_precision"] is not None:
            self._full_precision = tuple(
                config.mixed_precision._module_classes_to_ignore
            )
        self._casts = config.mixed_precision.param_dtype is not None
        self._partly = _partly_shared_params(root, ignored)
        self._hoisted: set[nn.Parameter] = set()
        self._kept: dict[str, str] = {}  # class by path of full-precision units

    def run(self, policy: Policy | Callable[..., bool]) -> None:
        """Choose modules, wrap them, and warn of what may surprise."""
        chosen: _Chosen = {}
        if isinstance(policy, Policy):
            modules = set(self._ignored.modules)
            chosen = run_policy(policy, self._root, modules, dict(self._arguments))
        else:
            self._choose(self._root, policy, chosen, set(), set())
        for module in self._root.modules():
            if self._is_full_precision(module):
                kwargs = chosen.get(module, self._arguments)
                chosen[module] = {**kwargs, "mixed_precision": None}
        self._wrap_children(self._root, "", chosen, {})
        self._warn_of_shared_params()
        self._warn_of_full_precision()

    def _choose(
        self,
        module: nn.Module,
        policy: Callable[..., bool],
        chosen: _Chosen,
        visited: set[nn.Module],
        taken: set[nn.Parameter],
    ) -> int:
        """Ask a policy function about ``module`` and what is in it, children first.

        Return how many elements the chosen modules hold; ``taken`` are theirs.
        """
        visited.add(module)
        own = [
            param
            for _, param in unsharded_params(module, self._ignored.params)
            if param not in taken
        ]
        numel = sum(param.numel() for param in own)
        is_full_precision = self._is_full_precision(module)
        if not is_full_precision and not policy(
            module=module, recurse=True, nonwrapped_numel=numel
        ):
            return 0
        chosen_numel = 0
        for _, child in self._children(module):
            if child not in visited:
                chosen_numel += self._choose(child, policy, chosen, visited, taken)
        if module is self._root or not (
            is_full_precision
            or policy(
                module=module, recurse=False, nonwrapped_numel=numel - chosen_numel
            )
        ):
            return chosen_numel
        chosen[module] = self._arguments
        taken.update(param for param in own if param not in self._left_out(module))
        return numel

    def _wrap_children(
        self,
        parent: nn.Module,
        prefix: str,
        chosen: _Chosen,
        visited: dict[nn.Module, nn.Module],
    ) -> None:
        """Wrap what is chosen in ``parent``; ``visited`` is what modules became."""
        for name, child in self._children(parent):
            if child not in visited:
                path = f"{prefix}{name}"
                visited[child] = child
                self._wrap_children(child, f"{path}.", chosen, visited)
                if child in chosen:
                    visited[child] = self._wrap(child, path, chosen[child])
            new = visited[child]
            if new is not child:
                setattr(parent, name, new)
            if parent._modules.get(name) is not new:
                raise RuntimeError(
                    f"child {name!r} of {type(parent).__name__} cannot be replaced by "
                    "its wrapped form: the parent's __setattr__ does not register it; "
                    "exclude the child from auto_wrap_policy"
                )

    def _children(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, child in list(module._modules.items()):
            if (
                child is not None
                and child not in self._ignored.modules
                and not isinstance(child, ShardedModule)
            ):
                yield name, child

    def _is_full_precision(self, module: nn.Module) -> bool:
        return (
            bool(self._full_precision)
            and isinstance(module, self._full_precision)
            and module is not self._root
            and module not in self._ignored.modules
        )

    def _left_out(self, module: nn.Module) -> frozenset[nn.Parameter]:
        """Return the parameters of ``module`` that belong to a unit around it."""
        return self._partly.get(module, frozenset())

    def _wrap(
        self, module: nn.Module, path: str, arguments: Mapping[str, Any]
    ) -> nn.Module:
        left_out = self._left_out(module)
        self._hoisted |= left_out
        if self._is_full_precision(module):
            self._kept[path] = type(module).__name__
            if self._casts:
                keep_full_precision(module)
        all_ignored = self._arguments.get("ignored_states")
        if all_ignored and arguments.get("ignored_states") is all_ignored:
            # Those of the whole model would be visited for every unit.
            own = [p for p in module.parameters() if p in self._ignored.params]
            arguments = {**arguments, "ignored_states": own}
        return self._make(module, arguments, path, left_out)

    def _warn_of_shared_params(self) -> None:
        """Say once which parameters stay in an ancestor."""
        if not self._hoisted:
            return
        names = [
            clean_name(name)
            for name, param in self._root.named_parameters()
            if param in self._hoisted
        ]
        warnings.warn(
            f"shared between units: {', '.join(names)}. Each is kept in the lowest "
            "unit that contains all its uses, and is whole while that unit runs",
            stacklevel=6,
        )

    def _warn_of_full_precision(self) -> None:
        """Say once which modules became units that mixed precision leaves alone.

        Source:
            The first words: ``_warn_on_overridden_mixed_precision`` (torch 2.13,
            ``fsdp/_wrap_utils.py``).
        """
        if not self._kept:
            return
        first = [f"{path} ({name})" for path, name in self._kept.items()][:8]
        more = f" and {len(self._kept) - 8} more" if len(self._kept) > 8 else ""
        warnings.warn(
            "Both mixed precision and an auto_wrap_policy were specified to FSDP. "
            "These modules will be wrapped as separate FSDP instances with mixed "
            f"precision disabled: {', '.join(first)}{more}; their classes are in "
            "MixedPrecision._module_classes_to_ignore",
            stacklevel=6,
        )


def _partly_shared_params(
    root: nn.Module, ignored: Ignored
) -> dict[nn.Module, frozenset[nn.Parameter]]:
    """Return the parameters that a module shares with others outside of it.

    By every module that contains some of the places where the parameter is used, but
    not all. A place is a path from ``root``: a module that two others hold has two.
    """
    chains: dict[nn.Parameter, list[frozenset[nn.Module]]] = {}
    stack: list[tuple[nn.Module, frozenset[nn.Module]]] = [(root, frozenset({root}))]
    while stack:
        module, chain = stack.pop()
        for param in module._parameters.values():
            if param is not None and param not in ignored.params:
                chains.setdefault(param, []).append(chain)
        stack.extend(
            (child, chain | {child})
            for child in module._modules.values()
            if child is not None
        )
    partly: dict[nn.Module, set[nn.Parameter]] = {}
    for param, places in chains.items():
        counts = Counter(module for chain in places for module in chain)
        for module, count in counts.items():
            if count < len(places):
                partly.setdefault(module, set()).add(param)
    return {module: frozenset(params) for module, params in partly.items()}
