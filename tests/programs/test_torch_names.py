"""Programs that use torch's own names, private ones too, on a model of fsdp_c."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecisionPolicy,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import _common_utils as torch_common
from torch.distributed.fsdp import _traversal_utils as torch_traversal
from torch.distributed.fsdp._fully_shard import _fsdp_state as torch_state
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp_c
import fsdp_c.integrations
from helpers.distributed import distributed
from helpers.impl import FSDP, StateDictType, fsdp
from helpers.models import CASES, MLP, Block, loss_of
from helpers.reference import assert_same_tensors
from helpers.seeds import generator

CPU = torch.device("cpu")
# On the CPU torch's FSDP1 shares memory between states that it offloads.
FULL = (FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False))


def _model(**kwargs: Any) -> Any:
    torch.manual_seed(0)
    return fsdp(MLP(), units={Block}, **kwargs)


def _trained(model: nn.Module) -> torch.optim.Optimizer:
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    (batch,) = CASES["mlp"].inputs(generator(dist.get_rank()))
    loss_of(model(batch)).backward()
    optim.step()
    optim.zero_grad()
    return optim


@distributed(world_size=2, device="cpu")
def test_isinstance_and_traversal() -> None:
    model = _model(use_orig_params=True)
    block = model.module.blocks[0]
    assert isinstance(model, TorchFSDP)
    assert isinstance(block, TorchFSDP)
    assert issubclass(FSDP, TorchFSDP)
    assert not isinstance(block.module, TorchFSDP)
    units = [model, *model.module.blocks]
    assert TorchFSDP.fsdp_modules(model) == units
    assert TorchFSDP.fsdp_modules(model, root_only=True) == [model]
    assert torch_traversal._get_fsdp_states(model) == units
    assert [each.flat_param._fqns for each in torch_traversal._get_fsdp_handles(model)]
    assert torch_common._get_module_fsdp_state(block) is block
    assert torch_common._get_module_fsdp_state_if_fully_sharded_module(block) is block
    assert torch_common._get_module_fsdp_state(block.module) is None
    # A model that nobody wrapped is torch's business, as before.
    plain = MLP()
    assert TorchFSDP.fsdp_modules(plain) == []
    with pytest.raises(AttributeError):
        TorchFSDP.optim_state_dict(plain, None)  # torch's own error


@distributed(world_size=2, device="cpu")
def test_state_of_fully_shard() -> None:
    """What programs read of FSDP2's: whether there is one, and the precision."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = MLP()
    with fsdp_c.integrations.installed():
        fully_shard = torch_fsdp.fully_shard
        get_state = torch_state._get_module_fsdp_state
        fully_shard(model.blocks[0], mp_policy=policy)
        for module in model.blocks:
            if get_state(module) is None:
                fully_shard(module)
        assert get_state(model) is None
        first = get_state(model.blocks[0])
    assert first is model.blocks[0]._get_fsdp_state()
    assert first is fully_shard.state(model.blocks[0])
    assert first._mp_policy.param_dtype == torch.bfloat16
    assert all(isinstance(each, torch_fsdp.FSDPModule) for each in model.blocks)
    assert fully_shard.state(model) is None


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu")
def test_static_methods(use_orig_params: bool) -> None:
    """Each of them, through torch's name, does what it does through ours."""
    model = _model(use_orig_params=use_orig_params)
    optim = _trained(model)
    before = TorchFSDP.get_state_dict_type(model)
    assert before.state_dict_type is StateDictType.FULL_STATE_DICT
    with TorchFSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        now = FSDP.get_state_dict_type(model)
        assert now.state_dict_type is StateDictType.SHARDED_STATE_DICT
        sharded = TorchFSDP.optim_state_dict(model, optim)
        flat = TorchFSDP.optim_state_dict_to_load(
            model=model, optim=optim, optim_state_dict=sharded
        )
    TorchFSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
    full = TorchFSDP.optim_state_dict(model, optim)
    optim.load_state_dict(flat)
    again = FSDP.optim_state_dict(model, optim)
    for name, state in full["state"].items():
        assert_same_tensors(name, again["state"][name], state, 0.0)
    with TorchFSDP.summon_full_params(model):
        assert model.module.inp.weight.shape == (6, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old = TorchFSDP.full_optim_state_dict(model, optim, rank0_only=False)
        for loaded in (
            TorchFSDP.shard_full_optim_state_dict(old, model, optim=optim),
            TorchFSDP.scatter_full_optim_state_dict(old, model, optim=optim),
            TorchFSDP.flatten_sharded_optim_state_dict(
                TorchFSDP.sharded_optim_state_dict(model, optim), model, optim
            ),
        ):
            mine = optim.state_dict()["state"]
            for key, state in loaded["state"].items():
                assert_same_tensors(str(key), state, mine[key], 0.0)
    for name, state in full["state"].items():
        assert_same_tensors(name, old["state"][name], state, 0.0)


@distributed(world_size=2, device="cpu")
def test_methods_of_instances(rank: int) -> None:
    model = _model(use_orig_params=True)
    (batch,) = CASES["mlp"].inputs(generator(rank))
    with TorchFSDP.no_sync(model):
        loss_of(model(batch)).backward()
    loss_of(model(batch)).backward()
    norm = TorchFSDP.clip_grad_norm_(model, 1e9)
    assert torch.equal(norm, model.clip_grad_norm_(1e9))
    assert TorchFSDP.check_is_root(model)
    seen = []
    TorchFSDP.apply(model, lambda module: seen.append(type(module)))
    assert FSDP in seen
    model._reset_lazy_init()
    assert model._is_root is None
    assert model.module.blocks[0].check_is_root()


@distributed(world_size=2, device="cpu")
def test_mixed_trees_are_refused() -> None:
    ours, theirs = _model(use_orig_params=True), TorchFSDP(MLP(), device_id=CPU)
    with pytest.raises(ValueError, match=r"holds modules of torch's.*unit 'MLP'"):
        TorchFSDP(nn.Sequential(ours), device_id=CPU)
    with pytest.raises(ValueError, match="holds modules of torch's"):
        FSDP(nn.Sequential(theirs))
    both = nn.ModuleList([ours, theirs])
    with pytest.raises(ValueError, match=r"fsdp_modules.*wrap the whole model"):
        TorchFSDP.fsdp_modules(both)
    with pytest.raises(ValueError, match=r"summon_full_params.*with one of them"):
        TorchFSDP.summon_full_params(both)


@distributed(world_size=2, device="cpu")
def test_torchs_own_models_are_left_to_torch() -> None:
    """Torch's class trains and saves as usual, beside a model of fsdp_c."""
    ours = _model(use_orig_params=True)
    torch.manual_seed(0)
    theirs = TorchFSDP(
        MLP(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=CPU,
        use_orig_params=True,
    )
    assert not isinstance(theirs, FSDP)
    assert len(TorchFSDP.fsdp_modules(theirs)) == len(TorchFSDP.fsdp_modules(ours))
    states = []
    for model in (ours, theirs):
        optim = _trained(model)
        with TorchFSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *FULL):
            states.append(
                (model.state_dict(), TorchFSDP.optim_state_dict(model, optim))
            )
    (our_params, our_optim), (their_params, their_optim) = states
    assert_same_tensors("parameters", our_params, their_params)
    assert our_optim["state"].keys() == their_optim["state"].keys()
    for name, state in their_optim["state"].items():
        assert_same_tensors(name, our_optim["state"][name], state)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu")
def test_activation_checkpointing_of_units(use_orig_params: bool) -> None:
    """A check_fn that asks for torch's class finds our units, and wraps them."""
    model = _model(use_orig_params=use_orig_params)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    apply_activation_checkpointing(
        model,
        check_fn=lambda module: isinstance(module, TorchFSDP) and module is not model,
    )
    assert_same_tensors("names", dict(model.state_dict()), expected, 0.0)
    other = _model(use_orig_params=use_orig_params)
    for each in (model, other):
        _trained(each)
    assert_same_tensors("trained", dict(model.state_dict()), dict(other.state_dict()))
