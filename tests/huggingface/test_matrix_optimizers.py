"""An optimizer of whole parameters in the Trainer: trained, saved and resumed."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fsdp_c import whole_parameter_optimizer
from helpers.distributed import distributed
from helpers.groups import groups_destroyed
from helpers.hf_process import launched
from helpers.hf_training import (
    WORLD,
    arguments,
    assert_trained_alike,
    fsdp_config,
    reference,
    root,
    train,
    whole_weights,
)
from helpers.matrix_optimizers import TensorNorm, muon
from helpers.shared_folder import shared_folder

TIMEOUT_S = 300


def norm(model: Any) -> torch.optim.Optimizer:
    return whole_parameter_optimizer(model, TensorNorm)


def muon_and_adamw(model: Any) -> torch.optim.Optimizer:
    return whole_parameter_optimizer(
        model,
        muon,
        lambda name, shape: len(shape) == 2 and "layers" in name,
        rest=lambda params: torch.optim.AdamW(params, lr=2e-3),
    )


@contextlib.contextmanager
def using(make: Any) -> Iterator[None]:
    """Have the Trainer create its optimizer, as a subclass of a user's would.

    With FSDP of version 1 it passes the model after it has wrapped it, with version 2
    it shards the model, and gives the optimizer other parameters, afterwards.
    """
    from transformers import Trainer

    def create_optimizer(self: Any, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = make(self.model if model is None else model)
        result: torch.optim.Optimizer = self.optimizer
        return result

    with pytest.MonkeyPatch.context() as patch:  # of the worker, which goes on
        patch.setattr(Trainer, "create_optimizer", create_optimizer)
        yield


@pytest.mark.parametrize("version", [1, 2])
@distributed(WORLD, timeout_s=TIMEOUT_S)
def test_trained_alike(rank: int, version: int) -> None:
    """Losses and gradient norms of one process with the unsharded optimizer."""
    with using(norm):
        expected = reference.__wrapped__("llama")  # that of AdamW may be cached
        with shared_folder() as folder, groups_destroyed(), launched(rank, WORLD):
            config = fsdp_config(version=version)
            record = train("llama", arguments(folder, fsdp=True, fsdp_config=config))
            assert_trained_alike(record, expected)
            record.trainer = None


@pytest.mark.parametrize("version", [1, 2])
@distributed(WORLD, timeout_s=TIMEOUT_S)
def test_muon_beside_adamw_resumes(rank: int, version: int) -> None:
    """From the Trainer's own checkpoint, with both optimizers in it, to the bit."""
    options = {"fsdp": True, "save_strategy": "steps", "save_steps": 2}
    with using(muon_and_adamw), shared_folder() as folder, groups_destroyed():
        with launched(rank, WORLD):
            config = fsdp_config(version=version)
            unbroken = train("llama", arguments(folder, fsdp_config=config, **options))
            weights = whole_weights(root(unbroken))
            unbroken.trainer = None
        with launched(rank, WORLD):
            config = fsdp_config(version=version)
            args = arguments(folder / "again", fsdp_config=config, **options)
            resumed = train("llama", args, resume=str(folder / "checkpoint-2"))
            assert resumed.losses == unbroken.losses
            for name, value in whole_weights(root(resumed)).items():
                assert torch.equal(value, weights[name]), name
            resumed.trainer = None
