"""Flat optimizer state dicts themselves show which states they have.

torch.distributed.checkpoint.state_dict takes the names that the optimizer has on this
rank, and drops the others without a word. With original parameters an optimizer that
has stepped has none for a parameter of which the rank holds nothing, and other ranks
need what this rank's rows of it are; an optimizer of whole parameters has its states
on their owners.
"""

import functools
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from fsdp_c._state.optim.classes import steps_wholes
from fsdp_c._torch_compat import checkpoint_state_dict
from fsdp_c._units.base import ShardedModule


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
        shown = SimpleNamespace(param_groups=optim.param_groups, state=names)
        return original(shown, state_dict, info)

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
