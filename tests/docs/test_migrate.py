"""What docs/guide/migrate.md says of torch's interfaces, and FSDP2's checkpoints."""

import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from helpers.distributed import distributed
from helpers.doc_pages import text_of
from helpers.impl import FSDP, StateDictType, fsdp
from helpers.models import DIM, MLP, Block
from helpers.reference import assert_same, assert_same_tensors, full_state_dict

PAGE = "docs/guide/migrate.md"
# What fsdp_c's methods take besides torch's arguments.
ADDED = {"no_sync": ["sharded"]}


def _public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def test_all_public_names_are_there() -> None:
    assert not _public(TorchFSDP) - _public(FSDP)


def _arguments(cls: type, name: str) -> list[tuple[str, object]]:
    """Return names and defaults; a constant of our own stands for torch's object."""
    signature = inspect.signature(getattr(cls, name))
    return [(p.name, p.default) for p in signature.parameters.values()]


@pytest.mark.parametrize(
    "name",
    [
        "__init__",
        *sorted(
            name
            for name in _public(TorchFSDP) - _public(nn.Module)
            if callable(getattr(TorchFSDP, name))
        ),
    ],
)
def test_arguments_are_torchs(name: str) -> None:
    ours = [
        (argument, default)
        for argument, default in _arguments(FSDP, name)
        if argument not in ADDED.get(name, ())
    ]
    assert ours == _arguments(TorchFSDP, name)


def test_every_argument_of_fsdp2_is_on_the_page() -> None:
    text = text_of(PAGE)
    arguments = inspect.signature(fully_shard).parameters
    methods = _public(FSDPModule) - _public(nn.Module)
    missing = [name for name in (*arguments, *methods) if f"`{name}" not in text]
    assert not missing


def _fsdp2(world_size: int) -> MLP:
    model = MLP()
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu")
def test_full_state_of_fsdp2(world_size: int, use_orig_params: bool) -> None:
    """Parameters and optimizer state load as they are; training goes on alike."""
    batch = torch.randn(4, DIM)
    theirs = _fsdp2(world_size)
    their_optim = torch.optim.AdamW(theirs.parameters(), lr=0.1)
    theirs(batch).sum().backward()
    their_optim.step()
    their_optim.zero_grad()

    options = StateDictOptions(full_state_dict=True)
    ours = fsdp(MLP(), units={Block}, use_orig_params=use_orig_params)
    ours.load_state_dict(get_model_state_dict(theirs, options=options))
    our_optim = torch.optim.AdamW(ours.parameters(), lr=0.1)
    state = get_optimizer_state_dict(theirs, their_optim, options=options)
    our_optim.load_state_dict(FSDP.optim_state_dict_to_load(ours, our_optim, state))

    for model, optim in ((theirs, their_optim), (ours, our_optim)):
        model(batch).square().sum().backward()
        optim.step()
    expected = {k: v.full_tensor() for k, v in theirs.state_dict().items()}
    assert_same_tensors("state", full_state_dict(ours), expected, 1e-6)


@distributed(world_size=2, device="cpu")
def test_fsdp2_loads_what_was_saved_here(world_size: int, tmp_path: Path) -> None:
    ours = fsdp(MLP(), units={Block})
    expected = full_state_dict(ours)
    with FSDP.state_dict_type(ours, StateDictType.SHARDED_STATE_DICT):
        dcp.save(ours.state_dict(), checkpoint_id=str(tmp_path / "ours"))
    theirs = _fsdp2(world_size)
    state = theirs.state_dict()
    dcp.load(state, checkpoint_id=str(tmp_path / "ours"))
    theirs.load_state_dict(state)
    got = {k: v.full_tensor() for k, v in theirs.state_dict().items()}
    assert_same_tensors("state", got, expected, 0.0)


@distributed(world_size=2, device="cpu")
def test_autocast_around_forward() -> None:
    """As DeepSpeed's torch_autocast: parameters stay fp32, matmuls are bf16."""
    reference = MLP()
    model = MLP()
    model.load_state_dict(reference.state_dict())
    model = fsdp(model, units={Block})
    batch = torch.randn(4, DIM)
    norms = []
    for each in (reference, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = each(batch)
        assert out.dtype is torch.bfloat16
        out.float().square().sum().backward()
        if each is model:
            norms.append(model.clip_grad_norm_(1e9))
        else:
            norms.append(nn.utils.clip_grad_norm_(reference.parameters(), 1e9))
    assert_same("norm", norms[1], norms[0], 1e-2)
    dist.barrier()
