"""Older methods, names for keys, groups, what is outside of units; collect."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import OptimStateKeyType
from torch.distributed.optim import _NamedOptimizer

from fsdp_c import keep_whole
from fsdp_c._state.optim.states import collect
from helpers.distributed import distributed
from helpers.impl import FSDP, fsdp
from helpers.models import CASES, Block
from helpers.optim_states import (
    FORMS,
    OPTIMIZERS,
    assert_same_states,
    full,
    in_form,
    train,
    trained,
    wrap,
)
from helpers.reference import objects_of_all_ranks


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("by", ["optim", "optim_input", "neither"])
@distributed(world_size=2)
def test_older_methods(rank: int, by: str, use_orig_params: bool) -> None:
    """They equal the newer ones, and say that they are deprecated."""
    model = wrap("uneven", use_orig_params=use_orig_params)
    params = list(model.parameters())
    optim = OPTIMIZERS["adam"](params)
    train(model, optim, "uneven", 2)
    local = copy.deepcopy(optim.state_dict())
    which: dict[str, Any] = {}
    if by != "neither":
        which = {by: optim if by == "optim" else params}
    saving = {"optim_input": params} if by == "optim_input" else {}

    with pytest.warns(FutureWarning, match="optim_state_dict"):
        first = FSDP.full_optim_state_dict(model, optim, **saving)
    with pytest.warns(FutureWarning, match="optim_state_dict"):
        whole = FSDP.full_optim_state_dict(model, optim, rank0_only=False, **saving)
    assert_same_states(whole["state"], full(model, optim)["state"])
    assert (first == {}) == (rank > 0)
    with pytest.warns(FutureWarning, match="optim_state_dict_to_load"):
        results = [
            FSDP.shard_full_optim_state_dict(whole, model, **which),
            FSDP.scatter_full_optim_state_dict(first or None, model, **which),
        ]
    with pytest.warns(FutureWarning, match="optim_state_dict"):
        sharded = FSDP.sharded_optim_state_dict(model, optim)
    with pytest.warns(FutureWarning, match="optim_state_dict_to_load"):
        results.append(FSDP.flatten_sharded_optim_state_dict(sharded, model, optim))
    for result in results:
        assert_same_states(result["state"], local["state"])
        assert result["param_groups"] == local["param_groups"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FSDP.optim_state_dict(model, optim)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_parameter_groups(use_orig_params: bool) -> None:
    """Options stay with their parameters, in whichever order the groups are."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        first = list(model.blocks[1].parameters())
        rest = [p for p in model.parameters() if all(p is not q for q in first)]
        return [
            {"params": first, "lr": 0.5, "betas": (0.5, 0.9)},
            {"params": rest, "weight_decay": 0.25},
        ]

    model = wrap("mlp", use_orig_params=use_orig_params)
    optim = torch.optim.AdamW(groups(model), lr=1e-2)
    train(model, optim, "mlp", 2)
    saved = full(model, optim)
    one, two = saved["param_groups"]
    assert sorted(one["params"]) == sorted(
        f"blocks.1.{name}"
        for name, _ in CASES["mlp"].build().blocks[1].named_parameters()
    )
    assert (one["lr"], two["weight_decay"]) == (0.5, 0.25)
    other = wrap("mlp", use_orig_params=not use_orig_params)
    other_optim = torch.optim.AdamW(list(reversed(groups(other))), lr=1e-3)
    FSDP.optim_state_dict_to_load(other, other_optim, saved, load_directly=True)
    second, first = other_optim.param_groups
    assert (first["lr"], first["betas"]) == (0.5, (0.5, 0.9))
    assert (second["lr"], second["weight_decay"]) == (1e-2, 0.25)
    assert_same_states(full(other, other_optim)["state"], saved["state"])


@distributed(world_size=2)
def test_ranks_may_order_parameters_differently(rank: int) -> None:
    model = wrap("uneven", use_orig_params=True)
    params = list(model.parameters())
    optim = OPTIMIZERS["adam"](params if rank == 0 else params[::-1])
    train(model, optim, "uneven", 2)
    local = copy.deepcopy(optim.state_dict())
    saved = full(model, optim)
    names = objects_of_all_ranks(list(saved["state"]))
    assert names[0] == names[1]
    FSDP.optim_state_dict_to_load(model, optim, saved, load_directly=True)
    assert_same_states(optim.state_dict()["state"], local["state"])


@pytest.mark.parametrize("named_params", [True, False])
@distributed(world_size=2)
def test_names_for_keys(named_params: bool) -> None:
    """An optimizer made of named parameters, and one that keys its states by name."""
    model, plain = trained("mlp", "momentum", 1, use_orig_params=True)
    expected = full(model, plain)
    if named_params:
        optim: Any = torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9)
        FSDP.optim_state_dict_to_load(model, optim, expected, load_directly=True)
        found = full(model, optim)
        names = [n for n, _ in CASES["mlp"].build().named_parameters()]
        assert sorted(found["param_groups"][0]["param_names"]) == sorted(names)
        assert optim.param_groups[0]["param_names"] == [
            name for name, _ in model.named_parameters()
        ]
    else:
        optim = _NamedOptimizer(
            model.named_parameters(), torch.optim.SGD, None, None, lr=0.05, momentum=0.9
        )
        optim.init_state()
        loaded = FSDP.optim_state_dict_to_load(
            model, optim, expected, is_named_optimizer=True
        )
        mine = {n for n, p in model.named_parameters() if p.numel()}
        assert mine <= loaded["state"].keys()
        assert all("_fsdp_wrapped_module" in name for name in loaded["state"])
        optim.load_state_dict(loaded)
        found = full(model, optim)
    assert_same_states(found["state"], expected["state"])


class CountsByName(torch.optim.SGD):
    """Has state of no parameter before any other, as MADGRAD."""

    def step(self, closure: Any = None) -> Any:
        self.state["k"] = self.state.get("k", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("form", FORMS)
@distributed(world_size=2)
def test_state_by_name_names_no_parameters(form: str) -> None:
    """It is saved and loaded; FSDP1 takes the ids of parameters for names."""
    model = wrap("mlp", use_orig_params=True)
    optims = [CountsByName(model.parameters(), lr=0.05, momentum=0.9) for _ in range(2)]
    train(model, optims[0], "mlp", 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found a optim state, k")
        with in_form(model, form):
            saved = FSDP.optim_state_dict(model, optims[0])
            FSDP.optim_state_dict_to_load(model, optims[1], saved, load_directly=True)
    states = [optim.state_dict()["state"] for optim in optims]
    assert states[1].pop("k") == states[0].pop("k") == 2
    assert_same_states(states[1], states[0])


class Outside(nn.Module):
    """One unit and parameters outside of all units, or ignored in it."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = Block()
        self.unit.extra = nn.Linear(3, 3)
        self.outside = nn.Linear(6, 2)
        self.scalar = nn.Parameter(torch.tensor(2.0))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_outside_of_units(use_orig_params: bool, form: str) -> None:
    """The root is not wrapped, a module is ignored; an optimizer over all."""
    torch.manual_seed(0)

    def make() -> tuple[Any, Any]:
        model = Outside()
        model.unit = fsdp(
            model.unit,
            ignored_modules=[model.unit.extra],
            use_orig_params=use_orig_params,
        )
        return model, torch.optim.Adam(model.parameters(), lr=1e-2)

    model, optim = make()
    for param in model.parameters():
        if param.numel():
            param.grad = torch.full_like(param, 0.5)
    optim.step()
    with in_form(model, form):
        saved = FSDP.optim_state_dict(model, optim)
    if form == "full":
        names = {name for name, _ in Outside().named_parameters()}
        assert saved["state"].keys() == names
        assert saved["state"]["scalar"]["exp_avg"].shape == ()
        assert saved["state"]["unit.fc1.weight"]["exp_avg"].dim() == 2
    other, other_optim = make()
    with in_form(other, form):
        FSDP.optim_state_dict_to_load(other, other_optim, saved, load_directly=True)
    assert_same_states(full(other, other_optim)["state"], full(model, optim)["state"])
    if use_orig_params:  # else there may be padding, which is not saved
        found = other_optim.state_dict()["state"]
        assert_same_states(found, optim.state_dict()["state"])


@pytest.mark.parametrize("form", ["full", "rank0"])
@pytest.mark.parametrize("is_ignored", [False, True])
@distributed(world_size=2)
def test_factors_of_an_unsharded_model(rank: int, is_ignored: bool, form: str) -> None:
    """Parameters of which each rank has the whole take state of other shapes."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(6, 8))
    own = torch.optim.Adafactor(plain[1].parameters())
    for param in plain[1].parameters():
        param.grad = torch.rand_like(param)
    own.step()
    by_name = OptimStateKeyType.PARAM_NAME
    given = FSDP.rekey_optim_state_dict(own.state_dict(), by_name, plain, optim=own)
    model = copy.deepcopy(plain)
    model = fsdp(
        model,
        strategy="FULL_SHARD" if is_ignored else "NO_SHARD",
        ignored_modules=[model[1]] if is_ignored else None,
        use_orig_params=True,
    )
    optim = torch.optim.Adafactor(model.module[1].parameters())
    with in_form(model, form):
        mine = given if rank == 0 or form == "full" else {}
        FSDP.optim_state_dict_to_load(model, optim, mine, load_directly=True)
    assert_same_states(optim.state_dict()["state"], own.state_dict()["state"])


@distributed(world_size=2)
def test_state_of_no_parameter() -> None:
    """Such state is kept, with a warning."""
    model, optim = trained("mlp", "momentum", 1, use_orig_params=True)
    given = copy.deepcopy(optim.state_dict())
    given["state"]["mine"] = {"anything": 3}
    with pytest.warns(UserWarning, match="Found a optim state, mine"):
        saved = FSDP.optim_state_dict(model, optim, given)
    assert saved["state"]["mine"] == {"anything": 3}
    loaded = FSDP.optim_state_dict_to_load(model, optim, saved)
    assert loaded["state"]["mine"] == {"anything": 3}
    without = {"state": saved["state"]}
    assert list(FSDP.optim_state_dict_to_load(model, optim, without)) == ["state"]


@distributed(world_size=2)
def test_named_groups_of_a_transformed_dict() -> None:
    """An unsharded model's state dict, made of it by name, loads."""
    reference = CASES["mlp"].build()
    plain = OPTIMIZERS["adam"](reference.parameters())
    for param in reference.parameters():
        param.grad = torch.randn_like(param)
    plain.step()
    named = FSDP.rekey_optim_state_dict(
        plain.state_dict(), OptimStateKeyType.PARAM_NAME, reference, optim=plain
    )
    dist.broadcast_object_list(objects := [named], src=0)
    for use_orig_params in (True, False):
        model = fsdp(
            copy.deepcopy(reference), units={Block}, use_orig_params=use_orig_params
        )
        optim = OPTIMIZERS["adam"](model.parameters())
        FSDP.optim_state_dict_to_load(model, optim, objects[0], load_directly=True)
        assert_same_states(full(model, optim)["state"], objects[0]["state"])


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_collect(use_orig_params: bool) -> None:
    """What fsdp_c.checkpoint builds on: of this rank's part only, without messages."""
    model, optim = trained("scalar", "counting", 2, use_orig_params=use_orig_params)
    found = collect(model, optim)
    for state in found.states.values():
        place = state.part
        assert sorted(state.plain) == sorted(
            ["count", "kind", "nothing", "history"] if state.has_state else []
        )
        for value in state.sharded.values():
            assert value.shape == (place.end - place.begin,)


class TwoLayers(nn.Module):
    """A layer, and one of three times its rows that does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.unused = nn.Linear(4, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.first(x)
        return result


@pytest.mark.parametrize("full_state_dict", [True, False])
@pytest.mark.parametrize("has_stepped", [True, False])
@distributed(world_size=2)
def test_states_are_made_on_all_ranks_or_none(
    has_stepped: bool, full_state_dict: bool
) -> None:
    """Rank 0 steps ``first``, and torch makes states where an optimizer has none."""
    module = TwoLayers()
    keep_whole(module, lambda *_: True, max_padding=1.0)
    module.unused = fsdp(module.unused, use_orig_params=True)
    model = fsdp(module, use_orig_params=True)
    optim = OPTIMIZERS["momentum"](model.parameters())
    if has_stepped:
        model(torch.ones(2, 4)).sum().backward()
        optim.step()
        optim.zero_grad()
        assert bool(optim.state) == (model.first.weight.numel() > 0)
    options = StateDictOptions(full_state_dict=full_state_dict)
    found = get_optimizer_state_dict(model, optim, options=options)["state"]
    names = {"first.weight"} if has_stepped else {"first.weight", "unused.weight"}
    assert found.keys() == names
    assert all("momentum_buffer" in state for state in found.values())
