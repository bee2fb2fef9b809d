"""fully_shard: the methods that say what is gathered, when and whether."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp_c import fully_shard
from helpers.distributed import distributed
from helpers.models import MLP, Block, Chain, vectors
from helpers.rows import Rows, shard_units


class _Gathers:
    """Which units were gathered since the last look, by the engine's log."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._last = -1
        self.take()

    def take(self) -> list[str]:
        running = self._model._fsdp_c_groups[0]._running
        if running is None:
            return []
        found = []
        for line in running.engine.log().splitlines():
            match = re.match(r"\s*#?(\d+)\s+all_gather\s+'?([\w.]+)'?", line)
            if match and int(match[1]) > self._last:
                self._last = int(match[1])
                found.append(match[2].replace("blocks.", ""))
        return found


def _chain() -> tuple[Rows, Any]:
    both = Rows(
        lambda: Chain(Block() for _ in range(4)),
        lambda model: shard_units(model, [Block]),
        vectors,
    )
    return both, both.model.blocks


@distributed(world_size=2)
def test_forward_prefetch() -> None:
    """In the order of the list, right after the module itself; from the first step."""
    both, blocks = _chain()
    blocks[0].set_modules_to_forward_prefetch([blocks[2], blocks[1]])
    blocks[2].set_modules_to_forward_prefetch([blocks[3]])
    both.forward()
    gathers = _Gathers(both.model)
    for _ in range(2):
        _, loss = both.forward()
        assert gathers.take() == ["0", "2", "1", "3"]
        loss.backward()
        gathers.take()
        both.zero_grad()
    both.train(2)
    blocks[0].set_modules_to_forward_prefetch([])
    gathers.take()
    both.evaluate()
    assert gathers.take() == ["0", "1", "2", "3"]
    with pytest.raises(ValueError, match="Expects FSDPModule"):
        blocks[0].set_modules_to_forward_prefetch([nn.Linear(2, 2)])


@distributed(world_size=2)
def test_a_prefetched_unit_that_does_not_run() -> None:
    """It is dropped, and gathered anew when it does."""
    both, blocks = _chain()
    both.train(1)
    blocks[0].set_modules_to_forward_prefetch([blocks[3]])
    blocks[0](torch.randn(2, 6, dtype=torch.float64)).sum()
    both.train(2)


@distributed(world_size=2)
def test_backward_prefetch() -> None:
    """Instead of the unit that comes next; [] is that one again."""
    both, blocks = _chain()
    both.train(1)
    gathers = _Gathers(both.model)

    def gathered_in_backward() -> list[str]:
        both.zero_grad()
        _, loss = both.forward()
        gathers.take()
        loss.backward()
        return gathers.take()

    default = gathered_in_backward()
    assert sorted(default) == ["0", "1", "2", "3"]
    blocks[3].set_modules_to_backward_prefetch([blocks[1], blocks[2]])
    blocks[2].set_modules_to_backward_prefetch([blocks[0], blocks[3]])
    assert gathered_in_backward() == ["3", "1", "2", "0"]  # 3 was through
    both.zero_grad()
    both.train(2)
    blocks[3].set_modules_to_backward_prefetch([])
    blocks[2].set_modules_to_backward_prefetch([])
    assert gathered_in_backward() == default


class _Embedded(nn.Module):
    """An embedding, whose backward does not read it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.block = Block()

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.embed(tokens))


class _Recomputed(_Embedded):
    def embed(self, tokens: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.embedding, tokens, use_reentrant=False)
        return found.tanh()


def _tokens(generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randint(0, 7, (4, 3), generator=generator),)


@pytest.mark.parametrize("kind", [_Embedded, _Recomputed])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=(2, 3))
def test_without_unshard_in_backward(
    kind: type[nn.Module], reshard_after_forward: bool
) -> None:
    """The embedding is not gathered for its gradient, unless it is recomputed."""
    both = Rows(
        kind,
        lambda model: shard_units(
            model,
            [nn.Embedding, Block],
            reshard_after_forward=reshard_after_forward,
        ),
        _tokens,
    )
    embedding: Any = both.model.embedding
    embedding.set_unshard_in_backward(False)
    both.train(2)
    both.run("zns")
    gathers = _Gathers(both.model)
    _, loss = both.forward()
    gathers.take()
    loss.backward()
    is_recomputed = kind is _Recomputed and reshard_after_forward
    assert ("embedding" in gathers.take()) == is_recomputed
    both.zero_grad()
    embedding.set_unshard_in_backward(True)
    both.train(1)


@distributed(world_size=2)
def test_unshard_in_backward_is_needed() -> None:
    """A backward that reads the parameters raises, instead of reading old memory."""
    both, blocks = _chain()
    both.train(1)
    blocks[2].set_unshard_in_backward(False)
    both.zero_grad()
    _, loss = both.forward()
    with pytest.raises(RuntimeError, match=r"is sharded now|storage of size 0"):
        loss.backward()
    blocks[2].set_unshard_in_backward(True)
    both.zero_grad()
    both.model.reset_iter_state()
    both.train(2)


@pytest.mark.parametrize("no_sync", [True, False])
@distributed(world_size=2)
def test_last_backward(no_sync: bool) -> None:
    """Micro-batches whose backwards leave their reductions to the last one."""
    both = Rows(MLP, lambda model: shard_units(model, [Block]), vectors)
    both.train(1)
    for _ in range(2):
        both.zero_grad()
        for index in range(3):
            is_last = index == 2
            both.model.set_is_last_backward(is_last)
            both.model.set_requires_gradient_sync(is_last or not no_sync)
            both.forward_backward()
        both.checked_step()
    both.model.set_is_last_backward(False)
    both.zero_grad()
    both.forward_backward()
    both.zero_grad()  # drops what is still being reduced
    both.model.set_is_last_backward(True)
    both.train(1)


@distributed(world_size=2)
def test_hooks_see_reduced_gradients() -> None:
    """Also when the backward is not the last one."""
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(64, 64))
    model.set_is_last_backward(False)
    seen: list[Tensor] = []
    model.bias.register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad.to_local().clone())
    )
    for _ in range(3):
        model(torch.ones(4, 64)).sum().backward()
    assert isinstance(model.bias.grad, DTensor)
    for times, grad in enumerate(seen, 1):
        assert grad.tolist() == [4.0 * times] * 32


@distributed(world_size=2)
def test_exception_of_a_hook() -> None:
    """It is raised as it is, and the next step is right."""

    def fail(_param: Tensor) -> None:
        raise ArithmeticError("of the hook")

    model: Any = fully_shard(nn.Linear(4, 4))
    handle = model.weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ArithmeticError, match="of the hook"):
        model(torch.ones(1, 4)).sum().backward()
    handle.remove()
    model.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.ones(4, 4))


@distributed(world_size=2)
def test_arguments() -> None:
    """As torch checks them."""
    model: Any = fully_shard(nn.Linear(4, 4))
    for value in (True, 1.0):
        with pytest.raises(TypeError, match="must be an int"):
            model.set_reduce_scatter_max_input_buffers(value)
    with pytest.raises(ValueError, match="must be a positive int"):
        model.set_reduce_scatter_max_input_buffers(0)
