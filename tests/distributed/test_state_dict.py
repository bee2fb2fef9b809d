"""FULL_STATE_DICT: save, load, keys, memory."""

import copy
import io

import pytest
import torch

from helpers.distributed import distributed
from helpers.impl import (
    FSDP,
    IS_TORCH,
    StateDictType,
    needs_fsdp_c,
)
from helpers.models import CASES
from helpers.reference import (
    Differential,
    assert_same_tensors,
    full_state_dict,
)

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


@pytest.mark.trap(16)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", CASES)
@distributed(world_size=(2, 3))
def test_save_equals_the_unwrapped_model(
    rank: int, world_size: int, model: str, strategy: str, use_orig_params: bool
) -> None:
    """Keys, their order, values and dtypes, before and after a step."""
    case = CASES[model]
    if case.only_fsdp_c or (case.only_orig_params and not use_orig_params):
        needs_fsdp_c(f"refuses {model} with use_orig_params={use_orig_params}")
    differential = Differential.of_model(
        model, strategy=strategy, use_orig_params=use_orig_params
    )
    for num_steps in (0, 1):
        differential.train(num_steps)
        state = full_state_dict(differential.model)
        expected = differential.reference.state_dict()
        if not IS_TORCH:  # torch moves the second name of a tied parameter back
            assert list(state) == list(expected)
        assert_same_tensors("state", state, expected, differential.tolerance)
        for name, tensor in state.items():
            assert tensor.dtype == expected[name].dtype, name
            assert not tensor.requires_grad, name


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=2)
def test_tensors_own_their_memory(
    rank: int, world_size: int, strategy: str, use_orig_params: bool
) -> None:
    """A state dict does not change when training goes on, and saves small."""
    differential = Differential.of_model(
        "mlp", strategy=strategy, use_orig_params=use_orig_params
    )
    differential.train(1)
    state = full_state_dict(differential.model)
    before = {name: tensor.clone() for name, tensor in state.items()}
    differential.train(2)
    if IS_TORCH and strategy == "NO_SHARD":
        return  # torch returns views of the live parameters
    assert_same_tensors("state", state, before, 0.0)
    with torch.no_grad():
        for tensor in state.values():
            tensor.zero_()
    differential.check()
    if not IS_TORCH:
        for name, tensor in state.items():
            nbytes = tensor.untyped_storage().nbytes()
            assert nbytes == tensor.numel() * tensor.element_size(), name


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["mlp", "uneven", "transformer", "scalar"])
@distributed(world_size=(2, 3))
def test_load(
    rank: int, world_size: int, model: str, strategy: str, use_orig_params: bool
) -> None:
    """A checkpoint of the unwrapped model goes in and trains on."""
    if CASES[model].only_fsdp_c:
        needs_fsdp_c(f"refuses {model}")
    differential = Differential.of_model(
        model, strategy=strategy, use_orig_params=use_orig_params
    )
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


@distributed(world_size=2)
def test_bad_checkpoints(rank: int, world_size: int) -> None:
    """Missing and unexpected keys and wrong shapes are named; nothing changes."""
    model = Differential.of_model("mlp").model
    state = copy.deepcopy(full_state_dict(model))
    without = {n: t for n, t in state.items() if n != "blocks.1.fc1.weight"}
    with pytest.raises(RuntimeError, match=r"blocks\.1\.fc1\.weight"):
        model.load_state_dict(without)
    with pytest.raises(RuntimeError, match=r"other"):
        model.load_state_dict({**state, "other": torch.zeros(1)})
    if not IS_TORCH:
        with pytest.raises(RuntimeError, match=r"(?s)out\.bias.*\[4\].*\[3\]"):
            model.load_state_dict({**state, "out.bias": torch.zeros(4)})
    result = model.load_state_dict(without, strict=False)
    assert [n.split(".")[-1] for n in result.missing_keys] == ["weight"]
    assert_same_tensors("state", full_state_dict(model), state, 0.0)
    model(torch.randn(4, 6)).sum().backward()
