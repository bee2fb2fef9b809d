"""Forms of values in state dicts, beside torch's FSDP1: what is alike, what is not."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from helpers.distributed import distributed
from helpers.impl import fsdp
from helpers.models import CASES
from helpers.reference import assert_same_tensors
from helpers.state_dicts import FULL, LOCAL, SHARDED

CPU = torch.device("cpu")


def wrap(impl: str, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    module = CASES["mlp"].build()
    kwargs["auto_wrap_policy"] = ModuleWrapPolicy(CASES["mlp"].unit_classes)
    if impl == "torch":
        return TorchFSDP(module, device_id=CPU, **kwargs)
    return fsdp(module, **kwargs)


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
        model = wrap(impl, use_orig_params=use_orig_params)
        given = {name: Lazy(value) for name, value in expected.items()}
        model.load_state_dict(given)
        assert_same_tensors(impl, dict(model.state_dict()), expected, 0.0)
        if impl == "fsdp_c":
            assert {each.num_reads for each in given.values()} == {1}
    with pytest.raises(RuntimeError, match=r"inp\.weight.*expected torch\.Tensor"):
        wrap("fsdp_c").load_state_dict({**expected, "inp.weight": 1})


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu")
def test_keep_vars(use_orig_params: bool) -> None:
    """FSDP1 gives detached copies whatever keep_vars is; here requires_grad stays."""
    for kind in (FULL, SHARDED):
        for keeps in (False, True):
            states = {}
            for impl in ("fsdp_c", "torch"):
                model = wrap(impl, use_orig_params=use_orig_params)
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
def test_local_has_no_original_keys() -> None:
    """FSDP1 adds each rank's own slices, with use_orig_params, under one key each.

    torch.distributed.checkpoint takes such plain tensors for equal on all ranks and
    writes those of one; loading does not need them.
    """
    keys = {}
    for impl in ("fsdp_c", "torch"):
        for use_orig_params in (True, False):
            model = wrap(impl, use_orig_params=use_orig_params)
            with TorchFSDP.state_dict_type(model, LOCAL):
                keys[impl, use_orig_params] = set(model.state_dict())
    assert keys["fsdp_c", True] == keys["fsdp_c", False] == keys["torch", False]
    names = set(CASES["mlp"].build().state_dict())
    assert keys["torch", True] == keys["torch", False] | names
