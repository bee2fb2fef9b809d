"""The simulated device itself: it computes as the CPU does, and it can fail."""

import copy
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from helpers.distributed import distributed
from simdevice.build import CORE, CSRC
from simdevice.device import native

NUM_SEEDS = 20


def sim_test(body):
    """Run the body in a process that has the device."""
    return distributed(world_size=1, device="sim")(body)


class Block(nn.Module):
    """Attention and a small network, as transformers have them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(dim)
        self.packed = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.second_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.packed(self.first_norm(x)).chunk(3, -1)
        weights = (query @ key.transpose(-1, -2) / 4).softmax(-1)
        fused = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        x = x + self.out(weights @ value + fused)
        return x + self.down(functional.gelu(self.up(self.second_norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 16)
        self.blocks = nn.Sequential(Block(16), Block(16))
        self.head = nn.Linear(16, 31, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


LAYERS = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, bias=False), (2, 4, 7)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (2, 4, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), (2, 4, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm(8), (2, 4, 8)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 8)),
    "batch norm": (lambda: nn.BatchNorm1d(4), (2, 4, 8)),
}


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
@sim_test
def test_layers(name: str, dtype: torch.dtype, is_training: bool) -> None:
    """Bit for bit, with gradients; the losses too that meta tensors get wrong."""
    make, shape = LAYERS[name]
    with torch.device("cpu"):
        layer = make().to(dtype).train(is_training)
        x = torch.randn(shape).to(dtype)
    found = []
    for device in ("cpu", "sim"):
        model = copy.deepcopy(layer).to(device)
        mine = x.detach().clone().to(device).requires_grad_()
        out = model(mine)
        loss = functional.mse_loss(out.float(), torch.ones_like(out).float())
        loss.backward()
        grads = [param.grad for param in model.parameters()]
        found.append([each.cpu() for each in (out, loss, mine.grad, *grads)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def train(model: nn.Module, device: str, name: str) -> list[float]:
    """Return the losses of some steps; clip, and step with ``name``."""
    model.to(device)
    kinds = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
        "AdamW_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    }
    optimizer = kinds[name](model.parameters())
    losses = []
    for step in range(4):
        generator = torch.Generator("cpu").manual_seed(step)
        tokens = torch.randint(0, 31, (2, 7), generator=generator, device="cpu")
        tokens = tokens.to(device)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("name", ["SGD", "AdamW", "AdamW_foreach"])
@sim_test
def test_training_matches_the_cpu(name: str) -> None:
    reference = Model().to("cpu").double()
    expected_params = copy.deepcopy(reference)
    expected = train(expected_params, "cpu", name)
    for seed in range(3):
        native().set_schedule(seed, 1.0)
        model = copy.deepcopy(reference)
        torch.testing.assert_close(train(model, "sim", name), expected)
        for mine, theirs in zip(
            model.parameters(), expected_params.parameters(), strict=True
        ):
            torch.testing.assert_close(mine.cpu(), theirs)


def ready(stream: torch.Stream) -> torch.Tensor:
    """Return what a chain of work on ``stream`` made: ones, in the end."""
    with stream:
        x = torch.zeros(64)
        for _ in range(20):
            x = x + 0.05
        return x.round()


@sim_test
def test_events_order_streams() -> None:
    for seed in range(NUM_SEEDS):
        native().set_schedule(seed, 1.0)
        writer, reader = torch.Stream("sim"), torch.Stream("sim")
        x = ready(writer)
        event = writer.record_event()
        reader.wait_event(event)
        with reader:
            y = x * 2
        reader.synchronize()
        assert event.query()
        assert y.cpu().sum().item() == 128


@sim_test
def test_without_an_event_results_are_late() -> None:
    late = 0
    for seed in range(NUM_SEEDS):
        native().set_schedule(seed, 1.0)
        writer, reader = torch.Stream("sim"), torch.Stream("sim")
        x = ready(writer)
        with reader:
            y = x * 2
        reader.synchronize()
        with reader:
            late += y.cpu().sum().item() != 128
        native().synchronize()
    assert late > NUM_SEEDS // 2


def reuse(*, is_recorded: bool) -> int:
    """Free memory that another stream reads; count the wrong results."""
    wrong = 0
    for seed in range(NUM_SEEDS):
        native().set_schedule(seed, 1.0)
        reader = torch.Stream("sim")
        x = torch.ones(1024)
        reader.wait_event(torch.accelerator.current_stream().record_event())
        with reader:
            busy = torch.zeros(8)
            for _ in range(5):
                busy = busy + 1
            y = x * 2
        if is_recorded:
            x.record_stream(reader)
        del x
        other = torch.full((1024,), 7.0)
        native().synchronize()
        wrong += y.cpu().sum().item() != 2048
        assert other.cpu().sum().item() == 7 * 1024
    return wrong


@sim_test
def test_freed_memory_is_poisoned() -> None:
    assert reuse(is_recorded=False) > 0


@sim_test
def test_record_stream_protects() -> None:
    assert reuse(is_recorded=True) == 0


@sim_test
def test_memory_is_cached_and_counted() -> None:
    native().synchronize()
    before = native().memory_stats()
    x = torch.zeros(1000)
    address = x.data_ptr()
    stats = native().memory_stats()
    assert stats["live_nbytes"] - before["live_nbytes"] == 4096
    assert stats["live_blocks"] - before["live_blocks"] == 1
    del x
    assert native().memory_stats()["live_nbytes"] == before["live_nbytes"]
    y = torch.empty(1000)
    assert y.data_ptr() == address
    assert y.cpu().isnan().all()


@sim_test
def test_copies_follow_the_stream() -> None:
    for seed in range(NUM_SEEDS):
        native().set_schedule(seed, 1.0)
        pinned = torch.ones(256, device="cpu").pin_memory()
        x = pinned.to("sim", non_blocking=True)
        x += 1
        back = torch.empty(256, device="cpu", pin_memory=True)
        back.copy_(x, non_blocking=True)
        torch.accelerator.current_stream().synchronize()
        assert back.sum().item() == 512
        plain = torch.full((256,), 3.0, device="cpu")
        y = plain.to("sim", non_blocking=True)
        plain.zero_()  # it has been read
        assert y.sum().item() == 768


@sim_test
def test_failures_of_tasks_are_raised() -> None:
    index = torch.tensor([5])
    x = torch.zeros(3)[index]  # out of bounds: only the task sees that
    with pytest.raises(RuntimeError, match="index"):
        x.cpu()
    native().synchronize()
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(3) + torch.zeros(3, device="cpu")


@distributed(world_size=3, device="sim")
def test_collectives_follow_the_stream(rank: int) -> None:
    for seed in range(5):
        native().set_schedule(seed, 1.0)
        x = torch.zeros(16)
        for _ in range(rank + 1):
            x = x + 1
        dist.all_reduce(x)
        gathered = torch.empty(48)
        dist.all_gather_single(gathered, x + rank)
        piece = torch.empty(16)
        dist.reduce_scatter_tensor(piece, gathered)
        work = dist.broadcast(piece, 1, async_op=True)
        work.wait()
        assert gathered[::16].tolist() == [6, 7, 8]
        assert piece.tolist() == [21] * 16
        dist.barrier()


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_streams_under_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    program = tmp_path / "check_streams"
    sources = [str(CSRC / name) for name in ("check_streams.c", *CORE)]
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", f"-fsanitize={sanitizer}"]
    subprocess.run(
        ["gcc", *flags, *sources, "-lpthread", "-o", str(program)], check=True
    )
    for arguments, is_right in ((["200"], True), (["200", "forget"], False)):
        if sanitizer == "thread" and not is_right:
            continue  # a data race is what it would report
        result = subprocess.run(
            [str(program), *arguments], capture_output=True, text=True, check=False
        )
        assert (result.returncode == 0) == is_right, result.stdout + result.stderr
