"""Tensor parallel models between a forward and its backward, where units are kept."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffload,
    MixedPrecision,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from fsdp_c import FullyShardedDataParallel as FSDP
from helpers.distributed import distributed, varied
from helpers.groups import groups_destroyed
from helpers.models import loss_of
from helpers.reference import (
    Differential,
    assert_same,
    assert_same_tensors,
    clean_name,
)
from helpers.tensor_parallel import make_both, whole_value

KEEPING = ("SHARD_GRAD_OP", "NO_SHARD", "_HYBRID_SHARD_ZERO2")
STRATEGIES = ("FULL_SHARD", "HYBRID_SHARD", *KEEPING)
# Of masters in fp64.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed": {"mixed_precision": MixedPrecision(torch.float32)},
    "offload": {"cpu_offload": CPUOffload(True)},
}


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def make(strategy: str, api: str = "FSDP", options: str = "plain") -> Differential:
    """Return both models after a step, with gradients."""
    both = make_both(
        api,
        2,
        2,
        num_replicas=1 if "HYBRID" in strategy else None,
        optimizer=adam,
        strategy=strategy,
        **OPTIONS[options],
    )
    if options == "mixed":
        both.tolerance = 1e-4
    both.forward_backward()
    both.checked_step()
    return both


# What is looked at there --------------------------------------------------------


def _state_dict(both: Differential, kind: str) -> None:
    with FSDP.state_dict_type(both.model, StateDictType[kind]):
        state = both.model.state_dict()
    expected = {n: p.detach() for n, p in both.reference_params.items()}
    assert list(state) == list(expected)
    assert all(isinstance(value, DTensor) for value in state.values())
    found = {name: whole_value(value) for name, value in state.items()}
    assert_same_tensors("state", found, expected, both.tolerance)


def _optim_state(both: Differential) -> None:
    found = FSDP.optim_state_dict(both.model, both.optimizer)["state"]
    expected = both.reference_optimizer.state
    assert sorted(found) == sorted(both.reference_params)
    for name, param in both.reference_params.items():
        for key in ("exp_avg", "exp_avg_sq"):
            value = whole_value(found[name][key])
            assert_same(f"{key} of {name}", value, expected[param][key], both.tolerance)


def _clip(both: Differential) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of no gradients
        both.clip(0.1)


def _zero(both: Differential, *, set_to_none: bool) -> None:
    both.reference.zero_grad(set_to_none=set_to_none)
    both.model.zero_grad(set_to_none=set_to_none)


LOOKS: dict[str, Callable[[Differential], None]] = {
    "none": lambda _: None,
    "summon": Differential.check,
    "full": partial(_state_dict, kind="FULL_STATE_DICT"),
    "sharded": partial(_state_dict, kind="SHARDED_STATE_DICT"),
    "optim": _optim_state,
    "clip": _clip,
    "zero": partial(_zero, set_to_none=True),
    "zeros": partial(_zero, set_to_none=False),
    "optimizer": Differential.zero_grad,
}


@varied(
    strategy=STRATEGIES,
    api=["FSDP", "FSDP flat"],
    look=sorted(LOOKS.keys() - {"none"}),
    options=list(OPTIONS),
)
@distributed(world_size=4)
def test_backward_after_looking(
    strategy: str, api: str, look: str, options: str
) -> None:
    """It sees whole values, and the backward is as good as before."""
    with groups_destroyed():
        both = make(strategy, api, options)
        for _ in range(2):
            both.forward_backward(inside=partial(LOOKS[look], both))
            both.check()
        both.checked_step()
        del both


@varied(
    strategy=STRATEGIES,
    api=["FSDP", "FSDP flat"],
    look=["full", "sharded", "optim", "zero", "zeros", "optimizer"],
    options=list(OPTIONS),
)
@distributed(world_size=4)
def test_looking_in_no_sync(strategy: str, api: str, look: str, options: str) -> None:
    """The same between micro-batches of which only the last one is reduced."""
    with groups_destroyed():
        both = make(strategy, api, options)
        for is_quiet in (True, True, False) * 2:
            with both.model.no_sync() if is_quiet else nullcontext():
                both.forward_backward(inside=partial(LOOKS[look], both))
            if not is_quiet:
                both.checked_step()
        del both


# What is shown and written there ------------------------------------------------


def _loss(model: nn.Module, *batch: Tensor) -> Tensor:
    """Add a penalty on every parameter.

    It is not linear: a part of a parameter gives another number.
    """
    loss = loss_of(model(*batch))
    terms = [whole_value(p.square().sum()).sqrt() for p in model.parameters()]
    return loss + 0.1 * torch.stack([term.double() for term in terms]).sum()


@varied(strategy=KEEPING, options=list(OPTIONS), look=["none", "full", "zero", "clip"])
@distributed(world_size=4)
def test_penalty_on_weights(strategy: str, options: str, look: str) -> None:
    """Parameters are whole DTensors there, whose gradients count."""
    with groups_destroyed():
        both = make(strategy, options=options)
        for _ in range(2):
            both.backward_of(_loss, inside=partial(LOOKS[look], both))
            both.check()
        both.checked_step()
        del both


@varied(strategy=STRATEGIES, api=["FSDP", "FSDP flat"], options=["plain", "mixed"])
@distributed(world_size=4)
def test_what_is_shown(strategy: str, api: str, options: str) -> None:
    """Whole DTensors, or plain local tensors, alike in all units that are kept."""
    with groups_destroyed():
        both = make(strategy, api, options)
        modules = dict(both.model.module.named_modules())
        names = [n for n in modules if n.endswith(("norm", "up", "head"))]

        def look() -> list[Tensor]:
            return [modules[name].weight for name in names]

        assert not any(isinstance(param, DTensor) for param in look())
        loss = both.forward()[1]
        for param, name in zip(look(), names, strict=True):
            assert isinstance(param, DTensor) == (strategy in KEEPING)
            if not isinstance(param, DTensor):
                continue
            whole = both.reference.get_submodule(clean_name(name)).weight
            assert param.shape == whole.shape
            is_cast = options == "mixed"
            assert param.dtype == (torch.float32 if is_cast else torch.float64)
            assert param.to_local().dtype == param.dtype
        loss.backward()
        assert not any(isinstance(param, DTensor) for param in look())
        del loss, both


def _summon_and_halve(both: Differential) -> None:
    with FSDP.summon_full_params(both.model):
        both.scale_params(0.5)


def _load(both: Differential) -> None:
    for model in (both.reference, both.model):
        state = model.state_dict()
        model.load_state_dict({n: v.detach() * 0.5 for n, v in state.items()})


def _apply(both: Differential) -> None:
    for model in (both.reference, both.model):
        model.apply(
            lambda module: (
                nn.init.ones_(module.weight)
                if isinstance(module, nn.LayerNorm)
                else None
            )
        )


def _write_locally(both: Differential) -> None:
    with torch.no_grad():
        for param in (*both.model.parameters(), *both.reference.parameters()):
            (param.to_local() if isinstance(param, DTensor) else param).mul_(0.5)


WRITES: dict[str, Callable[[Differential], None]] = {
    "summon": _summon_and_halve,
    "load": _load,
    "apply": _apply,
    "write": lambda both: both.scale_params(0.5),
    "local": _write_locally,
    "step": Differential.step,
}


@varied(
    strategy=STRATEGIES,
    api=["FSDP", "FSDP flat"],
    write=list(WRITES),
    options=list(OPTIONS),
)
@distributed(world_size=4)
def test_after_a_forward_whose_loss_is_dropped(
    strategy: str, api: str, write: str, options: str
) -> None:
    """What writes there works on the shards, and nothing is lost."""
    with groups_destroyed():
        both = make(strategy, api, options)
        both.forward()
        WRITES[write](both)
        both.train(2)
        del both
