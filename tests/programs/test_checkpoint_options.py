"""torch.distributed.checkpoint.state_dict: strategies, several optimizers.

test_checkpoint_state_dict.py has each option on its own; here they meet, beside torch's
FSDP1 and the unsharded model.
"""

import copy
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
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

from helpers.distributed import distributed, run_task
from helpers.groups import kept_mesh
from helpers.impl import ShardingStrategy, fsdp
from helpers.reference import assert_same_tensors
from programs.test_checkpoint_state_dict import (
    FULL,
    STEPS,
    AppState,
    assert_alike,
    assert_same_state,
    by_name,
    flatten,
    fresh,
    train,
    trained,
    wrap,
)


def settings(strategy: str, **kwargs: Any) -> dict[str, Any]:
    kwargs["sharding_strategy"] = ShardingStrategy[strategy]
    if "HYBRID" in strategy:
        kwargs["device_mesh"] = kept_mesh((2, 2), ("replica", "shard"))
    return kwargs


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("name", ["tied", "unused", "called_twice"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=4, device="cpu", timeout_s=120)
def test_strategies(name: str, strategy: str, use_orig_params: bool) -> None:
    """Got as from FSDP1, and set into another model, in each form."""
    kwargs = settings(strategy, use_orig_params=use_orig_params)
    ours, theirs = trained("fsdp_c", name, **kwargs), trained("torch", name, **kwargs)
    for chosen in ({}, {"full_state_dict": True}):
        # A parameter without state, flattened: FSDP1's own set_state_dict() fails.
        for flattened in (False,) if name == "unused" else (False, True):
            options = StateDictOptions(
                **chosen,
                flatten_optimizer_state_dict=flattened,
                strict=name != "unused",  # torch wants a state of each parameter
            )
            mine = get_state_dict(*ours, options=options)
            torchs = get_state_dict(*theirs, options=options)
            assert_alike(mine[0], torchs[0])
            # FSDP1's optimizer state is sharded with flat parameters only, ours always.
            is_plain = use_orig_params and strategy == "NO_SHARD"
            assert_alike(
                by_name(mine[1]), by_name(torchs[1]), is_same_form=not is_plain
            )
            for given in (mine, torchs):
                model, optim = fresh("fsdp_c", name, **kwargs)
                set_state_dict(
                    model,
                    optim,
                    model_state_dict=copy.copy(given[0]),
                    optim_state_dict=given[1],
                    options=options,
                )
                expected = get_state_dict(*ours, options=FULL)
                actual = get_state_dict(model, optim, options=FULL)
                if given is mine:
                    assert_same_state(actual, expected)
                else:
                    assert_alike(actual[0], expected[0])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=4, device="cpu", timeout_s=120)
def test_broadcast(rank: int, strategy: str, use_orig_params: bool) -> None:
    """From rank 0, also over replicas and with parts that no checkpoint has."""
    kwargs = settings(strategy, use_orig_params=use_orig_params)
    # FSDP1's flat parameters have one state for all of their parts, and under torch's
    # broadcast all ranks but the first miss the second name of a tied parameter.
    names = ("tied", "unused") if use_orig_params else ("called_twice",)
    for name in names:
        given = get_state_dict(*trained("plain", name), options=FULL)
        expected = copy.deepcopy(given)
        model, optim = fresh("fsdp_c", name, rank, **kwargs)
        options = StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True, strict=name != "unused"
        )
        # Not set_state_dict(): ranks without a state dict skip the model there.
        params, state = given if rank == 0 else ({}, {})
        set_model_state_dict(model, params, options=options)
        set_optimizer_state_dict(model, optim, state, options=options)
        actual = get_state_dict(model, optim, options=FULL)
        assert_same_state(actual, expected, what=name)


def two_optimizers(model: nn.Module) -> list[Any]:
    """One steps the blocks, the other the rest, with options of their own."""
    blocks = [p for n, p in model.named_parameters() if "blocks" in n]
    rest = [p for n, p in model.named_parameters() if "blocks" not in n]
    return [
        torch.optim.AdamW(blocks, lr=1e-2, amsgrad=True),
        torch.optim.SGD(rest, lr=1e-2, momentum=0.9),
    ]


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("flattened", [False, True])
@distributed(world_size=2, device="cpu", timeout_s=120)
def test_several_optimizers(use_orig_params: bool, full: bool, flattened: bool) -> None:
    """A list of optimizers has one state dict, which sets all of them."""

    class Both:
        def __init__(self, optims: list[Any]) -> None:
            self.optims = optims

        def step(self) -> None:
            for each in self.optims:
                each.step()

        def zero_grad(self) -> None:
            for each in self.optims:
                each.zero_grad()

    models = {}
    for impl in ("fsdp_c", "torch", "plain"):
        kwargs = {} if impl == "plain" else {"use_orig_params": use_orig_params}
        model = wrap(impl, "mlp", **kwargs)
        optims = two_optimizers(model)
        train(impl, "mlp", model, Both(optims))
        models[impl] = model, optims
    options = StateDictOptions(
        full_state_dict=full, flatten_optimizer_state_dict=flattened
    )
    got = {k: get_state_dict(*v, options=options) for k, v in models.items()}
    assert_alike(got["fsdp_c"][0], got["torch"][0])
    assert_alike(by_name(got["fsdp_c"][1]), by_name(got["torch"][1]))
    assert_alike(
        by_name(got["fsdp_c"][1]), by_name(got["plain"][1]), is_same_form=False
    )
    for source in ("fsdp_c", "torch"):
        model = wrap("fsdp_c", "mlp", seed=1, use_orig_params=use_orig_params)
        optims = two_optimizers(model)
        set_state_dict(
            model,
            optims,
            model_state_dict=copy.copy(got[source][0]),
            optim_state_dict=got[source][1],
            options=options,
        )
        now = get_state_dict(model, optims, options=options)
        assert_alike(now[0], got[source][0])
        assert_alike(by_name(now[1]), by_name(got[source][1]))


@distributed(world_size=2, device="cpu")
def test_flat_states_that_are_missing() -> None:
    """The states of one parameter: an error, or with ``strict=False`` none."""
    strict = StateDictOptions(flatten_optimizer_state_dict=True)
    loose = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)
    given = trained("fsdp_c", "mlp", use_orig_params=True)
    state = get_optimizer_state_dict(*given, options=strict)
    name = "blocks.0.fc1.weight"
    lost = [key for key in state if key.startswith(f"state.{name}.")]
    assert len(lost) == 3
    for key in lost:
        del state[key]
    model, optim = fresh("fsdp_c", "mlp", use_orig_params=True)
    with pytest.raises(RuntimeError, match=f"Missing optimizer state .*'{name}'"):
        set_optimizer_state_dict(model, optim, dict(state), options=strict)
    set_optimizer_state_dict(model, optim, dict(state), options=loose)
    now = get_optimizer_state_dict(model, optim, options=loose)
    assert sorted(now) == sorted(state)
    train("fsdp_c", "mlp", model, optim)  # and it can be stepped


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu")
def test_flat_states_of_a_stateless_optimizer(use_orig_params: bool) -> None:
    """There are none, as in the optimizer that was saved."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model = wrap("fsdp_c", "mlp", use_orig_params=use_orig_params)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    train("fsdp_c", "mlp", model, optim)
    state = get_optimizer_state_dict(model, optim, options=options)
    loaded = torch.optim.SGD(model.parameters(), lr=0.2)
    set_optimizer_state_dict(model, loaded, state, options=options)
    assert optim.state_dict()["state"] == loaded.state_dict()["state"] == {}
    assert loaded.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu")
def test_a_part_of_a_unit(use_orig_params: bool) -> None:
    """`submodules` that are units, plain modules in a unit, or several of them."""
    found = []
    for impl in ("fsdp_c", "torch"):
        model, _ = trained(impl, "mlp", use_orig_params=use_orig_params)
        inner = model.module
        of_impl = []
        for chosen in ({inner.inp}, {inner.blocks[0], inner.blocks[1]}, {inner.blocks}):
            for options in (FULL, StateDictOptions()):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    of_impl.append(
                        get_model_state_dict(model, submodules=chosen, options=options)
                    )
        found.append(of_impl)
    for mine, torchs in zip(*found, strict=True):
        assert mine
        assert_alike(mine, torchs)


@pytest.mark.parametrize("name", ["frozen", "frozen_units"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu")
def test_ignored_frozen_params(rank: int, name: str, use_orig_params: bool) -> None:
    """Left out as of the unsharded model, also where rank 0 alone gets anything.

    There torch's FSDP1 raises KeyError on the other ranks.
    """
    ours = trained("fsdp_c", name, use_orig_params=use_orig_params)
    plain = trained("plain", name)
    kept = {n for n, param in plain[0].named_parameters() if param.requires_grad}
    expected = get_state_dict(*plain, options=FULL)
    for full, offloads in itertools.product((True, False), repeat=2):
        options = StateDictOptions(
            full_state_dict=full, cpu_offload=offloads, ignore_frozen_params=True
        )
        params, state = get_state_dict(*ours, options=options)
        alone = get_model_state_dict(ours[0], options=options)
        assert alone.keys() == params.keys()
        if full and offloads and rank != 0:
            assert params == {}
            assert flatten(state) == {}
            continue
        assert params.keys() == kept
        assert state["state"].keys() == expected[1]["state"].keys()
        if full:
            part = {key: expected[0][key] for key in kept}
            assert_same_state((params, state), (part, expected[1]), 2e-5)


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@distributed(world_size=2, device="cpu")
def test_loading_only_what_is_trained(
    strategy: str, use_orig_params: bool, is_plain: bool
) -> None:
    """The frozen parameters stay, as with torch's FSDP1; others may not be missing."""
    model, _ = trained(
        "fsdp_c",
        "frozen",
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
    )
    if not is_plain:  # the units are gathered for it
        for module in model.modules():
            module.register_load_state_dict_pre_hook(lambda *_: None)
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    expected = get_model_state_dict(model, options=FULL)
    params = get_model_state_dict(model, options=options)
    assert len(params) < len(expected)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.zero_()
    result = set_model_state_dict(model, dict(params), options=options)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_same_tensors("loaded", get_model_state_dict(model, options=FULL), expected)
    if strategy == "NO_SHARD" and use_orig_params:
        return  # torch adds what is registered, here the whole parameter
    absent = next(iter(params))
    del params[absent]
    with pytest.raises(RuntimeError, match=f"Missing key.*{absent}"):
        set_model_state_dict(model, params, options=options)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu")
def test_sharded_optimizer_state_of_no_shard(use_orig_params: bool) -> None:
    """In rows, each rank's own copies. FSDP1's depends on use_orig_params.

    With it, the optimizer's own tensors are in the dictionary, whole: the next step
    changes them.
    """
    kwargs = {
        "use_orig_params": use_orig_params,
        "sharding_strategy": ShardingStrategy.NO_SHARD,
    }
    plain = trained("plain", "mlp")
    expected = get_state_dict(*plain, options=FULL)[1]["state"]
    models = {impl: trained(impl, "mlp", **kwargs) for impl in ("fsdp_c", "torch")}
    got = {impl: get_state_dict(*each)[1] for impl, each in models.items()}
    for impl, (_, optim) in models.items():
        live = {
            value.untyped_storage().data_ptr()
            for state in optim.state.values()
            for value in state.values()
        }
        for name, state in got[impl]["state"].items():
            for key, value in state.items():
                is_rows = key != "step" and (impl == "fsdp_c" or not use_orig_params)
                assert isinstance(value, ShardedTensor) == is_rows, (impl, name, key)
                if not is_rows and key != "step":
                    assert value.untyped_storage().data_ptr() in live
                if is_rows:
                    (shard,) = value.local_shards()
                    assert shard.tensor.untyped_storage().data_ptr() not in live
    for source, target in itertools.product(models, models):
        model, optim = fresh(target, "mlp", **kwargs)
        set_optimizer_state_dict(model, optim, got[source])
        state = get_state_dict(model, optim, options=FULL)[1]["state"]
        assert state.keys() == expected.keys()
        for name, each in expected.items():
            assert_same_tensors(f"{source} {target} {name}", state[name], each)


class Renamed(nn.Module):
    """Its state dict has `weight` in the place of `inner.weight`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6, bias=False)
        self.register_state_dict_post_hook(self._shorten)
        self.register_load_state_dict_pre_hook(self._lengthen)

    @staticmethod
    def _shorten(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}inner.weight")

    @staticmethod
    def _lengthen(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        state[f"{prefix}inner.weight"] = state.pop(f"{prefix}weight")

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "inner"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2, device="cpu")
def test_renamed_keys(use_orig_params: bool) -> None:
    """`dsd_fqn_modifiers`, of a module inside a unit. FSDP1 cannot save it.

    Sharded tensors under such keys are saved, and refused when they are loaded.
    """

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(Renamed(), nn.Linear(6, 2))

    expected = get_model_state_dict(build(0), options=FULL)
    assert "0.weight" in expected
    first, second = (
        fsdp(build(seed), use_orig_params=use_orig_params) for seed in (0, 1)
    )
    sharded = get_model_state_dict(first)
    assert sharded.keys() == expected.keys()
    with pytest.raises(RuntimeError, match=r"0\.inner\.weight"):
        set_model_state_dict(second, sharded)
    state = get_model_state_dict(first, options=FULL)
    set_model_state_dict(second, state, options=FULL)
    now = get_model_state_dict(second, options=FULL)
    assert_same_tensors("parameters", dict(now), expected, 0.0)


# On another number of ranks ------------------------------------------------------

OFFLOADED = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(
    full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True
)
SAVED = {
    "sharded": StateDictOptions(),
    "offloaded": StateDictOptions(cpu_offload=True),
    "full": FULL,
    "full_offloaded": OFFLOADED,
}


class Recipe(AppState):
    """PyTorch's recipe, with options.

    Not set_state_dict(): of a dictionary that is empty, on other ranks than the first,
    it skips the model, and so the broadcast.
    """

    def __init__(self, model: nn.Module, optim: Any, options: StateDictOptions) -> None:
        super().__init__(model, optim)
        self.options = options

    def state_dict(self) -> dict[str, Any]:
        params, state = get_state_dict(self.model, self.optim, options=self.options)
        return {"model": params, "optim": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state_dict["model"], options=self.options)
        set_optimizer_state_dict(
            self.model, self.optim, state_dict["optim"], options=self.options
        )


def _save(folder: Path, saver: str, use_orig_params: bool) -> None:
    """Save what ``saver`` has trained, in each form, and the unsharded model."""
    first = trained(saver, "mlp", use_orig_params=use_orig_params)
    for form, options in SAVED.items():
        if saver == "torch" and options.cpu_offload:
            continue  # its states share memory then, on the CPU
        dcp.save({"app": Recipe(*first, options)}, checkpoint_id=folder / form)
    model, optim = trained("plain", "mlp")
    if dist.get_rank() == 0:
        torch.save((model.state_dict(), optim.state_dict()), folder / "plain.pt")


def _resume(folder: Path, use_orig_params: bool) -> None:
    """Train on from each form, as the unsharded model does."""
    params, state = torch.load(folder / "plain.pt")
    plain, plain_optim = fresh("plain", "mlp")
    plain.load_state_dict(params)
    plain_optim.load_state_dict(state)
    before = copy.deepcopy(get_state_dict(plain, plain_optim, options=FULL))
    rest = range(STEPS, STEPS + 2)
    train("plain", "mlp", plain, plain_optim, rest)
    after = get_state_dict(plain, plain_optim, options=FULL)
    forms = {form: each for form, each in SAVED.items() if (folder / form).exists()}
    assert len(forms) in (2, 4)
    for form, own in forms.items():
        # A full state that only rank 0 has goes to the others.
        options = FROM_RANK_0 if form == "full_offloaded" else own
        model, optim = fresh("fsdp_c", "mlp", use_orig_params=use_orig_params)
        dcp.load({"app": Recipe(model, optim, options)}, checkpoint_id=folder / form)
        for expected in (before, after):
            actual = get_state_dict(model, optim, options=FULL)
            assert_same_state(actual, expected, 2e-5, form)
            if expected is before:
                train("fsdp_c", "mlp", model, optim, rest)


@pytest.mark.parametrize("saver", ["fsdp_c", "torch"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 3), (3, 2)])
def test_stateful_on_other_ranks(
    tmp_path: Path, saved_on: int, loaded_on: int, use_orig_params: bool, saver: str
) -> None:
    """Saved and loaded by the recipe: sharded, full, in host memory, from rank 0."""
    given = {"folder": tmp_path, "use_orig_params": use_orig_params}
    run_task(_save, saved_on, {**given, "saver": saver}, device="cpu")
    run_task(_resume, loaded_on, given, device="cpu")
