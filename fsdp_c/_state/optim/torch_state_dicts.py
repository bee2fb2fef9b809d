"""torch.distributed.checkpoint.state_dict, which looks at this rank's optimizer alone.

With original parameters an optimizer that has stepped has no states for what the rank
holds nothing of, nor for what was never stepped on it: frozen parameters, parts of
modules that did not run, padding. An optimizer of whole parameters has its states on
their owners. Other ranks have states of these parameters. So torch must not take the
names of states from the optimizer, which drops the others without a word. Nor may it
make first states here, with a step on zeros, where other ranks have states.

Of a parameter whose states a flat state dict lacks, torch makes empty ones.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_c._state.optim.classes import steps_wholes
from fsdp_c._torch_compat import checkpoint_state_dict
from fsdp_c._units.base import ShardedModule, sharded_modules
from fsdp_c._units.collectives import on_any_rank


@functools.cache
def show_names_of_flat_states() -> None:
    """Let torch take the names from the state dict, once per process."""
    checkpoint = checkpoint_state_dict()
    original = checkpoint._unflatten_optim_state_dict

    @functools.wraps(original)
    def unflatten(optim: Any, state_dict: Mapping[str, Any], info: Any) -> Any:
        is_ours = any(isinstance(each, ShardedModule) for each in info.fsdp_modules)
        if not is_ours and not steps_wholes(optim):
            return original(optim, state_dict, info)
        names = _names_of_states(state_dict, info.fqn_param_mapping)
        if info.strict:
            _check_states(optim, names, info.fqn_param_mapping)
        shown = SimpleNamespace(param_groups=optim.param_groups, state=names)
        result = original(shown, state_dict, info)
        # torch has an empty state for what the state dict has none for.
        result["state"] = {name: each for name, each in result["state"].items() if each}
        return result

    checkpoint._unflatten_optim_state_dict = unflatten


def _names_of_states(
    state_dict: Mapping[str, Any], fqns_of: Mapping[Any, Iterable[str]]
) -> dict[Any, dict[str, None]]:
    """Return the names of the states of each parameter; keys: ``state.<fqn>.<name>``.

    A state that is a dictionary has a key for each of its values.
    """
    names: dict[Any, dict[str, None]] = {}
    params: dict[str, Any] = {}
    for param, fqns in fqns_of.items():
        if isinstance(param, Tensor):
            names[param] = {}
            params.update(dict.fromkeys(fqns, param))
    for key in state_dict:
        kind, _, fqn = key.partition(".")
        while kind == "state" and fqn and fqn not in params:
            fqn = fqn.rpartition(".")[0]
        if kind == "state" and fqn:
            name = key.removeprefix(f"state.{fqn}.").partition(".")[0]
            names[params[fqn]][name] = None
    return names


def _check_states(
    optim: Optimizer,
    names: Mapping[Any, Mapping[str, None]],
    fqns_of: Mapping[Any, Iterable[str]],
) -> None:
    """Check that all trained parameters have states, or none, as without flattening.

    The message is torch's.
    """
    if not any(names.values()):
        return
    for group in optim.param_groups:
        for param in group["params"]:
            if param.requires_grad and not names[param]:
                raise RuntimeError(
                    f"Missing optimizer state for parameter {min(fqns_of[param])!r} in "
                    "checkpoint. The parameter requires gradients but has no saved "
                    "optimizer state. To load anyway, use "
                    "StateDictOptions(strict=False)."
                )


@functools.cache
def make_first_states_together() -> None:
    """Let torch make no states where another rank has some, once per process."""
    checkpoint = checkpoint_state_dict()
    save, make = checkpoint._get_optim_state_dict, checkpoint._init_optim_state
    begun: list[Optimizer] = []

    @functools.wraps(make)
    def make_unless_begun(optim: Optimizer) -> None:
        if all(optim is not each for each in begun):
            make(optim)

    @functools.wraps(save)
    def save_together(model: nn.Module, optimizers: Any, info: Any) -> Any:
        if info.handle_optim and info.fsdp_modules:
            begun.extend(_begun_on_any_rank(model, optimizers))
        try:
            return save(model, optimizers, info)
        finally:
            begun.clear()

    checkpoint._init_optim_state = make_unless_begun
    checkpoint._get_optim_state_dict = save_together


def _begun_on_any_rank(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> list[Optimizer]:
    """Return the optimizers that have states or gradients somewhere. Collective."""
    flags = [bool(each.state) or _has_gradients(each) for each in optimizers]
    groups: dict[Any, ShardedModule] = {}
    for module in sharded_modules(model):
        groups.setdefault(module._sharded.groups.shard_group, module)
    for group, module in groups.items():
        if group is not None:
            what = "search for optimizer states"
            flags = on_any_rank(flags, group, module.compute_device, what)
    return [each for each, flag in zip(optimizers, flags, strict=True) if flag]


def _has_gradients(optim: Optimizer) -> bool:
    """Whether torch would make no states of it: some parameter has a gradient."""
    params = (param for group in optim.param_groups for param in group["params"])
    return any(param.grad is not None for param in params)
