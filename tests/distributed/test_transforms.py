"""Function transforms (torch.func) and forward_ad through sharded modules.

Compared with the unsharded model on the data of all ranks. torch's fully_shard is right
for functions of inputs; FSDP1 and functional_call() with other values are not.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

from helpers.distributed import distributed, every_strategy
from helpers.models import DIM, MLP, Block
from helpers.reference import Differential, assert_same_tensors, full_state_dict
from helpers.rows import APIS, in_either_api

Loss = Callable[[Any, Tensor], Tensor]


def _jvp(model: Any, x: Tensor) -> Tensor:
    """MeanFlow's: the tangent is a target."""
    u, tangent = jvp(model, (x,), (torch.ones_like(x),))
    return (u - 0.3 * tangent.detach() - 1).square().mean()


def _through_jvp(model: Any, x: Tensor) -> Tensor:
    u, tangent = jvp(model, (x,), (torch.ones_like(x),))
    return (u - 0.3 * tangent - 1).square().mean()


def _forward_ad(model: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = model(forward_ad.make_dual(x, torch.ones_like(x)))
        u, tangent = forward_ad.unpack_dual(dual)
    return (u - 0.3 * tangent.detach() - 1).square().mean()


def _grad(model: Any, x: Tensor) -> Tensor:
    """Of the inputs: a score."""
    score = grad(lambda each: model(each).square().sum())(x)
    return (model(x).sum(-1, keepdim=True) - score).square().mean()


def _vjp(model: Any, x: Tensor) -> Tensor:
    out, pull_back = vjp(model, x)
    (pulled,) = pull_back(torch.ones_like(out))
    return (out.sum(-1, keepdim=True) - pulled.detach()).square().mean()


def _vmap(model: Any, x: Tensor) -> Tensor:
    out: Tensor = vmap(model)(x)
    return out.square().mean()


def _jacrev(model: Any, x: Tensor) -> Tensor:
    jacobian = jacrev(lambda each: model(each).sum(0))(x)
    return (model(x) - jacobian.detach().mean()).square().mean()


def _no_grad(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        _, tangent = jvp(model, (x,), (torch.ones_like(x),))
    return (model(x) - tangent).square().mean()


def _own_params(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = functional_call(model, dict(model.named_parameters()), (x,))
    return out.square().mean()


LOSSES = {
    "jvp": _jvp,
    "through jvp": _through_jvp,
    "forward_ad": _forward_ad,
    "grad": _grad,
    "vjp": _vjp,
    "vmap": _vmap,
    "jacrev": _jacrev,
    "no_grad": _no_grad,
    "functional_call": _own_params,
}


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("api", APIS)
@distributed(world_size=2)
def test_functions_of_inputs(api: str, strategy: str, loss: str) -> None:
    in_either_api(api, MLP, {Block}, strategy=strategy).train_on(LOSSES[loss])


def _other_values(model: nn.Module, x: Tensor) -> Tensor:
    params = {name: 2 * param for name, param in model.named_parameters()}
    out: Tensor = functional_call(model, params, (x,))
    return out.sum()


def _grad_of_params(model: nn.Module, x: Tensor) -> Tensor:
    params = dict(model.named_parameters())
    grads = grad(lambda each: functional_call(model, each, (x,)).sum())(params)
    return sum(each.sum() for each in grads.values())


@pytest.mark.parametrize("loss", [_other_values, _grad_of_params])
@pytest.mark.parametrize("api", APIS)
@distributed(world_size=2)
def test_functions_of_parameters_are_refused(api: str, loss: Loss) -> None:
    """The module would compute with the values in its shards. It trains on."""
    both = in_either_api(api, MLP, {Block})
    both.train_on(_jvp, 1)
    message = r"is a tensor and no parameter now.*functional_call.*torch\.func\.jvp"
    with pytest.raises(RuntimeError, match=message):
        loss(both.model, *both.batches()[both.rank])
    both.train_on(_jvp, 1)


def _doubled(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: nn.Parameter(2 * param.detach())
        for name, param in model.named_parameters()
    }


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=2)
def test_functional_call_with_other_parameters(api: str) -> None:
    """Shards, as of an average of the weights. Those of the model stay."""
    both = in_either_api(api, MLP, {Block})
    for _ in range(2):
        inputs = both.batches()[both.rank]
        with torch.no_grad():
            own, expected = (
                functional_call(model, _doubled(model), inputs)
                for model in (both.model, both.reference)
            )
        torch.testing.assert_close(own, expected)
        both.train_on(_jvp, 1)


class _Doubling(nn.Module):
    """Calls a module inside with values made of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.fc = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        values = {"weight": self.fc.weight * 2}
        out: Tensor = functional_call(self.fc, values, (self.inp(x),))
        return out


@every_strategy
@distributed(world_size=2)
def test_functional_call_inside_a_unit(strategy: str, use_orig_params: bool) -> None:
    """Behind flat parameters it sets the originals as attributes again."""
    both = Differential.of_units(
        _Doubling, (), strategy=strategy, use_orig_params=use_orig_params
    )
    names = [name for name, _ in both.model.named_parameters()]
    for _ in range(2):
        both.train(1)
        assert [name for name, _ in both.model.named_parameters()] == names
        both.zero_grad()
        both.forward_backward()
        assert_same_tensors(
            "state", full_state_dict(both.model), both.reference.state_dict()
        )


@distributed(world_size=2)
def test_gradients_of_other_parameters() -> None:
    """They have their own, and the model's have none: as with the unsharded model."""
    both = in_either_api("FSDP", MLP, {Block})
    batches = both.batches()
    given = _doubled(both.reference)
    for batch in batches:
        loss = functional_call(both.reference, given, batch).square().mean()
        (loss / len(batches)).backward()
    for name, param in both.reference.named_parameters():
        assert param.grad is None
        param.grad = given[name].grad
    given = _doubled(both.model)
    functional_call(both.model, given, batches[both.rank]).square().mean().backward()
    for name, param in both.model.named_parameters():
        assert param.grad is None
        param.grad = given[name].grad
    both.checked_step()


@pytest.mark.parametrize(
    ("api", "is_last"), [("FSDP", False), ("fully_shard", False), ("fully_shard", True)]
)
@distributed(world_size=2)
def test_backward_with_other_values_is_refused(api: str, is_last: bool) -> None:
    """A backward gathers what is registered, which is not what forward used.

    FSDP keeps what was given until the next forward.
    """
    both = in_either_api(api, MLP, {Block})
    both.train_on(_jvp, 1)
    inputs = both.batches()[both.rank]
    loss = functional_call(both.model, _doubled(both.model), inputs).sum()
    if not is_last:
        loss = loss + both.model(*inputs).sum()
    with pytest.raises(AssertionError, match=r"was replaced after.*functional_call"):
        loss.backward()
    both.train_on(_jvp, 1)


def _grad_of_sharded(model: nn.Module, x: Tensor, **options: bool) -> None:
    params = list(model.parameters())
    torch.autograd.grad(model(x).sum(), params, **options)


@pytest.mark.parametrize("option", [{}, {"allow_unused": True}])
@distributed(world_size=2)
def test_autograd_grad_of_sharded_parameters(option: dict[str, bool]) -> None:
    """They are not in the graph: torch's class has no gradients, or zeros."""
    both = in_either_api("fully_shard", MLP, {Block})
    inputs = both.batches()[both.rank]
    with pytest.raises(RuntimeError, match=r"Call loss\.backward\(inputs=\[\.\.\.\]\)"):
        _grad_of_sharded(both.model, *inputs, **option)
    both.train_on(_jvp, 1)
    x = inputs[0].detach().requires_grad_()
    params = list(both.model.parameters())
    grads = torch.autograd.grad(x.square().sum(), [x, *params], allow_unused=True)
    torch.testing.assert_close(grads[0], 2 * x)
    assert grads[1:] == (None,) * len(params)
    loss = params[-1].to_local().square().sum()
    (one,) = torch.autograd.grad(loss, params[-1:])
    torch.testing.assert_close(one, 2 * params[-1])


def _named(model: nn.Module, names: list[str]) -> list[nn.Parameter]:
    return [
        param
        for name, param in model.named_parameters()
        if any(each in name for each in names)
    ]


def _norm(model: nn.Module) -> Any:
    params = [p for name, p in model.named_parameters() if "blocks.1" in name]
    norm: Any = sum(param.square().sum() for param in params)
    return norm


@pytest.mark.parametrize("names", [None, ["blocks.1"]])
@pytest.mark.parametrize("is_first", [False, True])
@distributed(world_size=2)
def test_a_norm_of_sharded_parameters(is_first: bool, names: list[str] | None) -> None:
    """A parameter has gradients through its shard, too, sooner or later."""
    both = in_either_api("fully_shard", MLP, {Block})
    for step in range(4):
        batches = both.batches()
        if step % 2 == 0:
            both.zero_grad()
        inputs = [
            None if names is None else _named(model, names)
            for model in (both.reference, both.model)
        ]
        norm = _norm(both.model) if is_first else None
        loss = both.model(*batches[both.rank]).square().mean()
        norm = _norm(both.model) if norm is None else norm
        (loss + norm.full_tensor()).backward(inputs=inputs[1])
        losses = [both.reference(*batch).square().mean() for batch in batches]
        (torch.stack(losses).mean() + _norm(both.reference)).backward(inputs=inputs[0])
        both.checked_step()


@distributed(world_size=2)
def test_a_norm_that_adds_to_a_gradient_of_the_user() -> None:
    """The unit has a copy by then: an error. It trains on."""
    both = in_either_api("fully_shard", MLP, {Block})
    both.train_on(_jvp, 1)
    for param in both.model.parameters():
        param.grad = torch.ones_like(param)
    norm = _norm(both.model)
    loss = both.model(*both.batches()[both.rank]).square().mean()
    with pytest.raises(RuntimeError, match=r"unit 'blocks.1'.*was added to after"):
        (loss + norm.full_tensor()).backward()
    both.train_on(_jvp, 1)


@pytest.mark.parametrize("names", [["blocks.1"], ["inp"], ["out", "blocks.0"], [""]])
@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=2)
def test_backward_of_some_parameters(api: str, names: list[str]) -> None:
    """``backward(inputs=...)`` reduces their gradients and makes no others."""
    both = in_either_api(api, MLP, {Block})
    for _ in range(3):
        batches = both.batches()
        both.zero_grad()
        losses = [both.reference(*batch).square().mean() for batch in batches]
        mine = both.model(*batches[both.rank]).square().mean()
        for model, loss in (
            (both.reference, torch.stack(losses).mean()),
            (both.model, mine),
        ):
            inputs = _named(model, names)
            assert inputs
            loss.backward(inputs=inputs)
        both.checked_step()
