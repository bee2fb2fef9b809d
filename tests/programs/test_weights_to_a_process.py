"""Weights that an inference process reads while training goes on.

Each rank puts its shards into a queue of torch.multiprocessing, once: the queue moves
them into shared memory, so the process sees what the optimizer writes later. Or it puts
whole weights into it, after each step, with which the process runs the model. Compared
with the model that was never sharded.
"""

from multiprocessing import resource_sharer
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from helpers.distributed import distributed
from helpers.impl import FSDP
from helpers.models import DIM, MLP, Block
from helpers.reference import assert_same, clean_name
from helpers.rows import APIS, in_either_api
from programs.unsharded import draw

pytestmark = pytest.mark.cpu_only("memory of a device is shared in another way")


def _build() -> nn.Module:
    torch.manual_seed(0)
    return MLP(2).double()


def _serve(inbox: Any, outbox: Any) -> None:
    """Run in the child: keep what comes, and answer each question."""
    kept: dict[str, Tensor] = {}
    for message in iter(inbox.get, None):
        if isinstance(message, dict):
            kept = message
            outbox.put(None)
        elif message == "sums":
            outbox.put({name: float(tensor.sum()) for name, tensor in kept.items()})
        else:
            model = _build()
            model.load_state_dict(kept)
            with torch.no_grad():
                outbox.put(model(draw(3, DIM, seed=message)).tolist())


class _Server:
    """The child, a fork made before the model is."""

    def __init__(self) -> None:
        context = mp.get_context("fork")
        self.inbox, self.outbox = context.SimpleQueue(), context.SimpleQueue()
        self.process = context.Process(
            target=_serve, args=(self.inbox, self.outbox), daemon=True
        )
        self.process.start()

    def ask(self, message: Any) -> Any:
        self.inbox.put(message)
        return self.outbox.get()

    def end(self) -> None:
        self.inbox.put(None)
        self.process.join(10)
        assert self.process.exitcode == 0
        resource_sharer.stop(timeout=10)  # its thread


def _local(param: Any) -> Tensor:
    local: Tensor = param.to_local() if hasattr(param, "to_local") else param
    return local.detach()


def _shards(model: nn.Module) -> dict[str, Tensor]:
    return {clean_name(n): _local(param) for n, param in model.named_parameters()}


def _send_whole(server: _Server, model: Any) -> None:
    """Send what a summon shows, or full tensors."""
    if not isinstance(model, FSDP):
        server.ask({n: p.detach().full_tensor() for n, p in model.named_parameters()})
        return
    with FSDP.summon_full_params(model, writeback=False):
        server.ask({clean_name(n): p.detach() for n, p in model.named_parameters()})


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("sends", ["shards", "whole weights"])
@distributed(world_size=(1, 2))
def test_training(api: str, sends: str) -> None:
    """Weights after each step, seen by the process, and in training."""
    server = _Server()
    both = in_either_api(api, _build, {Block})
    for step in range(4):
        both.train(1)
        if sends == "whole weights":
            _check_outputs(server, both.model, both.reference, step)
        else:
            if step == 1:
                server.ask(_shards(both.model))
            if step >= 1:
                _check_sums(server, both.model)
    server.end()


def _check_outputs(server: _Server, model: Any, reference: Any, seed: int) -> None:
    """Of the process's model, whose weights are those of this step."""
    _send_whole(server, model)
    with torch.no_grad():
        expected = reference(draw(3, DIM, seed=seed))
    found = torch.tensor(server.ask(seed), dtype=torch.float64)
    assert_same("output", found, expected, 1e-9)


def _check_sums(server: _Server, model: nn.Module) -> None:
    """What the process reads in the shards is what they hold now."""
    expected = {name: float(shard.sum()) for name, shard in _shards(model).items()}
    assert server.ask("sums") == expected
