"""FULL_STATE_DICT: save, load, keys, memory."""

import copy
import io
from typing import Any

import pytest
import torch
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from helpers.distributed import distributed
from helpers.impl import (
    FSDP,
    IS_TORCH,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    fsdp,
    needs_fsdp_c,
)
from helpers.models import CASES
from helpers.reference import (
    Differential,
    assert_same,
    assert_same_tensors,
    full_state_dict,
)

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def _wrap(model: str, module: Any, **kwargs: Any) -> Any:
    kwargs.setdefault("use_orig_params", True)
    policy = ModuleWrapPolicy(set(CASES[model].unit_classes))
    return fsdp(module, auto_wrap_policy=policy, **kwargs)


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
    differential = Differential.of_case(
        case,
        lambda module: _wrap(
            model,
            module,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
        ),
        use_orig_params=use_orig_params,
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
    differential = Differential.of_case(
        CASES["mlp"],
        lambda module: _wrap(
            "mlp",
            module,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
        ),
        use_orig_params=use_orig_params,
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
    differential = Differential.of_case(
        CASES[model],
        lambda module: _wrap(
            model,
            module,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
        ),
        use_orig_params=use_orig_params,
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


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=(2, 3))
def test_round_trip_is_exact(rank: int, world_size: int, use_orig_params: bool) -> None:
    """What was saved loads into another wrapping, bit for bit."""
    first = _wrap("uneven", CASES["uneven"].build(), use_orig_params=use_orig_params)
    state = copy.deepcopy(full_state_dict(first))
    torch.manual_seed(5)
    second = fsdp(CASES["uneven"].build(), use_orig_params=not use_orig_params)
    second.load_state_dict(state)
    assert_same_tensors("state", full_state_dict(second), state, 0.0)


@distributed(world_size=2)
def test_mixed_precision_saves_full_precision(rank: int, world_size: int) -> None:
    """The state dict holds the fp32 master, not the bf16 copies."""
    torch.manual_seed(0)
    reference = CASES["mlp"].build()
    model = _wrap(
        "mlp",
        copy.deepcopy(reference),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
    )
    model(torch.randn(4, 6))
    assert_same_tensors("state", full_state_dict(model), reference.state_dict(), 0.0)


@pytest.mark.trap(26)
@distributed(world_size=2)
def test_rank0_only(rank: int, world_size: int) -> None:
    """Only rank 0 gets the dict, although all ranks call."""
    needs_fsdp_c("crashes on the CPU")
    torch.manual_seed(0)
    reference = CASES["mlp"].build()
    model = _wrap("mlp", copy.deepcopy(reference))
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    if rank == 0:
        assert_same_tensors("state", state, reference.state_dict(), 0.0)
    else:
        assert state == {}


@distributed(world_size=2)
def test_of_a_nested_unit(rank: int, world_size: int) -> None:
    """A unit inside the model has a state dict of its own."""
    torch.manual_seed(0)
    reference = CASES["mlp"].build()
    model = _wrap("mlp", copy.deepcopy(reference))
    model(torch.randn(4, 6))
    state = full_state_dict(model.blocks[1])
    expected = reference.get_submodule("blocks.1").state_dict()
    assert_same_tensors("state", state, expected, 0.0)


@distributed(world_size=2)
def test_buffers_and_prefix(rank: int, world_size: int) -> None:
    """Buffers are saved as they are; non-persistent ones are not; prefixes hold."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    module[0].register_buffer("gone", torch.ones(2), persistent=False)
    expected = copy.deepcopy(module).state_dict(prefix="a.b.")
    model = fsdp(module, use_orig_params=True)
    state = model.state_dict(prefix="a.b.")
    assert_same_tensors("state", state, expected, 0.0)


@distributed(world_size=2)
def test_bad_checkpoints(rank: int, world_size: int) -> None:
    """Missing and unexpected keys and wrong shapes are named; nothing changes."""
    model = _wrap("mlp", CASES["mlp"].build())
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


@pytest.mark.parametrize("writeback", [True, False])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=(2, 3))
def test_summon_full_params(
    rank: int, world_size: int, use_orig_params: bool, writeback: bool
) -> None:
    """Whole parameters inside the context; writes stay only with writeback."""
    torch.manual_seed(0)
    reference = CASES["uneven"].build()
    model = _wrap("uneven", copy.deepcopy(reference), use_orig_params=use_orig_params)
    expected = dict(reference.named_parameters())
    for _ in range(2):
        with FSDP.summon_full_params(model, writeback=writeback):
            for name, param in model.module.named_parameters():
                clean = name.replace("_fsdp_wrapped_module.", "")
                if clean in expected:  # flat parameters are not in it
                    assert_same(clean, param.detach(), expected[clean].detach(), 0.0)
            with torch.no_grad():
                model.get_submodule("module.last").weight.add_(1.0)
        if writeback:
            with torch.no_grad():
                expected["last.weight"].add_(1.0)
    state = full_state_dict(model)
    assert_same("last.weight", state["last.weight"], expected["last.weight"].detach())
    model(torch.randn(4, 6)).sum().backward()
