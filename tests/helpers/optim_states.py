"""Optimizers of the optimizer-state tests, and comparisons of their states."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import api

from helpers.impl import FSDP, StateDictType, fsdp
from helpers.models import CASES, loss_of
from helpers.reference import assert_same
from helpers.seeds import generator


class Counting(torch.optim.Optimizer):
    """SGD whose state is of every kind: numbers, text, None, bool, whole tensors."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move the parameters; write the state."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                state["kind"] = "counting"
                state["nothing"] = None
                state["history"] = torch.arange(3) * state["count"]
                state["is_positive"] = param.grad > 0
                state["low"] = param.grad.to(torch.bfloat16)
                param.sub_(param.grad, alpha=group["lr"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the dtypes, as optimizers with states of other dtypes do."""
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        for key, state in state_dict["state"].items():
            self.state[params[key]] = dict(state)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "adamw_foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "counting": Counting,
}


def wrap(
    model: str, *, nested: bool = True, module: nn.Module | None = None, **kwargs: Any
) -> Any:
    """Return ``CASES[model]`` wrapped; with its units, or the root only."""
    case = CASES[model]
    module = case.build() if module is None else module
    return fsdp(module, units=case.unit_classes if nested else (), **kwargs)


def train(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    case: str,
    num_steps: int,
    *,
    first: int = 0,
) -> None:
    """Train on the batches from ``first`` on, this rank's own."""
    for step in range(first, first + num_steps):
        optim.zero_grad()
        batch = CASES[case].inputs(generator("batch", step, dist.get_rank()))
        loss_of(model(*batch)).backward()
        optim.step()
    optim.zero_grad()


def trained(
    model: str, optimizer: str, num_steps: int, **kwargs: Any
) -> tuple[Any, torch.optim.Optimizer]:
    """Return what ``wrap()`` returns and an optimizer of it, after some steps."""
    wrapped = wrap(model, **kwargs)
    optim = OPTIMIZERS[optimizer](wrapped.parameters())
    train(wrapped, optim, model, num_steps)
    return wrapped, optim


def by_name(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an unsharded optimizer by parameter name."""
    names = {param: name for name, param in model.named_parameters()}
    params = [param for group in optim.param_groups for param in group["params"]]
    return {
        names[params[key]]: state for key, state in optim.state_dict()["state"].items()
    }


def configured(model: nn.Module, kind: str, **options: Any) -> Any:
    """Return the context of a kind of state dicts, with options of the optimizer's."""
    name = kind.capitalize()
    return FSDP.state_dict_type(
        model,
        StateDictType[f"{kind}_STATE_DICT"],
        getattr(api, f"{name}StateDictConfig")(),
        getattr(api, f"{name}OptimStateDictConfig")(**options),
    )


# State dict type, and options of its optimizer config.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("FULL", {}),
    "rank0": ("FULL", {"rank0_only": True}),
    "sharded": ("SHARDED", {}),
    "local": ("LOCAL", {}),
}


def in_form(model: nn.Module, form: str) -> Any:
    """Return the context of one of FORMS."""
    kind, options = FORMS[form]
    return configured(model, kind, **options)


def full(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the full optimizer state dict, on all ranks. Collective."""
    with in_form(model, "full"):
        result: dict[str, Any] = FSDP.optim_state_dict(model, optim)
    return result


def assert_same_states(
    actual: dict[Any, Any], expected: dict[Any, Any], tolerance: float = 0.0
) -> None:
    """Compare two "state" parts; bit for bit without a tolerance."""
    assert sorted(map(str, actual)) == sorted(map(str, expected))
    for name, state in expected.items():
        assert sorted(actual[name]) == sorted(state), name
        for key, value in state.items():
            found = actual[name][key]
            assert type(found) is type(value), (name, key)
            if not isinstance(value, Tensor):
                assert found == value, (name, key)
                continue
            assert found.dtype == value.dtype, (name, key)
            assert found.shape == value.shape, (name, key, found.shape, value.shape)
            if tolerance == 0.0:
                assert torch.equal(found.cpu(), value.cpu()), (name, key)
            else:
                assert_same(f"{name} {key}", found, value, tolerance)


def assert_own_memory(state: dict[Any, Any]) -> None:
    """Fail where a tensor of a "state" part keeps more memory than its own."""
    for name, its_state in state.items():
        for key, value in its_state.items():
            if isinstance(value, Tensor):
                nbytes = value.untyped_storage().nbytes()
                assert nbytes == value.nbytes, (name, key, nbytes, value.nbytes)
