"""Sharded optimizer states in torch.distributed.checkpoint's files; the page's code."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from helpers.distributed import distributed
from helpers.groups import first_ranks
from helpers.impl import FSDP, StateDictType
from helpers.optim_states import assert_same_states, full, trained
from helpers.shared_folder import shared_folder

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/optimizer_state.md"


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=3)
def test_through_files_to_fewer_ranks(use_orig_params: bool) -> None:
    """Written by three ranks, read by two; and by three with another wrapping."""
    model, optim = trained("scalar", "adam", 2, use_orig_params=use_orig_params)
    expected = full(model, optim)
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    with shared_folder() as folder:
        saved = FSDP.optim_state_dict(model, optim)
        dcp.save({"optim": saved}, checkpoint_id=folder)
        for num_ranks in (2, 3):
            with first_ranks(num_ranks) as group:
                if group is None:
                    continue
                other, other_optim = trained(
                    "scalar",
                    "adam",
                    1,
                    nested=num_ranks == 2,
                    process_group=group,
                    use_orig_params=not use_orig_params,
                )
                FSDP.set_state_dict_type(other, StateDictType.SHARDED_STATE_DICT)
                state = {"optim": FSDP.optim_state_dict(other, other_optim)}
                dcp.load(state, checkpoint_id=folder, process_group=group)
                FSDP.optim_state_dict_to_load(
                    other, other_optim, state["optim"], load_directly=True
                )
                assert_same_states(full(other, other_optim)["state"], expected["state"])
                del other, other_optim, state


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
