"""Programs that read the metadata of flat parameters, compared with torch's FSDP1."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp._flat_param import FlatParameter as TorchFlatParameter

import fsdp_c
from helpers.distributed import distributed
from helpers.impl import FSDP, ShardingStrategy, fsdp, wrap_case
from helpers.models import CASES, loss_of
from helpers.reference import assert_same, assert_same_tensors, objects_of_all_ranks
from helpers.seeds import generator

PLAIN = (
    "_fqns",
    "_shapes",
    "_strides",
    "_contiguities",
    "_numels",
    "_num_params",
    "_sharded_size",
    "_shard_numel_padded",
)
# Between parameters FSDP1 aligns with use_orig_params, and so does fsdp_c.
OF_LAYOUT = (
    "_numels_with_padding",
    "_is_padding_mask",
    "_unpadded_unsharded_size",
    "_shard_param_infos",
)


def step(model: nn.Module, name: str, optim: torch.optim.Optimizer) -> None:
    batch = CASES[name].inputs(generator(dist.get_rank()))
    loss_of(model(*batch)).backward()
    optim.step()
    optim.zero_grad()


@pytest.mark.cpu_only("on accelerators shards are aligned as FSDP1's are not")
@pytest.mark.parametrize("name", ["uneven", "transformer", "tied"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=3, device="cpu")
def test_values_are_torchs(name: str, use_orig_params: bool) -> None:
    strategies = [ShardingStrategy.FULL_SHARD]
    if not use_orig_params:  # then FSDP1 pads to the world size what nobody shards
        strategies.append(ShardingStrategy.NO_SHARD)
    for strategy in strategies:
        kwargs = {"use_orig_params": use_orig_params, "sharding_strategy": strategy}
        models = [wrap_case(impl, name, **kwargs) for impl in ("fsdp_c", "torch")]
        for model in models:  # torch sets some of them at the first step
            step(model, name, torch.optim.SGD(model.parameters(), lr=0.1))
        units = [TorchFSDP.fsdp_modules(model) for model in models]
        for ours, theirs in zip(*units, strict=True):
            if theirs._handle is None:
                assert ours._handle is None
                continue
            mine, torchs = ours._handle.flat_param, theirs._handle.flat_param
            assert isinstance(mine, TorchFlatParameter)
            assert mine._fsdp_flattened
            for attribute in (*PLAIN, *OF_LAYOUT):
                expected = getattr(torchs, attribute)
                if isinstance(expected, list):  # FSDP1's annotations say tuple
                    expected = tuple(expected)
                assert getattr(mine, attribute) == expected, attribute
            if strategy is ShardingStrategy.FULL_SHARD:
                assert mine._padded_unsharded_size == torchs._padded_unsharded_size
            for attribute in ("_param_infos", "_shared_param_infos"):
                found, expected = getattr(mine, attribute), getattr(torchs, attribute)
                assert [type(each) for each in found] == [
                    type(each) for each in expected
                ]
                assert [_names(each) for each in found] == [
                    _names(each) for each in expected
                ]
            assert {type(each) for each in mine._modules} == {
                type(each) for each in torchs._modules
            }
            for fqn, info in zip(mine._fqns, mine._shard_param_infos, strict=True):
                if info.in_shard:  # FSDP1 fills padding with 42
                    part = slice(
                        info.offset_in_shard, info.offset_in_shard + info.numel_in_shard
                    )
                    assert_same(fqn, mine._local_shard[part], torchs._local_shard[part])
            assert ours._handle.shard_metadata() == theirs._handle.shard_metadata()
            assert (
                ours._handle.uses_sharded_strategy
                == theirs._handle.uses_sharded_strategy
            )


def _names(info: Any) -> list[Any]:
    return [
        each.replace("_fsdp_wrapped_module.", "")
        if isinstance(each, str)
        else type(each)
        for each in info
    ]


@pytest.mark.parametrize("name", ["uneven", "frozen_units", "mixed_dtype"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=3)
def test_checkpointer_that_walks_metadata(
    world_size: int, name: str, use_orig_params: bool
) -> None:
    """Each rank saves its flat shards and their metadata; a reader joins them.

    As checkpointers do that write shards without communication: all that the reader
    knows of a parameter is what the flat parameter says.
    """
    model = wrap_case("fsdp_c", name, use_orig_params=use_orig_params)
    files: list[Any] = []
    prefixes = {id(unit): prefix for prefix, unit in model.named_modules()}
    for unit in FSDP.fsdp_modules(model):
        prefix = prefixes[id(unit)].replace("_fsdp_wrapped_module.", "")
        prefix = prefix.removesuffix("_fsdp_wrapped_module")
        prefix = f"{prefix}." if prefix and not prefix.endswith(".") else prefix
        for flat_param in unit.params:
            rows = zip(
                flat_param._fqns,
                flat_param._shapes,
                flat_param._shard_param_infos,
                strict=True,
            )
            shard = flat_param._local_shard.clone()
            files.append((shard, [(prefix + fqn, *rest) for fqn, *rest in rows]))
    of_all = objects_of_all_ranks(files)
    found: dict[str, Tensor] = {}
    for shard, rows in (each for files in of_all for each in files):
        for fqn, shape, info in rows:
            whole = found.setdefault(fqn, torch.full(shape, torch.nan).to(shard.dtype))
            if info.in_shard:
                first, numel = info.offset_in_shard, info.numel_in_shard
                begin, last = info.intra_param_start_idx, info.intra_param_end_idx
                assert last - begin + 1 == numel
                whole.view(-1)[begin : last + 1] = shard[first : first + numel]
    torch.manual_seed(0)
    expected = dict(CASES[name].build().named_parameters())
    assert_same_tensors("parameters", found, expected, 0.0)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_average_of_weights(use_orig_params: bool) -> None:
    """An average by hand, which looks at the handle before it swaps its values in."""
    model = wrap_case("fsdp_c", "mlp", use_orig_params=use_orig_params)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    shards: dict[str, Tensor] = {}
    units = dict(enumerate(FSDP.fsdp_modules(model)))
    for index, unit in units.items():
        shards[str(index)] = unit._handle.flat_param._local_shard.clone()
    for _ in range(3):
        step(model, "mlp", optim)
        with torch.no_grad():
            for name, value in model.state_dict().items():
                average[name].lerp_(value, 0.5)
            for index, unit in units.items():
                shard = unit._handle.flat_param._local_shard
                shards[str(index)].lerp_(shard, 0.5)
    for index, unit in units.items():
        handle = unit._handle
        assert handle.needs_unshard()
        assert handle.is_sharded(handle.flat_param)
        whole = handle._get_padded_unsharded_flat_param()
        assert whole.shape == handle.flat_param._padded_unsharded_size
        assert whole.untyped_storage().size() == 0  # nothing to purge
        handle.reshard(True)
        handle.flat_param._local_shard.copy_(shards[str(index)])
    assert_same_tensors("average", dict(model.state_dict()), average)
    with FSDP.summon_full_params(model):
        for method in ("reshard", "_get_padded_unsharded_flat_param"):
            with pytest.raises(RuntimeError, match=f"{method}.*'MLP' in state"):
                getattr(model._handle, method)()
    with pytest.raises(NotImplementedError, match="summon_full_params"):
        model._handle.unshard()
    with pytest.raises(AttributeError):
        model._handle.flat_param._numels_with_padding = ()


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_sharded_grad(world_size: int, use_orig_params: bool) -> None:
    """All ranks' parts are the gradient; an optimizer in backward leaves none."""
    model = fsdp(nn.Linear(6, 3), use_orig_params=use_orig_params)
    handle = model._handle
    assert handle.sharded_grad is None
    model(torch.ones(2, 6)).sum().backward()
    shard = handle.sharded_grad
    assert shard.shape == handle.flat_param._sharded_size
    shards = [torch.empty_like(shard) for _ in range(world_size)]
    dist.all_gather(shards, shard)
    whole = torch.cat(shards)
    for _, offset, numel in model._sharded.unit.slots:
        assert torch.equal(whole[offset : offset + numel], torch.full((numel,), 2.0))
    model.zero_grad()
    fsdp_c.optimizer_in_backward(model, lambda params: torch.optim.SGD(params, lr=0.1))
    model(torch.ones(2, 6)).sum().backward()
    assert handle.sharded_grad is None
