"""Without reshards after forward, a forward uses what an earlier one gathered.

As with torch's classes, several forwards before a backward gather once. So does, under
fully_shard with reshard_after_forward=False, an evaluation or a model that generates.
What is written in between counts.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import memory_stats
from fsdp_c.checkpoint import load, save
from helpers.distributed import distributed, varied
from helpers.impl import assert_idle
from helpers.models import MLP, Block
from helpers.reference import Differential
from helpers.rows import APIS, in_either_api
from helpers.shared_folder import shared_folder
from helpers.transports import OWN, over

NUM_UNITS = 4


def _make(api: str = "fully_shard", **options: Any) -> Differential:
    return in_either_api(api, MLP, {Block}, **{"strategy": "SHARD_GRAD_OP", **options})


def _fused(params: Any) -> torch.optim.Optimizer:
    """Torch counts none of its writes."""
    return torch.optim.AdamW(params, lr=0.1, fused=True)


def _num_gathers(both: Differential, act: Callable[[], object]) -> int:
    before = memory_stats(both.model)["num_all_gathers"]
    act()
    return memory_stats(both.model)["num_all_gathers"] - before


@pytest.mark.parametrize("transport", [OWN, "c10d"])
@distributed(world_size=2)
def test_one_gather(transport: str) -> None:
    """Of each module, until a forward that trains, which sees other weights."""
    with over(transport):
        both = _make()
        for _ in range(2):
            assert _num_gathers(both, both.evaluate) == NUM_UNITS
            assert all(isinstance(param, DTensor) for param in both.model.parameters())
            assert _num_gathers(both, both.evaluate) == 0
            assert _num_gathers(both, both.forward_backward) == NUM_UNITS
            both.checked_step()
            assert_idle(both.model)
        del both


@distributed(world_size=2)
def test_modes() -> None:
    """Forwards in inference mode and under no_grad() use each other's parameters."""
    both = _make()

    def infer() -> None:
        with torch.inference_mode():
            both.forward()

    assert _num_gathers(both, infer) == NUM_UNITS
    assert _num_gathers(both, both.evaluate) == 0
    assert _num_gathers(both, infer) == 0
    both.train(2, inside=infer)


@distributed(world_size=2)
def test_set_for_an_evaluation() -> None:
    """As torch uses set_reshard_after_forward(): off for an evaluation, on after."""
    both = _make(strategy="FULL_SHARD")
    for _ in range(2):
        both.model.set_reshard_after_forward(False)
        assert _num_gathers(both, both.evaluate) == NUM_UNITS
        assert _num_gathers(both, both.evaluate) == 0
        both.model.set_reshard_after_forward(True)
        both.train(1)
    both.model.set_reshard_after_forward(False)
    both.evaluate()
    for module in (both.model, *both.model.blocks):
        module.reshard()
    assert_idle(both.model)


class Tied(MLP):
    """Its output layer is the weight of a module that has run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks[0](x)
        return hidden @ self.blocks[0].fc1.weight.T


@distributed(world_size=2)
def test_weight_of_a_module_that_has_run() -> None:
    """It is whole until the outermost forward ends, as in training."""
    both = in_either_api("fully_shard", Tied, {Block}, strategy="SHARD_GRAD_OP")
    for _ in range(2):
        both.evaluate()
        both.forward_backward()
        both.zero_grad()


@pytest.mark.parametrize(
    ("api", "strategy"), [("FSDP", "SHARD_GRAD_OP"), ("fully_shard", None)]
)
@distributed(world_size=2)
def test_not_kept_unasked(api: str, strategy: str | None) -> None:
    """Nor by the outermost module, so writes that torch does not count are seen."""
    both = _make(api, strategy=strategy)
    for _ in range(2):
        assert _num_gathers(both, both.evaluate) == NUM_UNITS
        assert_idle(both.model)
        _write_data(both)


@varied(api=APIS, transport=[OWN, "c10d"])
@distributed(world_size=2)
def test_forwards_of_one_backward(api: str, transport: str) -> None:
    """Also one without gradients between them, and after the step of an optimizer."""
    with over(transport):
        both = _make(api)
        for _ in range(2):
            both.zero_grad()
            act = functools.partial(both.forward_backward, 2, inside=both.evaluate)
            assert _num_gathers(both, act) == NUM_UNITS
            both.checked_step()
            assert_idle(both.model)
        del both


@varied(api=APIS)
@distributed(world_size=2)
def test_dropped_forwards(api: str) -> None:
    """A graph that no backward comes for keeps no old weights in place."""
    both = _make(api, optimizer=_fused)
    both.zero_grad()
    both.forward_backward()
    for write in (both.step, lambda: _load(both)):
        both.forward()
        write()
        both.forward()
        assert _num_gathers(both, both.forward) == 0
    both.zero_grad()
    both.forward_backward()
    both.checked_step()


def _models(both: Differential) -> list[list[nn.Parameter]]:
    return [list(both.model.parameters()), list(both.reference.parameters())]


def _write_data(both: Differential) -> None:
    for params in _models(both):
        for param in params:
            param.data.mul_(1.25)


def _scale_reference(both: Differential, factor: float) -> None:
    for param in both.reference.parameters():
        param.mul_(factor)


def _in_place(both: Differential) -> None:
    both.scale_params(1.5)


@torch.inference_mode()
def _in_inference_mode(both: Differential) -> None:
    both.scale_params(1.5)


@torch.no_grad()
def _local(both: Differential) -> None:
    for param in both.model.parameters():
        param.to_local().mul_(1.5)
    _scale_reference(both, 1.5)


@torch.no_grad()
def _one_parameter(both: Differential) -> None:
    for model in (both.model, both.reference):
        model.out.bias.fill_(0.5)


@torch.no_grad()
def _load(both: Differential) -> None:
    state = both.model.state_dict()
    both.model.load_state_dict({name: value * 1.5 for name, value in state.items()})
    _scale_reference(both, 1.5)


@torch.no_grad()
def _load_checkpoint(both: Differential) -> None:
    with shared_folder() as folder:
        save(folder / "checkpoint", both.model)
        both.scale_params(2)
        both.evaluate()
        load(folder / "checkpoint", both.model)
        _scale_reference(both, 0.5)


@distributed(world_size=2)
def test_writes_between_forwards() -> None:
    """What the shards got is in the next forward, and all ranks gather for it."""
    both = _make()
    for write in (
        _in_place,
        _in_inference_mode,
        _local,
        _one_parameter,
        _load,
        _load_checkpoint,
    ):
        both.evaluate()
        write(both)
        both.evaluate()
        assert _num_gathers(both, both.evaluate) == 0, write
    both.train(2)


@distributed(world_size=2)
def test_ranks_that_write_different_units() -> None:
    """They gather all, and not each what it wrote."""
    both = _make()
    both.evaluate()
    with torch.no_grad():
        for param in both.model.blocks[both.rank].parameters():
            param.to_local().mul_(1)
    assert _num_gathers(both, both.evaluate) == NUM_UNITS


def _copy(both: Differential) -> None:
    copy.deepcopy(both.model)


def _state_dict(both: Differential) -> None:
    with FSDP.state_dict_type(both.model, StateDictType.LOCAL_STATE_DICT):
        both.model.state_dict()


@varied(api=APIS[:2], read=[_copy, _state_dict])
@distributed(world_size=2)
def test_one_rank_reads(api: str, read: Callable[[Differential], None]) -> None:
    """Between two forwards of one backward: it gathers what the others do."""
    both = _make(api)

    def read_on_first_rank() -> None:
        if both.rank == 0:
            read(both)

    both.zero_grad()
    both.forward()
    read_on_first_rank()
    both.forward_backward(2, inside=read_on_first_rank)
    both.checked_step()


@torch.no_grad()
def _average(both: Differential) -> None:
    """By operators whose writes torch does not count in a DTensor."""
    for params in _models(both):
        torch._foreach_mul_(params, 0.75)


@distributed(world_size=2)
def test_averages_after_steps() -> None:
    """A teacher's weights change after each step of the student's optimizer."""
    teacher = _make()
    student = _make("FSDP")
    for _ in range(3):
        teacher.evaluate()
        student.zero_grad()
        student.forward_backward()
        student.step()
        _average(teacher)


@distributed(world_size=2)
def test_steps_between_forwards() -> None:
    """Those of an optimizer whose writes torch does not count, too."""
    both = _make(optimizer=_fused)
    for _ in range(2):
        both.zero_grad()
        both.forward_backward()
        both.evaluate()
        both.step()
        both.evaluate()
        both.check()


@distributed(world_size=2)
def test_steps_after_requests() -> None:
    """What unshard() gathered before a step is from before it."""
    both = _make(strategy="FULL_SHARD", optimizer=_fused)
    both.forward_backward()
    for module in (both.model, *both.model.blocks):
        module.unshard()
    both.step()
    both.evaluate()
    both.forward_backward()
    both.checked_step()


@distributed(world_size=2)
def test_training_after_uncounted_writes() -> None:
    """As of averaged weights that are put back by ``param.data.copy_()``."""
    both = _make()
    for _ in range(2):
        both.evaluate()
        _write_data(both)
        both.train(1)
