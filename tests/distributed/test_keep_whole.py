"""keep_whole(): whole parameters, rows and blocks, against the unsharded model."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_c import checkpoint, explain, fully_shard, keep_whole
from fsdp_c._whole import owned
from fsdp_c.checkpoint._holders import checked_layout
from fsdp_c.checkpoint._manifest import MANIFEST, parse_manifest
from fsdp_c.tools.plan import ModelSource, PlanError, plan_model
from helpers.distributed import TEST_DEVICE, distributed
from helpers.groups import first_ranks, hybrid_groups, kept_mesh
from helpers.impl import FSDP, CPUOffload, MixedPrecision, ShardingStrategy, fsdp
from helpers.matrix_optimizers import BlockwiseAdam, Shampoo, TensorNorm
from helpers.models import CASES
from helpers.reference import Differential, assert_same_tensors, full_state_dict
from helpers.seeds import seeded
from helpers.state_dicts import (
    FULL,
    LOCAL,
    SHARDED,
    Everything,
    everything,
    load,
    save,
    whole_state,
    wrap_everything,
)
from helpers.whole_runs import Run, build, is_hidden, shard, wholes_of

ANY_PADDING = 1e9


def rows(_name: str, shape: torch.Size) -> int:
    return shape[1:].numel() if len(shape) > 1 else 0


def matrices(_name: str, shape: torch.Size) -> bool:
    return len(shape) > 1


def fives(_name: str, _shape: torch.Size) -> int:
    return 5


KEPT: dict[str, Callable[[str, torch.Size], int]] = {
    "rows": rows,
    "matrices": matrices,
    "fives": fives,
}


def wrap(case: str, kept: str, module: nn.Module, **kwargs: Any) -> Any:
    """Keep, and wrap with the case's units."""
    keep_whole(module, KEPT[kept], max_padding=ANY_PADDING)
    return fsdp(module, units=CASES[case].unit_classes, **kwargs)


def check_blocks(model: nn.Module, choose: Callable[[str, torch.Size], int]) -> int:
    """Fail if two ranks share a block; return how many parameters have several."""
    num_cut = 0
    for module in FSDP.fsdp_modules(model):
        for use in module._sharded.uses:
            chosen = choose(use.fqn, use.shape)
            numel = use.shape.numel() if chosen is True else int(chosen)
            parts = [p for p in module._sharded.unit.parts(use.slot) if p[1] > p[0]]
            num_cut += len(parts) > 1
            for begin, _ in parts if numel > 0 else ():
                assert begin % numel == 0, (use.fqn, parts)
    return num_cut


def has_blocks_apart(model: nn.Module) -> bool:
    """Whether a unit has several segments of the same dtype."""
    kinds = [
        [segment[:2] for segment in module._sharded.unit.segments]
        for module in FSDP.fsdp_modules(model)
    ]
    return any(len(set(each)) < len(each) for each in kinds)


# Training ----------------------------------------------------------------------------


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=(2, 3, 4))
def test_training_is_that_of_the_unsharded_model(
    kept: str, use_orig_params: bool
) -> None:
    for case in ("transformer", "tied", "frozen"):
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
            run = Differential.of_case(
                CASES[case],
                lambda module, case=case, strategy=strategy: wrap(
                    case,
                    kept,
                    module,
                    strategy=strategy,
                    use_orig_params=use_orig_params,
                ),
                use_orig_params=use_orig_params,
            )
            num_cut = check_blocks(run.model, KEPT[kept])
            assert num_cut > 0 or kept == "matrices"
            assert (kept, case) != ("rows", "tied") or has_blocks_apart(run.model)
            run.train(3)


@pytest.mark.parametrize("kept", KEPT)
@distributed(world_size=(2, 3))
def test_mixed_precision_and_offload(kept: str) -> None:
    """Parameters are aligned as in other layouts."""
    options: list[dict[str, Any]] = [
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
        {"cpu_offload": CPUOffload(offload_params=True)},
    ]
    for kwargs in options:
        precision = kwargs.get("mixed_precision")
        run = Differential.of_case(
            CASES["transformer"],
            lambda module, kwargs=kwargs: wrap(
                "transformer", kept, module, use_orig_params=True, **kwargs
            ),
            use_orig_params=True,
            param_dtype=precision and precision.param_dtype,
        )
        check_blocks(run.model, KEPT[kept])
        run.train(2)


@distributed(world_size=4)
def test_replicas() -> None:
    with hybrid_groups(2, 2) as groups:
        run = Differential.of_case(
            CASES["transformer"],
            lambda module: wrap(
                "transformer",
                "matrices",
                module,
                strategy="HYBRID_SHARD",
                process_group=groups,
                use_orig_params=True,
            ),
            use_orig_params=True,
        )
        run.train(2)
        del run


@distributed(world_size=2)
def test_a_copy_and_a_converted_model_keep_the_same() -> None:
    """As does one whose parameters were made anew before."""
    with torch.device("meta"):
        module = CASES["transformer"].build()
    keep_whole(module, rows, max_padding=ANY_PADDING)
    module.to_empty(device=TEST_DEVICE)
    for param in module.parameters():
        nn.init.normal_(param)
    model = fsdp(module, units=CASES["transformer"].unit_classes, use_orig_params=True)
    expected = full_state_dict(model)
    assert check_blocks(model, rows) > 0
    for other in (copy.deepcopy(model), model.double()):
        assert check_blocks(other, rows) > 0
        state = full_state_dict(other)
        for name, value in expected.items():
            assert torch.equal(state[name].float(), value), name


# State dicts -------------------------------------------------------------------------


def _everything(seed: int, kept: str | None, **kwargs: Any) -> tuple[Any, Any]:
    if kept is None:
        return everything(seed, **kwargs)
    reference = Everything(seed)
    module = copy.deepcopy(reference)
    keep_whole(module, KEPT[kept], max_padding=ANY_PADDING)
    return reference, wrap_everything(module, **kwargs)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=(2, 3))
def test_state_dicts_fit_any_layout(use_orig_params: bool) -> None:
    for before, after in ((None, "matrices"), ("matrices", "rows"), ("fives", None)):
        reference, one = _everything(1, before, use_orig_params=use_orig_params)
        _, other = _everything(2, after, use_orig_params=use_orig_params)
        for kind in (FULL, SHARDED):
            state = save(one, kind)
            assert_same_tensors(
                "saved", whole_state(state), reference.state_dict(), 0.0
            )
            load(other, kind, state)
            assert_same_tensors(
                "loaded", full_state_dict(other), reference.state_dict(), 0.0
            )


@distributed(world_size=2)
def test_local_state_dicts_are_refused() -> None:
    """Their elements have no names: in another order they would be wrong."""
    _, plain = everything(use_orig_params=True)
    _, kept = _everything(1, "matrices", use_orig_params=True)
    with pytest.raises(ValueError, match="use SHARDED_STATE_DICT"):
        save(kept, LOCAL)
    state = save(plain, LOCAL)
    with pytest.raises(Exception, match="use SHARDED_STATE_DICT"):
        load(kept, LOCAL, state)


@distributed(world_size=2)
def test_local_optimizer_states_of_another_order_are_refused(rank: int) -> None:
    """Ranks hold the same elements, rank 1 two parameters in another order."""

    def make(whole: str) -> tuple[Any, Any]:
        layers = [nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)]
        module = nn.Sequential(*layers, nn.Linear(4, 2, bias=False))
        keep_whole(module, lambda name, _: True if name in (whole, "2.weight") else 2)
        model = fsdp(module, use_orig_params=False)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    saved = []
    places = []
    for whole in ("0.weight", "1.weight", "0.weight"):
        model, optim = make(whole)
        with FSDP.state_dict_type(model, LOCAL):
            saved.append(FSDP.optim_state_dict(model, optim))
            places.append([slot[1] for slot in model._sharded.unit.slots])
            if whole == "1.weight" and rank == 1:
                with pytest.raises(ValueError, match=r"at \d+ of its shard"):
                    FSDP.optim_state_dict_to_load(model, optim, saved[0])
    assert places[0] == places[2] != places[1]
    with FSDP.state_dict_type(model, LOCAL):
        FSDP.optim_state_dict_to_load(model, optim, saved[0])


def _trained(kept: str | None, group: Any = None) -> tuple[Any, Any]:
    case = CASES["transformer"]
    torch.manual_seed(5)
    module = case.build()
    if kept is not None:
        keep_whole(module, KEPT[kept], max_padding=ANY_PADDING)
    model = fsdp(
        module, units=case.unit_classes, use_orig_params=True, process_group=group
    )
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        optim.zero_grad()
        model(*case.inputs(seeded(step))).square().mean().backward()
        optim.step()
    return model, optim


@pytest.mark.parametrize(
    ("before", "after"), [(None, "matrices"), ("matrices", None), ("rows", "fives")]
)
@distributed(world_size=3)
def test_checkpoints_fit_any_layout(
    tmp_path: Path, before: str | None, after: str | None
) -> None:
    """Of another layout on another number of ranks: values and optimizer states."""
    model, optim = _trained(before)
    checkpoint.save(tmp_path / "saved", model, optim)
    expected = full_state_dict(model)
    states = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    with first_ranks(2) as two:
        for group in (dist.group.WORLD, two) if two else (dist.group.WORLD,):
            other, its_optim = _trained(after, group)
            for param in other.parameters():
                param.data.zero_()
            checkpoint.load(tmp_path / "saved", other, its_optim, process_group=group)
            assert_same_tensors("loaded", full_state_dict(other), expected, 0.0)
            found = FSDP.full_optim_state_dict(other, its_optim, rank0_only=False)
            for name, state in states["state"].items():
                for key, value in state.items():
                    assert torch.equal(found["state"][name][key], value), (name, key)
        del other, its_optim


@distributed(world_size=2)
def test_a_checkpoint_is_checked(rank: int, tmp_path: Path) -> None:
    """Where parameters lie is in the manifest; another layout loads it."""
    model, optim = _trained("matrices")
    checkpoint.save(tmp_path / "saved", model, optim)
    if rank == 0:
        checkpoint.verify(tmp_path / "saved")
    expected = full_state_dict(model)
    other, its_optim = _trained("rows")
    checkpoint.load(tmp_path / "saved", other, its_optim)
    assert_same_tensors("loaded", full_state_dict(other), expected, 0.0)
    manifest = parse_manifest((tmp_path / "saved" / MANIFEST).read_bytes())
    unit = next(each for each in manifest.units if each.is_placed)
    moved = replace(unit.params[0], offset=unit.params[0].offset + 1)
    with pytest.raises(ValueError, match="cannot lie at offset"):
        checked_layout(replace(unit, params=(moved, *unit.params[1:])))


# Optimizers --------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Shampoo, TensorNorm])
@distributed(world_size=(2, 3, 4))
def test_what_lies_whole_does_not_travel(make: Any) -> None:
    """Its owner steps a view of the shard, or a copy if that is not aligned."""

    def exchange(*_: Any) -> None:
        raise AssertionError("something travels")

    run = Run("FSDP", make, matrices, keep=matrices)
    memory = {
        shard.untyped_storage().data_ptr()
        for module in FSDP.fsdp_modules(run.model)
        for shard in module._sharded.unit.shards
    }
    seen = num_views = 0
    step = run.optimizer.optimizer.step

    def watched() -> None:
        nonlocal seen, num_views
        for param in run.optimizer.optimizer.param_groups[0]["params"]:
            is_view = param.untyped_storage().data_ptr() in memory
            num_views += is_view
            assert param.data_ptr() % owned.ALIGNMENT_NBYTES == 0
            seen += param.numel()
        step()

    run.optimizer.optimizer.step = watched  # type: ignore[method-assign]
    run.plain_optimizers = [make([p for p in run.plain.parameters() if p.dim() > 1])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owned, "exchange_in", exchange)
        run.train(2)
    total = torch.tensor([seen, num_views])
    dist.all_reduce(total)
    numel = sum(p.numel() for p in run.plain.parameters() if p.dim() > 1)
    assert total[0] == 2 * numel
    assert total[1] > 0
    owners = run.optimizer.owners
    for name, param in run.model.named_parameters():
        if param.numel() > 0 and name.endswith("weight") and "norm" not in name:
            clean = name.replace("_fsdp_wrapped_module.", "")
            assert owners[clean] == dist.get_rank()


@distributed(world_size=3)
def test_some_travel_and_some_do_not() -> None:
    """The owners of the others are chosen around those that are fixed."""

    def keep(name: str, shape: torch.Size) -> bool:
        return is_hidden(name, shape) and ".0." in name

    run = Run("FSDP", TensorNorm, keep=keep)
    run.train(3)
    assert {each.travels for each in run.optimizer._dealt.wholes} == {True, False}
    state = run.optimizer.state_dict()
    run.optimizer.load_state_dict(state)
    run.train(2, first=3)


@distributed(world_size=4)
def test_wholes_on_replicas() -> None:
    """Both replicas step some of what they have, and pass it on."""
    with hybrid_groups(2, 2) as groups:
        run = Run(
            "FSDP",
            TensorNorm,
            keep=matrices,
            process_group=groups,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        )
        run.train(3)
        assert set(run.optimizer.owners.values()) == {0, 1, 2, 3}
        del run


@distributed(world_size=(2, 3, 4))
def test_blockwise_state_is_that_of_the_unsharded_optimizer() -> None:
    """To the bit, with a plain optimizer over the parts; without blocks it is not."""
    for keep in (lambda _name, _shape: 256, None):

        def make() -> nn.Module:
            torch.manual_seed(3)
            layers = [nn.Linear(24, 50), nn.Tanh(), nn.Linear(50, 24), nn.Tanh()]
            return nn.Sequential(*layers, nn.Linear(24, 70)).to(TEST_DEVICE)

        plain, module = make(), make()
        if keep is not None:
            keep_whole(module, keep, max_padding=0.5)
        model = fsdp(module, use_orig_params=True)
        optimizers = [BlockwiseAdam(each.parameters()) for each in (plain, model)]
        for number in range(4):
            batch = torch.randn(8, 24, generator=seeded(number)).to(TEST_DEVICE)
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                optimizer.zero_grad()
                each(batch).square().mean().backward()
            grads = wholes_of(model, grads=True)
            for name, param in plain.named_parameters():
                param.grad = grads[name]
            for optimizer in optimizers:
                optimizer.step()
        values = wholes_of(model)
        is_equal = all(torch.equal(values[n], p) for n, p in plain.named_parameters())
        assert is_equal == (keep is not None)


# Padding, and what is refused ---------------------------------------------------------


@distributed(world_size=3)
def test_padding_is_told_and_limited() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(3, 4))
    keep_whole(model, matrices)
    with pytest.raises(
        ValueError, match=r"pads 116 elements by 184 on 3 ranks"
    ) as info:
        fsdp(model)
    for text in (
        "on 3 ranks, which is 158.6%",
        "max_padding is 5.0%",
        "'0.weight' and has 100 elements",
    ):
        assert text in str(info.value)
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(3, 4))
    keep_whole(model, matrices, max_padding=2)
    (unit,) = explain(fsdp(model)).units
    assert unit.padding_numel == 184
    assert unit.shard_nbytes == 400


def test_a_plan_counts_padding() -> None:
    """A whole matrix of 36 elements on 4 ranks, in shards of as many; the rest fits."""
    max_padding = 3.0

    def make_kept(_batch: int, _sequence: int) -> tuple[nn.Module, None]:
        model = nn.Linear(6, 6)
        keep_whole(model, matrices, max_padding=max_padding)
        return model, None

    source = ModelSource("kept", make_kept)
    assert plan_model(source, [4]).ranks[0].shard_nbytes == 36 * 4
    max_padding = 0.5
    with pytest.raises(PlanError, match="pads 42 elements by 102 on 4 ranks"):
        plan_model(source, [4])


@distributed(world_size=2)
def test_fully_shard_keeps_rows_only() -> None:
    keeps: list[tuple[Callable[[str, torch.Size], int], bool]] = [
        (matrices, False),
        (lambda _n, shape: shape[-1] // 2 if shape[1:] == (12,) else 0, True),
        (lambda _n, _s: 5, False),
        (rows, True),
    ]
    for keep, is_taken in keeps:
        model = build()
        keep_whole(model, keep)
        if is_taken:
            shard("fully_shard", model)
            continue
        with pytest.raises(ValueError, match="whole_parameter_optimizer"):
            fully_shard(model)


@distributed(world_size=4)
def test_tensor_parallel_parameters_are_refused() -> None:
    mesh = kept_mesh((2, 2), ("dp", "tp"))
    model = parallelize_module(
        nn.Sequential(nn.Linear(4, 6)), mesh["tp"], {"0": ColwiseParallel()}
    )
    keep_whole(model, matrices, max_padding=ANY_PADDING)
    with pytest.raises(ValueError, match=r"'0\.weight' is a tensor parallel DTensor"):
        fsdp(model, device_mesh=mesh["dp"], use_orig_params=True)


def test_wrong_arguments() -> None:
    model = nn.Linear(3, 4)
    with pytest.raises(TypeError, match="model must be a module, got int"):
        keep_whole(3, matrices)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got 2\.5 for parameter 'weight'"):
        keep_whole(model, lambda _n, _s: 2.5)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="returned -1 for parameter 'weight'"):
        keep_whole(model, lambda _n, _s: -1)
    with pytest.raises(ValueError, match="chose no parameter"):
        keep_whole(model, lambda _n, _s: None)
    with pytest.raises(ValueError, match="max_padding is -1, need >= 0"):
        keep_whole(model, matrices, max_padding=-1)


@distributed(world_size=2)
def test_a_sharded_model_is_refused() -> None:
    model = fsdp(nn.Linear(3, 4))
    with pytest.raises(ValueError, match="call keep_whole"):
        keep_whole(model, matrices)


@distributed(world_size=2)
def test_the_last_call_decides() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(3, 4))
    keep_whole(model, matrices)
    keep_whole(model, rows, max_padding=ANY_PADDING)
    wrapped = fsdp(model, units={nn.Linear}, use_orig_params=True)
    assert check_blocks(wrapped, rows) > 0
