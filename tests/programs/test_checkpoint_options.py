"""torch.distributed.checkpoint.state_dict: strategies, several optimizers.

test_checkpoint_state_dict.py has each option on its own; here they meet, beside torch's
FSDP1 and the unsharded model.
"""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from helpers.distributed import distributed
from helpers.groups import kept_mesh
from helpers.impl import ShardingStrategy
from helpers.reference import assert_same_tensors
from programs.test_checkpoint_state_dict import (
    assert_alike,
    by_name,
    optimizer,
    train,
    trained,
    wrap,
)

FULL = StateDictOptions(full_state_dict=True)


def assert_same_state(actual: Any, expected: Any) -> None:
    """Both are (parameters, optimizer state) of FULL, with equal values."""
    assert_same_tensors("parameters", dict(actual[0]), dict(expected[0]), 0.0)
    mine, theirs = actual[1]["state"], expected[1]["state"]
    assert mine.keys() == theirs.keys()
    for name, state in theirs.items():
        assert_same_tensors(name, mine[name], state, 0.0)


def settings(strategy: str, **kwargs: Any) -> dict[str, Any]:
    kwargs["sharding_strategy"] = ShardingStrategy[strategy]
    if "HYBRID" in strategy:
        kwargs["device_mesh"] = kept_mesh((2, 2), ("replica", "shard"))
    return kwargs


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("name", ["tied", "unused", "called_twice"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=4, device="cpu", timeout_s=120)
def test_strategies(name: str, strategy: str, use_orig_params: bool) -> None:
    """Got as from FSDP1, and set into another model, in each form."""
    kwargs = settings(strategy, use_orig_params=use_orig_params)
    ours, theirs = trained("fsdp_c", name, **kwargs), trained("torch", name, **kwargs)
    for chosen in ({}, {"full_state_dict": True}):
        # A parameter without state, flattened: FSDP1's own set_state_dict() fails.
        for flattened in (False,) if name == "unused" else (False, True):
            options = StateDictOptions(
                **chosen,
                flatten_optimizer_state_dict=flattened,
                strict=name != "unused",  # torch wants a state of each parameter
            )
            mine = get_state_dict(*ours, options=options)
            torchs = get_state_dict(*theirs, options=options)
            assert_alike(mine[0], torchs[0])
            # FSDP1's optimizer state is sharded with flat parameters only, ours always.
            is_plain = use_orig_params and strategy == "NO_SHARD"
            assert_alike(
                by_name(mine[1]), by_name(torchs[1]), is_same_form=not is_plain
            )
            for given in (mine, torchs):
                model = wrap("fsdp_c", name, seed=1, **kwargs)
                optim = optimizer(model)
                set_state_dict(
                    model,
                    optim,
                    model_state_dict=copy.copy(given[0]),
                    optim_state_dict=given[1],
                    options=options,
                )
                expected = get_state_dict(*ours, options=FULL)
                actual = get_state_dict(model, optim, options=FULL)
                if given is mine:
                    assert_same_state(actual, expected)
                else:
                    assert_alike(actual[0], expected[0])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=4, device="cpu", timeout_s=120)
def test_broadcast(rank: int, strategy: str, use_orig_params: bool) -> None:
    """From rank 0, also over replicas and with parts that no checkpoint has."""
    kwargs = settings(strategy, use_orig_params=use_orig_params)
    for name in ("tied", "unused"):
        given = get_state_dict(*trained("plain", name), options=FULL)
        expected = copy.deepcopy(given)
        model = wrap("fsdp_c", name, seed=rank, **kwargs)
        optim = optimizer(model)
        options = StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True, strict=name == "tied"
        )
        set_state_dict(
            model,
            optim,
            model_state_dict=given[0] if rank == 0 else {},
            optim_state_dict=given[1] if rank == 0 else {},
            options=options,
        )
        actual = get_state_dict(model, optim, options=FULL)
        assert_same_tensors(name, dict(actual[0]), dict(expected[0]), 0.0)
        for key, state in expected[1]["state"].items():
            assert_same_tensors(key, actual[1]["state"][key], state, 0.0)


def two_optimizers(model: nn.Module) -> list[Any]:
    """One steps the blocks, the other the rest, with options of their own."""
    blocks = [p for n, p in model.named_parameters() if "blocks" in n]
    rest = [p for n, p in model.named_parameters() if "blocks" not in n]
    return [
        torch.optim.AdamW(blocks, lr=1e-2, amsgrad=True),
        torch.optim.SGD(rest, lr=1e-2, momentum=0.9),
    ]


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu", timeout_s=120)
def test_several_optimizers(use_orig_params: bool) -> None:
    """A list of optimizers has one state dict, which sets all of them."""

    class Both:
        def __init__(self, optims: list[Any]) -> None:
            self.optims = optims

        def step(self) -> None:
            for each in self.optims:
                each.step()

        def zero_grad(self) -> None:
            for each in self.optims:
                each.zero_grad()

    models = {}
    for impl in ("fsdp_c", "torch", "plain"):
        kwargs = {} if impl == "plain" else {"use_orig_params": use_orig_params}
        model = wrap(impl, "mlp", **kwargs)
        optims = two_optimizers(model)
        train(impl, "mlp", model, Both(optims))
        models[impl] = model, optims
    for full in (True, False):
        for flattened in (False, True):
            options = StateDictOptions(
                full_state_dict=full, flatten_optimizer_state_dict=flattened
            )
            got = {k: get_state_dict(*v, options=options) for k, v in models.items()}
            assert_alike(got["fsdp_c"][0], got["torch"][0])
            assert_alike(by_name(got["fsdp_c"][1]), by_name(got["torch"][1]))
            assert_alike(
                by_name(got["fsdp_c"][1]), by_name(got["plain"][1]), is_same_form=False
            )
            for source in ("fsdp_c", "torch"):
                model = wrap("fsdp_c", "mlp", seed=1, use_orig_params=use_orig_params)
                optims = two_optimizers(model)
                set_state_dict(
                    model,
                    optims,
                    model_state_dict=copy.copy(got[source][0]),
                    optim_state_dict=got[source][1],
                    options=options,
                )
                now = get_state_dict(model, optims, options=options)
                assert_alike(now[0], got[source][0])
                assert_alike(by_name(now[1]), by_name(got[source][1]))


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu")
def test_a_part_of_a_unit(use_orig_params: bool) -> None:
    """`submodules` that are units, plain modules in a unit, or several of them."""
    found = []
    for impl in ("fsdp_c", "torch"):
        model, _ = trained(impl, "mlp", use_orig_params=use_orig_params)
        inner = model.module
        of_impl = []
        for chosen in ({inner.inp}, {inner.blocks[0], inner.blocks[1]}, {inner.blocks}):
            for options in (FULL, StateDictOptions()):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    of_impl.append(
                        get_model_state_dict(model, submodules=chosen, options=options)
                    )
        found.append(of_impl)
    for mine, torchs in zip(*found, strict=True):
        assert mine
        assert_alike(mine, torchs)
