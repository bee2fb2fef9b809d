"""Accelerator: loops of one's own, its checkpoints, and models wrapped before it."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp_c
from fsdp_c import FullyShardedDataParallel as FSDP
from fsdp_c import ShardingStrategy
from helpers.distributed import distributed
from helpers.groups import groups_destroyed
from helpers.hf_models import build, clean, data
from helpers.hf_process import ON_CPU, launched
from helpers.hf_training import WORLD, cases, whole_weights
from helpers.shared_folder import shared_folder

TIMEOUT_S = 300
KINDS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
BATCH = 2
CLIP = 0.5
RATE = 2e-3


def _plugin(**options: Any) -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    options.setdefault("auto_wrap_policy", "transformer_based_wrap")
    options.setdefault("fsdp_version", 1)
    if options["fsdp_version"] == 1:
        options.setdefault("use_orig_params", True)
    return FullyShardedDataParallelPlugin(**options)


def _accelerator(*, accumulate: int = 1, **options: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(
        cpu=ON_CPU,
        fsdp_plugin=_plugin(**options),
        gradient_accumulation_steps=accumulate,
    )


def _loader(name: str, num_batches: int, batch: int) -> Any:
    from transformers import default_data_collator

    return torch.utils.data.DataLoader(
        data(name, num_batches * batch),  # type: ignore[arg-type]
        batch_size=batch,
        collate_fn=default_data_collator,
    )


class _Loop:
    """A model, its optimizer and scheduler, prepared by an accelerator."""

    def __init__(self, accelerator: Any, model: nn.Module) -> None:
        self.accelerator = accelerator
        self.model: Any = model
        if not accelerator.is_fsdp2:
            self.model = accelerator.prepare(model)
            assert type(self.model) is FSDP, type(self.model)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1 / (1 + step)
        )
        if accelerator.is_fsdp2:  # wants the model and its optimizer together
            self.model, self.optimizer = accelerator.prepare(model, optimizer)
            assert isinstance(self.model, fsdp_c.FSDPModule), type(self.model)
        else:
            self.optimizer = accelerator.prepare(optimizer)
        self.scheduler = accelerator.prepare(scheduler)

    def run(self, loader: Any) -> list[tuple[float, float]]:
        """Train on all batches; return loss and gradient norm of each step."""
        accelerator = self.accelerator
        loader = accelerator.prepare(loader)
        log, losses = [], []
        for batch in loader:
            with accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                accelerator.backward(loss)
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                    log.append((sum(losses) / len(losses), norm.item()))
                    losses.clear()
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return log


@functools.cache
def _reference(
    name: str, num_steps: int, per_step: int
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Train one unwrapped model in plain torch on ``per_step`` micro-batches a step.

    The mean over the micro-batches' losses is what ranks and accumulation make.
    """
    from transformers import default_data_collator

    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    examples = data(name, num_steps * per_step * BATCH)
    log = []
    for step in range(num_steps):
        losses = []
        for micro in range(per_step):
            at = (step * per_step + micro) * BATCH
            batch = default_data_collator(examples[at : at + BATCH])  # type: ignore[arg-type]
            loss = model(**batch).loss / per_step
            loss.backward()
            losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        # accelerate steps a scheduler once per process.
        for group in optimizer.param_groups:
            group["lr"] = RATE / (1 + WORLD * step)
        optimizer.step()
        optimizer.zero_grad()
        log.append((sum(losses), norm.item()))
    return log, clean(model)


def _assert_alike(
    actual: list[tuple[float, float]], expected: list[tuple[float, float]]
) -> None:
    assert len(actual) == len(expected) > 0
    for step, (mine, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert abs(mine[0] - wanted[0]) <= 2e-6, (step, mine, wanted)
        assert abs(mine[1] - wanted[1]) <= 2e-6 * max(1.0, wanted[1]), (step, mine)


@contextmanager
def _folder(rank: int, **env: str) -> Iterator[Path]:
    with shared_folder() as folder, groups_destroyed(), launched(rank, WORLD, **env):
        yield folder


@pytest.mark.parametrize("accumulate", cases([1, 2], slow=[1]))
@pytest.mark.parametrize(
    "strategy",
    # test_trainer_options.py runs the others as well.
    cases(
        ShardingStrategy.__members__, {*ShardingStrategy.__members__} - {"FULL_SHARD"}
    ),
)
@distributed(world_size=WORLD, timeout_s=TIMEOUT_S)
def test_strategy(rank: int, strategy: str, accumulate: int) -> None:
    expected, _ = _reference("llama", 4, WORLD * accumulate)
    with _folder(rank):
        accelerator = _accelerator(
            accumulate=accumulate, sharding_strategy=ShardingStrategy[strategy]
        )
        loop = _Loop(accelerator, build("llama"))
        units = list(FSDP.fsdp_modules(loop.model))
        assert len(units) == 4
        assert {unit.sharding_strategy.name for unit in units} == {strategy}
        _assert_alike(
            loop.run(_loader("llama", 4 * WORLD * accumulate, BATCH)), expected
        )
        del loop, units, accelerator


_ACCUMULATING = [("llama", 2), ("gpt2", 1), ("lora", 2)]


@pytest.mark.parametrize("case", cases(_ACCUMULATING, _ACCUMULATING[1:]))
@distributed(world_size=WORLD, timeout_s=TIMEOUT_S)
def test_version_2(rank: int, case: tuple[str, int]) -> None:
    name, accumulate = case
    expected, _ = _reference(name, 4, WORLD * accumulate)
    with _folder(rank):
        accelerator = _accelerator(accumulate=accumulate, fsdp_version=2)
        loop = _Loop(accelerator, build(name))
        _assert_alike(loop.run(_loader(name, 4 * WORLD * accumulate, BATCH)), expected)
        # A model that is prepared already stays as it is.
        assert accelerator.prepare(loop.model, loop.optimizer)[0] is loop.model
        del loop, accelerator


_MODELS = list(product(("gpt2", "t5", "lora"), (True, False)))


@pytest.mark.parametrize("case", cases(_MODELS, _MODELS[1:-1]))
@distributed(world_size=WORLD, timeout_s=TIMEOUT_S)
def test_model(rank: int, case: tuple[str, bool]) -> None:
    name, use_orig_params = case
    expected, _ = _reference(name, 4, WORLD)
    with _folder(rank):
        accelerator = _accelerator(use_orig_params=use_orig_params)
        model = build(name)
        if name == "lora":
            from peft.utils.other import fsdp_auto_wrap_policy

            plugin = accelerator.state.fsdp_plugin
            plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
        loop = _Loop(accelerator, model)
        _assert_alike(loop.run(_loader(name, 4 * WORLD, BATCH)), expected)
        del loop, model, accelerator


_SAVING = [("llama", 1), ("gpt2", 1), ("gpt2", 2), ("lora", 2)]
_SAVES = [(*case, kind) for case in _SAVING for kind in KINDS]
_COMMON = [("gpt2", 1, KINDS[1]), ("gpt2", 2, KINDS[0])]


@pytest.mark.parametrize("case", cases(_SAVES, set(_SAVES) - set(_COMMON)))
@distributed(world_size=WORLD, timeout_s=TIMEOUT_S)
def test_save_state_and_load_state(rank: int, case: tuple[str, int, str]) -> None:
    """Two steps, a checkpoint, two more: again from the checkpoint, the same bits."""
    name, version, kind = case
    with shared_folder() as folder, groups_destroyed():
        options = {"state_dict_type": kind, "fsdp_version": version}
        _save_and_load_state(rank, name, options, folder)


def _save_and_load_state(
    rank: int, name: str, options: dict[str, Any], folder: Path
) -> None:
    with launched(rank, WORLD):
        loop = _Loop(_accelerator(**options), build(name))
        loop.run(_loader(name, 2 * WORLD, BATCH))
        loop.accelerator.save_state(str(folder / "state"))
        unbroken = loop.run(_loader(name, 2 * WORLD, BATCH))
        weights = whole_weights(loop.model)
        rate = loop.scheduler.get_last_lr()
        del loop
    with launched(rank, WORLD):
        # Nothing is as it was: other weights and an optimizer without state.
        model = build(name)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.5)
        loop = _Loop(_accelerator(**options), model)
        loop.accelerator.load_state(str(folder / "state"))
        assert loop.run(_loader(name, 2 * WORLD, BATCH)) == unbroken
        assert loop.scheduler.get_last_lr() == rate
        resumed = whole_weights(loop.model)
        for key, value in weights.items():
            assert torch.equal(resumed[key], value), key
        del loop, model


@pytest.mark.parametrize(
    "case", cases([(KINDS[0], 1), (KINDS[1], 1), (KINDS[1], 2)], [(KINDS[1], 1)])
)
@distributed(world_size=WORLD, timeout_s=TIMEOUT_S)
def test_save_pretrained(rank: int, case: tuple[str, int]) -> None:
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    kind, version = case
    with _folder(rank) as folder:
        accelerator = _accelerator(state_dict_type=kind, fsdp_version=version)
        loop = _Loop(accelerator, build("llama"))
        loop.run(_loader("llama", 2 * WORLD, BATCH))
        accelerator.unwrap_model(loop.model).save_pretrained(
            folder / "pretrained",
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(loop.model),
        )
        accelerator.save_model(loop.model, str(folder / "saved"))
        accelerator.wait_for_everyone()
        weights = whole_weights(loop.model)
        loaded = LlamaForCausalLM.from_pretrained(folder / "pretrained").state_dict()
        saved = load_file(folder / "saved" / "model.safetensors")
        assert loaded.keys() == saved.keys() == weights.keys()
        for key, value in weights.items():
            assert torch.equal(loaded[key].cpu(), value), key
            assert torch.equal(saved[key], value), key
        if kind == "SHARDED_STATE_DICT":
            from accelerate.utils import merge_fsdp_weights

            accelerator.save_state(str(folder / "state"))
            shards = folder / "state" / "pytorch_model_fsdp_0"
            merge_fsdp_weights(str(shards), str(folder / "merged"))
            merged = load_file(folder / "merged" / "model.safetensors")
            for key, value in weights.items():
                assert torch.equal(merged[key], value), key
        accelerator.wait_for_everyone()
        del loop, accelerator


@distributed(world_size=WORLD, timeout_s=TIMEOUT_S)
def test_wrapped_before_prepare(rank: int) -> None:
    """A model that the user wrapped: accelerate must leave it as it is."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    expected, _ = _reference("llama", 4, WORLD)
    with _folder(rank):
        accelerator = _accelerator()
        model = FSDP(
            build("llama"),
            auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            device_id=accelerator.device,
        )
        loop = _Loop(accelerator, model)
        assert loop.model is model
        _assert_alike(loop.run(_loader("llama", 4 * WORLD, BATCH)), expected)
        del loop, model, accelerator


@pytest.mark.parametrize("version", [1, 2])
@distributed(world_size=WORLD, timeout_s=TIMEOUT_S)
def test_no_sync(rank: int, version: int) -> None:
    """accelerator.no_sync(): no gradient is reduced inside, all are afterwards."""
    with _folder(rank):
        accelerator = _accelerator(fsdp_version=version)
        loop = _Loop(accelerator, build("llama"))
        model = loop.model
        loader = accelerator.prepare(_loader("llama", 2 * WORLD, BATCH))
        first, second = list(loader)
        with accelerator.no_sync(model):
            accelerator.backward(model(**first).loss)
        assert fsdp_c.memory_stats(model)["num_reduces"] == 0
        accelerator.backward(model(**second).loss)
        num_units = 4 if version == 1 else 5  # the root of version 2 has no parameter
        assert fsdp_c.memory_stats(model)["num_reduces"] == num_units
        del loop, model, loader, accelerator


@distributed(world_size=WORLD, timeout_s=TIMEOUT_S)
def test_ignored_modules_by_name(rank: int) -> None:
    with _folder(rank):
        accelerator = _accelerator(ignored_modules=r".*norm")
        model = accelerator.prepare(build("llama"))
        shapes = {n: p.shape for n, p in model.named_parameters()}
        norms = {n for n in shapes if "norm" in n}
        assert norms
        assert all(shapes[name] == (32,) for name in norms)
        sharded = _sharded_names(model)
        assert any("mlp" in name for name in sharded)
        assert not any("norm" in name for name in sharded)
        del model, accelerator


def _sharded_names(model: Any) -> set[str]:
    return {
        name for unit in FSDP.fsdp_modules(model) for name in unit._flat_param._fqns
    }


@distributed(world_size=WORLD, timeout_s=TIMEOUT_S)
def test_weights_loaded_in_bf16_are_trained_in_fp32(rank: int) -> None:
    """With mixed precision, accelerate upcasts the shards of a bf16 model."""
    from accelerate import Accelerator

    with _folder(rank):
        accelerator = Accelerator(
            cpu=ON_CPU, mixed_precision="bf16", fsdp_plugin=_plugin()
        )
        model = accelerator.prepare(build("llama").to(torch.bfloat16))
        for unit in fsdp_c.explain(model).units:
            assert unit.master_dtypes == (torch.float32,)
            assert unit.compute_dtypes == (torch.bfloat16,)
        batch = next(iter(accelerator.prepare(_loader("llama", WORLD, BATCH))))
        accelerator.backward(model(**batch).loss)
        for param in model.parameters():
            if param.numel():
                assert param.grad is not None
                assert param.dtype == param.grad.dtype == torch.float32
        del model, accelerator
    dist.barrier()
