"""FULL_STATE_DICT: save, load, keys, memory."""

import io

import pytest
import torch

from helpers.distributed import distributed, every_strategy, varied
from helpers.impl import FSDP, StateDictType
from helpers.models import CASES
from helpers.reference import (
    Differential,
    assert_same_tensors,
    full_state_dict,
    with_model,
)


@pytest.mark.trap(16)
@every_strategy
@varied(model=list(CASES))
@distributed(world_size=(2, 3))
@with_model()
def test_save_equals_the_unwrapped_model(differential: Differential) -> None:
    """Keys, their order, values and dtypes, before and after a step."""
    for num_steps in (0, 1):
        differential.train(num_steps)
        state = full_state_dict(differential.model)
        expected = differential.reference.state_dict()
        assert list(state) == list(expected)
        assert_same_tensors("state", state, expected, differential.tolerance)
        for name, tensor in state.items():
            assert tensor.dtype == expected[name].dtype, name
            assert not tensor.requires_grad, name


@every_strategy
@distributed(world_size=2)
@with_model()
def test_tensors_own_their_memory(differential: Differential, strategy: str) -> None:
    """A state dict does not change when training goes on, and saves small."""
    differential.train(1)
    state = full_state_dict(differential.model)
    before = {name: tensor.clone() for name, tensor in state.items()}
    differential.train(2)
    assert_same_tensors("state", state, before, 0.0)
    with torch.no_grad():
        for tensor in state.values():
            tensor.zero_()
    differential.check()
    for name, tensor in state.items():
        nbytes = tensor.untyped_storage().nbytes()
        assert nbytes == tensor.numel() * tensor.element_size(), name


@every_strategy
@pytest.mark.parametrize("model", ["mlp", "uneven", "transformer", "scalar"])
@distributed(world_size=(2, 3))
@with_model()
def test_load(differential: Differential, model: str) -> None:
    """A checkpoint of the unwrapped model goes in and trains on."""
    differential.train(1)
    torch.manual_seed(99)
    checkpoint = CASES[model].build().state_dict()
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    loaded = torch.load(file)
    with FSDP.state_dict_type(differential.model, StateDictType.FULL_STATE_DICT):
        result = differential.model.load_state_dict(loaded)
    assert result.missing_keys == []
    assert result.unexpected_keys == []
    assert list(loaded) == list(checkpoint)  # the user's dict is left alone
    differential.reference.load_state_dict(checkpoint)
    differential.zero_grad()
    differential.check()
    differential.train(2)
