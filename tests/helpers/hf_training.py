"""Training with transformers' Trainer, on this rank or in a process by itself.

Note [Reference]
What two ranks train is compared with one process that has no process group in its
environment, knows nothing of fsdp_c, and takes the batches of both ranks together:
the Trainer, with `WORLD` times the batch size. Samplers are sequential, so step s of
both sees the same examples.
"""

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_c import FSDPModule, StateDictType
from fsdp_c import FullyShardedDataParallel as FSDP
from helpers.groups import groups_destroyed
from helpers.hf_models import build, data
from helpers.hf_process import ON_CPU, launched, single_process
from helpers.shared_folder import shared_folder

WORLD = 2
STEPS = 5
BATCH = 2  # examples of one rank and micro-batch


def cases(names: Iterable[Any], slow: Iterable[Any] = ()) -> list[Any]:
    """Return ``names`` for parametrize; those in ``slow`` are only_full."""
    rare = list(slow)
    return [
        pytest.param(each, marks=pytest.mark.only_full) if each in rare else each
        for each in names
    ]


@dataclass
class Record:
    """What a training run left behind."""

    losses: list[float]
    grad_norms: list[float]
    trainer: Any = field(default=None, repr=False)
    evaluations: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)


def arguments(folder: str | Path, **changes: Any) -> Any:
    """Return TrainingArguments: few steps of AdamW, every step logged."""
    from transformers import Seq2SeqTrainingArguments

    options: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": ON_CPU,
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "learning_rate": 2e-3,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "dataloader_num_workers": 0,
        "seed": 7,
        **changes,
    }
    return Seq2SeqTrainingArguments(**options)


def train(
    name: str,
    args: Any,
    *,
    model: nn.Module | None = None,
    resume: str | None = None,
    **trainer_options: Any,
) -> Record:
    """Train the model ``name`` as ``args`` say; the trainer stays in the record."""
    from transformers import PrinterCallback, Seq2SeqTrainer, default_data_collator

    processes = max(args.world_size, 1)
    steps = args.max_steps * args.gradient_accumulation_steps
    examples = data(name, steps * args.per_device_train_batch_size * processes)
    trainer = Seq2SeqTrainer(
        model=build(name) if model is None else model,
        args=args,
        train_dataset=examples,
        data_collator=default_data_collator,
        **trainer_options,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    return Record(
        [entry["loss"] for entry in history if "loss" in entry],
        [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        trainer,
        [entry["eval_loss"] for entry in history if "eval_loss" in entry],
    )


@functools.cache
def reference(name: str, **changes: Any) -> Record:
    """Train on all ranks' data in one process; see Note [Reference].

    Not within `launched`: accelerate's state is one per process.
    """
    assert "RANK" not in os.environ, "call reference() before trained()"
    with single_process(), tempfile.TemporaryDirectory() as folder:
        batch = changes.pop("per_device_train_batch_size", BATCH)
        args = arguments(folder, per_device_train_batch_size=batch * WORLD, **changes)
        assert args.world_size == 1
        record = train(name, args)
        weights = record.trainer.model.state_dict()
    record.weights = {n: w.detach().cpu().clone() for n, w in weights.items()}
    record.trainer = None
    return record


def fsdp_config(**changes: Any) -> dict[str, Any]:
    """Return a ``fsdp_config``, of FSDP version 1 if nothing else is said."""
    return {"version": 1, **changes}


@contextlib.contextmanager
def trained(
    name: str,
    rank: int,
    *,
    config: dict[str, Any] | str,
    env: dict[str, str] | None = None,
    model: nn.Module | None = None,
    **changes: Any,
) -> Iterator[Record]:
    """Train with FSDP in a shared folder; what the block does is still launched."""
    with (
        shared_folder() as folder,
        groups_destroyed(),
        launched(rank, WORLD, **(env or {})),
    ):
        changes.setdefault("fsdp", True)
        args = arguments(folder, fsdp_config=config, **changes)
        record = train(name, args, model=model)
        yield record
        record.trainer = None


def root(record: Record) -> Any:
    """Return the sharded model of a run, which must be fsdp_c's of its version."""
    model = record.trainer.model_wrapped
    if record.trainer.accelerator.is_fsdp2:
        assert isinstance(model, FSDPModule), type(model)
    else:
        assert type(model) is FSDP, type(model)
    return model


def whole_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return the full state dict, on every rank, on the CPU."""
    is_version_2 = isinstance(model, FSDPModule)
    settings = FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT)
    with contextlib.nullcontext() if is_version_2 else settings:
        state = model.state_dict()
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value)
        .detach()
        .cpu()
        .clone()
        for name, value in state.items()
    }


def assert_trained_alike(
    record: Record, expected: Record, tolerance: float = 2e-6
) -> None:
    """Fail unless losses and gradient norms agree, step by step."""
    assert len(record.losses) == len(expected.losses) > 0
    assert len(record.grad_norms) == len(expected.grad_norms) == len(record.losses)
    for step, pair in enumerate(zip(record.losses, expected.losses, strict=True)):
        assert abs(pair[0] - pair[1]) <= tolerance, (step, record, expected)
    for step, (actual, wanted) in enumerate(
        zip(record.grad_norms, expected.grad_norms, strict=True)
    ):
        assert abs(actual - wanted) <= tolerance * max(1.0, wanted), (step, record)
    assert record.losses[-1] != record.losses[0]


def assert_weights_alike(model: Any, expected: Record, tolerance: float) -> None:
    """Fail unless the gathered weights agree with those of one process.

    AdamW divides by the gradient's size, so an element whose gradient is nearly zero
    may be off by far more than the loss: most elements must agree, all loosely.
    """
    actual = whole_weights(model)
    assert set(actual) == set(expected.weights)
    for name, wanted in expected.weights.items():
        error = (actual[name].float() - wanted.float()).abs()
        assert error.max() <= 1e-2, (name, float(error.max()))
        assert error.mean() <= 10 * tolerance, (name, float(error.mean()))
