"""Sharded optimizer states in torch.distributed.checkpoint's files; the page's code."""

import copy
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from helpers.distributed import distributed
from helpers.impl import FSDP, StateDictType
from helpers.optim_states import OPTIMIZERS, assert_same_states, full, train, wrap

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/optimizer_state.md"


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=3)
def test_through_files_to_fewer_ranks(rank: int, use_orig_params: bool) -> None:
    """Written by three ranks, read by two; and by three with another wrapping."""
    model = wrap("scalar", use_orig_params=use_orig_params)
    optim = OPTIMIZERS["adam"](model.parameters())
    train(model, optim, "scalar", 2, rank=rank)
    expected = full(model, optim)
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders, src=0)
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    dcp.save({"optim": FSDP.optim_state_dict(model, optim)}, checkpoint_id=folders[0])
    for num_ranks in (2, 3):
        group = dist.new_group(list(range(num_ranks)))
        if rank < num_ranks:
            other = wrap(
                "scalar",
                nested=num_ranks == 2,
                process_group=group,
                use_orig_params=not use_orig_params,
            )
            other_optim = OPTIMIZERS["adam"](other.parameters())
            train(other, other_optim, "scalar", 1, rank=rank)  # so that it has state
            FSDP.set_state_dict_type(other, StateDictType.SHARDED_STATE_DICT)
            state: dict[str, Any] = {"optim": FSDP.optim_state_dict(other, other_optim)}
            dcp.load(state, checkpoint_id=folders[0], process_group=group)
            FSDP.optim_state_dict_to_load(
                other, other_optim, state["optim"], load_directly=True
            )
            assert_same_states(full(other, other_optim)["state"], expected["state"])
            del other, other_optim, state
        dist.destroy_process_group(group)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folders[0])


@distributed(world_size=2)
def test_examples_of_the_page(rank: int) -> None:
    """They run one after the other, and do what they say."""
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    exec(compile(blocks[0], str(PAGE), "exec"), names)
    assert (names["state"] == {}) == (rank > 0)
    before = copy.deepcopy(full(names["model"], names["optim"]))
    exec(compile(blocks[1], str(PAGE), "exec"), names)
    after = full(names["model"], names["optim"])
    assert_same_states(after["state"], before["state"])
