"""Trainer(fsdp=True): every option of fsdp_config takes effect and trains alike."""

from typing import Any

import pytest

from helpers.distributed import distributed
from hf_training import assert_trained_alike, fsdp_config, reference, root, trained


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu")
def test_default(rank: int, world_size: int, use_orig_params: bool) -> None:
    config = fsdp_config(use_orig_params=use_orig_params)
    expected = reference("llama")
    with trained("llama", rank, config=config) as record:
        model: Any = root(record)
        assert model._use_orig_params is use_orig_params
        assert_trained_alike(record, expected)
