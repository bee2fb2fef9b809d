"""copy.deepcopy of a wrapped module: new parameters over a copy of the shards."""

import copy
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

from torch import nn

from fsdp_c._module.attributes import Attributes
from fsdp_c._torch_compat import TrainingState
from fsdp_c._units.buffers import UnitBuffers
from fsdp_c._units.names import WRAPPED_MODULE
from fsdp_c._units.originals import Originals
from fsdp_c._units.params import own_modules
from fsdp_c._units.uses import ParamUse, mark_sharded


def copy_sharded(module: Attributes, memo: dict[int, Any]) -> Any:
    """Return a copy of ``module`` without gradients, for ``copy.deepcopy``.

    The copy has a unit of its own over a copy of this rank's shards; process groups
    and the configuration are shared. Nothing is communicated.

    Raises:
        RuntimeError: Inside forward, backward or ``summon_full_params``.
    """
    state = module.training_state
    if state is not TrainingState.IDLE:
        raise RuntimeError(
            f"unit {module._unit.name!r} cannot be copied in state {state.name}: call "
            "copy.deepcopy() between steps"
        )
    result = type(module).__new__(type(module))
    memo[id(module)] = result
    # A shallow copy, its dicts (children, hooks) too; what follows replaces the rest.
    result.__dict__.update(
        (key, value.copy() if isinstance(value, dict) else value)
        for key, value in module.__dict__.items()
    )
    with ExitStack() as stack:
        stack.enter_context(module._originals.shown())  # no flat parameters
        if module._unit_buffers is not None:
            stack.enter_context(
                module._unit_buffers.in_original_dtypes(
                    is_training=module.wrapped.training
                )
            )
        wrapped: nn.Module = copy.deepcopy(module.wrapped, memo)
    uses = [
        ParamUse(memo[id(use.module)], use.name, use.fqn, memo[id(use.param)])
        for use in module._originals.uses
    ]
    params = [use.param for use in uses]
    unit = module._unit.clone(params)
    for param in params:
        mark_sharded(param, unit.name)

    result._modules[WRAPPED_MODULE] = wrapped
    result._engine = None
    result._is_root = None
    result._engine_members = WeakSet()
    result._ignored_modules = frozenset(
        memo.get(id(each), each) for each in module._ignored_modules
    )
    result._ignored_params = frozenset(
        memo.get(id(each), each) for each in module._ignored_params
    )
    result._follower = None  # its optimizer steps the module that was copied
    result.adopt_unit(unit)
    result._originals = Originals(
        wrapped,
        unit,
        uses,
        module._originals.shapes,
        use_orig_params=module._config.use_orig_params,
        rank=module.shard_rank,
    )
    if module._unit_buffers is not None:
        dtype = module._config.mixed_precision.buffer_dtype
        assert dtype is not None  # or there would be no UnitBuffers
        result._unit_buffers = UnitBuffers(
            wrapped,
            [each for _, each in own_modules(wrapped, result._ignored_modules)],
            dtype=dtype,
            is_full_in_eval=module._config.full_precision_in_eval,
        )
    return result
