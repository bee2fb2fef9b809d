"""A sharded model whose optimizer steps wholes, beside the unsharded model's."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fsdp_c import keep_whole, whole_parameter_optimizer
from helpers.distributed import TEST_DEVICE
from helpers.impl import FSDP
from helpers.reference import clean_name, gather_flat
from helpers.rows import shard_by

Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """Matrices of several shapes, uneven over any number of ranks, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 7 + i), nn.Tanh(), nn.Linear(7 + i, 12))
            for i in range(3)
        )
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        result: Tensor = self.head(self.norm(hidden))
        return result


def is_hidden(name: str, shape: torch.Size) -> bool:
    return len(shape) == 2 and name.startswith("blocks")


def build() -> Net:
    torch.manual_seed(3)
    return Net().to(TEST_DEVICE)


def shard(api: str, model: nn.Module, **options: Any) -> Any:
    """Return ``model`` with its blocks as units, by one of helpers.rows.APIS."""
    return shard_by(api, model, {nn.Sequential}, **options)


def wholes_of(model: Any, *, grads: bool = False) -> dict[str, Tensor | None]:
    """Return whole parameters, or gradients, by name. Collective."""
    found: dict[str, Tensor | None] = {}
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model, writeback=False, with_grads=grads):
            for name, param in model.named_parameters():
                value = param.grad if grads else param
                found[clean_name(name)] = (
                    None if value is None else value.detach().clone()
                )
        return found
    for name, param in model.named_parameters():
        value = param.grad if grads else param.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        found[name] = None if value is None else value.detach().clone()
    return found


def _chosen(trained: Mapping[str, Tensor], choose: Any) -> list[Tensor]:
    return [p for n, p in trained.items() if choose is None or choose(n, p.shape)]


class Run:
    """A sharded model with an optimizer of wholes, and the unsharded ones."""

    def __init__(
        self,
        api: str,
        make: Make,
        params: Any = None,
        *,
        rest: Make | None = None,
        build: Callable[[], nn.Module] = build,
        keep: Callable[[str, torch.Size], int] | None = None,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self.api = api
        self.group = group
        self.plain = build()
        if {"cpu_offload", "offload_policy"} & set(options):
            self.plain.cpu()  # the host's optimizer rounds otherwise
        model = build()
        if keep is not None:
            keep_whole(model, keep, max_padding=9.0)
        if group is not None and api == "fully_shard":
            options["mesh"] = DeviceMesh.from_group(group, TEST_DEVICE)
        elif group is not None:
            options["process_group"] = group
        self.model = shard(api, model, **options)
        self.optimizer = whole_parameter_optimizer(self.model, make, params, rest=rest)
        named = dict(self.plain.named_parameters())
        self.names = list(named)
        groups = params if isinstance(params, list) else [{"params": params}]
        trained = {name: param for name, param in named.items() if param.requires_grad}
        plain = [
            {**group, "params": _chosen(trained, group["params"])} for group in groups
        ]
        self.plain_optimizers = [make(plain)]
        if rest is not None:
            taken = {param for group in plain for param in group["params"]}
            others = [param for param in trained.values() if param not in taken]
            self.plain_optimizers.append(rest(others))

    def backward(self, number: int) -> None:
        """Run on one batch, each rank on its own."""
        seed = 100 * number + dist.get_rank()
        generator = torch.Generator("cpu").manual_seed(seed)
        tokens = torch.randint(0, 13, (4, 6), generator=generator, device="cpu")
        tokens = tokens.to(TEST_DEVICE)
        (self.model(tokens) ** 2).mean().backward()

    def take_gradients(self) -> None:
        """Give the unsharded model the gradients that the sharded one has.

        Those of parameters that have none on any rank are None.
        """
        first: dict[Tensor, str] = {}
        names = {
            name: first.setdefault(param, name)
            for name, param in self.plain.named_parameters(remove_duplicate=False)
        }
        has_grad = dict.fromkeys(self.names, False)
        for full_name, param in self.model.named_parameters():
            prefix = clean_name(full_name).rpartition("_flat_param")[0]
            for fqn in getattr(param, "_fqns", [clean_name(full_name)]):
                has_grad[names[prefix + fqn]] = param.grad is not None
        flags = torch.tensor(list(has_grad.values()), dtype=torch.uint8)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        grads: Mapping[str, Tensor | None] = (
            gather_flat(self.model, names)[1]
            if self.api == "FSDP flat"
            else wholes_of(self.model, grads=True)
        )
        for (name, param), flag in zip(
            self.plain.named_parameters(), flags, strict=True
        ):
            grad = grads[name]  # of offloaded shards it is in host memory
            param.grad = None if grad is None or not flag else grad.to(param)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.plain.zero_grad()
        self.backward(number)
        self.take_gradients()
        for each in (*self.plain_optimizers, self.optimizer):
            each.step()

    def check(self) -> None:
        values = wholes_of(self.model)
        for name, param in self.plain.named_parameters():
            value = values[name]
            assert value is not None
            assert torch.equal(value.to(param.device), param.detach()), name

    def train(self, num_steps: int, first: int = 0) -> None:
        for number in range(first, first + num_steps):
            self.step(number)
        self.check()


def plain_states(run: Run) -> dict[str, dict[str, Any]]:
    """Return the unsharded optimizers' states by parameter name."""
    names = {param: name for name, param in run.plain.named_parameters()}
    return {
        names[param]: state
        for optimizer in run.plain_optimizers
        for param, state in optimizer.state.items()
    }


def assert_states(
    given: Mapping[str, Mapping[str, Any]], expected: Mapping[str, Mapping[str, Any]]
) -> None:
    missing, extra = expected.keys() - given.keys(), given.keys() - expected.keys()
    assert not missing | extra, f"{missing=} {extra=}"
    for name, state in expected.items():
        assert given[name].keys() == state.keys(), (name, [*given[name]], [*state])
        for key, value in state.items():
            own, wanted = tree_leaves(given[name][key]), tree_leaves(value)
            for one, other in zip(own, wanted, strict=True):
                _assert_equal((name, key), one, other)


def _assert_equal(what: Any, own: Any, expected: Any) -> None:
    if isinstance(own, DTensor):
        own = own.full_tensor()
    if isinstance(expected, Tensor):
        assert own.shape == expected.shape, (what, own.shape)
        assert torch.equal(own.cpu(), expected.cpu()), what
    else:
        assert own == expected, (what, own, expected)


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def copy_values(source: Run, target: Run) -> None:
    """Give another run the values, and its unsharded optimizers the states."""
    copy_plain(source, target)
    values = target.plain.state_dict()
    if isinstance(target.model, FSDP):
        target.model.load_state_dict(values)
    else:
        full = StateDictOptions(full_state_dict=True)
        set_model_state_dict(target.model, values, options=full)


def copy_plain(source: Run, target: Run) -> None:
    """Copy the unsharded model's values and its optimizers' states."""
    target.plain.load_state_dict(source.plain.state_dict())
    for one, other in zip(
        source.plain_optimizers, target.plain_optimizers, strict=True
    ):
        other.load_state_dict(copy.deepcopy(one.state_dict()))
        for mine, its in zip(params_of(one), params_of(other), strict=True):
            if mine in one.state:  # torch's load casts
                other.state[its] = copy.deepcopy(one.state[mine])
