"""Loops that are not forward, backward, step: and that still equal the reference."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from helpers.distributed import distributed
from helpers.impl import FSDP, IS_TORCH, ShardingStrategy, fsdp, needs_fsdp_c
from helpers.models import CASES, Block, loss_of, vectors
from helpers.reference import Differential, assert_same, full_state_dict

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def _differential(
    model: str,
    use_orig_params: bool = True,
    strategy: str = "FULL_SHARD",
    **kwargs: Any,
) -> Differential:
    case = CASES[model]
    return Differential.of_case(
        case,
        lambda module: fsdp(
            module,
            auto_wrap_policy=ModuleWrapPolicy(set(case.unit_classes)),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
        ),
        use_orig_params=use_orig_params,
        **kwargs,
    )


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["mlp", "called_twice"])
@distributed(world_size=(2, 3))
def test_several_forwards_before_one_backward(
    rank: int, world_size: int, model: str, strategy: str, use_orig_params: bool
) -> None:
    """Two or three losses, summed."""
    differential = _differential(model, use_orig_params, strategy)
    for num_forwards in (2, 3, 1):
        differential.zero_grad()
        differential.forward_backward(num_forwards)
        differential.check()
        differential.step()
        differential.check()


@pytest.mark.trap(5)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("order", ["same", "reversed"])
@distributed(world_size=2)
def test_several_forwards_then_several_backwards(
    rank: int, world_size: int, order: str, strategy: str, use_orig_params: bool
) -> None:
    """As in pipelines: each backward reduces and adds."""
    needs_fsdp_c("frees and reduces only in the first backward, silently or not")
    differential = _differential("mlp", use_orig_params, strategy)
    for _ in range(2):
        differential.zero_grad()
        losses = [differential.forward() for _ in range(3)]
        if order == "reversed":
            losses.reverse()
        for mean, mine in losses:
            mean.backward()
            mine.backward()
        differential.check()
        differential.step()
        differential.check()


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["mlp", "transformer", "conv"])
@distributed(world_size=2)
def test_evaluation_between_steps(
    rank: int, world_size: int, model: str, strategy: str, use_orig_params: bool
) -> None:
    """Before the first step, between steps and twice in a row."""
    differential = _differential(model, use_orig_params, strategy)
    differential.evaluate()
    differential.train(1)
    differential.evaluate()
    differential.evaluate()
    differential.train(2)
    differential.evaluate()


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=2)
def test_evaluation_between_forward_and_backward(
    rank: int, world_size: int, strategy: str, use_orig_params: bool
) -> None:
    """A forward without gradients does not disturb a backward that is to come."""
    differential = _differential("mlp", use_orig_params, strategy)
    for _ in range(2):
        differential.zero_grad()
        mean, mine = differential.forward()
        differential.evaluate()
        mean.backward()
        mine.backward()
        differential.check()
        differential.step()


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_forward_without_backward(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    """A loss that is thrown away."""
    differential = _differential("mlp", use_orig_params)
    for _ in range(2):
        differential.forward()
        differential.train(1)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["mlp", "called_twice"])
@distributed(world_size=2)
def test_backward_twice_with_retain_graph(
    rank: int, world_size: int, model: str, strategy: str, use_orig_params: bool
) -> None:
    """Gradients double."""
    needs_fsdp_c("frees and reduces only in the first backward, silently or not")
    differential = _differential(model, use_orig_params, strategy)
    for _ in range(2):
        differential.zero_grad()
        for loss in differential.forward():
            loss.backward(retain_graph=True)
            loss.backward()
        differential.check()
        differential.step()
        differential.check()


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_backward_twice_without_retain_graph(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    """Torch's own error, and training goes on."""
    needs_fsdp_c("stays in its backward state after an exception")
    differential = _differential("mlp", use_orig_params)
    mean, mine = differential.forward()
    mean.backward()
    mine.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        mine.backward()
    differential.zero_grad()
    differential.train(2)


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


class _PlannedErrory(nn.Module):
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


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", ["forward", "backward", "inner_forward"])
@distributed(world_size=(2, 3))
def test_training_goes_on_after_an_exception(
    rank: int, world_size: int, where: str, strategy: str, use_orig_params: bool
) -> None:
    """The user's exception comes out as it is; the next steps are right."""
    if where == "backward":
        needs_fsdp_c("stays in its backward state after an exception")
    if where == "inner_forward" or strategy == "NO_SHARD":
        needs_fsdp_c("stays in its forward state after an exception")
    differential = Differential(
        _PlannedErrory,
        lambda module: fsdp(
            module,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
        ),
        vectors,
        use_orig_params=use_orig_params,
    )
    model = differential.model

    def fail(*_: Any) -> None:
        msg = "forward fault"
        raise _PlannedError(msg)

    for num_faults in (1, 2):
        for _ in range(num_faults):
            (batch,) = differential.batches()[rank]
            handle = None
            if where == "inner_forward":
                inner = model.blocks[1].fc1
                handle = inner.register_forward_pre_hook(fail)
            else:
                model.module.fault = where
            with pytest.raises(_PlannedError, match="fault"):
                loss_of(model(batch)).backward()
            model.module.fault = ""
            if handle is not None:
                handle.remove()
        differential.zero_grad()
        differential.train(2)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_exception_leaves_earlier_gradients(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    """Gradients that were complete before the failing forward are kept."""
    needs_fsdp_c("stays in its forward state after an exception")
    differential = _differential("mlp", use_orig_params)
    differential.forward_backward()
    with pytest.raises(RuntimeError):
        differential.model(torch.randn(4, 7))
    differential.check()
    differential.step()
    differential.check()


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=2)
def test_gradient_of_the_input(
    rank: int, world_size: int, strategy: str, use_orig_params: bool
) -> None:
    """Inputs that require grad get theirs, local to the rank."""
    differential = _differential("mlp", use_orig_params, strategy)
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
        differential.check()
        differential.step()


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_batch_sizes_differ_between_ranks(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    """The mean is over ranks, not over samples."""
    differential = _differential("mlp", use_orig_params)
    torch.manual_seed(0)
    batches = [torch.randn(2 + 3 * r, 6) for r in range(world_size)]
    for batch in batches:
        (loss_of(differential.reference(batch)) / world_size).backward()
    loss_of(differential.model(batches[rank])).backward()
    differential.check()


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_some_parameters_get_no_gradient_on_one_rank(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    """A parameter that only one rank used has that rank's part of the mean."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.second = nn.Linear(6, 6)

        def forward(self, x: Any, branch: Any) -> Any:
            return self.first(x) if int(branch) == 0 else self.second(x)

    differential = Differential(
        Branch,
        lambda module: fsdp(module, use_orig_params=use_orig_params),
        vectors,
        use_orig_params=use_orig_params,
    )
    for _ in range(2):
        differential.zero_grad()
        batches = differential.batches()
        for index, (batch,) in enumerate(batches):
            out = differential.reference(batch, torch.tensor(index))
            (loss_of(out) / world_size).backward()
        loss_of(differential.model(batches[rank][0], torch.tensor(rank))).backward()
        differential.check()
        differential.step()
        differential.check()


@pytest.mark.parametrize("optimizer", ["AdamW", "Adagrad", "SGD_foreach"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_optimizers(
    rank: int, world_size: int, use_orig_params: bool, optimizer: str
) -> None:
    """Elementwise optimizers step shards as they step whole parameters."""
    makers: dict[str, Any] = {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
        "SGD_foreach": lambda p: torch.optim.SGD(
            p, lr=1e-2, momentum=0.9, foreach=True
        ),
    }
    differential = _differential(
        "mlp", use_orig_params, optimizer=makers[optimizer], tolerance=1e-3
    )
    differential.train(4)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(world_size=2)
def test_parameters_written_between_steps(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    """What the user writes into the sharded parameters is what runs."""
    differential = _differential("mlp", use_orig_params)
    for _ in range(2):
        differential.train(1)
        with torch.no_grad():
            for model in (differential.model, differential.reference):
                for param in model.parameters():
                    param.mul_(0.5)
    differential.train(1)


@pytest.mark.trap(18)
@distributed(world_size=2)
def test_parameter_data_replaced_between_steps(rank: int, world_size: int) -> None:
    """`param.data = ...` of the shard's shape is written back to the shard."""
    differential = _differential("mlp")
    differential.train(1)
    for model in (differential.model, differential.reference):
        for param in model.parameters():
            param.data = param.data.clone() * 0.5
    differential.train(2)


@pytest.mark.trap(18)
@distributed(world_size=2)
def test_gradients_changed_between_backward_and_step(
    rank: int, world_size: int
) -> None:
    """In place and by assignment; then accumulated onto."""
    differential = _differential("mlp")
    differential.forward_backward()
    for model in (differential.model, differential.reference):
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)
                param.grad = param.grad.clone() * 3.0
    differential.check()
    differential.forward_backward()
    differential.check()
    differential.step()
    differential.check()


@distributed(world_size=2)
def test_parameter_replaced_after_wrapping(rank: int, world_size: int) -> None:
    """A new Parameter in a unit: an error that names it, or the right result."""
    needs_fsdp_c("is free to do otherwise")
    model = fsdp(Block(), use_orig_params=True)
    model(torch.randn(4, 6)).sum().backward()
    model.module.fc1.weight = nn.Parameter(torch.zeros(10, 6))
    x = torch.randn(4, 6)
    try:
        first = model(torch.zeros(4, 6))
        # The new weight is zero, so the input only passes through the residual.
        torch.testing.assert_close(model(x), first + x)
        state = full_state_dict(model)
    except (RuntimeError, ValueError) as error:
        if "fc1.weight" not in str(error):
            raise
        return
    assert bool((state["fc1.weight"] == 0).all())


@pytest.mark.trap(19)
@distributed(world_size=2)
def test_frozen_between_steps(rank: int, world_size: int) -> None:
    """requires_grad_ toggled after wrapping, as for staged fine-tuning."""
    needs_fsdp_c("decides at construction what is trainable")
    differential = _differential("mlp")
    differential.train(1)
    both: tuple[Any, ...] = (differential.model, differential.reference)
    for requires_grad in (False, True):
        for model in both:
            model.blocks[1].requires_grad_(requires_grad)
        differential.zero_grad()
        differential.train(2)


@distributed(world_size=2)
def test_copies_of_units_share_nothing(rank: int, world_size: int) -> None:
    """Two models of one build train apart."""
    first, second = _differential("mlp"), _differential("mlp")
    first.train(1)
    second.train(2)
    first.train(1)


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(world_size=2)
def test_inference_mode(rank: int, world_size: int, strategy: str) -> None:
    """torch.inference_mode before and between steps."""
    differential = _differential("mlp", strategy=strategy)
    if IS_TORCH:
        differential.train(1)  # its lazy initialisation must not happen in it
    for _ in range(2):
        batches = differential.batches()
        with torch.inference_mode():
            expected = differential.reference(*batches[rank])
            actual = differential.model(*batches[rank])
            assert_same("output", actual, expected)
        differential.train(1)


@distributed(world_size=2)
def test_nested_unit_trained_alone(rank: int, world_size: int) -> None:
    """A unit inside a model can be run and trained as if it were a root."""
    needs_fsdp_c("decides the root at the first forward")
    differential = _differential("mlp")
    differential.train(1)
    differential.zero_grad()
    block = differential.model.blocks[1]
    assert isinstance(block, FSDP)
    reference = differential.reference.get_submodule("blocks.1")
    batches = differential.batches()
    for batch in batches:
        (loss_of(reference(*batch)) / world_size).backward()
    loss_of(block(*batches[rank])).backward()
    differential.check()
    differential.step()
    differential.train(1)
