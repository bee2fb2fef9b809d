"""What torch's own ``fully_shard`` gets wrong or refuses, one test for each.

Numbers are those of the list in docs/guide/fully_shard.md. Against the unsharded model.
"""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from fsdp_c import FSDPModule, fully_shard
from helpers.distributed import distributed
from helpers.groups import groups_destroyed, kept_mesh
from helpers.models import DIM, vectors
from helpers.rows import Rows


class Layers(nn.Module):
    """Layers, each a group, and a head."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(num_layers))
        self.head = nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def shard_layers(module: nn.Module, **options: Any) -> Any:
    """Make each layer a group, and the rest."""
    for layer in module.get_submodule("layers").children():
        fully_shard(layer, **options)
    return fully_shard(module, **options)


def pair(build: Callable[[], nn.Module] = Layers, **options: Any) -> Rows:
    return Rows(build, lambda module: shard_layers(module, **options), vectors)


class RecomputedTwice(Layers):
    """A layer that runs twice, recomputed in reentrant backwards."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.layers
        x = torch.tanh(first(x))
        for layer in (second, third, second):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return self.head(first(x))


@pytest.mark.parametrize("reshards", [True, False])
@distributed(world_size=2)
def test_1_reentrant_and_twice(reshards: bool) -> None:
    """Every use of a layer adds to its gradient, which is reduced once."""
    both = pair(RecomputedTwice, reshard_after_forward=reshards)
    both.train(2)
    both.run("zns")


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@distributed(world_size=2)
def test_2_divide_factor(world_size: int, shape: tuple[int, int]) -> None:
    """Divided once, also where a shard group has one rank and sums are forced."""
    both = pair(mesh=kept_mesh(shape, ("replicate", "shard")))
    for module in both.model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(6.0)
    both.accumulate(2, no_sync=False)
    both.scale_reference_grads(world_size / 6.0)
    both.check()


class UsesSome(Layers):
    """Uses one of two parameters, by the batch, so by rank and micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Either() for _ in range(3))


class Either(nn.Module):
    """Two layers, of which one runs; a parameter that never does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        is_first = bool(x.detach().sum() > 0)
        return self.first(x) if is_first else self.second(x)


@distributed(world_size=(2, 3))
def test_3_reduce_dtype() -> None:
    """Another reduce_dtype, no synchronization, parameters that some ranks use."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    both = pair(UsesSome, mp_policy=policy)
    both.tolerance = 1e-5  # reduced in fp32
    both.run("znnsu znnsu")


@distributed(world_size=(2, 4))
def test_4_all_reduce_once(world_size: int) -> None:
    """Each micro-batch uses other parameters before the one that all-reduces."""
    mesh = kept_mesh((2, world_size // 2), ("replicate", "shard"))
    both = pair(UsesSome, mesh=mesh)
    for _ in range(2):
        both.zero_grad()
        both.accumulate_in_shards(3)
        both.step()


@distributed(world_size=2)
def test_5_thawed_with_mixed_precision() -> None:
    """A group is frozen at its first forward, and trained later."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    both = pair(mp_policy=policy)
    both.tolerance = 1e-4  # computed in fp32
    for is_trained in (False, True, False, True):
        for model in (both.reference, both.model):
            model.get_submodule("layers.1").requires_grad_(is_trained)
        both.train(1)


@pytest.mark.parametrize("inner", [6, 7])
@distributed(world_size=4)
def test_6_columns_in_parts(inner: int) -> None:
    """Shard(1) and reshard_after_forward=2, with equal parts and others."""

    class Wide(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(DIM, inner), nn.Linear(inner, DIM))
                for _ in range(2)
            )

    with groups_destroyed():
        both = pair(
            Wide,
            reshard_after_forward=2,
            shard_placement_fn=lambda param: Shard(param.ndim - 1),
        )
        both.train(2)


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("mode", ["eval", "train", "unshard"])
@distributed(world_size=2)
def test_7_no_stale_weights(mode: str, reshards: bool) -> None:
    """Whatever gathers between backward and the step, the next forward is right."""
    both = pair(reshard_after_forward=reshards)
    for _ in range(2):
        both.zero_grad()
        both.forward_backward()
        if mode == "eval":
            both.evaluate()
        elif mode == "train":
            both.forward()
        else:
            both.model.unshard()
            both.model.reshard()
        both.step()
        both.evaluate()
    both.train(1)


@distributed(world_size=2)
def test_8_offload_and_factors_on_gloo(world_size: int) -> None:
    """CPUOffloadPolicy() as it is, and factors without forced sums."""
    both = pair(offload_policy=CPUOffloadPolicy())
    for module in both.model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(world_size / 3)
    both.forward_backward()
    both.scale_reference_grads(3)
    both.checked_step()


class Kinds(Layers):
    """Kinds of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM)])
        self.turned = nn.Parameter(torch.randn(5, DIM).t())
        self.empty = nn.Parameter(torch.randn(3, 0))
        self.one = nn.Parameter(torch.randn(1, 1, 1))
        self.odd = nn.Parameter(torch.randn(DIM, 7))
        self.turns = nn.Parameter(torch.randn(DIM, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.turned) @ self.turned.t() * self.one.flatten()
        x = torch.tanh(x @ self.odd) @ self.odd.t() + (x * self.turns).imag
        return super().forward(x) + self.empty.sum()


@pytest.mark.parametrize("dim", [0, -1])
@distributed(world_size=2)
def test_9_kinds_of_parameters(dim: int) -> None:
    """Not contiguous, without elements, with one, uneven columns, complex: trained."""
    both = pair(Kinds, shard_placement_fn=lambda param: Shard(dim % param.ndim))
    both.tolerance = 1e-4  # complex64
    both.train(2)


@distributed(world_size=2)
def test_9_refused() -> None:
    """Scalars, and ties across groups, by name."""
    scalar = nn.Module()
    scalar.gain = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="Change gain to a 1D tensor"):
        fully_shard(scalar)
    tied = Layers()
    tied.layers[1].weight = tied.layers[0].weight
    fully_shard(tied.layers[0])
    with pytest.raises(ValueError, match="'weight' is shared with 'weight'"):
        fully_shard(tied.layers[1])
    shared = nn.Linear(DIM, DIM)
    first = fully_shard(nn.Sequential(shared))  # kept: its groups say whose it is
    with pytest.raises(ValueError, match=r"'1\.weight' is shared with '0\.weight'"):
        fully_shard(nn.Sequential(nn.ReLU(), shared))
    del first
    gc.collect()
    with pytest.raises(
        ValueError, match=r"'1\.weight' is a DTensor on .*, which is not"
    ):
        fully_shard(nn.Sequential(nn.ReLU(), shared))


class TwoNames(Layers):
    """A layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.layers[1]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(self.again(x)))


@distributed(world_size=2)
def test_10_full_state_of_two_names() -> None:
    """set_model_state_dict() loads a full one."""
    both, other = pair(TwoNames), pair(TwoNames)
    both.train(1)
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(both.model, options=options)
    assert {"again.weight", "layers.1.weight"} <= state.keys()
    set_model_state_dict(other.model, state, options=options)
    expected, _ = both.gather()
    for name, value in other.gather()[0].items():
        assert torch.equal(value, expected[name]), name
