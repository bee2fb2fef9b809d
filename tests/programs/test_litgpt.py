"""litgpt's model, loss and checkpoint functions over Fabric, with fsdp_c.install()."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_c
from helpers.distributed import distributed
from helpers.frameworks import STEPS, environment, framework, installed
from helpers.reference import assert_same_tensors
from helpers.seeds import generator
from helpers.shared_folder import shared_folder

VOCAB = 16


def build(seed: int) -> Any:
    litgpt = framework("litgpt")
    config = litgpt.Config(
        name="tiny", block_size=8, n_layer=2, n_head=2, n_embd=8, vocab_size=VOCAB
    )
    torch.manual_seed(seed)
    return litgpt.GPT(config)


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(VOCAB, (2, 8), generator=generator(100 * step + rank))


def loss_of(model: Any, ids: Tensor) -> Tensor:
    loss = framework("litgpt.utils").chunked_cross_entropy
    return loss(model(ids[:, :-1]), ids[:, 1:], chunk_size=0)


def fabric_of(rank: int, world_size: int, kind: str) -> Any:
    block = framework("litgpt.model").Block

    class OnCPU(framework("lightning.fabric.strategies").FSDPStrategy):
        """Fabric asks for a GPU if it is FSDPStrategy itself."""

    fabric = framework("lightning.fabric").Fabric(
        accelerator="cpu",
        devices=world_size,
        # As litgpt's scripts make it.
        strategy=OnCPU(auto_wrap_policy={block}, state_dict_type=kind),
        plugins=[environment(rank, world_size)],
    )
    fabric.launch()
    return fabric


def train(fabric: Any, model: Any, optim: Any, steps: range) -> None:
    for step in steps:
        fabric.backward(loss_of(model, tokens(step, fabric.global_rank)))
        optim.step()
        optim.zero_grad()


@pytest.mark.parametrize("kind", ["full", "sharded"])
@distributed(world_size=2, device="cpu", timeout_s=300)
def test_train_save_resume(rank: int, world_size: int, kind: str) -> None:
    """litgpt.pretrain's state and its way to save and resume."""
    with installed(), shared_folder() as folder:
        fabric = fabric_of(rank, world_size, kind)
        reference = build(0)
        plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        states = []
        for seed in (0, 1):
            model = fabric.setup(build(seed))
            optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
            optim = fabric.setup_optimizers(optim)
            states.append({"model": model, "optimizer": optim, "iter_num": 0})
        first, second = states
        assert type(first["model"]._forward_module) is fsdp_c.FSDP
        train(fabric, first["model"], first["optimizer"], range(STEPS))
        first["iter_num"] = STEPS
        path = Path(folder) / "lit_model.pth"
        fabric.save(path, first)
        dist.barrier()
        fabric.load(path, second)
        assert second["iter_num"] == STEPS
        train(fabric, second["model"], second["optimizer"], range(STEPS, 2 * STEPS))
        for step in range(2 * STEPS):
            for each in range(world_size):
                (loss_of(reference, tokens(step, each)) / world_size).backward()
            plain.step()
            plain.zero_grad()
        state = dict(second["model"]._forward_module.state_dict())
        assert_same_tensors("resumed", state, reference.state_dict())
