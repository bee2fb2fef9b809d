"""FULL, SHARDED and LOCAL state dicts: keys, values, memory, and loading them."""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardedStateDictConfig
from torch.distributed.tensor import DTensor, Replicate, Shard

from helpers.distributed import TEST_DEVICE, distributed, every_strategy, varied
from helpers.groups import hybrid_groups, kept_mesh
from helpers.impl import (
    FSDP,
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    fsdp,
)
from helpers.models import CASES, Block
from helpers.reference import (
    Differential,
    assert_same_tensors,
    full_state_dict,
    with_model,
)
from helpers.state_dicts import (
    FULL,
    LOCAL,
    SHARDED,
    WIDTH,
    Everything,
    Inner,
    everything,
    load,
    local_part,
    save,
    whole_state,
    wrap_everything,
)

KINDS = (FULL, SHARDED, LOCAL)


@pytest.mark.trap(16)
@every_strategy
@varied(model=list(CASES))
@distributed(world_size=(2, 3))
@with_model()
def test_full_equals_the_unwrapped_model(differential: Differential) -> None:
    """Keys, their order, values and dtypes; memory of their own, and no more."""
    for num_steps in (0, 1):
        differential.train(num_steps)
        state = full_state_dict(differential.model)
        expected = differential.reference.state_dict()
        assert list(state) == list(expected)
        assert_same_tensors("state", state, expected, differential.tolerance)
        for name, tensor in state.items():
            assert tensor.dtype == expected[name].dtype, name
            assert not tensor.requires_grad, name
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
    before = {name: tensor.clone() for name, tensor in state.items()}
    differential.train(1)
    assert_same_tensors("state", state, before, 0.0)
    for tensor in state.values():
        tensor.zero_()
    differential.check()


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
    result = load(differential.model, FULL, loaded)
    assert result == ([], [])
    assert list(loaded) == list(checkpoint)  # the user's dict is left alone
    differential.reference.load_state_dict(checkpoint)
    differential.zero_grad()
    differential.check()
    differential.train(2)


def _check_saved(state: dict[str, Any], reference: nn.Module, kind: Any) -> None:
    """Compare a state dict with the unwrapped model's. Collective."""
    expected = reference.state_dict()
    if kind is LOCAL:
        params = dict(reference.named_parameters(remove_duplicate=False))
        ignored = {n for n in params if n.startswith("ignored.")}
        slices = (params.keys() - ignored) & state.keys()  # with use_orig_params
        assert slices in (set(), params.keys() - ignored)
        others = {n: t for n, t in state.items() if n not in slices}
        plain = {n: t for n, t in others.items() if "_flat_param" not in n}
        assert plain.keys() == (expected.keys() - params.keys()) | ignored
        for name, value in plain.items():
            assert torch.equal(value, expected[name]), name
        return
    assert list(state) == list(expected)
    actual = whole_state(state)
    assert_same_tensors("state", actual, expected, 0.0)
    for name, tensor in actual.items():
        assert tensor.dtype == expected[name].dtype, name


def _check_round_trip(make: Callable[[int], tuple[nn.Module, Any]]) -> None:
    """Save and load every kind; ``make(seed)`` gives a model and it wrapped."""
    reference, model = make(0)
    for kind in KINDS:
        state = save(model, kind)
        _check_saved(state, reference, kind)
        _, other = make(1)
        result = load(other, kind, state)
        assert result == ([], [])
        expected = reference.state_dict()
        assert_same_tensors(f"{kind}", full_state_dict(other), expected, 0.0)


@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@distributed(world_size=(2, 3))
def test_round_trip(strategy: str, use_orig_params: bool, is_nested: bool) -> None:
    """Scalar, empty, tied, frozen, mixed dtypes, ignored, buffers; every kind."""
    _check_round_trip(
        lambda seed: everything(
            seed,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
            is_nested=is_nested,
        )
    )


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
@distributed(world_size=4)
def test_hybrid_round_trip(
    world_size: int, num_replicas: int, strategy: str, use_orig_params: bool
) -> None:
    """Each replica has the whole state."""
    with hybrid_groups(num_replicas, world_size // num_replicas) as groups:
        _check_round_trip(
            lambda seed: everything(
                seed,
                process_group=groups,
                sharding_strategy=ShardingStrategy[strategy],
                use_orig_params=use_orig_params,
            )
        )


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_no_shard_gives_full_state_dicts(use_orig_params: bool) -> None:
    """As FSDP1: nothing is sharded, so every kind is FULL, with a warning."""
    reference, model = everything(
        sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=use_orig_params
    )
    _, other = everything(
        1, sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=use_orig_params
    )
    for kind in KINDS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = save(model, kind)
        is_told = any(
            "full_state_dict will be returned" in str(w.message) for w in caught
        )
        assert is_told == (kind is not FULL)
        assert_same_tensors("state", state, reference.state_dict(), 0.0)
        for name, value in state.items():
            assert not isinstance(value, (ShardedTensor, DTensor)), name
        load(other, kind, state)
        assert_same_tensors("loaded", full_state_dict(other), state, 0.0)


@varied(use_orig_params=[True, False], model=["mlp", "frozen", "mixed_dtype"])
@pytest.mark.parametrize("kind", KINDS)
@distributed(world_size=(2, 3))
@with_model()
def test_training_goes_on(differential: Differential, kind: Any) -> None:
    """Save after a step, load after another: as if that had not been."""
    differential.train(1)
    state = save(differential.model, kind)
    expected = copy.deepcopy(differential.reference.state_dict())
    if kind is not LOCAL:
        actual = whole_state(state)
        assert_same_tensors("state", actual, expected, differential.tolerance)
    else:
        state = {n: v for n, v in state.items() if isinstance(v, ShardedTensor)}
    before = [copy.deepcopy(local_part(value)) for value in state.values()]
    differential.train(1)
    for (name, value), part in zip(state.items(), before, strict=True):
        now = local_part(value)  # has memory of its own
        if now is not None and part is not None:
            assert torch.equal(now, part), name
            assert now.untyped_storage().nbytes() == now.nbytes, name
    load(differential.model, kind, state)
    differential.reference.load_state_dict(expected)
    differential.zero_grad()
    differential.train(2)


@distributed(world_size=(2, 3))
def test_sharded_tensors_are_torchs_chunks(rank: int, world_size: int) -> None:
    """Metadata and local parts are those of torch.chunk on dim 0, as FSDP1's are."""
    reference = CASES["uneven"].build()
    model = fsdp(copy.deepcopy(reference), use_orig_params=True)
    with_mesh = fsdp(
        copy.deepcopy(reference),
        use_orig_params=True,
        device_mesh=init_device_mesh(TEST_DEVICE, (world_size,)),
    )
    dtensors = save(with_mesh, SHARDED)
    for name, value in save(model, SHARDED).items():
        full = reference.state_dict()[name]
        chunks = full.chunk(world_size)
        assert isinstance(value, ShardedTensor)
        assert value.size() == full.shape
        metadata = value.metadata().shards_metadata
        assert [tuple(m.shard_sizes) for m in metadata] == [c.shape for c in chunks]
        assert [m.placement.rank() for m in metadata] == list(range(len(chunks)))
        assert all(m.placement.device().type == TEST_DEVICE for m in metadata)
        dtensor = dtensors[name]
        assert isinstance(dtensor, DTensor)
        assert dtensor.placements == (Shard(0),)
        if rank < len(chunks):
            assert torch.equal(value.local_shards()[0].tensor, chunks[rank])
            assert torch.equal(dtensor.to_local(), chunks[rank])
        else:
            assert value.local_shards() == []
            assert dtensor.to_local().numel() == 0


@pytest.mark.parametrize("kind", [FULL, SHARDED])
@distributed(world_size=(2, 3))
def test_other_wrapping_and_dtype(kind: Any) -> None:
    """Loading converts, as nn.Module's does; units may be cut elsewhere."""
    reference, model = everything(is_nested=True, use_orig_params=True)
    state = save(model, kind)
    _, other = everything(1, is_nested=False, use_orig_params=False)
    load(other, kind, state)
    assert_same_tensors("loaded", full_state_dict(other), reference.state_dict(), 0.0)
    other.double()
    load(other, kind, state)
    expected = {name: t.double() for name, t in reference.state_dict().items()}
    assert_same_tensors("double", full_state_dict(other), expected, 0.0)
    assert full_state_dict(other)["inp.weight"].dtype == torch.float64
    state = save(other, kind)
    load(model, kind, state)
    assert_same_tensors("back", full_state_dict(model), reference.state_dict(), 0.0)


@pytest.mark.parametrize("num_replicas", [None, 1, 2])
@distributed(world_size=4)
def test_device_mesh(world_size: int, num_replicas: int | None) -> None:
    """DTensors over the mesh; LOCAL is refused, as in FSDP1."""
    if num_replicas is None:
        mesh = init_device_mesh(TEST_DEVICE, (world_size,))
        placements: tuple[Any, ...] = (Shard(0),)
        strategy = ShardingStrategy.FULL_SHARD
    else:
        sizes = (num_replicas, world_size // num_replicas)
        mesh = kept_mesh(sizes, ("replicate", "shard"))
        placements = (Replicate(), Shard(0))
        strategy = ShardingStrategy.HYBRID_SHARD
    reference, model = everything(device_mesh=mesh, sharding_strategy=strategy)
    config = ShardedStateDictConfig()
    state = save(model, SHARDED, config)
    assert config._use_dtensor  # as FSDP1 does
    for name, value in state.items():
        if isinstance(value, DTensor):
            assert value.placements == placements, name
            assert value.device_mesh == mesh, name
    assert isinstance(state["inp.weight"], DTensor)
    _check_saved(state, reference, SHARDED)
    _, other = everything(1, device_mesh=mesh, sharding_strategy=strategy)
    load(other, SHARDED, state)
    assert_same_tensors("loaded", full_state_dict(other), reference.state_dict(), 0)
    with pytest.raises(RuntimeError, match="DeviceMesh is not compatible"):
        save(model, LOCAL)
    with pytest.raises(RuntimeError, match="DeviceMesh is not compatible"):
        load(model, LOCAL, state)


@distributed(world_size=2)
def test_dtensors_without_a_mesh() -> None:
    """``_use_dtensor`` makes a mesh of the group; both forms load into both."""
    reference, model = everything()
    state = save(model, SHARDED, ShardedStateDictConfig(_use_dtensor=True))
    assert isinstance(state["inp.weight"], DTensor)
    _check_saved(state, reference, SHARDED)
    _, other = everything(1)
    load(other, SHARDED, state)
    assert_same_tensors("loaded", full_state_dict(other), reference.state_dict(), 0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_mixed_precision(use_orig_params: bool, kind: Any) -> None:
    """Masters, and buffers in the dtype that they had, before and after forward."""
    precision = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    reference, model = everything(
        mixed_precision=precision, use_orig_params=use_orig_params
    )
    model.eval()
    for _ in range(2):
        state = save(model, kind)
        expected = reference.state_dict()
        for name, value in state.items():
            if name in expected:
                assert value.dtype == expected[name].dtype, name
        buffers = dict(reference.named_buffers())
        for name in buffers.keys() & state.keys():
            assert_same_tensors(name, {"": state[name]}, {"": buffers[name]}, 1e-2)
        if kind is not LOCAL:
            params = dict(reference.named_parameters())
            actual = whole_state({name: state[name] for name in params})
            assert_same_tensors("state", actual, params, 0.0)
        model(torch.randn(3, WIDTH))
    _, other = everything(1, mixed_precision=precision, use_orig_params=use_orig_params)
    load(other, kind, state)
    params = dict(reference.named_parameters())
    state = full_state_dict(other)
    assert_same_tensors("loaded", {name: state[name] for name in params}, params, 0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_offload(use_orig_params: bool, kind: Any) -> None:
    """CPU offload of the parameters, and of the state dict."""
    offload = {
        "cpu_offload": CPUOffload(offload_params=True),
        "use_orig_params": use_orig_params,
    }
    reference, model = everything(**offload)
    config = {FULL: FullStateDictConfig, SHARDED: ShardedStateDictConfig}.get(kind)
    state = save(model, kind, None if config is None else config(offload_to_cpu=True))
    for name, value in state.items():
        part = local_part(value)
        assert part is None or part.device == torch.device("cpu"), name
    _check_saved(state, reference, kind)
    _, other = everything(1, **offload)
    load(other, kind, state)
    assert_same_tensors("loaded", full_state_dict(other), reference.state_dict(), 0.0)


@pytest.mark.parametrize("kind", KINDS)
@distributed(world_size=2)
def test_between_micro_batches_and_inside_a_summon(kind: Any) -> None:
    """What was loaded counts at once, also where whole parameters are kept."""
    for use_orig_params in (True, False):
        differential = Differential.of_model(
            "mlp", strategy="SHARD_GRAD_OP", use_orig_params=use_orig_params
        )
        torch.manual_seed(3)
        source = CASES["mlp"].build()
        other = fsdp(
            copy.deepcopy(source),
            units=CASES["mlp"].unit_classes,
            use_orig_params=use_orig_params,
            strategy="SHARD_GRAD_OP",
        )
        state = save(other, kind)
        with differential.model.no_sync():
            differential.forward_backward()
            load(differential.model, kind, state)
            differential.reference.load_state_dict(source.state_dict())
            differential.forward()
        differential.zero_grad()
        differential.train(1)
        model = differential.model
        with FSDP.summon_full_params(model):
            inside = save(model, kind)
            load(model, kind, state)
        assert_same_tensors("inside", full_state_dict(model), source.state_dict(), 0.0)
        load(model, kind, inside)
        differential.zero_grad()
        differential.reference.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
@distributed(world_size=2)
def test_prefixes_and_roots(kind: Any) -> None:
    """A prefix, a nested unit alone, and a root that is not wrapped."""
    reference = CASES["mlp"].build()
    model = fsdp(copy.deepcopy(reference), units={Block}, use_orig_params=True)
    state = save(model, kind, prefix="a.b.")
    assert all(name.startswith("a.b.") for name in state)
    nested = save(model.blocks[1], kind)
    container = nn.Sequential(model, nn.Linear(2, 2))
    outer = save(container, kind)
    if kind is not LOCAL:
        expected = reference.state_dict(prefix="a.b.")
        assert_same_tensors("prefix", whole_state(state), expected, 0.0)
        expected = reference.get_submodule("blocks.1").state_dict()
        assert_same_tensors("nested", whole_state(nested), expected, 0.0)
        expected = nn.Sequential(reference, container[1]).state_dict()
        assert list(outer) == list(expected)
        assert_same_tensors("outer", whole_state(outer), expected, 0.0)
    with torch.no_grad():
        for param in container.parameters():
            param.zero_()
    load(container, kind, outer)
    assert_same_tensors("loaded", full_state_dict(model), reference.state_dict(), 0.0)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    load(model.blocks[1], kind, nested)
    expected = reference.get_submodule("blocks.1").state_dict()
    assert_same_tensors("loaded", full_state_dict(model.blocks[1]), expected, 0.0)


@pytest.mark.parametrize("when", ["before", "after"])
@distributed(world_size=2)
def test_activation_checkpointing(when: str) -> None:
    """Wrappers of activation checkpointing do not show in keys."""
    reference = Everything()
    model = copy.deepcopy(reference)

    def is_inner(module: nn.Module) -> bool:
        return isinstance(module, (Inner, nn.Linear))

    if when == "before":
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=is_inner
        )
        model = fsdp(model, units={Inner})
    else:
        model = wrap_everything(model)
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=is_inner
        )
    for kind in (FULL, SHARDED, LOCAL):
        state = save(model, kind)
        assert not any("_wrapped_module" in name for name in state)
        if kind is not LOCAL:
            expected = reference.state_dict()
            assert list(state) == list(expected)
            assert_same_tensors("state", whole_state(state), expected, 0.0)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "ignored" not in name:  # it is in the state dict itself
                    param.zero_()
        result = load(model, kind, state)
        assert result == ([], [])
        assert_same_tensors("loaded", full_state_dict(model), reference.state_dict(), 0)


@distributed(world_size=2)
def test_settings() -> None:
    """Types and configs are set, returned, and given back to each unit."""
    model = fsdp(CASES["mlp"].build(), units={Block})
    assert FSDP.get_state_dict_type(model).state_dict_type is FULL
    config = ShardedStateDictConfig(offload_to_cpu=True)
    before = FSDP.set_state_dict_type(model, SHARDED, config)
    assert before.state_dict_type is FULL
    settings = FSDP.get_state_dict_type(model)
    assert settings.state_dict_config is config
    assert type(settings.optim_state_dict_config).__name__.startswith("Sharded")
    with FSDP.state_dict_type(model, LOCAL):
        assert FSDP.get_state_dict_type(model).state_dict_type is LOCAL
    assert FSDP.get_state_dict_type(model).state_dict_config is config
    with pytest.raises(RuntimeError, match="Expected state_dict_config of type"):
        FSDP.set_state_dict_type(model, LOCAL, config)
    with pytest.raises(RuntimeError, match="Expected optim_state_dict_config of type"):
        FSDP.set_state_dict_type(
            model, LOCAL, None, FSDP.get_state_dict_type(model).optim_state_dict_config
        )
    assert FSDP.get_state_dict_type(model).state_dict_config is config
    nested = FSDP.fsdp_modules(model)[1]
    FSDP.set_state_dict_type(nested, StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(AssertionError, match="same state"):
        FSDP.get_state_dict_type(model)
