"""Optimizer state that is another on each rank: nothing of it is lost."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from helpers.distributed import distributed
from helpers.groups import first_ranks
from helpers.impl import FSDP, StateDictType, fsdp
from helpers.reference import objects_of_all_ranks
from helpers.shared_folder import shared_folder


class _Rms(torch.optim.Optimizer):
    """Keeps the root mean square of what it steps, as transformers' Adafactor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None or param.numel() == 0:
                    continue
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                state["RMS"] = param.square().mean().sqrt().item()
                state["rms_tensor"] = param.square().mean().sqrt()
                state["sum"] = state.get("sum", torch.zeros_like(param)) + param.grad
                param.sub_(group["lr"] * param.grad)


def _trained(
    use_orig_params: bool, group: dist.ProcessGroup | None = None
) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    model = fsdp(module, use_orig_params=use_orig_params, process_group=group)
    optim = _Rms(model.parameters())
    for _ in range(2):
        optim.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
        optim.step()
    return model, optim


def _same(mine: Any, other: Any) -> bool:
    states = [list(optim.state_dict()["state"].values()) for optim in (mine, other)]
    return len(states[0]) == len(states[1]) and all(
        first.keys() == second.keys()
        and all(
            torch.equal(torch.as_tensor(v), torch.as_tensor(second[k]))
            for k, v in first.items()
        )
        for first, second in zip(*states, strict=True)
    )


@pytest.mark.parametrize("kind", ["FULL", "SHARDED", "LOCAL"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_round_trip(world_size: int, use_orig_params: bool, kind: str) -> None:
    """Each rank gets its own back."""
    model, optim = _trained(use_orig_params)
    FSDP.set_state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"])
    saved = FSDP.optim_state_dict(model, optim)
    fresh = _Rms(model.parameters())
    if use_orig_params:  # a rank without a part of a parameter steps nothing
        model(torch.ones(2, 8)).sum().backward()
        fresh.step()
    fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, saved))
    if kind != "LOCAL":
        everyone = objects_of_all_ranks(saved["rank_states"])
        assert everyone[0] == everyone[1]
        values = saved["rank_states"]["0.weight"]["RMS"]
        assert len(values) == world_size
        assert values[0] != values[1]
        assert saved["state"]["0.weight"]["RMS"] == values[0]
        assert "step" not in saved["rank_states"]["0.weight"]
    held = optim.state[next(iter(optim.state))]
    assert held["RMS"] == fresh.state[next(iter(optim.state))]["RMS"]
    assert _same(optim, fresh)


@distributed(world_size=2)
def test_through_checkpoint(world_size: int) -> None:
    """torch.distributed.checkpoint keeps all ranks' values."""
    model, optim = _trained(use_orig_params=False)
    sharded = FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    with sharded, shared_folder() as folder:
        saved = FSDP.optim_state_dict(model, optim)
        dcp.save({"optim": saved}, checkpoint_id=folder)
        target = {"optim": FSDP.optim_state_dict(model, optim)}
        values = target["optim"]["rank_states"]["0.weight"]["RMS"]
        expected = list(values)
        values[:] = [0.0] * world_size
        dcp.load(target, checkpoint_id=folder)
        assert target["optim"]["rank_states"]["0.weight"]["RMS"] == expected


@distributed(world_size=3)
def test_through_checkpoint_on_more_ranks() -> None:
    """Saved on two ranks, loaded on three: all get the first rank's values."""
    values: list[Any] = [None]
    with shared_folder() as folder:
        with first_ranks(2) as group:
            if group is not None:
                few, optim = _trained(use_orig_params=False, group=group)
                with FSDP.state_dict_type(few, StateDictType.SHARDED_STATE_DICT):
                    saved = FSDP.optim_state_dict(few, optim)
                assert len(saved["rank_states"]["0.weight"]["rms_tensor"]) == 2
                values = [saved["state"]["0.weight"]["rms_tensor"]]
                dcp.save({"optim": saved}, checkpoint_id=folder, process_group=group)
                del few, optim, saved
        dist.broadcast_object_list(values)
        model, optim = _trained(use_orig_params=False)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            target = {"optim": FSDP.optim_state_dict(model, optim)}
            dcp.load(target, checkpoint_id=folder)
            with pytest.warns(UserWarning, match=r"'rms_tensor' of parameter '0\.wei"):
                loaded = FSDP.optim_state_dict_to_load(model, optim, target["optim"])
    optim.load_state_dict(loaded)
    (state,) = optim.state.values()
    assert torch.equal(state["rms_tensor"].cpu(), values[0].cpu())
    assert state["rms_tensor"].dtype == torch.float32


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_through_torchs_functions(use_orig_params: bool, full: bool) -> None:
    """They pass on one value of a parameter, the first rank's, as FSDP1 does."""
    model, optim = _trained(use_orig_params)
    values = objects_of_all_ranks([s["RMS"] for s in optim.state.values()])
    assert values[0][-1] != values[1][-1]
    options = StateDictOptions(full_state_dict=full)
    saved = get_optimizer_state_dict(model, optim, options=options)
    if not use_orig_params:
        assert {s["RMS"] for s in saved["state"].values()} == {values[0][0]}
    set_optimizer_state_dict(model, optim, saved, options=options)
    loaded = next(iter(optim.state.values()))["RMS"]
    assert loaded == saved["state"]["0.weight"]["RMS"] == values[0][0]


@distributed(world_size=3)
def test_another_number_of_ranks() -> None:
    """All get the first rank's value, and a warning."""
    model, optim = _trained(use_orig_params=False)
    saved = FSDP.optim_state_dict(model, optim)
    with first_ranks(2) as group:
        if group is None:
            return
        model, optim = _trained(use_orig_params=False, group=group)
        with pytest.warns(UserWarning, match=r"'RMS' of parameter '0\.weight' dif"):
            loaded = FSDP.optim_state_dict_to_load(model, optim, saved)
        optim.load_state_dict(loaded)
        (state,) = optim.state.values()
        assert state["RMS"] == saved["rank_states"]["0.weight"]["RMS"][0]
        del model, optim, state


@distributed(world_size=2)
def test_equal_states_have_no_entry() -> None:
    """As before, where nothing differs."""
    torch.manual_seed(0)
    model = fsdp(nn.Linear(8, 8), use_orig_params=True)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optim.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sorted(FSDP.optim_state_dict(model, optim)) == ["param_groups", "state"]
