"""generate() of sharded models: the same tokens as from the unwrapped model."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp_c
from fsdp_c import FullyShardedDataParallel as FSDP
from helpers.distributed import distributed
from helpers.hf_models import PAD, build, data
from helpers.hf_process import launched
from helpers.hf_training import (
    BATCH,
    WORLD,
    arguments,
    cases,
    fsdp_config,
    root,
    train,
    trained,
    whole_weights,
)
from helpers.shared_folder import shared_folder

TIMEOUT_S = 300


def _unwrapped(name: str, weights: dict[str, Tensor]) -> Any:
    model = build(name)
    model.load_state_dict(weights)
    return model.eval()


_PREDICTS = list(product(("full_shard", "shard_grad_op"), (1, 2)))


@pytest.mark.parametrize("case", cases(_PREDICTS, _PREDICTS[:-1]))
@distributed(world_size=WORLD, timeout_s=TIMEOUT_S)
def test_predict_with_generate(rank: int, case: tuple[str, int]) -> None:
    kind, num_beams = case
    num_examples, num_tokens = 2 * WORLD * BATCH, 5
    examples = data("t5", num_examples)
    with shared_folder() as folder, launched(rank, WORLD):
        args = arguments(
            folder,
            fsdp=True,
            fsdp_config=fsdp_config(reshard_after_forward=kind),
            predict_with_generate=True,
        )
        record = train("t5", args)
        result = record.trainer.predict(
            examples, max_new_tokens=num_tokens, num_beams=num_beams
        )
        weights = whole_weights(root(record))
        record.trainer = None
    model = _unwrapped("t5", weights)
    with torch.no_grad():
        expected = model.generate(
            torch.stack([example["input_ids"] for example in examples]),
            max_new_tokens=num_tokens,
            num_beams=num_beams,
        )
    actual = torch.from_numpy(result.predictions)
    assert actual.shape[0] == num_examples
    width = expected.shape[1]
    assert torch.equal(actual[:, :width].cpu(), expected)
    assert torch.all(actual[:, width:] == PAD)
    assert set(expected.flatten().tolist()) != {PAD}


_SUMMONED = list(product(("llama", "gpt2", "lora"), (True, False)))
_COMMON = [("gpt2", False), ("lora", True)]


@pytest.mark.parametrize("case", cases(_SUMMONED, set(_SUMMONED) - set(_COMMON)))
@distributed(world_size=WORLD, timeout_s=TIMEOUT_S)
def test_within_summon_full_params(rank: int, case: tuple[str, bool]) -> None:
    name, use_orig_params = case
    prompt = data(name, WORLD)[rank]["input_ids"][None]
    config = fsdp_config(use_orig_params=use_orig_params)
    with trained(name, rank, config=config) as record:
        model = root(record).eval()
        with torch.no_grad(), FSDP.summon_full_params(model, writeback=False):
            # Each rank as many tokens as it likes: nothing is communicated.
            actual = model.generate(
                input_ids=prompt, max_new_tokens=4 + 3 * rank, do_sample=False
            )
        weights = whole_weights(model)
    with torch.no_grad():
        expected = _unwrapped(name, weights).generate(
            input_ids=prompt, max_new_tokens=4 + 3 * rank, do_sample=False
        )
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize(
    "case", cases([("llama", 1), ("llama", 2), ("lora", 2)], [("llama", 2)])
)
@distributed(world_size=WORLD, timeout_s=TIMEOUT_S)
def test_unit_by_unit(rank: int, case: tuple[str, int]) -> None:
    """register_forward_method: the model is never whole on a rank.

    The Trainer does this itself with version 2.
    """
    name, version = case
    prompt = data("llama", WORLD)[rank]["input_ids"][None]
    # Ranks end at different lengths: the others go on for their sake.
    options: dict[str, Any] = {"max_new_tokens": 3 + 4 * rank, "do_sample": False}
    with trained(name, rank, config=fsdp_config(version=version)) as record:
        model = root(record).eval()
        if version == 1:
            fsdp_c.register_forward_method(model, "generate")
        if version == 1 or name == "lora":  # else generate() sees it itself
            options["synced_gpus"] = True
        with torch.no_grad():
            actual = model.generate(input_ids=prompt, **options)
        options.pop("synced_gpus", None)
        weights = whole_weights(model)
    with torch.no_grad():
        expected = _unwrapped(name, weights).generate(input_ids=prompt, **options)
    assert torch.equal(actual.cpu(), expected)
