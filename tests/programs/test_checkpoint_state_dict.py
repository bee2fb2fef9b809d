"""torch.distributed.checkpoint.state_dict on models of fsdp_c, without install().

Each result is compared with torch's FSDP1 (keys, types, shapes, dtypes, devices and
values) and with the same functions on the unsharded model, trained on all ranks' data.
"""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from helpers.distributed import distributed
from helpers.groups import kept_mesh
from helpers.impl import FSDP, StateDictType, wrap_case
from helpers.models import CASES, loss_of
from helpers.reference import assert_same, assert_same_tensors
from helpers.seeds import generator
from helpers.shared_folder import shared_folder
from helpers.state_dicts import whole_state

STEPS = 2
FULL = StateDictOptions(full_state_dict=True)


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return CASES[name].build()


def wrap(impl: str, name: str, seed: int = 0, **kwargs: Any) -> nn.Module:
    """Return the model of the case, wrapped by fsdp_c or torch, or as it is."""
    if impl == "plain":
        return build(name, seed)
    return wrap_case(impl, name, seed, **kwargs)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def fresh(impl: str, name: str, seed: int = 1, **kwargs: Any) -> tuple[Any, Any]:
    """Return what a state is loaded into: a model and its optimizer."""
    model = wrap(impl, name, seed, **kwargs)
    return model, optimizer(model)


def train(
    impl: str, name: str, model: nn.Module, optim: Any, steps: range = range(STEPS)
) -> None:
    """Train on this rank's batches, the unsharded model on those of all ranks."""
    world_size = dist.get_world_size()
    ranks = range(world_size) if impl == "plain" else [dist.get_rank()]
    for step in steps:
        for rank in ranks:
            batch = CASES[name].inputs(generator(100 * step + rank))
            loss = loss_of(model(*batch))
            (loss / world_size if impl == "plain" else loss).backward()
        optim.step()
        optim.zero_grad()


def trained(impl: str, name: str, **kwargs: Any) -> tuple[nn.Module, Any]:
    model, optim = fresh(impl, name, **{"seed": 0, **kwargs})
    train(impl, name, model, optim)
    return model, optim


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dictionaries and lists, by their path."""
    if isinstance(value, dict):
        items = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(index), each) for index, each in enumerate(value)]
    else:
        return {prefix: value}
    found = {}
    for key, each in items:
        found.update(flatten(each, f"{prefix}/{key}"))
    return found


def by_name(optim_state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with its groups' parameters sorted.

    FSDP1 lists them by unit, the unsharded model in the order of the modules.
    """
    if "param_groups" not in optim_state:
        return optim_state
    groups = [
        {**group, "params": sorted(group["params"])}
        for group in optim_state["param_groups"]
    ]
    return {**optim_state, "param_groups": groups}


def describe(value: Any) -> Any:
    """Return what two values have in common if they are of one form."""
    if isinstance(value, ShardedTensor):
        shards = [
            (s.metadata.shard_offsets, s.metadata.shard_sizes, s.tensor.device)
            for s in value.local_shards()
        ]
        return ShardedTensor, tuple(value.size()), value.dtype, shards
    if isinstance(value, DTensor):
        local = value.to_local()
        place = (value.placements, value.device_mesh.mesh.tolist())
        return DTensor, tuple(value.shape), value.dtype, place, local.shape
    if isinstance(value, Tensor):
        kind = Tensor if type(value) is nn.Parameter else type(value)
        return kind, tuple(value.shape), value.dtype, value.device
    return type(value), value


def assert_alike(actual: Any, expected: Any, *, is_same_form: bool = True) -> None:
    """Compare two state dicts: keys, forms and values. Collective."""
    actual, expected = flatten(actual), flatten(expected)
    assert sorted(actual) == sorted(expected)
    if is_same_form:
        for key, value in expected.items():
            assert describe(actual[key]) == describe(value), key
    theirs, ours = whole_state(expected), whole_state(actual)
    for key, value in theirs.items():
        if isinstance(value, Tensor):
            assert_same(key, ours[key], value)
        else:
            assert ours[key] == value, key


def assert_same_state(
    actual: Any, expected: Any, tolerance: float = 0.0, what: str = "loaded"
) -> None:
    """Both are (parameters, optimizer state) of FULL, with equal values."""
    assert_same_tensors(what, actual[0], expected[0], tolerance)
    mine, theirs = actual[1]["state"], expected[1]["state"]
    assert mine.keys() == theirs.keys()
    for name, state in theirs.items():
        assert_same_tensors(f"{what} {name}", mine[name], state, tolerance)


# Getting -----------------------------------------------------------------------

OPTIONS = [
    dict(zip(("full_state_dict", "flatten_optimizer_state_dict"), each, strict=True))
    for each in itertools.product((False, True), repeat=2)
]


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("name", ["frozen_units", "uneven"])
@distributed(world_size=2, device="cpu", timeout_s=120)
def test_get(name: str, use_orig_params: bool) -> None:
    """Every option, against torch's FSDP1, and the unsharded model."""
    kwargs = {"use_orig_params": use_orig_params}
    ours, theirs = trained("fsdp_c", name, **kwargs), trained("torch", name, **kwargs)
    plain = trained("plain", name)
    kind = StateDictType.SHARDED_STATE_DICT  # set on the model, it has no effect
    FSDP.set_state_dict_type(ours[0], kind)
    for chosen in OPTIONS:
        for ignores_frozen in (False, use_orig_params and name == "frozen_units"):
            options = StateDictOptions(**chosen, ignore_frozen_params=ignores_frozen)
            states = [
                get_state_dict(*each, options=options) for each in (ours, theirs, plain)
            ]
            for index in (0, 1):
                mine, torchs, whole_one = (each[index] for each in states)
                if index == 1:
                    mine, torchs, whole_one = map(by_name, (mine, torchs, whole_one))
                assert_alike(mine, torchs)
                assert_alike(mine, whole_one, is_same_form=False)
            alone = get_model_state_dict(ours[0], options=options)
            assert_alike(alone, states[0][0])
            alone = get_optimizer_state_dict(*ours, options=options)
            assert_alike(alone, states[0][1])
        assert FSDP.get_state_dict_type(ours[0]).state_dict_type is kind


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu")
def test_get_offloaded(rank: int, use_orig_params: bool) -> None:
    """cpu_offload: the same values in memory of their own; FULL on rank 0 only.

    On the CPU torch's FSDP1 is no reference for this: it shares memory between states.
    """
    model, optim = trained("fsdp_c", "mlp", use_orig_params=use_orig_params)
    for full in (False, True):
        expected = get_state_dict(
            model, optim, options=StateDictOptions(full_state_dict=full)
        )
        options = StateDictOptions(full_state_dict=full, cpu_offload=True)
        params, state = get_state_dict(model, optim, options=options)
        if full and rank != 0:
            assert params == {}
            assert flatten(state) == {}
            continue
        if full:
            assert_same_state((params, state), expected)
        else:
            assert_alike(params, expected[0])
            assert_alike(state, expected[1])


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu")
def test_get_with_device_mesh(world_size: int, use_orig_params: bool) -> None:
    """With a device mesh the sharded values are DTensors, as FSDP1's."""
    mesh = kept_mesh((world_size,), ("shard",))
    kwargs = {"use_orig_params": use_orig_params, "device_mesh": mesh}
    ours, theirs = trained("fsdp_c", "mlp", **kwargs), trained("torch", "mlp", **kwargs)
    mine, torchs = get_state_dict(*ours), get_state_dict(*theirs)
    assert any(isinstance(each, DTensor) for each in mine[0].values())
    assert_alike(mine[0], torchs[0])
    assert_alike(by_name(mine[1]), by_name(torchs[1]))


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu")
def test_get_of_submodules(use_orig_params: bool) -> None:
    """`submodules` and keep_submodule_prefixes, which torch has deprecated."""
    results = []
    for impl in ("fsdp_c", "torch"):
        model = wrap(impl, "mlp", use_orig_params=use_orig_params)
        chosen = {model.module.blocks[0]}
        found = []
        for keeps in (True, False):
            options = StateDictOptions(
                full_state_dict=True, keep_submodule_prefixes=keeps
            )
            with pytest.warns(FutureWarning, match="submodules only"):
                state = get_model_state_dict(model, submodules=chosen, options=options)
            found.append(state)
        results.append(found)
    for mine, torchs in zip(*results, strict=True):
        assert mine
        assert_alike(mine, torchs)


# Setting -----------------------------------------------------------------------


def assert_resumes(name: str, first: Any, second: Any) -> None:
    """Two models train on alike: parameters and optimizer state were loaded."""
    for model, optim in (first, second):
        train("fsdp_c", name, model, optim, range(STEPS, STEPS + 2))
    assert_same_state(
        get_state_dict(*second, options=FULL), get_state_dict(*first, options=FULL)
    )


@pytest.mark.parametrize("saved", ["same", "torch", "plain"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu", timeout_s=120)
def test_set(saved: str, use_orig_params: bool) -> None:
    """What was got here, from torch's FSDP1 and from the unsharded model loads."""
    kwargs = {"use_orig_params": use_orig_params}
    for name in ("mlp", "frozen_units", "mixed_dtype"):
        if name == "mixed_dtype" and saved == "torch":
            continue  # which refuses the model
        first = trained("fsdp_c", name, **kwargs)
        impl = {"same": "fsdp_c"}.get(saved, saved)
        given = (
            first
            if saved == "same"
            else trained(impl, name, **({} if impl == "plain" else kwargs))
        )
        for chosen in OPTIONS:
            if saved == "plain" and not chosen["full_state_dict"]:
                continue
            options = StateDictOptions(**chosen)
            params, state = get_state_dict(*given, options=options)
            model, optim = fresh("fsdp_c", name, **kwargs)
            result = set_state_dict(
                model,
                optim,
                model_state_dict=copy.copy(params),
                optim_state_dict=copy.deepcopy(state) if saved == "plain" else state,
                options=options,
            )
            assert not result.missing_keys
            assert not result.unexpected_keys
            now = get_state_dict(model, optim, options=options)
            assert_alike(now[0], params, is_same_form=saved != "plain")
            if name != "mixed_dtype":  # several flat parameters: groups are alike
                assert_alike(by_name(now[1]), by_name(state), is_same_form=False)
            if saved == "same" and not chosen["flatten_optimizer_state_dict"]:
                model, optim = fresh("fsdp_c", name, **kwargs)
                set_model_state_dict(model, copy.copy(params), options=options)
                set_optimizer_state_dict(model, optim, state, options=options)
                assert_resumes(name, copy_of(first, name, kwargs), (model, optim))


@pytest.mark.parametrize("flattened", [True, False])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=3, device="cpu")
def test_set_after_a_step(use_orig_params: bool, flattened: bool) -> None:
    """An optimizer that has stepped has no state where a rank holds nothing."""
    kwargs = {"use_orig_params": use_orig_params}
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    first = trained("fsdp_c", "uneven", **kwargs)
    params, state = get_state_dict(*first, options=options)
    second = trained("fsdp_c", "uneven", seed=1, **kwargs)
    set_state_dict(
        *second, model_state_dict=params, optim_state_dict=state, options=options
    )
    assert_resumes("uneven", first, second)


def copy_of(first: Any, name: str, kwargs: dict[str, Any]) -> Any:
    """Return a copy of a trained model and its optimizer, so that both can go on."""
    model, optim = first
    other = copy.deepcopy(model)
    other_optim = optimizer(other)
    with_names = FSDP.optim_state_dict(model, optim)
    other_optim.load_state_dict(
        FSDP.optim_state_dict_to_load(other, other_optim, with_names)
    )
    return other, other_optim


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=3, device="cpu")
def test_broadcast_from_rank0(rank: int, use_orig_params: bool) -> None:
    """Only rank 0 has the state dicts; all models get them."""
    for name in ("mlp", "frozen_units", "mixed_dtype"):
        plain = trained("plain", name)
        params, state = get_state_dict(*plain, options=FULL)
        expected = copy.deepcopy(params), copy.deepcopy(state)
        if rank != 0:
            params, state = {}, {}
        model, optim = fresh("fsdp_c", name, rank, use_orig_params=use_orig_params)
        options = StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True, cpu_offload=name == "mlp"
        )
        set_model_state_dict(model, params, options=options)
        set_optimizer_state_dict(model, optim, state, options=options)
        actual = get_state_dict(model, optim, options=FULL)
        assert_same_state(actual, expected, what=name)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu")
def test_strict(use_orig_params: bool) -> None:
    """A part of the state: an error with strict, the rest stays as it is without."""
    given, _ = trained("plain", "mlp")
    params = get_model_state_dict(given)
    part = {name: value for name, value in params.items() if "blocks" in name}
    for chosen in ({"full_state_dict": True}, {}):
        model = wrap("fsdp_c", "mlp", seed=1, use_orig_params=use_orig_params)
        before = get_model_state_dict(model, options=FULL)
        values: dict[str, Any] = dict(part)
        if not chosen:
            first, _ = trained("fsdp_c", "mlp", use_orig_params=use_orig_params)
            sharded = get_model_state_dict(first)
            values = {name: sharded[name] for name in part}
        loose = StateDictOptions(**chosen, strict=False)
        set_model_state_dict(model, dict(values), options=loose)
        now = get_model_state_dict(model, options=FULL)
        for name, value in now.items():
            expected = params[name] if name in part else before[name]
            assert_same(name, value, expected)
        model = wrap("fsdp_c", "mlp", seed=1, use_orig_params=use_orig_params)
        extra = {**values, "blocks.0.none": next(iter(values.values()))}
        with pytest.raises(RuntimeError, match=r"blocks\.0\.none"):
            set_model_state_dict(model, extra, options=StateDictOptions(**chosen))


# The recipe of PyTorch's tutorial --------------------------------------------------


class AppState(Stateful):
    """Model and optimizer as one object that dcp.save() and dcp.load() take."""

    def __init__(self, model: nn.Module, optim: torch.optim.Optimizer) -> None:
        self.model, self.optim = model, optim

    def state_dict(self) -> dict[str, Any]:
        params, state = get_state_dict(self.model, self.optim)
        return {"model": params, "optim": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optim,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


@pytest.mark.parametrize("saver", ["fsdp_c", "torch"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu")
def test_stateful(use_orig_params: bool, saver: str) -> None:
    """A checkpoint of either class resumes here, with the other use_orig_params too."""
    name = "mlp"
    first = trained(saver, name, use_orig_params=use_orig_params)
    with shared_folder() as path:
        dcp.save({"app": AppState(*first)}, checkpoint_id=path)
        loaded = []
        for use_orig in (use_orig_params, not use_orig_params):
            loaded.append(fresh("fsdp_c", name, use_orig_params=use_orig))
            dcp.load({"app": AppState(*loaded[-1])}, checkpoint_id=path)
    train(saver, name, *first, range(STEPS, STEPS + 2))
    expected = get_state_dict(*first, options=FULL)
    for each in loaded:
        train("fsdp_c", name, *each, range(STEPS, STEPS + 2))
        assert_same_state(get_state_dict(*each, options=FULL), expected, 2e-5)


@distributed(world_size=2, device="cpu")
def test_inside_another_module() -> None:
    """The wrapped module is a child, and DDP's prefix goes, as for a plain model."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.head = nn.Linear(3, 3)

    outer = Outer(wrap("fsdp_c", "mlp", use_orig_params=False))
    state = get_model_state_dict(outer, options=FULL)
    expected = Outer(build("mlp")).state_dict()
    assert state.keys() == expected.keys()
    optim = torch.optim.AdamW(outer.parameters())
    found = get_optimizer_state_dict(outer, optim, options=FULL)
    assert found["state"].keys() <= expected.keys()
    assert DistributedDataParallel(Outer(build("mlp")))
