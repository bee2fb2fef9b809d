"""Forms of values in state dicts, beside torch's FSDP1: what is alike, what is not."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from helpers.distributed import distributed
from helpers.impl import FSDP, ShardingStrategy, wrap_case
from helpers.models import CASES, loss_of
from helpers.reference import assert_same_tensors
from helpers.seeds import generator
from helpers.state_dicts import FULL, LOCAL, SHARDED


class Lazy:
    """A tensor that is read when it is used, as Lightning's, and no torch.Tensor."""

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self.shape, self.dtype = value.shape, value.dtype
        self.num_reads = 0

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def read(each: Any) -> Any:
            if isinstance(each, Lazy):
                each.num_reads += 1
                return each._value
            return each

        values = {key: read(each) for key, each in (kwargs or {}).items()}
        return func(*map(read, args), **values)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu")
def test_tensor_likes_load(use_orig_params: bool) -> None:
    """As in nn.Module and FSDP1; each is read once."""
    torch.manual_seed(1)
    expected = CASES["mlp"].build().state_dict()
    for impl in ("fsdp_c", "torch"):
        model = wrap_case(impl, "mlp", use_orig_params=use_orig_params)
        given = {name: Lazy(value) for name, value in expected.items()}
        model.load_state_dict(given)
        assert_same_tensors(impl, dict(model.state_dict()), expected, 0.0)
        if impl == "fsdp_c":
            assert {each.num_reads for each in given.values()} == {1}
    with pytest.raises(RuntimeError, match=r"inp\.weight.*expected torch\.Tensor"):
        wrap_case("fsdp_c", "mlp").load_state_dict({**expected, "inp.weight": 1})


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu")
def test_keep_vars(use_orig_params: bool) -> None:
    """FSDP1 gives detached copies whatever keep_vars is; here requires_grad stays."""
    for kind in (FULL, SHARDED):
        for keeps in (False, True):
            states = {}
            for impl in ("fsdp_c", "torch"):
                model = wrap_case(impl, "mlp", use_orig_params=use_orig_params)
                with TorchFSDP.state_dict_type(model, kind):
                    states[impl] = model.state_dict(keep_vars=keeps)
            ours, theirs = states["fsdp_c"], states["torch"]
            assert ours.keys() == theirs.keys()
            for name, value in ours.items():
                assert isinstance(value, ShardedTensor) == (kind is SHARDED), name
                if kind is FULL:
                    assert type(value) is type(theirs[name]) is Tensor, name
                    assert value.requires_grad == keeps, name
                    assert not theirs[name].requires_grad, name
                    assert value.is_leaf


@distributed(world_size=2, device="cpu")
def test_local_slices() -> None:
    """With use_orig_params each rank's own slices are there too, as in FSDP1.

    They share the parameters' memory. torch.distributed.checkpoint would write those of
    one rank for all, and FSDP1's do not load from it.
    """
    names = set(CASES["mlp"].build().state_dict())
    for use_orig_params in (True, False):
        states = {}
        for impl in ("fsdp_c", "torch"):
            model = wrap_case(impl, "mlp", use_orig_params=use_orig_params)
            with TorchFSDP.state_dict_type(model, LOCAL):
                states[impl] = dict(model.state_dict())
        ours, theirs = states["fsdp_c"], states["torch"]
        assert ours.keys() == theirs.keys()
        assert names < ours.keys() if use_orig_params else not names & ours.keys()
        slices = {n: v for n, v in theirs.items() if not isinstance(v, ShardedTensor)}
        assert slices.keys() == (names if use_orig_params else set())
        assert_same_tensors("slices", {n: ours[n] for n in slices}, slices, 0.0)


class _Slices(FSDP):
    """A checkpoint of each rank's slices, as audiocraft's and AQLM's."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = dict(super().state_dict(*args, **kwargs))
        return {n: v for n, v in state.items() if not isinstance(v, ShardedTensor)}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        current = self.state_dict()
        assert current.keys() == state.keys()
        for name, value in state.items():
            current[name].copy_(value)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("by_method", [True, False])
@distributed(world_size=2)
def test_checkpoint_of_slices(rank: int, strategy: str, by_method: bool) -> None:
    """Each rank saves its own, and copies them into the live ones."""
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = _Slices(
            CASES["mlp"].build(),
            auto_wrap_policy=ModuleWrapPolicy(CASES["mlp"].unit_classes),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=True,
        )
        FSDP.set_state_dict_type(model, LOCAL)
        models.append(model)
    first, second = models
    step(rank, first, 0)
    step(rank, second, 1)
    state = copy.deepcopy(first.state_dict())
    step(rank, second, 2)
    if by_method:
        second.load_state_dict(state)
    else:
        result = FSDP.load_state_dict(second, state)
        assert not result.missing_keys
        assert not result.unexpected_keys
    for model in models:
        step(rank, model, 3)
    for expected, actual in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(actual, expected)


def step(rank: int, model: Any, seed: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (batch,) = CASES["mlp"].inputs(generator(10 * seed + rank))
    loss_of(model(batch)).backward()
    optimizer.step()
    optimizer.zero_grad()
