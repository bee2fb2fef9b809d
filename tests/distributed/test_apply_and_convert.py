"""apply() and the conversions after wrapping: to(), half(), double(), float()."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_c import checkpoint, fully_shard, reset
from helpers.distributed import TEST_DEVICE, distributed
from helpers.impl import FSDP, MixedPrecision, fsdp
from helpers.models import CASES, MLP, Block, vectors
from helpers.reference import assert_same_tensors, full_state_dict
from helpers.rows import APIS, in_either_api
from helpers.seeds import seeded


def _wrap(model: nn.Module, *, use_orig_params: bool, **kwargs: Any) -> Any:
    return fsdp(model, units={Block}, use_orig_params=use_orig_params, **kwargs)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("has_run", [True, False])
@distributed(world_size=(2, 3, 4))
def test_other_dtypes(has_run: bool, api: str) -> None:
    """Before the first step and after some: the model trains on, in its new dtype."""
    both = in_either_api(
        api, MLP, {Block}, optimizer=lambda params: torch.optim.SGD(params, lr=0.05)
    )
    both.train(2 if has_run else 0)
    both.tolerance = 2e-5
    before = [id(param) for param in both.model.parameters()]
    for dtype in (torch.float32, torch.float64):
        both.zero_grad()
        assert both.model.to(dtype) is both.model
        both.reference.to(dtype)
        assert [id(param) for param in both.model.parameters()] == before
        assert all(param.dtype == dtype for param in both.model.parameters())
        both.inputs = lambda g, dtype=dtype: tuple(x.to(dtype) for x in vectors(g))
        both.train(2)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@distributed(world_size=(2, 3))
def test_elements_stay_where_they_are(
    tmp_path: Path, dtype: torch.dtype, use_orig_params: bool
) -> None:
    """An optimizer goes on with its state; copies and checkpoints have them there."""

    def wrap() -> Any:
        units = {Block, nn.Linear}
        return fsdp(
            CASES["uneven"].build(), units=units, use_orig_params=use_orig_params
        )

    model = wrap()
    if use_orig_params:  # since wrapping
        model.big.bias.requires_grad_(False)
        model.gain.requires_grad_(False)
    else:
        next(model.small.parameters()).requires_grad_(False)
    trained = [param.requires_grad for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (x,) = vectors(seeded(1))
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [param.detach().to(dtype) for param in model.parameters()]
    model.to(dtype)
    assert all(map(torch.equal, model.parameters(), before))
    assert [param.requires_grad for param in model.parameters()] == trained
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].to(dtype)
    assert all(map(torch.equal, copy.deepcopy(model).parameters(), before))
    checkpoint.save(tmp_path / "converted", model)
    other = wrap().to(dtype)
    checkpoint.load(tmp_path / "converted", other)
    assert_same_tensors("state", full_state_dict(other), full_state_dict(model), 0.0)
    model(x.to(dtype)).sum().backward()
    optimizer.step()


@distributed(world_size=2)
def test_one_unit_of_several() -> None:
    """The units around it go on with it, whatever ran before."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Block()
            self.second = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dtype = next(self.second.parameters()).dtype
            return self.second(self.first(x).to(dtype))

    reference = Net()
    model = _wrap(copy.deepcopy(reference), use_orig_params=True)
    x = torch.randn(4, 6, generator=seeded(1))
    for _ in range(2):
        torch.testing.assert_close(model(x), reference(x))
        model(x).sum().backward()
        model.zero_grad()
        model.second.double()
        reference.second.double()
        assert model(x).dtype == torch.float64
    state = full_state_dict(model)
    assert state["first.fc1.weight"].dtype == torch.float32
    assert state["second.fc1.weight"].dtype == torch.float64
    assert_same_tensors("state", state, dict(reference.state_dict()))


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_dtypes_that_become_one(use_orig_params: bool) -> None:
    """Two segments, hence two flat parameters, stay two: an optimizer has them."""
    reference = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4).double())
    model = fsdp(copy.deepcopy(reference), use_orig_params=use_orig_params)
    before = [id(param) for param in model.parameters()]
    model.double()
    reference.double()
    assert len(model._sharded.unit.segments) == 2
    assert [id(param) for param in model.parameters()] == before
    x = torch.randn(3, 6, dtype=torch.float64)
    model(x).sum().backward()
    assert_same_tensors("state", full_state_dict(model), dict(reference.state_dict()))


@distributed(world_size=2)
def test_what_changes_nothing(rank: int) -> None:
    """The same dtype and device: not even a collective, with gradients too."""
    model = _wrap(MLP(1), use_orig_params=True)
    model(torch.randn(4, 6)).sum().backward()
    units = [each._sharded.unit for each in FSDP.fsdp_modules(model)]
    if rank == 0:
        model.to(TEST_DEVICE).float().to(dtype=torch.float32).to(TEST_DEVICE)
    assert [each._sharded.unit for each in FSDP.fsdp_modules(model)] == units
    assert all(p.grad is not None for p in model.parameters() if p.numel())


@distributed(world_size=2)
def test_shared_memory_leaves_shards_alone() -> None:
    """What works in place must not move memory that the engine knows."""
    reference = MLP(1)
    model = _wrap(copy.deepcopy(reference), use_orig_params=True)
    model.share_memory()
    x = torch.randn(4, 6)
    model(x).sum().backward()
    assert_same_tensors("state", full_state_dict(model), dict(reference.state_dict()))


@distributed(world_size=2)
def test_buffers_and_ignored_modules() -> None:
    """They are converted as well; a buffer's new dtype is the state dict's."""
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model = fsdp(
        net,
        ignored_modules=[net[2]],
        mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16),
    )
    model.double()
    assert net[2].weight.dtype == torch.float64
    state = full_state_dict(model)
    assert all(
        value.dtype == torch.float64
        for name, value in state.items()
        if "num_batches" not in name
    )
    assert net[1].running_mean.dtype == torch.bfloat16


@distributed(world_size=2)
def test_with_gradients() -> None:
    """Gradients would not fit: the message says what to call."""
    model = _wrap(MLP(1), use_orig_params=False)
    model(torch.randn(4, 6)).sum().backward()
    with pytest.raises(RuntimeError, match=r"has gradients.*zero_grad"):
        model.half()
    model.zero_grad()
    model.double()
    model(torch.randn(4, 6, dtype=torch.float64)).sum().backward()


@pytest.mark.parametrize("api", APIS)
@distributed(world_size=2)
def test_while_an_earlier_graph_lives(api: str) -> None:
    """As ``loss`` does to the next step: its end leaves the converted parameters alone.

    A backward through it is refused on all ranks.
    """
    both = in_either_api(api, MLP, {Block})
    batches = both.batches()
    old = both.model(*batches[both.rank]).square().mean()
    old.backward(retain_graph=True)
    both.zero_grad()
    for model in (both.model, both.reference):
        model.float()
        model.double()
    with pytest.raises(RuntimeError, match=r"were converted .* call backward first"):
        old.backward()
    reset(both.model)
    both.zero_grad()
    both.model(*batches[both.rank]).sum().backward()
    both.zero_grad()
    del old
    both.train(2)


@distributed(world_size=2)
def test_names_inside_apply() -> None:
    """They are clean there, as FSDP1's, and only there."""
    model = _wrap(MLP(), use_orig_params=True)
    found: list[list[str]] = []
    model.apply(lambda _: found.append([name for name, _ in model.named_parameters()]))
    expected = [name for name, _ in MLP().named_parameters()]
    assert all(names == expected for names in found)
    assert [name for name, _ in model.named_parameters()] != expected


@distributed(world_size=2)
def test_inside_a_summon() -> None:
    """Neither conversions nor apply()."""
    model = _wrap(MLP(1), use_orig_params=True)
    with FSDP.summon_full_params(model):
        with pytest.raises(RuntimeError, match="between steps"):
            model.half()
        with pytest.raises(ValueError, match=r"expected to be in states.*IDLE"):
            model.apply(lambda module: None)
    model(torch.randn(4, 6)).sum().backward()


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_handle(use_orig_params: bool) -> None:
    """FSDP1's name for the flat parameter, for looking only."""
    model = _wrap(MLP(1), use_orig_params=use_orig_params)
    model(torch.randn(4, 6)).sum().backward()
    for each in FSDP.fsdp_modules(model):
        flat_param = each._handle.flat_param
        assert flat_param.dim() == 1
        assert "weight" in flat_param._fqns[0]
        assert use_orig_params or flat_param.grad is not None
    assert fsdp(nn.ReLU())._handle is None


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@distributed(world_size=2)
def test_hooks_of_sharded_parameters(dtype: torch.dtype, has_run: bool) -> None:
    """A conversion keeps them, as nn.Module's does."""
    model = fully_shard(nn.Linear(4, 2))
    calls: list[torch.dtype] = []
    model.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.dtype))
    if has_run:
        model(torch.ones(3, 4)).sum().backward()
        model.zero_grad()
        calls.clear()
    model.to(dtype)
    model(torch.ones(3, 4, dtype=dtype)).sum().backward()
    assert calls == [dtype]
