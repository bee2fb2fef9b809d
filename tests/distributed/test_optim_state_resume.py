"""Training goes on from an optimizer state dict as if it had not stopped."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType

from helpers.distributed import distributed
from helpers.groups import first_ranks, hybrid_groups
from helpers.impl import FSDP, ShardingStrategy
from helpers.models import CASES, loss_of
from helpers.optim_states import (
    OPTIMIZERS,
    assert_same_states,
    full,
    in_form,
    train,
    trained,
    wrap,
)
from helpers.reference import assert_same_tensors, full_state_dict
from helpers.seeds import generator

OTHERS = ("rank0", "sharded", "local")


def _assert_same_local(
    first: tuple[nn.Module, Any], second: tuple[nn.Module, Any]
) -> None:
    """Compare shards and optimizer states of this rank bit for bit.

    Not the state of a parameter of which the rank holds nothing: Adagrad has one.
    """
    params = dict(first[0].named_parameters())
    empty = {key for key, p in enumerate(params.values()) if p.numel() == 0}
    for (name, one), other in zip(params.items(), second[0].parameters(), strict=True):
        assert torch.equal(one, other), name
    one, other = first[1].state_dict(), second[1].state_dict()
    states = [
        {key: state for key, state in each["state"].items() if key not in empty}
        for each in (one, other)
    ]
    assert_same_states(*states)
    assert one["param_groups"] == other["param_groups"]


@pytest.mark.trap(25)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize(
    ("optimizer", "form"),
    [(name, "full") for name in OPTIMIZERS]
    + [(name, form) for name in ("momentum", "adam", "counting") for form in OTHERS],
)
@distributed(world_size=3)
def test_resume_is_exact(optimizer: str, form: str, use_orig_params: bool) -> None:
    """5 steps, save, load into a new model, 5 steps: as 10 steps, bit for bit."""
    case = "scalar"
    model, optim = trained(case, optimizer, 5, use_orig_params=use_orig_params)
    with in_form(model, form):
        saved = FSDP.optim_state_dict(model, optim)
    other = wrap(case, use_orig_params=use_orig_params)
    other.load_state_dict(full_state_dict(model))
    other_optim = OPTIMIZERS[optimizer](other.parameters())
    with in_form(other, form):
        FSDP.optim_state_dict_to_load(other, other_optim, saved, load_directly=True)
    _assert_same_local((model, optim), (other, other_optim))
    train(model, optim, case, 5, first=5)
    train(other, other_optim, case, 5, first=5)
    _assert_same_local((model, optim), (other, other_optim))


@pytest.mark.parametrize("form", ["full", "rank0", "sharded"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=(2, 3))
def test_other_wrapping(use_orig_params: bool, form: str) -> None:
    """Into the root only, and into the other use_orig_params, and back again."""
    case = "tied"
    model, optim = trained(case, "adam", 2, use_orig_params=use_orig_params)
    expected = full(model, optim)
    for nested in (True, False):
        for other_orig in (True, False):
            other = wrap(case, nested=nested, use_orig_params=other_orig)
            other_optim = OPTIMIZERS["adam"](other.parameters())
            with in_form(model, form), in_form(other, form):
                saved = FSDP.optim_state_dict(model, optim)
                FSDP.optim_state_dict_to_load(
                    other, other_optim, saved, load_directly=True
                )
            found = full(other, other_optim)
            assert_same_states(found["state"], expected["state"])
            names = [sorted(g["params"]) for g in found["param_groups"]]
            assert names == [sorted(g["params"]) for g in expected["param_groups"]]


@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
@pytest.mark.parametrize("form", ["full", "rank0", "sharded"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=4)
def test_other_strategy(use_orig_params: bool, form: str, strategy: str) -> None:
    """From each strategy to itself; a full state dict also to FULL_SHARD."""
    with hybrid_groups(2, 2) as groups:
        model, optim = trained(
            "scalar",
            "adam",
            2,
            sharding_strategy=ShardingStrategy[strategy],
            process_group=groups if strategy == "HYBRID_SHARD" else None,
            use_orig_params=use_orig_params,
        )
        expected = copy.deepcopy(optim.state_dict())
        with in_form(model, form):
            saved = FSDP.optim_state_dict(model, optim)
            train(model, optim, "scalar", 1)
            FSDP.optim_state_dict_to_load(model, optim, saved, load_directly=True)
        assert_same_states(optim.state_dict()["state"], expected["state"])
        if form == "full":
            other = wrap("scalar", use_orig_params=not use_orig_params)
            other_optim = OPTIMIZERS["adam"](other.parameters())
            FSDP.optim_state_dict_to_load(other, other_optim, saved, load_directly=True)
            assert_same_states(full(other, other_optim)["state"], saved["state"])
        del model, optim


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adagrad", "counting"])
@distributed(world_size=4)
def test_other_number_of_ranks(
    rank: int, optimizer: str, use_orig_params: bool
) -> None:
    """From 4 ranks to 1, 2 and 3 and back, through a full state dict."""
    model, optim = trained("uneven", optimizer, 2, use_orig_params=use_orig_params)
    saved = full(model, optim)
    for num_ranks in (1, 2, 3):
        with first_ranks(num_ranks) as group:
            if group is not None:
                other = wrap(
                    "uneven", process_group=group, use_orig_params=use_orig_params
                )
                other_optim = OPTIMIZERS[optimizer](other.parameters())
                for form in ("full", "rank0"):
                    given = saved if form == "full" or rank == 0 else {}
                    with in_form(other, form):
                        FSDP.optim_state_dict_to_load(
                            other, other_optim, given, load_directly=True
                        )
                    found = full(other, other_optim)
                    assert_same_states(found["state"], saved["state"])
                train(other, other_optim, "uneven", 1)
                again = full(other, other_optim)
                del other, other_optim
        # What fewer ranks trained goes back to all, from rank 0.
        with in_form(model, "rank0"):
            FSDP.optim_state_dict_to_load(
                model, optim, again if rank == 0 else {}, load_directly=True
            )
        found = full(model, optim)
        if rank == 0:
            assert_same_states(found["state"], again["state"])


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_unsharded_model_both_ways(use_orig_params: bool) -> None:
    """Through rekey_optim_state_dict, by id and by name; training goes on alike."""
    case = "transformer"
    reference = CASES[case].build()
    module = copy.deepcopy(reference)
    model, optim = trained(
        case, "adam", 2, module=module, use_orig_params=use_orig_params
    )
    plain_optim = OPTIMIZERS["adam"](reference.parameters())
    reference.load_state_dict(full_state_dict(model))
    saved = full(model, optim)
    by_id = FSDP.rekey_optim_state_dict(
        saved, OptimStateKeyType.PARAM_ID, reference, optim=plain_optim
    )
    plain_optim.load_state_dict(copy.deepcopy(by_id))
    # One step of each, on the same batch on all ranks.
    batch = CASES[case].inputs(generator("same batch"))
    for each, its_optim in ((reference, plain_optim), (model, optim)):
        its_optim.zero_grad()
        loss_of(each(*batch)).backward()
        its_optim.step()
    assert_same_tensors("weights", full_state_dict(model), reference.state_dict())
    named = FSDP.rekey_optim_state_dict(
        plain_optim.state_dict(),
        OptimStateKeyType.PARAM_NAME,
        reference,
        optim=plain_optim,
    )
    assert_same_states(full(model, optim)["state"], named["state"], 1e-4)
    FSDP.optim_state_dict_to_load(model, optim, named, load_directly=True)
    assert_same_states(full(model, optim)["state"], named["state"])
