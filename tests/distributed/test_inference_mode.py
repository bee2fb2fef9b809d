"""Forwards in inference mode, whose tensors torch lets no backward use."""

import pytest
import torch

from helpers.distributed import distributed
from helpers.models import MLP, Block
from helpers.rows import in_either_api
from helpers.transports import OWN, over


@pytest.mark.parametrize("transport", [OWN, "c10d"])
@pytest.mark.parametrize("api", ["FSDP", "FSDP flat", "fully_shard"])
@distributed(world_size=2)
def test_training_between_evaluations(api: str, transport: str) -> None:
    """The first forward of all, and forwards between a forward and its backward.

    What they make once (units, views over memory of the transport) is used in training.
    """

    def evaluate() -> None:
        with torch.inference_mode():
            both.model(*both.batches()[both.rank])

    with over(transport):
        both = in_either_api(api, MLP, {Block})
        evaluate()
        both.train(3, inside=evaluate)
