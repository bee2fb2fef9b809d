"""Random models under whole_parameter_optimizer, to the bit against the unsharded ones.

FSDP_C_RANDOM_FIRST=123 FSDP_C_RANDOM_CASES=1 pytest ...         # one of them
"""

import contextlib
import copy
import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_c import checkpoint
from helpers.distributed import TEST_DEVICE, run_task
from helpers.groups import groups_destroyed
from helpers.impl import FSDP, CPUOffload, StateDictType
from helpers.matrix_optimizers import ANY_SHAPE, BlockwiseAdam, muon
from helpers.random_programs import batches_of, divisors_of
from helpers.random_runs import keep_some
from helpers.reference import clean_name
from helpers.shared_folder import shared_folder
from helpers.tensor_parallel import new_meshes
from helpers.whole_runs import Run, assert_states, copy_values, plain_states

ROUND_NBYTES = "fsdp_c._whole.optimizer.ROUND_NBYTES"
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **ANY_SHAPE,
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "blocks": lambda params: BlockwiseAdam(params, block_numel=16),
    "muon": muon,
}
EVENTS = (
    *("own_state", "full_state", "sharded_state"),
    *("write", "freeze", "options", "schedule", "fresh", "files"),
)
FULL = StateDictOptions(full_state_dict=True, strict=False)


class Layer(nn.Module):
    """A linear layer, or one that keeps the width and may be left out of a forward."""

    KINDS = ("linear", "linear", "norm", "experts", "tied", "small", "double", "void")

    def __init__(self, kind: str, width: int, numbers: random.Random) -> None:
        super().__init__()
        self.kind = kind
        self.width = numbers.randint(1, 20) if kind == "linear" else width
        if kind in ("linear", "double", "tied"):
            self.fc = nn.Linear(width, self.width, bias=numbers.random() < 0.5)
        if kind == "double":
            self.double()
        if kind == "norm":
            self.norm = nn.LayerNorm(width)
        if kind == "experts":
            shape = (numbers.randint(1, 4), width, width)
            self.experts = nn.Parameter(torch.randn(shape) / width)
        if kind == "tied":
            self.second = nn.Linear(width, width)
            self.second.weight = self.fc.weight
        if kind in ("small", "void"):
            self.gain = nn.Parameter(torch.ones([1] * numbers.randint(1, 3)))
        if kind == "void":
            self.void = nn.Parameter(torch.ones(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor
        if self.kind == "norm":
            out = torch.tanh(self.norm(x))
        elif self.kind == "experts":
            out = torch.tanh(torch.einsum("bsi,eio->bso", x, self.experts))
        elif self.kind in ("small", "void"):
            out = x * self.gain.flatten()
        elif self.kind == "tied":
            out = self.second(torch.tanh(self.fc(x)))
        else:
            out = self.fc(x.to(self.fc.weight.dtype)).to(x.dtype)
        return out


class Unit(nn.Sequential):
    """What is sharded by itself."""


class Layers(Unit):
    """All layers but those left out."""

    def forward(self, x: Tensor, left_out: frozenset[int]) -> Tensor:
        for number, layer in enumerate(self):
            if number not in left_out:
                x = layer(x)
        return x


class RandomNet(nn.Module):
    """Layers of random sizes, some of them frozen, each a unit or not."""

    def __init__(self, numbers: random.Random, kinds: Sequence[str]) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, width := numbers.randint(1, 20))
        layers: list[nn.Module] = []
        self.may_lack: list[int] = []
        for number in range(numbers.randint(1, 5)):
            layer = Layer(numbers.choice(kinds), width, numbers)
            width = layer.width
            if layer.kind != "linear":
                self.may_lack.append(number)
            if numbers.random() < 0.2:
                layer.requires_grad_(False)
            layers.append(Unit(layer) if numbers.random() < 0.4 else layer)
        self.layers = Layers(*layers)
        self.head = nn.Linear(width, numbers.randint(1, 6))
        self.left_out: frozenset[int] = frozenset()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layers(self.embed(tokens), self.left_out)
        result: Tensor = self.head(hidden)
        return result


class Case:
    """A run of a seed, whose next layout may be another one."""

    def __init__(self, seed: int) -> None:
        self.numbers = numbers = random.Random(seed)
        self.seed = seed
        self.shape_seed = numbers.randrange(2**32)
        self.maker = numbers.choice(list(MAKERS))
        self.is_mixed = self.maker == "muon" or numbers.random() < 0.4
        self.num_groups = numbers.choice([1, 1, 2, 3])
        self.words = [f"{self.maker} {self.is_mixed=} {self.num_groups=}"]
        self.schedulers: list[Any] = []
        self.has_schedule = self.had_files = self.has_frozen = False
        self.run = self.make()
        self.optimizers = [*self.run.plain_optimizers, self.run.optimizer]

    def build(self, kept: int = 0) -> RandomNet:
        """Return the unsharded model, in which a seed says what is kept whole."""
        torch.manual_seed(self.seed)
        # torch's Adafactor divides by the number of elements, and takes an epsilon from
        # the first parameter's dtype for all.
        kinds = Layer.KINDS[: -2 if self.maker == "adafactor" else None]
        net = RandomNet(random.Random(self.shape_seed), kinds)
        if kept:
            keep_some(net, kept)
        return net.to(TEST_DEVICE)

    def make(self, group: dist.ProcessGroup | None = None) -> Run:
        """Return a run in a layout that is drawn, over all ranks or a group."""
        numbers = self.numbers
        apis = ["FSDP", "FSDP", "fully_shard"]
        # A flat parameter has state for each of its elements.
        is_element_wise = self.maker in ("sgd", "adamw", "norm")
        # All of it has one step, which a freeze ends.
        is_one = is_element_wise and not self.is_mixed and self.num_groups == 1
        if is_one and group is None and not self.has_frozen:
            apis.append("FSDP flat")
        api = numbers.choice(apis)
        is_flat_layout = api != "fully_shard"
        strategies = ["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP"]
        strategy = numbers.choice([*strategies, *["NO_SHARD"] * is_flat_layout])
        kept = numbers.randrange(1 << 16) * (is_flat_layout and numbers.random() < 0.4)
        options: dict[str, Any] = {}
        if group is None and numbers.random() < 0.3:
            num_replicas = numbers.choice(divisors_of(size := dist.get_world_size()))
            shape = (num_replicas, size // num_replicas)
            options["mesh"] = new_meshes(shape, None)[0]
            strategy = "HYBRID_SHARD"
        if numbers.random() < 0.2:
            name = "cpu_offload" if is_flat_layout else "offload_policy"
            options[name] = (
                CPUOffload(offload_params=True)
                if is_flat_layout
                else CPUOffloadPolicy()
            )
        self.words.append(f"{api} {strategy} {kept=} {options}")

        return Run(
            api,
            MAKERS[self.maker],
            self.groups(),
            rest=MAKERS["adamw"] if self.is_mixed else None,
            build=lambda: self.build(kept),
            strategy=strategy,
            group=group,
            **options,
        )

    def groups(self) -> list[dict[str, Any]]:
        """Return groups that share out the parameters; none is empty."""
        named = self.build().named_parameters()
        names = [
            name
            for name, param in named
            if param.requires_grad and (param.dim() == 2 or not self.is_mixed)
        ]
        num_groups = min(self.num_groups, len(names))
        return [
            {
                "params": lambda name, _, taken=set(names[n::num_groups]): (
                    name in taken
                ),
                "lr": 0.02 * (n + 1),
            }
            for n in range(num_groups)
        ]

    def go(self) -> None:
        for number in range(self.numbers.randint(2, 5)):
            self.step(number)
            for event in self.numbers.sample(EVENTS, self.numbers.choice([0, 1, 2])):
                self.words.append(event)
                getattr(self, f"on_{event}")()
                self.run.check()
        self.end_on_fewer_ranks()

    def step(self, number: int) -> None:
        run, numbers = self.run, self.numbers
        set_to_none = numbers.random() < 0.7
        for each in self.optimizers:
            each.zero_grad(set_to_none=set_to_none)
        net = run.model.module if isinstance(run.model, FSDP) else run.model
        lacks = numbers.random() < 0.5
        net.left_out = frozenset(
            n for n in net.may_lack if lacks and numbers.random() < 0.5
        )
        syncs = numbers.choice([[True], [True], [False, True], [True, True]])
        words = f"{set_to_none=} {[*net.left_out]} {syncs}"
        for index, is_synced in enumerate(syncs):
            with synced(run.model, is_synced):
                run.backward(10 * number + index)
        if numbers.random() < 0.3:
            words += " clipped"
            clip(run.model)
        self.words.append(words)
        run.take_gradients()
        for each in (*self.optimizers, *self.schedulers):
            each.step()
        run.check()

    # Events.

    def on_own_state(self) -> None:
        state = copy.deepcopy(self.run.optimizer.state_dict())
        self.run.optimizer.load_state_dict(state)

    def on_full_state(self) -> None:
        """Compare the states with the unsharded ones, and load them."""
        state = self.full_state()
        if self.can_load(self.run, state):
            self.load(state)

    def can_load(self, run: Run, state: dict[str, Any]) -> bool:
        return isinstance(run.model, FSDP) or self.has_all(state["state"])

    def has_all(self, states: dict[str, Any]) -> bool:
        """Whether torch loads all of it, and leaves no states that it made."""
        named = self.run.plain.named_parameters()
        return {name for name, p in named if p.requires_grad} == states.keys()

    def load(self, state: dict[str, Any]) -> None:
        run = self.run
        if not self.has_all(state["state"]) or (
            isinstance(run.model, FSDP) and self.numbers.random() < 0.5
        ):
            with FSDP.state_dict_type(run.model, StateDictType.FULL_STATE_DICT):
                loaded = FSDP.optim_state_dict_to_load(run.model, run.optimizer, state)
                run.optimizer.load_state_dict(loaded)
        else:
            set_optimizer_state_dict(run.model, run.optimizer, state, options=FULL)

    def full_state(self) -> dict[str, Any]:
        """Return the optimizers' state, which is compared. Collective."""
        run = self.run
        if isinstance(run.model, FSDP) and self.numbers.random() < 0.5:
            self.words.append("FSDP's")
            with FSDP.state_dict_type(run.model, StateDictType.FULL_STATE_DICT):
                saved = FSDP.optim_state_dict(run.model, run.optimizer)
        else:
            saved = get_optimizer_state_dict(run.model, run.optimizer, options=FULL)
        states = [
            {n: state for n, state in each.items() if self.is_kept(n)}
            for each in (saved["state"], plain_states(run))
        ]
        assert_states(*states)
        return saved

    def is_kept(self, name: str) -> bool:
        """Whether it has state: files have none of parameters without elements."""
        return not (self.had_files and name.endswith("void"))

    def on_sharded_state(self) -> None:
        run = self.run
        if isinstance(run.model, FSDP):
            with FSDP.state_dict_type(run.model, StateDictType.SHARDED_STATE_DICT):
                saved = FSDP.optim_state_dict(run.model, run.optimizer)
                loaded = FSDP.optim_state_dict_to_load(run.model, run.optimizer, saved)
                run.optimizer.load_state_dict(loaded)
        elif self.has_all(plain_states(run)):
            options = StateDictOptions(strict=False)
            saved = get_optimizer_state_dict(run.model, run.optimizer, options=options)
            set_optimizer_state_dict(run.model, run.optimizer, saved, options=options)

    def on_write(self) -> None:
        with torch.no_grad():
            for model in (self.run.model, self.run.plain):
                for param in model.parameters():
                    param.mul_(0.9)

    def on_freeze(self) -> None:
        """Freeze or thaw some parameters, by name."""
        if self.run.api == "FSDP flat":
            return
        self.has_frozen = True
        mine = {clean_name(n): p for n, p in self.run.model.named_parameters()}
        for name, param in self.run.plain.named_parameters():
            if "head" not in name and self.numbers.random() < 0.3:
                wants = not param.requires_grad
                for each in (param, mine[name]):
                    each.requires_grad_(wants)
                self.words.append(f"{name} {wants}")

    def on_options(self) -> None:
        """Change the options of all groups."""
        plain = [g for each in self.run.plain_optimizers for g in each.param_groups]
        for groups in zip(plain, self.run.optimizer.param_groups, strict=True):
            factor = self.numbers.uniform(0.5, 1.5)
            for group in groups:
                for name in {"lr", "weight_decay", "momentum"} & group.keys():
                    group[name] *= factor

    def on_schedule(self) -> None:
        self.has_schedule = True
        self.schedulers += [
            torch.optim.lr_scheduler.StepLR(each, 2, 0.7) for each in self.optimizers
        ]

    def on_fresh(self) -> None:
        """Go on in another layout."""
        state, run = self.full_state(), self.make()
        if self.can_load(run, state):
            self.go_on_in(run)
            self.load(state)

    def go_on_in(self, run: Run) -> None:
        before, self.run = self.run, run
        self.schedulers.clear()
        self.optimizers = [*run.plain_optimizers, run.optimizer]
        if self.has_schedule:  # a state with its options is loaded by torch into such
            self.on_schedule()
        copy_values(before, run)
        mine = {clean_name(name): param for name, param in run.model.named_parameters()}
        for param, (name, its) in zip(
            before.plain.parameters(), run.plain.named_parameters(), strict=True
        ):
            for each in (its, mine.get(name, its)):
                each.requires_grad_(param.requires_grad)

    def on_files(self) -> None:
        """Save in files; go on in another layout."""
        self.had_files = True
        with shared_folder() as folder:
            checkpoint.save(folder / "c", self.run.model, self.run.optimizer)
            self.go_on_in(self.make())
            checkpoint.load(folder / "c", self.run.model, self.run.optimizer)
            self.run.check()

    def end_on_fewer_ranks(self) -> None:
        num_ranks = self.numbers.randint(1, dist.get_world_size() - 1)
        group = dist.new_group(list(range(num_ranks)))
        with shared_folder() as folder:
            checkpoint.save(folder / "c", self.run.model, self.run.optimizer)
            if dist.get_rank() < num_ranks:
                self.words.append(f"{num_ranks} ranks")
                self.go_on_in(self.make(group))
                checkpoint.load(
                    folder / "c",
                    self.run.model,
                    self.run.optimizer,
                    process_group=group,
                )
                self.step(20)
                self.on_sharded_state()
                self.step(21)


def synced(model: Any, is_synced: bool) -> contextlib.AbstractContextManager[None]:
    if isinstance(model, FSDP):
        return contextlib.nullcontext() if is_synced else model.no_sync()
    model.set_requires_gradient_sync(is_synced)
    return contextlib.nullcontext()


def clip(model: Any) -> None:
    """Clip, or halve the gradients of what torch has no norm of."""
    if isinstance(model, FSDP):
        model.clip_grad_norm_(0.1)
        return
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)


def run_case(rank: int, world_size: int, seed: int) -> None:
    """Train, compare values and states, and go on from saved states."""
    torch.manual_seed(seed)
    nbytes = random.Random(seed).choice([64, 1024, 1 << 26])
    with groups_destroyed(), mock.patch(ROUND_NBYTES, nbytes):
        case = Case(seed)
        try:
            case.go()
        except Exception as error:
            words = "\n".join(case.words)
            raise AssertionError(f"{error}\ncase {seed}: {words}") from error


@pytest.mark.parametrize(
    ("world_size", "seeds"),
    batches_of(num_short=9, num_full=200, size=10),
)
def test_random_models(world_size: int, seeds: tuple[int, ...]) -> None:
    """See :func:`run_case`."""
    for seed in seeds:
        run_task(run_case, world_size=world_size, arguments={"seed": seed})
