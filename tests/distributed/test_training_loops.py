"""Loops that are not forward, backward, step: and that still equal the reference."""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.distributed import STRATEGIES, distributed, every_strategy, varied
from helpers.impl import FSDP, assert_idle, memory_stats
from helpers.models import DIM, MLP, Block, loss_of
from helpers.reference import Differential, assert_same, with_model
from helpers.rows import APIS, in_either_api
from helpers.seeds import seeded

RANKS = (2, 3, 4)


@every_strategy
@varied(model=["mlp", "called_twice"])
@distributed(world_size=(2, 3))
@with_model()
def test_several_forwards_before_one_backward(differential: Differential) -> None:
    """Two or three losses, summed."""
    for num_forwards in (2, 3, 1):
        differential.zero_grad()
        differential.forward_backward(num_forwards)
        differential.checked_step()


@pytest.mark.trap(5)
@every_strategy
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@distributed(world_size=RANKS)
@with_model("called_twice")
def test_forwards_then_backwards(
    differential: Differential, order: tuple[int, ...]
) -> None:
    """Three forwards; their backwards in any order; the last one without no_sync."""
    for keeps in (False, True):
        differential.zero_grad()
        losses = [differential.forward() for _ in range(3)]
        for position, index in enumerate(order):
            no_sync = keeps and position < 2
            with differential.model.no_sync() if no_sync else contextlib.nullcontext():
                for loss in losses[index]:
                    loss.backward()
        assert_idle(differential.model)
        differential.checked_step()


@every_strategy
@varied(model=["mlp", "called_twice"])
@distributed(world_size=2)
@with_model()
def test_backward_twice_with_retain_graph(differential: Differential) -> None:
    """Gradients double."""
    for _ in range(2):
        differential.zero_grad()
        for loss in differential.forward():
            loss.backward(retain_graph=True)
            loss.backward()
        differential.checked_step()


@varied(use_orig_params=[True, False])
@distributed(world_size=2)
@with_model()
def test_backward_twice_without_retain_graph(differential: Differential) -> None:
    """Torch's own error, and training goes on."""
    mean, mine = differential.forward()
    mean.backward()
    mine.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        mine.backward()
    differential.zero_grad()
    differential.train(2)


@every_strategy
@pytest.mark.parametrize("how", ["eval", "train", "inference", "a unit"])
@distributed(world_size=RANKS)
@with_model()
def test_forwards_without_gradients_anywhere(
    differential: Differential, rank: int, how: str
) -> None:
    """Before the first step, between forward and backward, in no_sync, after."""
    model, reference = differential.model, differential.reference

    def look() -> None:
        (batch,) = differential.batches()[rank]
        if how == "eval":
            differential.evaluate()
        elif how == "train":
            with torch.no_grad():
                differential.forward()
        elif how == "inference":
            with torch.inference_mode():
                assert_same("output", model(batch), reference(batch))
        else:
            with torch.no_grad():
                expected = reference.get_submodule("blocks.1")(batch)
                assert_same("output", model.blocks[1](batch), expected)

    look()
    for _ in range(2):
        differential.zero_grad()
        with model.no_sync():
            differential.forward_backward()
            look()
        differential.forward_backward(inside=lambda: (look(), look()))
        look()
        differential.checked_step()
        look()
        differential.check()


@pytest.mark.trap(5)
@every_strategy
@pytest.mark.parametrize("what", ["step", "write", "backward"])
@distributed(world_size=RANKS)
@with_model()
def test_forward_whose_loss_is_dropped(differential: Differential, what: str) -> None:
    """Then a step, a write or another backward: on the shards, and not lost."""
    differential.train(1)
    for _ in range(2):
        differential.zero_grad()
        differential.forward_backward()
        differential.forward()
        if what == "step":
            differential.step()
        elif what == "write":
            differential.scale_params(0.9)
        differential.forward_backward()
        differential.checked_step()


class _SharedModule(nn.Module):
    """One block that two parents hold."""

    def __init__(self) -> None:
        super().__init__()
        shared = Block()
        self.left = _Parent(shared)
        self.right = _Parent(shared)

    def forward(self, x: Tensor) -> Tensor:
        return self.right(self.left(x))


class _Parent(nn.Module):
    """Its own layer, then the block of both."""

    def __init__(self, shared: Block) -> None:
        super().__init__()
        self.own = nn.Linear(DIM, DIM)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(torch.tanh(self.own(x)))


@pytest.mark.trap(24)
@every_strategy
@pytest.mark.parametrize("units", ["parents", "block", "both"])
@pytest.mark.filterwarnings("ignore:shared between units")
@distributed(world_size=RANKS)
def test_module_that_two_units_use(
    units: str, strategy: str, use_orig_params: bool
) -> None:
    """As a unit of its own, or with its parameters in the lowest common unit."""
    classes = {"parents": {_Parent}, "block": {Block}, "both": {_Parent, Block}}
    differential = Differential.of_units(
        _SharedModule,
        classes[units],
        strategy=strategy,
        use_orig_params=use_orig_params,
    )
    assert differential.model.left.shared is differential.model.right.shared
    differential.train(2)
    differential.run("zns")


@distributed(world_size=2)
@with_model()
def test_nested_unit_trained_alone(differential: Differential) -> None:
    """A unit inside a model can be run and trained as if it were a root."""
    differential.train(1)
    differential.zero_grad()
    assert isinstance(differential.model.blocks[1], FSDP)
    differential.backward_of(lambda model, x: loss_of(model.blocks[1](x)))
    differential.checked_step()
    differential.train(1)


@distributed(world_size=RANKS)
def test_two_models_trained_in_turn(rank: int) -> None:
    """A GAN: the generator's gradient passes through the frozen discriminator."""
    generator, judge = (
        Differential.of_units(lambda: MLP(2), {Block}) for _ in range(2)
    )
    widen = torch.randn(3, DIM, generator=seeded(0))

    def losses(batches: Any) -> tuple[Tensor, Tensor]:
        whole = [
            loss_of(judge.reference(generator.reference(*batch) @ widen))
            for batch in batches
        ]
        mine = loss_of(judge.model(generator.model(*batches[rank]) @ widen))
        return torch.stack(whole).mean(), mine

    for _ in range(2):
        for trained, frozen in ((judge, generator), (generator, judge)):
            for model in (frozen.model, frozen.reference):
                model.requires_grad_(False)
            trained.zero_grad()
            frozen.zero_grad()
            for loss in losses(generator.batches()):
                loss.backward()
            trained.check()
            frozen.check()
            trained.step()
            for model in (frozen.model, frozen.reference):
                model.requires_grad_(True)
    assert_idle(generator.model)
    assert_idle(judge.model)


@every_strategy
@distributed(world_size=2)
@with_model()
def test_gradient_of_the_input(
    differential: Differential, rank: int, world_size: int
) -> None:
    """Inputs that require grad get theirs, local to the rank."""
    for _ in range(2):
        differential.zero_grad()
        batches = differential.batches()
        inputs = [batch[0].requires_grad_() for batch in batches]
        mean, _ = differential.reference_forward(batches)
        mean.backward()
        mine = inputs[rank].detach().clone().requires_grad_()
        loss_of(differential.model(mine)).backward()
        assert mine.grad is not None
        expected = inputs[rank].grad
        assert expected is not None
        assert_same("input gradient", mine.grad, expected * world_size)
        differential.checked_step()


@pytest.mark.trap(5)
@every_strategy
@pytest.mark.parametrize("when", ["before", "after", "instead"])
@distributed(world_size=RANKS)
@with_model()
def test_autograd_grad_of_the_inputs(
    differential: Differential, rank: int, world_size: int, when: str
) -> None:
    """torch.autograd.grad reaches no parameter: no gradient, no reduction."""
    for _ in range(2):
        differential.zero_grad()
        batches = differential.batches()
        for (batch,) in batches:
            batch.requires_grad_()
        mean, _ = differential.reference_forward(batches)
        x = batches[rank][0].detach().clone().requires_grad_()
        loss = loss_of(differential.model(x))
        expected = torch.autograd.grad(mean, batches[rank][0], retain_graph=True)[0]
        if when == "after":
            loss.backward(retain_graph=True)
        before = memory_stats(differential.model)["num_reduces"]
        grad = torch.autograd.grad(loss, x, retain_graph=when == "before")[0]
        assert memory_stats(differential.model)["num_reduces"] == before
        assert_same("input gradient", grad, expected * world_size)
        if when == "before":
            loss.backward()
        if when == "instead":
            differential.check()
            assert_idle(differential.model)
            differential.forward_backward()
        else:
            mean.backward()
        differential.check()
        assert_idle(differential.model)
        differential.step()
        differential.check()


@varied(strategy=STRATEGIES)
@distributed(world_size=RANKS)
@with_model()
def test_autograd_grad_of_parameters_is_refused_or_local(
    differential: Differential, rank: int
) -> None:
    """It cannot be the mean over ranks; training goes on whatever it does."""
    differential.train(1)
    (batch,) = differential.batches()[rank]
    with contextlib.suppress(RuntimeError, ValueError):
        loss = loss_of(differential.model(batch))
        torch.autograd.grad(loss, list(differential.model.parameters()))
    differential.zero_grad()
    differential.train(2)


@varied(use_orig_params=[True, False])
@distributed(world_size=2)
@with_model()
def test_batch_sizes_differ_between_ranks(
    differential: Differential, rank: int, world_size: int
) -> None:
    """The mean is over ranks, not over samples."""
    torch.manual_seed(0)
    batches = [torch.randn(2 + 3 * r, 6) for r in range(world_size)]
    for batch in batches:
        (loss_of(differential.reference(batch)) / world_size).backward()
    loss_of(differential.model(batches[rank])).backward()
    differential.check()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "AdamW_foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "AdamW_fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "SGD_foreach": lambda params: torch.optim.SGD(
        params, lr=1e-2, momentum=0.9, foreach=True
    ),
}


@varied(optimizer=list(OPTIMIZERS), api=APIS)
@distributed(world_size=2)
def test_optimizers(api: str, optimizer: str) -> None:
    """Elementwise optimizers step shards as they step whole parameters."""
    both = in_either_api(api, MLP, {Block}, optimizer=OPTIMIZERS[optimizer])
    both.train(4)


class _PlannedError(RuntimeError):
    """Raised on purpose."""


class _Raises(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        msg = "backward fault"
        raise _PlannedError(msg)


class _Fails(nn.Module):
    """Fails on demand, in the middle block or in the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(6, 2)
        self.fault = ""

    def forward(self, x: Any) -> Any:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1 and self.fault == "forward":
                msg = "forward fault"
                raise _PlannedError(msg)
            if index == 1 and self.fault == "backward":
                x = _Raises.apply(x)
        return self.out(x)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", ["forward", "backward", "inner_forward"])
@distributed(world_size=(2, 3))
def test_training_goes_on_after_an_exception(
    api: str, strategy: str, where: str
) -> None:
    """The user's exception comes out as it is; the next steps are right."""
    both = in_either_api(api, _Fails, {Block}, strategy=strategy)
    net = next(module for module in both.model.modules() if isinstance(module, _Fails))
    (inner,) = (m for name, m in net.named_modules() if re.search(r"1\..*fc1$", name))

    def fail(*_: Any) -> None:
        msg = "forward fault"
        raise _PlannedError(msg)

    for num_faults in (1, 2):
        for _ in range(num_faults):
            net.fault = where
            handles = []
            if where == "inner_forward":
                handles.append(inner.register_forward_pre_hook(fail))
            with pytest.raises(_PlannedError, match="fault"):
                loss_of(both.model(*both.batches()[both.rank])).backward()
            net.fault = ""
            for handle in handles:
                handle.remove()
        both.zero_grad()
        both.train(2)
        assert_idle(both.model)


@varied(use_orig_params=[True, False])
@distributed(world_size=2)
@with_model()
def test_exception_leaves_earlier_gradients(differential: Differential) -> None:
    """Gradients that were complete before the failing forward are kept."""
    differential.forward_backward()
    with pytest.raises(RuntimeError):
        differential.model(torch.randn(4, 7))
    differential.checked_step()
