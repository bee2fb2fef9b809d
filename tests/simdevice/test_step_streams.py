"""Note [Stream of a step] in step_stream.hpp: steps on several streams.

Each body waits where the unsharded model would need it, and nowhere else.
"""

import copy

import torch
from torch import nn

from helpers.distributed import distributed
from helpers.impl import FSDP, fsdp
from simdevice.device import native

NUM_SEEDS = 8
NUM_STEPS = 3
DIM = 24
WORLD_SIZE = 2
ROWS = 4  # of a rank's batch


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3)))


class Case:
    """A sharded model, and the same unsharded, which gets the rows of all ranks."""

    def __init__(self, rank: int, seed: int, reference: nn.Module) -> None:
        native().set_schedule(seed, 1.0)
        self.name = f"seed {seed}"
        self.rank = rank
        self.reference = reference
        self.model = fsdp(
            copy.deepcopy(reference), units=[nn.Linear], use_orig_params=True
        )

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's rows, and those of all ranks."""
        rows = torch.randn(WORLD_SIZE * ROWS, DIM)
        return rows[self.rank * ROWS :][:ROWS], rows

    def check_grads(self, step: int) -> None:
        """Compare the gradients, and clear them."""
        with FSDP.summon_full_params(self.model, with_grads=True):
            pairs = zip(
                self.model.parameters(), self.reference.parameters(), strict=True
            )
            for mine, theirs in pairs:
                torch.testing.assert_close(
                    mine.grad, theirs.grad, msg=f"{self.name}, step {step}"
                )
        self.model.zero_grad()
        self.reference.zero_grad()


@distributed(world_size=WORLD_SIZE, device="sim")
def test_gradients_on_the_stream_of_an_older_graph(rank: int) -> None:
    for seed in range(NUM_SEEDS):
        case = Case(rank, seed, layers())
        stream, current = torch.Stream("sim"), torch.accelerator.current_stream()
        graph = case.model(case.batch()[0])
        for step in range(NUM_STEPS):
            mine, whole = case.batch()
            stream.wait_stream(current)
            with stream:
                case.model(mine).square().mean().backward()
            current.wait_stream(stream)
            case.reference(whole).square().mean().backward()
            case.check_grads(step)
        del graph


@distributed(world_size=WORLD_SIZE, device="sim")
def test_forwards_on_two_streams_and_their_backwards(rank: int) -> None:
    for seed in range(NUM_SEEDS):
        case = Case(rank, seed, layers())
        streams = [torch.Stream("sim") for _ in range(2)]
        current = torch.accelerator.current_stream()
        for step in range(NUM_STEPS):
            losses = []
            batches = [case.batch() for _ in streams]
            for stream, (mine, _) in zip(streams, batches, strict=True):
                stream.wait_stream(current)
                with stream:
                    losses.append(case.model(mine).square().mean())
            for stream, loss in zip(streams, losses, strict=True):
                current.wait_stream(stream)
                loss.backward()
            for _, whole in batches:
                case.reference(whole).square().mean().backward()
            case.check_grads(step)


@distributed(world_size=WORLD_SIZE, device="sim")
def test_one_backward_of_forwards_on_two_streams(rank: int) -> None:
    for seed in range(NUM_SEEDS):
        case = Case(rank, seed, layers())
        streams = [torch.Stream("sim") for _ in range(2)]
        current = torch.accelerator.current_stream()
        for step in range(NUM_STEPS):
            losses = []
            batches = [case.batch() for _ in streams]
            for stream, (mine, _) in zip(streams, batches, strict=True):
                stream.wait_stream(current)
                with stream:
                    losses.append(case.model(mine).square().mean())
            for stream in streams:
                current.wait_stream(stream)
            torch.stack(losses).sum().backward()
            for _, whole in batches:
                case.reference(whole).square().mean().backward()
            case.check_grads(step)
