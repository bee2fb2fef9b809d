"""State dicts through torch.distributed.checkpoint, and to and from torch's FSDP1."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from helpers.distributed import TEST_DEVICE, distributed
from helpers.groups import first_ranks, hybrid_groups, kept_mesh
from helpers.impl import ShardingStrategy, fsdp
from helpers.models import CASES
from helpers.reference import assert_same_tensors, clean_name, full_state_dict
from helpers.shared_folder import shared_folder
from helpers.state_dicts import (
    LOCAL,
    SHARDED,
    everything,
    load,
    save,
    whole_state,
)


def _wrap(implementation: str, model: str, module: nn.Module, **kwargs: Any) -> Any:
    policy = ModuleWrapPolicy(set(CASES[model].unit_classes))
    if implementation == "fsdp_c":
        return fsdp(module, auto_wrap_policy=policy, **kwargs)
    return torch_fsdp.FullyShardedDataParallel(
        module, auto_wrap_policy=policy, device_id=torch.device(TEST_DEVICE), **kwargs
    )


def _sharded(model: Any) -> Any:
    """Return the SHARDED state dict of either class."""
    with type(model).state_dict_type(model, SHARDED):
        return model.state_dict()


def _load_sharded(model: Any, state: Any) -> None:
    with type(model).state_dict_type(model, SHARDED):
        model.load_state_dict(state)


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        ("fsdp_c", "fsdp_c"),
        ("fsdp_c", "torch"),
        ("torch", "fsdp_c"),
    ],
)
@pytest.mark.parametrize(("num_before", "num_after"), [(4, 2), (3, 4), (1, 3), (2, 2)])
@distributed(world_size=4)
def test_other_world_sizes(
    num_before: int, num_after: int, saver: str, loader: str
) -> None:
    """A checkpoint goes to another number of ranks, wrapping and implementation."""
    for model in ("uneven", "transformer"):
        torch.manual_seed(0)
        reference = CASES[model].build()
        with (
            shared_folder() as folder,
            first_ranks(num_before) as before,
            first_ranks(num_after) as after,
        ):
            if before is not None:
                source = _wrap(
                    saver,
                    model,
                    copy.deepcopy(reference),
                    process_group=before,
                    use_orig_params=True,
                )
                dcp.save(_sharded(source), checkpoint_id=folder, process_group=before)
                del source
            dist.barrier()
            if after is not None:
                torch.manual_seed(1)
                target = _wrap(loader, model, CASES[model].build(), process_group=after)
                state = _sharded(target)
                dcp.load(state, checkpoint_id=folder, process_group=after)
                _load_sharded(target, state)
                now = whole_state(_sharded(target))
                assert_same_tensors("loaded", now, reference.state_dict(), 0.0)
                del target, state


@pytest.mark.parametrize("kind", ["mesh", "groups"])
@distributed(world_size=4)
def test_hybrid_and_meshes(kind: str) -> None:
    """From two replicas to four shards and back; DTensor and ShardedTensor mixed."""
    with hybrid_groups(2, 2) as groups, shared_folder() as folder:
        hybrid: dict[str, Any] = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
        if kind == "mesh":
            hybrid["device_mesh"] = kept_mesh((2, 2), ("replicate", "shard"))
        else:
            hybrid["process_group"] = groups
        reference, model = everything(0, **hybrid)
        dcp.save(save(model, SHARDED), checkpoint_id=folder)
        _, flat = everything(1)
        state = save(flat, SHARDED)
        dcp.load(state, checkpoint_id=folder)
        load(flat, SHARDED, state)
        assert_same_tensors("flat", full_state_dict(flat), reference.state_dict(), 0.0)
        dcp.save(save(flat, SHARDED), checkpoint_id=f"{folder}/back")
        _, back = everything(2, **hybrid)
        state = save(back, SHARDED)
        dcp.load(state, checkpoint_id=f"{folder}/back")
        load(back, SHARDED, state)
        assert_same_tensors("back", full_state_dict(back), reference.state_dict(), 0.0)
        del model, back, state, hybrid


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_local(use_orig_params: bool) -> None:
    """A checkpoint takes flat parameters; each rank's slices have to be left out."""

    def flat_state(model: Any) -> dict[str, Any]:
        state = save(model, LOCAL)
        if use_orig_params:
            for name, _ in model.named_parameters(remove_duplicate=False):
                if "ignored" not in name:
                    del state[clean_name(name)]
        return state

    reference, model = everything(0, use_orig_params=use_orig_params)
    _, other = everything(1, use_orig_params=use_orig_params)
    with shared_folder() as folder:
        dcp.save(flat_state(model), checkpoint_id=folder)
        state = flat_state(other)
        dcp.load(state, checkpoint_id=folder)
        load(other, LOCAL, state)
    assert_same_tensors("loaded", full_state_dict(other), reference.state_dict(), 0.0)


@pytest.mark.cpu_only("on accelerators fsdp_c aligns parameters in a flat one")
@distributed(world_size=(2, 3))
def test_torchs_local_state_dicts() -> None:
    """FSDP1's own LOCAL state dict loads here, and ours there: same flat layout."""
    for model in ("mlp", "uneven"):
        torch.manual_seed(0)
        reference = CASES[model].build()
        theirs = _wrap("torch", model, copy.deepcopy(reference))
        with type(theirs).state_dict_type(theirs, LOCAL):
            state = copy.deepcopy(theirs.state_dict())
        ours = _wrap("fsdp_c", model, CASES[model].build())
        load(ours, LOCAL, state)
        expected = reference.state_dict()
        assert_same_tensors("ours", full_state_dict(ours), expected, 0.0)
        theirs = _wrap("torch", model, CASES[model].build())
        with type(theirs).state_dict_type(theirs, LOCAL):
            theirs.load_state_dict(save(ours, LOCAL))
        assert_same_tensors("theirs", whole_state(_sharded(theirs)), expected, 0.0)


class _Counting(nn.Linear):
    """Has extra state."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return super().forward(x)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.num_calls)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.num_calls = int(state)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_extra_state_of_a_units_module(use_orig_params: bool, full: bool) -> None:
    """Torch's own functions look for an attribute of that name, and raise."""
    model = fsdp(
        nn.Sequential(_Counting(), nn.Sequential(_Counting())),
        units={_Counting},
        use_orig_params=use_orig_params,
    )
    options = StateDictOptions(full_state_dict=full)
    model(torch.ones(2, 4))
    state = get_model_state_dict(model, options=options)
    for counting in (model[0], model[1][0]):
        counting.module.num_calls = 5
    set_model_state_dict(model, state, options=options)
    assert state.keys() == model.state_dict().keys()
    assert [model[0].module.num_calls, model[1][0].module.num_calls] == [1, 1]
