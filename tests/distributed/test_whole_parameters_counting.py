"""What optimizers of whole parameters keep beside the state of parameters."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fsdp_c import checkpoint, whole_parameter_optimizer
from helpers.distributed import distributed
from helpers.impl import FSDP
from helpers.matrix_optimizers import TensorNorm, muon
from helpers.whole_runs import Run, assert_states, copy_values, is_hidden, plain_states


class Counting(Optimizer):
    """SGD whose rate falls with the steps that it has counted in several places."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.num_steps = 0
        self.counts: dict[str, Any] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        self.counts["calls"] = self.counts.get("calls", 0) + 1
        self.state.setdefault("k", torch.zeros(1, dtype=torch.long)).add_(1)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group.setdefault("total", torch.zeros(())).add_(1)
            for param in group["params"]:
                if param.grad is None:
                    continue
                counts = [self.num_steps, self.counts["calls"], group["step"]]
                counts += [int(self.state["k"]), int(group["total"])]
                for count in counts:
                    param.sub_(param.grad / count, alpha=group["lr"])


def optimizer_of(params: Any) -> Optimizer:
    """Counting inside another one, as in Lookahead."""
    inner = Counting(params)
    outer = TensorNorm(inner.param_groups)
    outer.param_groups = inner.param_groups
    outer.inner = inner  # type: ignore[attr-defined]
    outer.state = inner.state
    outer.step = inner.step  # type: ignore[method-assign]
    return outer


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=(2, 3))
def test_a_step_of_many_rounds_counts_once(
    monkeypatch: pytest.MonkeyPatch, api: str, wrapped: bool
) -> None:
    """In groups, attributes and state by name, from the first step on."""
    monkeypatch.setattr("fsdp_c._whole.optimizer.ROUND_NBYTES", 64)
    run = Run(api, optimizer_of if wrapped else Counting)
    assert run.optimizer._dealt.num_rounds > 2
    run.train(3)
    group = run.optimizer.param_groups[0]
    assert (group["step"], int(group["total"])) == (3, 3)
    inner = run.optimizer.optimizer
    inner = inner.inner if wrapped else inner
    assert (inner.num_steps, inner.counts) == (3, {"calls": 3})


class Last(Optimizer):
    """Has a number in its groups that tells of the last gradients that it has seen."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"largest": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            group["largest"] = max((float(g.abs().max()) for g in grads), default=None)


@distributed(world_size=2)
def test_a_group_has_the_values_of_a_round_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not of a round that had parameters of other groups alone."""
    monkeypatch.setattr("fsdp_c._whole.optimizer.ROUND_NBYTES", 64)
    run = Run("fully_shard", Last)
    run.optimizer = whole_parameter_optimizer(
        run.model, Last, [{"params": is_hidden}, {"params": ["head.weight"]}]
    )
    run.step(0)
    values = [group["largest"] for group in run.optimizer.param_groups]
    owner = run.optimizer.owners["head.weight"]
    assert values[0] is not None
    assert (values[1] is not None) == (owner == dist.get_rank())


class NamedCount(Optimizer):
    """SGD that counts steps in state of no parameter, as MADGRAD does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        count = self.state.setdefault("k", torch.zeros(1, dtype=torch.long))
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    rate = group["lr"] / (1 + count.item())
                    mean = self.state[param].setdefault("m", torch.zeros_like(param))
                    param.sub_(mean.add_(param.grad), alpha=rate)
        count.add_(1)


@pytest.mark.parametrize("has_rest", [False, True])
@pytest.mark.parametrize("way", ["own", "FSDP", "files"])
@distributed(world_size=2)
def test_state_of_no_parameter_is_saved(
    way: str, has_rest: bool, tmp_path: Path
) -> None:
    """Of either optimizer, in any form; then training goes on as unsharded."""

    def make() -> Run:
        if has_rest:
            return Run("FSDP", muon, is_hidden, rest=NamedCount)
        return Run("FSDP", NamedCount)

    run, other = make(), make()
    run.train(2)
    copy_values(run, other)
    if way == "own":
        other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    elif way == "FSDP":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found a optim state, k")
            saved = FSDP.optim_state_dict(run.model, run.optimizer)
        loaded = FSDP.optim_state_dict_to_load(other.model, other.optimizer, saved)
        other.optimizer.load_state_dict(loaded)
    else:
        checkpoint.save(tmp_path / "saved", run.model, run.optimizer)
        checkpoint.load(tmp_path / "saved", other.model, other.optimizer)
    other.train(2, first=2)


class OwnEntry(NamedCount):
    """Adds an entry to its state dict, as heavyball and StableSPAM do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.num_steps = 0

    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.num_steps = state_dict["num_steps"]


@distributed(world_size=2)
def test_entries_of_state_dicts(tmp_path: Path) -> None:
    """state_dict() has them; what has states and groups alone says so."""
    run, other = (Run("FSDP", OwnEntry) for _ in range(2))
    run.train(2)
    other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    assert other.optimizer.optimizer.num_steps == 2
    plain = OwnEntry(run.model.parameters())
    for save in (
        lambda: FSDP.optim_state_dict(run.model, run.optimizer),
        lambda: FSDP.optim_state_dict(run.model, plain),
        lambda: checkpoint.save(tmp_path / "saved", run.model, run.optimizer),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            save()
        assert any("'num_steps', which is not saved" in str(w.message) for w in caught)


class Nested(Optimizer):
    """Has its state as heavyball has it, and options that are no numbers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "kind": Nested, "dtype": torch.float32})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["kind"] is Nested
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param].setdefault(0, {"begun": set()})
                    if 0 not in state["begun"]:
                        state["m"] = torch.zeros_like(param, dtype=group["dtype"])
                        state["begun"].add(0)
                    state["m"].add_(param.grad)
                    param.sub_(state["m"], alpha=group["lr"])


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=2)
def test_nested_states_in_files(api: str, tmp_path: Path) -> None:
    """Named by numbers, with sets; classes and dtypes are the new optimizer's."""
    run, other = (Run(api, Nested) for _ in range(2))
    run.train(2)
    copy_values(run, other)
    checkpoint.save(tmp_path / "saved", run.model, run.optimizer)
    checkpoint.load(tmp_path / "saved", other.model, other.optimizer)
    other.train(2, first=2)


class Sliced(torch.optim.SGD):
    """Keeps some values of a parameter, as Prodigy does: of small ones, one."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["some"] = param.flatten()[::100].detach().clone()
        super().step(closure)


@distributed(world_size=2)
def test_states_of_one_element_with_a_stride() -> None:
    run = Run("FSDP", Sliced)
    run.train(1)
    saved = FSDP.optim_state_dict(run.model, run.optimizer)["state"]
    assert_states(saved, plain_states(run))


class Wrapping(Optimizer):
    """Keeps state apart from that of the optimizer in it, as Lookahead does."""

    def __init__(self, params: Any) -> None:
        self.inside = torch.optim.AdamW(params)
        super().__init__(self.inside.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.inside.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"inside": self.inside.state_dict()}


@distributed(world_size=2)
def test_an_optimizer_in_another_is_not_saved_in_part(tmp_path: Path) -> None:
    run = Run("FSDP", Wrapping)
    run.step(0)
    run.check()
    with pytest.raises(ValueError, match="Wrapping keeps its state apart from that of"):
        run.optimizer.state_dict()
    plain = Wrapping(run.model.parameters())
    with pytest.raises(ValueError, match=r"\['inside'\] and no 'state'"):
        FSDP.optim_state_dict(run.model, plain)
    with pytest.raises(Exception, match=r"\['inside'\] and no 'state'"):
        checkpoint.save(tmp_path / "saved", run.model, plain)


class Distance(Optimizer):
    """Has a rate that it takes from all gradients of a group, as Prodigy does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "d": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            group["d"] += sum(float(p.grad.norm()) for p in params)
            for param in params:
                param.sub_(param.grad, alpha=group["lr"] * group["d"])


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=(2, 3))
def test_a_number_of_all_parameters_is_warned_of(api: str) -> None:
    """Once; a schedule that all ranks follow is no difference."""
    run = Run(api, Distance)
    run.step(0)
    with pytest.warns(UserWarning, match=r"Distance differ between ranks \(here d="):
        run.step(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.step(2)
        other = Run(api, NamedCount)
        schedule = torch.optim.lr_scheduler.ExponentialLR(other.optimizer, 0.5)
        for number in range(3):
            other.step(number)
            schedule.step()
