"""copy.deepcopy of a wrapped module: new parameters over a copy of the shards."""

import copy
from typing import Any, NoReturn

from torch import nn

from fsdp_c._fsdp1.attributes import Attributes
from fsdp_c._torch_compat import TrainingState
from fsdp_c._units.base import Ignored
from fsdp_c._units.build import take_unit


def copy_sharded(module: Attributes, memo: dict[int, Any]) -> Any:
    """Return a copy of ``module`` without gradients, for ``copy.deepcopy``.

    The copy has a unit of its own over a copy of this rank's shards; process groups
    and the configuration are shared. Nothing is communicated.
    """
    state = module.training_state
    if state is not TrainingState.IDLE:
        raise RuntimeError(
            f"unit {module._sharded.name!r} cannot be copied in state {state.name}: "
            "call copy.deepcopy() between steps"
        )
    result = type(module).__new__(type(module))
    memo[id(module)] = result
    # A shallow copy, its dicts (children, hooks) too; what follows replaces the rest.
    result.__dict__.update(
        (key, value.copy() if isinstance(value, dict) else value)
        for key, value in module.__dict__.items()
    )
    # What Module.compile() made runs the module that was copied. A copy of a plain
    # module is not compiled, either.
    result.__dict__.pop("_compiled_call_impl", None)
    sharded = module._sharded
    if sharded.originals.parallel:
        raise RuntimeError(
            f"unit {sharded.name!r} has parameters that are DTensors and cannot be "
            "copied: build the model again and load its state dict"
        )
    if any(id(param) in memo for param in sharded.originals.flat_params()):
        raise RuntimeError(
            f"the flat parameters of unit {sharded.name!r} were copied before the "
            "module, as part of an optimizer: copy the module first, as "
            "copy.deepcopy((model, optimizer)) does"
        )
    sharded.unit.show_kept(False)
    # What flat parameters stand for has no memory to copy: the clone shows its own.
    for use in sharded.originals.uses if sharded.originals.flat_params() else ():
        empty, requires_grad = use.param.new_empty(0), use.param.requires_grad
        memo.setdefault(id(use.param), type(use.param)(empty, requires_grad))
    # Without flat parameters.
    with sharded.originals.shown(), sharded.buffers.in_original_dtypes():
        wrapped: nn.Module = copy.deepcopy(module.wrapped, memo)
        uses = [  # of modules that were taken out of the tree, too
            use._replace(
                module=copy.deepcopy(use.module, memo),
                param=copy.deepcopy(use.param, memo),
            )
            for use in sharded.originals.uses
        ]
    unit = sharded.unit.clone([use.param for use in uses])
    ignored = Ignored(
        frozenset(memo.get(id(each), each) for each in sharded.ignored.modules),
        frozenset(memo.get(id(each), each) for each in sharded.ignored.params),
    )
    parallel = sharded.originals.parallel  # none
    copied = take_unit(wrapped, unit, sharded.config, ignored, uses, parallel)
    result.adopt_unit(wrapped, copied)
    flat_params = sharded.originals.flat_params(), copied.originals.flat_params()
    for mine, its in zip(*flat_params, strict=True):
        its.requires_grad_(mine.requires_grad)  # it may have changed since wrapping
        memo[id(mine)] = its  # of an optimizer that is copied with the model
    result.follow_reductions(None)  # the optimizer steps the module that was copied
    return result


class Copying:
    """What a module gives ``copy.deepcopy``, which makes its copy of this object."""

    def __init__(self, module: Attributes) -> None:
        self._module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy_sharded(self._module, memo)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a FullyShardedDataParallel module cannot be pickled or copied: it holds "
            "process groups and this rank's part only; save state_dict() instead"
        )

    @staticmethod
    def made(copied: Any) -> Any:
        """Return the copy; without one, refuse as when pickled."""
        return copied.__reduce__() if isinstance(copied, Copying) else copied
