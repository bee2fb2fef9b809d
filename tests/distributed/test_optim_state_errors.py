"""Optimizer state dicts that do not fit: what is said, and that nothing changes."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType, api

from helpers.distributed import distributed
from helpers.impl import FSDP, StateDictType, fsdp
from helpers.optim_states import (
    OPTIMIZERS,
    assert_same_states,
    full,
    train,
    trained,
    wrap,
)

pytestmark = pytest.mark.bookkeeping

_trained = partial(trained, "uneven", "adam", 1, use_orig_params=True)


def _no_state(d: dict[str, Any]) -> dict[str, Any]:
    return {"param_groups": d["param_groups"]}


def _unknown(d: dict[str, Any]) -> dict[str, Any]:
    d["state"]["stranger"] = d["state"]["last.weight"]
    d["param_groups"][0]["params"].append("stranger")
    return d


def _other_shape(d: dict[str, Any]) -> dict[str, Any]:
    d["state"]["last.weight"]["exp_avg"] = torch.zeros(9)
    return d


def _scalar_for_vector(d: dict[str, Any]) -> dict[str, Any]:
    d["state"]["last.weight"]["exp_avg"] = torch.tensor(1.0)
    return d


def _missing_in_groups(d: dict[str, Any]) -> dict[str, Any]:
    d["param_groups"][0]["params"].remove("last.weight")
    return d


def _ids(d: dict[str, Any]) -> dict[str, Any]:
    d["state"] = dict(enumerate(d["state"].values()))
    return d


def _two_groups(d: dict[str, Any]) -> dict[str, Any]:
    group = d["param_groups"][0]
    names = group["params"]
    d["param_groups"] = [
        {**group, "params": [n for n in names if n.endswith("bias")]},
        {**group, "params": [n for n in names if not n.endswith("bias")]},
    ]
    return d


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no_state": (_no_state, r'must have the keys "state"'),
    "unknown": (_unknown, r"'stranger'.*not in the model.*saved from"),
    "shape": (
        _other_shape,
        r"'exp_avg' of parameter 'last\.weight'.*\(9,\), expected \(5, 7\): load",
    ),
    "scalar": (_scalar_for_vector, r"'exp_avg' of parameter 'last\.weight'.*\(\), exp"),
    "groups": (_missing_in_groups, r"'last\.weight'.*in no parameter group.*same par"),
    "ids": (_ids, r"keyed by parameter ids.*rekey_optim_state_dict"),
    "two_groups": (_two_groups, r"are in one parameter group.*same groups"),
    "list": (lambda d: [d], r"must be a dict"),
}


@pytest.mark.parametrize("rank0_only", [False, True])
@pytest.mark.parametrize("bad", BAD)
@distributed(world_size=2)
def test_bad_state_dicts(rank: int, bad: str, rank0_only: bool) -> None:
    """All ranks raise the same, and the optimizer is as it was."""
    model, optim = _trained()
    before = copy.deepcopy(optim.state_dict())
    make, message = BAD[bad]
    given = make(full(model, optim))
    config = api.FullOptimStateDictConfig(rank0_only=rank0_only)
    with (
        FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config),
        pytest.raises((ValueError, TypeError), match=f"(?s){message}"),
    ):
        FSDP.optim_state_dict_to_load(
            model,
            optim,
            given if rank == 0 or not rank0_only else None,
            load_directly=True,
        )
    assert_same_states(optim.state_dict()["state"], before["state"])
    assert optim.state_dict()["param_groups"] == before["param_groups"]
    train(model, optim, "uneven", 1)


@distributed(world_size=2)
def test_flat_parameters_need_equal_plain_state() -> None:
    """One flat parameter has one step, and is in one group."""
    model, optim = _trained(use_orig_params=False)
    saved = full(model, optim)
    flat = optim.param_groups[0]["params"][0]
    first, second = flat._fqns[:2]
    other = copy.deepcopy(saved)
    other["state"][second]["step"] += 3
    with pytest.raises(
        ValueError,
        match=rf"(?s)^All unflattened parameters.*'step' of '{first}' is 1\.0.*"
        rf"'{second}' is 4\.0.*use_orig_params=True",
    ):
        FSDP.optim_state_dict_to_load(model, optim, other)
    other = copy.deepcopy(saved)
    other["state"].pop(second)
    with pytest.raises(ValueError, match=rf"(?s)'{second}' is no value"):
        FSDP.optim_state_dict_to_load(model, optim, other)
    with pytest.raises(ValueError, match="one flat parameter is in one group"):
        FSDP.optim_state_dict_to_load(model, optim, _two_groups(saved))


@distributed(world_size=2)
def test_optimizers_of_other_parameters() -> None:
    model, optim = _trained()
    stranger = torch.optim.Adam([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match=r"parameter 0 of shape \(2,\).*not in"):
        FSDP.optim_state_dict(model, stranger)
    some = torch.optim.Adam(list(model.parameters())[1:])
    with pytest.raises(ValueError, match=r"not one that the optimizer steps"):
        FSDP.optim_state_dict_to_load(model, some, full(model, optim))
    module = nn.Linear(3, 2)
    early = torch.optim.Adam(module.parameters())
    flat_model = fsdp(module, use_orig_params=False)
    with pytest.raises(ValueError, match=r"'weight'.*flat parameter.*after"):
        FSDP.optim_state_dict(flat_model, early)
    with pytest.raises(ValueError, match="pass the wrapped model"):
        FSDP.optim_state_dict_to_load(nn.Linear(1, 1), optim, {})
    inner = nn.Sequential(model.module.last, fsdp(nn.Linear(1, 1)))
    with pytest.raises(ValueError, match=r"'0\.weight' is sharded by unit.*contains"):
        FSDP.full_optim_state_dict(inner, optim)


@pytest.mark.trap(25)
@distributed(world_size=2)
def test_ranks_that_differ(rank: int) -> None:
    """State that one rank lacks, and plain state that differs, on all ranks alike."""
    model, _ = _trained(use_orig_params=False)
    params = list(model.parameters())
    optim = OPTIMIZERS["adam"](params if rank == 0 else params[:-1])
    train(model, optim, "uneven", 1)
    with pytest.raises(RuntimeError, match=r"FSDP currently.*rank 1 does not step"):
        full(model, optim)
    model, optim = _trained()
    for state in optim.state.values():
        if "step" in state:
            state["step"] += rank
    with pytest.raises(ValueError, match=r"'step'.*1\.0.*rank 0, 2\.0.*LOCAL"):
        full(model, optim)
    model, optim = _trained()
    if rank == 1:
        optim.state.clear()
    with pytest.raises(RuntimeError, match=r"rank 1 has no '\w+' for its part of"):
        full(model, optim)
    # An error of one rank reaches the others.
    model, optim = _trained()
    if rank == 1:
        optim = torch.optim.Adam([nn.Parameter(torch.zeros(2))])
    with pytest.raises((RuntimeError, ValueError), match="not in the model"):
        full(model, optim)


@distributed(world_size=2)
def test_local_of_another_layout() -> None:
    model, optim = _trained()
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        local = FSDP.optim_state_dict(model, optim)
    with pytest.raises(ValueError, match=r"local optimizer state dict.*LOCAL_STATE"):
        FSDP.optim_state_dict_to_load(model, optim, local)
    other = wrap("uneven", nested=False, use_orig_params=True)
    other_optim = OPTIMIZERS["adam"](other.parameters())
    FSDP.set_state_dict_type(other, StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(ValueError, match=r"elements \d+ to \d+ of \d+.*this rank hol"):
        FSDP.optim_state_dict_to_load(other, other_optim, local)
    with pytest.raises(ValueError, match="no local optimizer state dict"):
        FSDP.optim_state_dict_to_load(other, other_optim, full(model, optim))


@distributed(world_size=2)
def test_sharded_state_dicts_of_other_ranks(rank: int) -> None:
    """One rank's bad dictionary is an error on all."""
    model, optim = _trained()
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    saved = FSDP.optim_state_dict(model, optim)
    before = copy.deepcopy(optim.state_dict())
    bad = {**saved, "state": dict(saved["state"])}
    if rank == 1:
        bad["state"].pop("last.weight")
    with pytest.raises(RuntimeError, match="different parameters or states"):
        FSDP.optim_state_dict_to_load(model, optim, bad)
    with pytest.raises((RuntimeError, ValueError), match='keys "state"'):
        FSDP.optim_state_dict_to_load(model, optim, saved if rank == 0 else {})
    assert_same_states(optim.state_dict()["state"], before["state"])


@distributed(world_size=2)
def test_key_types() -> None:
    model, optim = _trained()
    saved = full(model, optim)
    unwrapped = nn.Linear(2, 2)
    plain = OPTIMIZERS["adam"](unwrapped.parameters())
    with pytest.raises(AssertionError, match="PARAM_NAME or PARAM_ID"):
        FSDP.rekey_optim_state_dict(saved, "name", unwrapped, optim=plain)
    mixed = {**saved, "state": {**saved["state"], 3: {}}}
    with pytest.raises(ValueError, match="Invalid parameter keys"):
        FSDP.rekey_optim_state_dict(
            mixed, OptimStateKeyType.PARAM_ID, unwrapped, optim=plain
        )
    with pytest.raises(ValueError, match=r"'\S+' of the state dict is none of the 2"):
        FSDP.rekey_optim_state_dict(
            saved, OptimStateKeyType.PARAM_ID, unwrapped, optim=plain
        )
    same = FSDP.rekey_optim_state_dict(
        saved, OptimStateKeyType.PARAM_NAME, unwrapped, optim=plain
    )
    assert same is saved
