"""A captured step is a step: the same training, and the same model after it."""

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fsdp_c
from fakecuda.device import needs_cuda, needs_fake, schedules, set_memory
from helpers.distributed import distributed
from helpers.groups import kept_mesh
from helpers.impl import fsdp

pytestmark = needs_cuda

DIM = 8
NUM_STEPS = 5


def network(dim: int = DIM) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(dim, dim), nn.LayerNorm(dim)) for _ in range(3)),
        nn.Linear(dim, dim),
    )


def shard(api: str, model: nn.Module) -> nn.Module:
    if api == "fully_shard":
        for layer in model:
            fsdp_c.fully_shard(layer)
        return fsdp_c.fully_shard(model)
    return fsdp(
        model, units=(nn.Sequential, nn.Linear), use_orig_params=api == "orig_params"
    )


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    options = {"lr": 1e-2, "capturable": True} | options
    return torch.optim.AdamW(model.parameters(), **options)


def batches(
    count: int = NUM_STEPS, dim: int = DIM
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(4, dim), torch.randn(4, dim)) for _ in range(count)]


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        # Of one dtype: torch 2.11 has no other on the CPU.
        loss = functional.mse_loss(model(x).to(y.dtype), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train_step


def local_values(model: nn.Module) -> list[torch.Tensor]:
    return [
        getattr(param, "_local_tensor", param).detach().clone()
        for param in model.parameters()
    ]


@pytest.mark.parametrize("api", ["fully_shard", "orig_params", "flat_params"])
@distributed(world_size=2, device="cuda")
def test_captured_steps_equal_plain_ones(api: str) -> None:
    original = network()
    for seed in schedules(4):
        plain, captured = (shard(api, copy.deepcopy(original)) for _ in range(2))
        plain_step = step_of(plain, adamw(plain))
        optimizer = adamw(captured)
        step = fsdp_c.capture_step(
            step_of(captured, optimizer), captured, optimizer, warmup=2
        )
        for x, y in batches(2 + NUM_STEPS):
            expected = plain_step(x, y)
            loss = step(x, y)
            assert torch.equal(loss.cpu(), expected.cpu()), f"seed {seed}"
        assert step.is_captured
        for mine, theirs in zip(
            local_values(captured), local_values(plain), strict=True
        ):
            assert torch.equal(mine.cpu(), theirs.cpu()), f"seed {seed}"


def captured(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> fsdp_c.CapturedStep:
    """Return a step of ``model`` that is captured after one step of warm-up."""
    optimizer = adamw(model) if optimizer is None else optimizer
    return fsdp_c.capture_step(step_of(model, optimizer), model, optimizer, warmup=1)


VARIANTS: dict[str, dict[str, Any]] = {
    "SHARD_GRAD_OP": {"strategy": "SHARD_GRAD_OP"},
    "HYBRID_SHARD": {"strategy": "HYBRID_SHARD"},
    "NO_SHARD": {"strategy": "NO_SHARD"},
    "mixed": {
        "mixed_precision": fsdp_c.MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    },
}


@distributed(world_size=2, device="cuda")
def test_another_capture_after_a_step() -> None:
    """A user's own, in torch's usual mode, where other threads may ask nothing.

    The watchdog asks for the step's collectives meanwhile.
    """
    model = shard("orig_params", network())
    ((x, _),) = batches(1)
    y = torch.ones(DIM)
    model(x).sum().backward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = y * 2
        time.sleep(0.5)  # more than twice the watchdog's period
    graph.replay()
    assert z.tolist() == [2.0] * DIM


@pytest.mark.parametrize("variant", VARIANTS)
@distributed(world_size=4, device="cuda")
def test_strategies(variant: str) -> None:
    options = dict(VARIANTS[variant])
    if variant == "HYBRID_SHARD":
        options["device_mesh"] = kept_mesh((2, 2), ("replicate", "shard"))
    original = network()
    plain, mine = (
        fsdp(
            copy.deepcopy(original),
            units=(nn.Sequential,),
            use_orig_params=True,
            **options,
        )
        for _ in range(2)
    )
    plain_step = step_of(plain, adamw(plain))
    step = captured(mine)
    for x, y in batches(4):
        assert torch.equal(step(x, y).cpu(), plain_step(x, y).cpu())
    assert step.is_captured


@pytest.mark.parametrize("api", ["fully_shard", "orig_params"])
@distributed(world_size=2, device="cuda")
def test_a_step_of_several_batches_that_clips(api: str) -> None:
    original = network()
    losses = []
    for is_captured in (False, True):
        model = shard(api, copy.deepcopy(original))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def train_step(
            xs: list[torch.Tensor],
            scale: float,
            model: nn.Module = model,
            optimizer: torch.optim.Optimizer = optimizer,
        ) -> dict[str, torch.Tensor]:
            optimizer.zero_grad()
            for x in xs[:-1]:
                if api == "fully_shard":
                    model.set_requires_gradient_sync(False)
                    model(x).square().mean().backward()
                    model.set_requires_gradient_sync(True)
                else:
                    with model.no_sync():
                        model(x).square().mean().backward()
            loss = model(xs[-1]).square().mean() * scale
            loss.backward()
            if api == "fully_shard":
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
            else:
                norm = model.clip_grad_norm_(0.1)
            optimizer.step()
            return {"loss": loss, "norm": norm}

        step: Any = train_step
        if is_captured:
            step = fsdp_c.capture_step(train_step, model, optimizer, warmup=1)
        torch.manual_seed(3)
        for _ in range(4):
            found = step([torch.randn(4, DIM) for _ in range(3)], 0.5)
            losses.append([value.detach().cpu().clone() for value in found.values()])
        if is_captured:
            assert step.is_captured
    assert losses[:4] == losses[4:]


@pytest.mark.parametrize("api", ["fully_shard", "orig_params", "flat_params"])
@distributed(world_size=2, device="cuda")
def test_the_model_between_replays(api: str) -> None:
    """State dict, evaluation, gradients and steps of its own: as if it had stepped."""
    plain, mine = (shard(api, copy.deepcopy(model)) for model in [network()] * 2)
    plain_step = step_of(plain, adamw(plain))
    optimizer = adamw(mine)
    step, own_step = captured(mine, optimizer), step_of(mine, optimizer)

    def check() -> None:
        for pair in zip(
            mine.state_dict().values(), plain.state_dict().values(), strict=True
        ):
            found, expected = (getattr(each, "_local_tensor", each) for each in pair)
            assert torch.equal(found.cpu(), expected.cpu())
        x = torch.randn(4, DIM)
        with torch.no_grad():
            assert torch.equal(mine(x).cpu(), plain(x).cpu())
        assert all(param.grad is None for param in mine.parameters())

    for number, (x, y) in enumerate(batches(12)):
        expected = plain_step(x, y)
        # Some with the same model and optimizer, without the graph.
        found = (step if number < 4 or number % 3 == 0 else own_step)(x, y)
        assert torch.equal(found.cpu(), expected.cpu()), number
        if number >= 3:
            check()
    assert step.is_captured
    # A backward whose gradients nobody used: the next step begins without.
    x, y = batches(1)[0]
    mine(x).sum().backward()
    assert torch.equal(step(x, y).cpu(), plain_step(x, y).cpu())
    check()
    # A forward whose backward never came.
    mine(x)
    assert torch.equal(step(x, y).cpu(), plain_step(x, y).cpu())
    check()


@distributed(world_size=2, device="cuda")
def test_after_steps_on_the_default_stream() -> None:
    """What autograd remembers of the stream of earlier steps spoils no capture."""
    plain, mine = (shard("orig_params", copy.deepcopy(m)) for m in [network()] * 2)
    plain_step = step_of(plain, adamw(plain))
    optimizer = adamw(mine)
    own_step, step = step_of(mine, optimizer), captured(mine, optimizer)
    for number, (x, y) in enumerate(batches(6)):
        found = own_step(x, y) if number < 2 else step(x, y)
        assert torch.equal(found.cpu(), plain_step(x, y).cpu())
    assert step.is_captured


@distributed(world_size=2, device="cuda")
def test_after_a_graph_of_the_default_stream() -> None:
    """A graph that kept the nodes of its stream in the first steps of a warm-up."""
    plain, mine = (shard("orig_params", copy.deepcopy(m)) for m in [network()] * 2)
    plain_step = step_of(plain, adamw(plain))
    optimizer = adamw(mine)
    step = fsdp_c.capture_step(step_of(mine, optimizer), mine, optimizer, warmup=2)
    graph = mine(torch.randn(4, DIM))
    for number, (x, y) in enumerate(batches(4)):
        if number == 1:
            del graph
        assert torch.equal(step(x, y).cpu(), plain_step(x, y).cpu())
    assert step.is_captured


@needs_fake
@distributed(world_size=2, device="cuda")
def test_memory_of_a_capture() -> None:
    # A whole unit needs more than the 20 MiB of torch's segments for smaller tensors.
    dim = 2400
    model = shard("orig_params", network(dim))
    step = captured(model)
    data = batches(3, dim)
    for x, y in data:
        step(x, y)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = fsdp_c.memory_stats(model)
    held = torch.cuda.memory_reserved()
    for x, y in data:
        step(x, y)
    after = fsdp_c.memory_stats(model)
    assert torch.cuda.memory_reserved() == held
    assert after["num_allocs"] == before["num_allocs"]
    assert after["num_frees"] == before["num_frees"]
    # A summon needs memory, but none of the graph's goes.
    set_memory(held)
    try:
        with (
            pytest.raises(torch.OutOfMemoryError),
            fsdp_c.FSDP.summon_full_params(model),
        ):
            raise AssertionError("the limit is too high")
    finally:
        set_memory(0)
    fsdp_c.reset(model)
    assert fsdp_c.memory_stats(model)["num_frees"] == before["num_frees"]
    step(*batches(1, dim)[0])
    # It goes with the step.
    step.reset()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < held
    step(*batches(1, dim)[0])
    step(*batches(1, dim)[0])
    del step
    set_memory(held)
    try:
        torch.cuda.empty_cache()
        with fsdp_c.FSDP.summon_full_params(model):
            pass
    finally:
        set_memory(0)


@distributed(world_size=2, device="cuda")
def test_a_step_that_waits_for_the_device() -> None:
    plain, mine = (shard("orig_params", copy.deepcopy(m)) for m in [network()] * 2)
    plain_step = step_of(plain, adamw(plain))
    optimizer = adamw(mine)
    own_step = step_of(mine, optimizer)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = own_step(x, y)
        assert loss.item() >= 0
        return loss

    step = fsdp_c.capture_step(train_step, mine, optimizer, warmup=1)
    (x, y), *others = batches(4)
    assert torch.equal(step(x, y).cpu(), plain_step(x, y).cpu())
    with pytest.raises(
        RuntimeError, match=r"captured in a graph: \S+( error)?: operation not"
    ):
        step(x, y)
    assert not step.is_captured
    for x, y in others:
        assert torch.equal(own_step(x, y).cpu(), plain_step(x, y).cpu())
    working = captured(mine, optimizer)
    for x, y in batches(3):  # random numbers can still be drawn
        assert torch.equal(working(x, y).cpu(), plain_step(x, y).cpu())
    assert working.is_captured


@distributed(world_size=2, device="cuda")
def test_one_rank_that_cannot_capture(rank: int) -> None:
    model = shard("orig_params", network())
    optimizer = adamw(model)
    own_step = step_of(model, optimizer)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = own_step(x, y)
        if rank == 1:
            loss.item()
        return loss

    step = fsdp_c.capture_step(train_step, model, optimizer, warmup=1)
    first, second = batches(2)
    step(*first)
    expected = "cannot be captured" if rank == 1 else "because another rank"
    with pytest.raises(RuntimeError, match=expected):
        step(*second)
    for x, y in batches(2):
        own_step(x, y)


@distributed(world_size=2, device="cuda")
def test_what_changed_since_the_capture() -> None:
    model = shard("orig_params", network())
    optimizer = adamw(model)
    step = captured(model, optimizer)
    (x, y), *more = batches(4)
    for batch in more:
        step(*batch)
    with pytest.raises(ValueError, match=r"shape \(4, 8\).*got a tensor of shape \(3,"):
        step(x[:3], y[:3])
    with pytest.raises(ValueError, match=r"got a tensor of shape .* torch\.float64"):
        step(x.double(), y)
    with pytest.raises(ValueError, match="capture a step for each kind of batch"):
        step({"x": x}, y)
    model.eval()
    with pytest.raises(RuntimeError, match="training mode of the model changed"):
        step(x, y)
    model.train()
    optimizer.param_groups[0]["lr"] = 1e-4
    with pytest.raises(RuntimeError, match="param_groups of the optimizer changed"):
        step(x, y)
    optimizer.param_groups[0]["lr"] = 1e-2
    step(x, y)
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="call reset"):
        step(x, y)
    step.reset()
    for batch in more:
        step(*batch)
    assert step.is_captured


@distributed(world_size=2, device="cuda")
def test_a_scheduler_changes_a_learning_rate_on_the_device() -> None:
    plain, mine = (shard("orig_params", copy.deepcopy(m)) for m in [network()] * 2)
    losses = []
    for model in (plain, mine):
        optimizer = adamw(model, lr=torch.tensor(0.1))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        step = step_of(model, optimizer)
        if model is mine:
            step = fsdp_c.capture_step(step, model, optimizer, warmup=1)
        torch.manual_seed(5)
        for x, y in batches():
            losses.append(step(x, y).item())
            scheduler.step()
    assert losses[:NUM_STEPS] == losses[NUM_STEPS:]


def refused(
    model: nn.Module, match: str, optimizer: torch.optim.Optimizer | None = None
) -> None:
    before = local_values(model)
    with pytest.raises(RuntimeError, match=match):
        captured(model, optimizer)
    for value, old in zip(local_values(model), before, strict=True):
        assert torch.equal(value, old)
    model(torch.randn(2, DIM)).sum().backward()  # it is usable


@distributed(world_size=2, device="cuda")
def test_refusals() -> None:
    offloaded = fsdp(network(), cpu_offload=fsdp_c.CPUOffload(offload_params=True))
    refused(offloaded, "its shards are in host memory; wrap it without CPU offload")
    model = shard("orig_params", network())
    refused(model, "capturable=True", adamw(model, capturable=False))
    lr = torch.tensor(0.1, device="cpu")
    refused(model, "put it on cuda", adamw(model, lr=lr, foreach=False))
    fsdp_c.offload_activations(model)
    refused(model, "enabled=False")
    fsdp_c.offload_activations(model, enabled=False)
    with model.no_sync():
        refused(model, "it accumulates gradients; leave no_sync first")
    model.zero_grad()
    model(torch.randn(2, DIM)).sum().backward()
    with (
        fsdp_c.FSDP.summon_full_params(model),
        pytest.raises(RuntimeError, match="summoned; leave summon_full_params"),
    ):
        captured(model)
    with torch.device("cpu"):  # where it makes the tensor of its step
        adagrad = torch.optim.Adagrad(model.parameters())
    step = captured(model, adagrad)
    step(*batches(1)[0])
    with pytest.raises(RuntimeError, match="Adagrad keeps 'step' of its state on cpu"):
        step(*batches(1)[0])
    hooked = shard("orig_params", network())
    hooked.register_comm_hook(None, lambda state, grad, mine: mine.zero_())
    refused(hooked, "it has communication hooks")
    rows = shard("fully_shard", network())
    rows.unshard()
    with pytest.raises(
        RuntimeError, match=r"unsharded on demand; call reshard\(\) first"
    ):
        captured(rows)
    rows.reshard()
    step = captured(rows)
    for x, y in batches(2):
        step(x, y)
    rows.unshard()
    with pytest.raises(
        RuntimeError, match=r"unsharded on demand; call reshard\(\) first"
    ):
        step(x, y)
    rows.reshard()
    step(x, y)
    with pytest.raises(ValueError, match="warmup must be at least 1, got 0"):
        fsdp_c.capture_step(print, model, adamw(model), warmup=0)
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer, got list"):
        fsdp_c.capture_step(print, model, [])
