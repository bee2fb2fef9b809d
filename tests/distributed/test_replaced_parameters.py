"""`module.weight = nn.Parameter(new)` after wrapping, with use_orig_params=True."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fsdp_c import reset
from helpers.distributed import STRATEGIES, distributed, varied
from helpers.impl import FSDP, assert_idle
from helpers.models import CASES, DIM, TiedBlock
from helpers.reference import Differential, full_state_dict, sgd, with_model
from helpers.seeds import seeded


def _new_values(shape: tuple[int, ...]) -> Tensor:
    """Return the same values on every rank."""
    generator = seeded(7)
    return torch.randn(*shape, generator=generator) * 0.3


def _renew_optimizers(differential: Differential) -> None:
    differential.optimizer = sgd(differential.model.parameters())
    differential.reference_optimizer = sgd(differential.reference.parameters())


@pytest.mark.trap(18)
@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize(
    ("module_name", "name"),
    [("inp", "weight"), ("blocks.1.fc2", "bias"), ("blocks.2.fc1", "weight")],
)
@varied(strategy=STRATEGIES)
@distributed(world_size=(2, 3))
@with_model()
def test_taken_over(
    differential: Differential, module_name: str, name: str, num_steps: int
) -> None:
    """Its values are trained on, it has the gradients, an optimizer steps it."""
    differential.train(num_steps)
    differential.zero_grad()
    inner = module_name.replace("blocks.1", "blocks.1._fsdp_wrapped_module").replace(
        "blocks.2", "blocks.2._fsdp_wrapped_module"
    )
    values = _new_values(
        tuple(getattr(differential.reference.get_submodule(module_name), name).shape)
    )
    reference = differential.reference.get_submodule(module_name)
    setattr(reference, name, nn.Parameter(values.clone()))
    sharded = differential.model.module.get_submodule(inner)
    old: nn.Parameter = getattr(sharded, name)
    new = nn.Parameter(values.clone())
    setattr(sharded, name, new)
    differential.reference_params = dict(differential.reference.named_parameters())
    _renew_optimizers(differential)

    differential.evaluate()  # the forward that takes it over
    assert getattr(sharded, name) is new
    differential.check()
    state = full_state_dict(differential.model)
    assert torch.equal(state[f"{module_name}.{name}"], values)
    differential.train(2)
    assert getattr(sharded, name) is new
    assert [id(p) for p in differential.optimizer.param_groups[0]["params"]] == [
        id(p) for p in differential.model.parameters()
    ]
    _assert_detached(differential, old)
    _assert_detached(differential, old)
    assert_idle(differential.model)


def _assert_detached(differential: Differential, old: nn.Parameter) -> None:
    """Writing to the object that was replaced changes nothing."""
    with torch.no_grad():
        old.fill_(1e3)
    differential.zero_grad()
    differential.train(1)


@varied(strategy=STRATEGIES)
@distributed(world_size=2)
@with_model(CASES["tied"].build, {TiedBlock})
def test_shared_in_all_places(differential: Differential) -> None:
    """Both layers get the new parameter: it is shared as before."""
    differential.train(1)
    values = _new_values((DIM, DIM))
    both = (differential.reference.tied, differential.model.module.tied.module)
    for tied in both:
        assert isinstance(tied, TiedBlock)
        new = nn.Parameter(values.clone())
        tied.first.weight = tied.second.weight = new
    differential.reference_params = dict(differential.reference.named_parameters())
    _renew_optimizers(differential)
    differential.train(2)
    assert both[1].first.weight is both[1].second.weight is new


@pytest.mark.trap(24)
@pytest.mark.parametrize("place", ["first", "second"])
@distributed(world_size=2)
@with_model(CASES["tied"].build, {TiedBlock})
def test_shared_in_one_place(differential: Differential, place: str) -> None:
    """An error: it cannot be one parameter and two."""
    differential.train(1)
    differential.zero_grad()
    layer = getattr(differential.model.module.tied.module, place)
    old = layer.weight
    layer.weight = nn.Parameter(torch.zeros(DIM, DIM))
    _assert_refused(differential, r"writeback.*weight.*share")
    layer.weight = old
    differential.train(2)


def _assert_refused(differential: Differential, message: str) -> None:
    """Fail unless the forward, a summon and a state dict raise."""
    model = differential.model
    x = torch.zeros(1, DIM)
    attempts: dict[str, Callable[[], object]] = {
        "forward": lambda: model(x),
        "summon": lambda: FSDP.summon_full_params(model).__enter__(),
        "state dict": model.state_dict,
    }
    for what, attempt in attempts.items():
        try:
            attempt()
        except RuntimeError as error:
            text = str(error)
        else:
            msg = f"{what} did not raise"
            raise AssertionError(msg)
        with pytest.raises(RuntimeError, match=message):
            raise RuntimeError(text)
        reset(differential.model)
    assert_idle(model)


@pytest.mark.parametrize("shape", [(DIM + 1, DIM), (DIM,), (2, 2, 2)])
@varied(strategy=STRATEGIES)
@distributed(world_size=2)
@with_model()
def test_wrong_shape(
    differential: Differential, rank: int, shape: tuple[int, ...]
) -> None:
    """The error names the parameter and its unit; putting it back heals."""
    differential.train(1)
    differential.zero_grad()
    layer = differential.model.module.inp
    old = layer.weight
    layer.weight = nn.Parameter(torch.zeros(shape))
    (batch,) = differential.batches()[rank]
    with pytest.raises(RuntimeError, match=r"writeback.*inp\.weight.*shape"):
        differential.model(batch)
    _reset_after(layer, old, differential)


def _reset_after(layer: nn.Module, old: nn.Parameter, differential: object) -> None:
    assert isinstance(differential, Differential)
    layer.weight = old
    reset(differential.model)
    differential.train(2)


@distributed(world_size=2)
@with_model()
def test_wrong_dtype(differential: Differential, rank: int) -> None:
    """No silent cast."""
    layer = differential.model.module.inp
    old = layer.weight
    layer.weight = nn.Parameter(torch.zeros(DIM, DIM, dtype=torch.float64))
    (batch,) = differential.batches()[rank]
    with pytest.raises(RuntimeError, match=r"writeback.*inp\.weight.*dtype"):
        differential.model(batch)
    _reset_after(layer, old, differential)


@pytest.mark.parametrize("how", ["None", "deleted", "tensor"])
@pytest.mark.parametrize("in_unit", [False, True])
@distributed(world_size=2)
@with_model()
def test_removed(
    differential: Differential, rank: int, in_unit: bool, how: str
) -> None:
    """An error that says so, before anything is gathered."""
    differential.train(1)
    differential.zero_grad()
    model = differential.model
    layer = model.blocks[1].module.fc1 if in_unit else model.module.inp
    old = layer.weight
    if how == "None":
        layer.weight = None
    else:
        del layer.weight
    if how == "tensor":
        layer.weight = torch.zeros(tuple(old.shape))
    (batch,) = differential.batches()[rank]
    with pytest.raises(RuntimeError, match=r"writeback.*weight.*removed"):
        model(batch)
    if how == "tensor":
        del layer.weight
    # Back in its old place among the names.
    bias = layer._parameters.pop("bias")
    layer._parameters.pop("weight", None)
    layer.register_parameter("weight", old)
    layer.register_parameter("bias", bias)
    reset(differential.model)
    differential.train(2)


@distributed(world_size=2)
@with_model()
def test_replaced_between_forward_and_backward(differential: Differential) -> None:
    """The step under way is the old parameter's; the next one is the new one's."""
    differential.train(1)
    differential.zero_grad()
    values = _new_values((DIM, DIM))
    differential.forward_backward()
    differential.check()
    for module in (differential.reference, differential.model.module):
        module.inp.weight = nn.Parameter(values.clone())
    differential.reference_params = dict(differential.reference.named_parameters())
    _renew_optimizers(differential)
    differential.train(2)
