"""Trainer's checkpoints: saving, resuming, and loading into an unwrapped model."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_c import FullyShardedDataParallel as FSDP
from helpers.distributed import distributed
from helpers.groups import groups_destroyed
from helpers.hf_models import build, data
from helpers.hf_process import launched
from helpers.hf_training import (
    WORLD,
    arguments,
    assert_trained_alike,
    cases,
    fsdp_config,
    reference,
    root,
    train,
    whole_weights,
)
from helpers.shared_folder import shared_folder

TIMEOUT_S = 300
KINDS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
SAVED_AT = 2


def _optimizer_state(trainer: Any) -> dict[str, Any]:
    """Return this rank's optimizer state by position.

    A parameter of which this rank holds nothing may have an empty state or none.
    """
    optimizer = trainer.optimizer
    state: dict[str, Any] = {}
    for number, param in enumerate(
        p for group in optimizer.param_groups for p in group["params"]
    ):
        if param.numel() == 0:
            continue
        for key, value in optimizer.state.get(param, {}).items():
            own = value.to_local() if isinstance(value, DTensor) else value
            state[f"{number}.{key}"] = torch.as_tensor(own).detach().clone()
    return state


def _assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    assert len(actual) > 0
    for name, value in expected.items():
        assert torch.equal(actual[name].cpu(), value.cpu()), name


def _resume(
    name: str, rank: int, folder: Path, config: dict[str, Any], **changes: Any
) -> None:
    """Train; train anew from the middle; fail unless both end with the same bits."""
    options = {"fsdp": True, "save_strategy": "steps", "save_steps": SAVED_AT}
    options |= changes
    with launched(rank, WORLD):
        args = arguments(folder, fsdp_config=dict(config), **options)
        unbroken = train(name, args)
        weights = whole_weights(root(unbroken))
        state = _optimizer_state(unbroken.trainer)
        rates = unbroken.trainer.lr_scheduler.get_last_lr()
        unbroken.trainer = None
    assert state
    checkpoint = folder / f"checkpoint-{SAVED_AT}"
    assert checkpoint.is_dir()
    # Other weights: what is not loaded is seen. (The base of LoRA is in no checkpoint.)
    model = build(name)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.mul_(1.5)
    with launched(rank, WORLD):
        args = arguments(folder / "again", fsdp_config=dict(config), **options)
        resumed = train(name, args, model=model, resume=str(checkpoint))
        assert resumed.losses[-3:] == unbroken.losses[-3:]
        assert resumed.grad_norms[-3:] == unbroken.grad_norms[-3:]
        assert resumed.trainer.lr_scheduler.get_last_lr() == rates
        _assert_equal(whole_weights(root(resumed)), weights)
        _assert_equal(_optimizer_state(resumed.trainer), state)
        resumed.trainer = None


_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "flat_params": ({"use_orig_params": False}, {}),
    "shard_grad_op": ({"reshard_after_forward": "shard_grad_op"}, {}),
    "no_shard": ({"reshard_after_forward": "no_shard"}, {}),
    "hybrid_shard": ({"reshard_after_forward": "hybrid_shard"}, {}),
    "cpu_offload": ({"cpu_offload": True}, {}),
    "activation_checkpointing": ({"activation_checkpointing": "true"}, {}),
    "bf16": ({}, {"bf16": True}),
    "gradient_accumulation": ({}, {"gradient_accumulation_steps": 2}),
    "version_2": ({"version": 2}, {}),
    "version_2_bf16": ({"version": 2}, {"bf16": True}),
}
# Model, option and state dict type; the other kind of each, and _RARE, need --full.
_COMMON = (
    ("llama", "flat_params", "FULL_STATE_DICT"),
    ("t5", "default", "SHARDED_STATE_DICT"),
    ("lora", "default", "FULL_STATE_DICT"),
    ("gpt2", "version_2", "FULL_STATE_DICT"),
)
_RARE = (
    ("llama", "cpu_offload"),
    ("llama", "version_2_bf16"),
    ("llama", "hybrid_shard"),
    ("llama", "bf16"),
    ("llama", "default"),
    ("gpt2", "default"),
    ("llama", "shard_grad_op"),
    ("llama", "no_shard"),
    ("llama", "activation_checkpointing"),
    ("llama", "gradient_accumulation"),
    ("lora", "version_2"),
)
_RESUMES = [(*case[:2], kind) for case in (*_COMMON, *_RARE) for kind in KINDS]


@pytest.mark.parametrize(
    "case", cases(_RESUMES, set(_RESUMES) - set(_COMMON)), ids="-".join
)
@distributed(world_size=WORLD, timeout_s=TIMEOUT_S)
def test_resume(rank: int, case: tuple[str, str, str]) -> None:
    name, option, kind = case
    config, changes = _OPTIONS[option]
    with shared_folder() as folder, groups_destroyed():
        config = fsdp_config(state_dict_type=kind, **config)
        _resume(name, rank, folder, config, **changes)


def _load_unwrapped(folder: Path, name: str) -> nn.Module:
    """Load what save_model wrote, with from_pretrained, in this process alone."""
    import transformers

    classes = {
        "llama": transformers.LlamaForCausalLM,
        "gpt2": transformers.GPT2LMHeadModel,
        "t5": transformers.T5ForConditionalGeneration,
    }
    model, info = classes[name].from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    assert not info["mismatched_keys"], info
    return model


_SAVES = [
    ("llama", KINDS[1], 1),
    ("gpt2", KINDS[0], 1),
    ("t5", KINDS[1], 1),
    ("llama", KINDS[0], 2),
    ("gpt2", KINDS[1], 2),
]


@pytest.mark.parametrize("case", cases(_SAVES, _SAVES[2:4]))
@distributed(world_size=WORLD, timeout_s=TIMEOUT_S)
def test_save_model(rank: int, case: tuple[str, str, int]) -> None:
    """Ask for FULL_STATE_DICT at the end, as the guide of transformers says."""
    name, kind, version = case
    with shared_folder() as folder, groups_destroyed():
        with launched(rank, WORLD):
            config = fsdp_config(state_dict_type=kind, version=version)
            args = arguments(folder, fsdp=True, fsdp_config=config)
            record = train(name, args)
            trainer = record.trainer
            if trainer.is_fsdp_enabled:
                plugin = trainer.accelerator.state.fsdp_plugin
                plugin.set_state_dict_type("FULL_STATE_DICT")
            trainer.save_model(str(folder / "saved"))
            weights = whole_weights(root(record))
            record.trainer = trainer = None
            dist.barrier()
        loaded = _load_unwrapped(folder / "saved", name)
        _assert_equal(dict(loaded.state_dict()), weights)
        batch = data(name, 1)[0]
        with torch.no_grad():
            loaded(
                **{key: value[None].to(loaded.device) for key, value in batch.items()}
            )


@pytest.mark.parametrize(
    "case", cases([(KINDS[0], 1), (KINDS[1], 1), (KINDS[1], 2)], [(KINDS[0], 1)])
)
@distributed(world_size=WORLD, timeout_s=TIMEOUT_S)
def test_save_of_lora(rank: int, case: tuple[str, int]) -> None:
    from peft import PeftModel

    with shared_folder() as folder, groups_destroyed():
        with launched(rank, WORLD):
            config = fsdp_config(state_dict_type=case[0], version=case[1])
            args = arguments(folder, fsdp=True, fsdp_config=config)
            record = train("lora", args)
            plugin = record.trainer.accelerator.state.fsdp_plugin
            plugin.set_state_dict_type("FULL_STATE_DICT")
            record.trainer.save_model(str(folder / "saved"))
            weights = whole_weights(root(record))
            record.trainer = None
            dist.barrier()
        base: Any = build("llama")
        # The base of build("lora") was made of another seed.
        base.load_state_dict(build("lora").unload().state_dict())  # type: ignore[operator]
        loaded = PeftModel.from_pretrained(base, str(folder / "saved"))
        adapters = {n: w for n, w in loaded.state_dict().items() if "lora_" in n}
        assert len(adapters) == 3 * 2 * 2
        _assert_equal(dict(loaded.state_dict()), weights)


@pytest.mark.parametrize(
    "case", cases([(KINDS[0], 1), (KINDS[1], 1), (KINDS[0], 2)], [(KINDS[1], 1)])
)
@distributed(world_size=WORLD, timeout_s=TIMEOUT_S)
def test_load_best_model_at_end(rank: int, case: tuple[str, int]) -> None:
    options: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that the best one is not the last
    }
    with shared_folder() as folder, groups_destroyed(), launched(rank, WORLD):
        config = fsdp_config(state_dict_type=case[0], version=case[1])
        args = arguments(folder, fsdp=True, fsdp_config=config, **options)
        record = train("llama", args, eval_dataset=data("llama", 4))
        trainer = record.trainer
        best = max(record.evaluations)
        assert best > record.evaluations[-1]
        at = record.evaluations.index(best) + 1
        assert trainer.state.best_model_checkpoint == str(folder / f"checkpoint-{at}")
        assert trainer.evaluate()["eval_loss"] == best
        record.trainer = trainer = None


@distributed(world_size=WORLD, timeout_s=TIMEOUT_S)
def test_evaluation_alone(rank: int) -> None:
    """evaluate() on a model that was never trained: only forward runs."""
    expected = reference("llama")
    with shared_folder() as folder, launched(rank, WORLD):
        args = arguments(folder, fsdp=True, fsdp_config=fsdp_config())
        record = train("llama", args, eval_dataset=data("llama", 8))
        assert_trained_alike(record, expected)
        assert isinstance(record.trainer.model_wrapped, FSDP)
        loss = record.trainer.evaluate()["eval_loss"]
        record.trainer = None
    model = build("llama")
    model.load_state_dict(expected.weights)
    with torch.no_grad():
        losses = [
            model(**{key: value[None] for key, value in example.items()}).loss
            for example in data("llama", 8)
        ]
    assert min(losses) <= loss <= max(losses)
