"""Deferred initialisation: host memory stays at the shards and about one unit.

Memory is counted in bytes by torch's profiler, which sees every allocation of
torch's CPU allocator and none of Python's.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_c import _native
from helpers.allocations import counted
from helpers.distributed import TEST_DEVICE, distributed
from helpers.impl import FSDP, ShardingStrategy, fsdp
from helpers.reference import assert_same_tensors, full_state_dict, objects_of_all_ranks

RANKS = (2, 3, 4)
NUM_LAYERS = 8
WIDTH = 96
LAYER_NBYTES = (WIDTH * WIDTH + WIDTH) * 4
TIED_NBYTES = 4 * WIDTH * 4
SLACK_NBYTES = 8192  # buffers, counters, padding
if TEST_DEVICE == "cuda":  # whose allocator rounds each tensor up
    SLACK_NBYTES += 512 * 4 * NUM_LAYERS


class _Layer(nn.Module):
    """A linear layer with a persistent and a non-persistent buffer."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH, device=device)
        self.register_buffer("offset", torch.zeros(3, device=device))
        self.register_buffer("gain", torch.zeros((), device=device), persistent=False)

    def reset_parameters(self) -> None:
        """Fill the buffers; the linear layer resets itself."""
        with torch.no_grad():
            self.offset.copy_(torch.tensor([1.0, 2.0, 3.0]))
            self.gain.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x)) * self.gain + self.offset.sum()


class _Deep(nn.Module):
    """Layers, and two tied parameters in the root."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, 4, bias=False, device=device)
        self.layers = nn.ModuleList(_Layer(device) for _ in range(NUM_LAYERS))
        self.out = nn.Linear(WIDTH, 4, bias=False, device=device)
        self.out.weight = self.inp.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inp(x).sum()
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def _init(module: nn.Module) -> None:
    """As torchdistX and FSDP's documentation do: this module's own tensors."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if any(tensor.is_meta for tensor in tensors):
        module.to_empty(device=torch.device(TEST_DEVICE), recurse=False)
        reset: Any = module.reset_parameters
        reset()


@contextlib.contextmanager
def _broadcasts_of_views() -> Iterator[list[int]]:
    """Broadcast through memory that was there before; yield the list of sizes.

    gloo's threads may be the last to hold a tensor, and the profiler does not see
    what they free.
    """
    scratch = torch.empty(1 << 18, dtype=torch.uint8)
    original = dist.broadcast
    broadcast_nbytes: list[int] = []

    def broadcast(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        flat = tensor.reshape(-1).view(torch.uint8)
        broadcast_nbytes.append(flat.numel())
        view = scratch[: flat.numel()]
        view.copy_(flat)
        original(view, *args, **kwargs)
        flat.copy_(view)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", broadcast)
        patch.setattr(_native, "broadcast", lambda *_: False)  # c10d's instead
        yield broadcast_nbytes


def _wrap(module: nn.Module, **kwargs: Any) -> Any:
    kwargs.setdefault("use_orig_params", True)
    return fsdp(module, units={_Layer}, **kwargs)


def _check_buffers(model: nn.Module) -> None:
    for _, buffer in model.named_buffers():
        assert not buffer.is_meta
        assert buffer.tolist() in ([1.0, 2.0, 3.0], 0.5)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("init", ["param_init_fn", "reset_parameters"])
@pytest.mark.parametrize("sync", [True, False])
@distributed(world_size=RANKS)
def test_peak_is_the_shards_and_one_unit(
    world_size: int, sync: bool, init: str, use_orig_params: bool
) -> None:
    """One layer in full, and one more for the broadcast; never the whole model."""
    with _broadcasts_of_views(), counted() as allocations:
        model = _wrap(
            _Deep("meta"),
            param_init_fn=_init if init == "param_init_fn" else None,
            sync_module_states=sync,
            use_orig_params=use_orig_params,
        )
    shards = (NUM_LAYERS * LAYER_NBYTES + TIED_NBYTES) // world_size
    assert shards <= allocations.left_nbytes <= shards + SLACK_NBYTES
    num_whole = 2 if sync else 1
    assert allocations.peak_nbytes <= shards + num_whole * LAYER_NBYTES + SLACK_NBYTES
    assert allocations.peak_nbytes < NUM_LAYERS * LAYER_NBYTES
    _check_buffers(model)
    model(torch.randn(2, WIDTH)).sum().backward()


def _state_of(build: Callable[[], nn.Module], seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: tensor.clone() for name, tensor in build().state_dict().items()}


@pytest.mark.trap(27)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("where", ["all ranks", "all but the first"])
@distributed(world_size=RANKS)
def test_states_are_synced_after_materialisation(
    rank: int, world_size: int, where: str, use_orig_params: bool
) -> None:
    """Rank 0's parameters and buffers reach ranks that came with nothing."""
    is_meta = where == "all ranks" or rank > 0
    torch.manual_seed(rank)  # each rank would initialise differently
    module = _Deep("meta" if is_meta else None)
    if not is_meta:
        with torch.no_grad():
            for layer in module.layers:
                layer.reset_parameters()  # type: ignore[operator]
            for buffer in module.buffers():
                buffer.mul_(3.0)
    model = _wrap(
        module,
        param_init_fn=_init if is_meta else None,
        sync_module_states=True,
        use_orig_params=use_orig_params,
    )
    state = full_state_dict(model)
    if is_meta and where == "all ranks":
        _check_buffers(model)
    else:
        for name, buffer in model.named_buffers():
            assert buffer.tolist() in ([3.0, 6.0, 9.0], 1.5), name
    theirs = objects_of_all_ranks(state)
    for each in theirs:
        assert_same_tensors("state", each, theirs[0], 0.0)
    if not is_meta or where == "all but the first":
        expected = _state_of(_Deep, 0)
        for name, tensor in expected.items():
            if "offset" not in name:
                assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("init", ["param_init_fn", "reset_parameters"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=RANKS)
def test_tied_weights_stay_tied(use_orig_params: bool, init: str) -> None:
    """One parameter, sharded once, that both modules still share."""
    model = _wrap(
        _Deep("meta"),
        param_init_fn=_init if init == "param_init_fn" else None,
        use_orig_params=use_orig_params,
    )
    assert model.out.weight is model.inp.weight
    with FSDP.summon_full_params(model):
        assert model.out.weight is model.inp.weight
        assert model.out.weight.shape == (4, WIDTH)
        names = [name for name, _ in model.named_parameters()]
    assert "inp.weight" in names
    assert "out.weight" not in names
    state = full_state_dict(model)
    assert torch.equal(state["inp.weight"], state["out.weight"])
    loss = model(torch.randn(2, WIDTH)).square().sum()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    state = full_state_dict(model)
    assert torch.equal(state["inp.weight"], state["out.weight"])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@distributed(world_size=RANKS)
def test_checkpoint_goes_into_a_meta_model(strategy: str) -> None:
    """Wrapped on meta, loaded, and then the model that was saved."""
    expected = _state_of(_Deep, 7)
    model = _wrap(
        _Deep("meta"), param_init_fn=_init, sharding_strategy=ShardingStrategy[strategy]
    )
    model.load_state_dict(expected)
    assert_same_tensors("state", full_state_dict(model), expected, 0.0)
    reference = _Deep()
    reference.load_state_dict(expected)
    for layer in reference.layers:
        layer.get_buffer("gain").fill_(0.5)  # not in the state dict
    x = torch.randn(2, WIDTH)
    torch.testing.assert_close(model(x), reference(x))


@distributed(world_size=2)
def test_sync_is_chunked(
    rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No broadcast carries more than a chunk, whatever the parameter's size."""
    monkeypatch.setattr("fsdp_c._units.collectives.CHUNK_NBYTES", 4096)
    torch.manual_seed(rank)
    with _broadcasts_of_views() as sent, counted() as allocations:
        model = _wrap(_Deep("meta"), param_init_fn=_init, sync_module_states=True)
    assert max(sent) <= 4096
    assert sum(sent) >= NUM_LAYERS * LAYER_NBYTES
    shards = (NUM_LAYERS * LAYER_NBYTES + TIED_NBYTES) // world_size
    assert allocations.peak_nbytes <= shards + LAYER_NBYTES + 2 * 4096 + SLACK_NBYTES
    theirs = objects_of_all_ranks(full_state_dict(model))
    assert_same_tensors("state", theirs[1], theirs[0], 0.0)
