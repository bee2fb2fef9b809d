"""Random training runs in legs: what each leg is, how it saves, the model it trains.

Models are fp64, so that an error cannot hide in rounding.
"""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from helpers.reference import clean_name
from helpers.seeds import generator

DTYPE = torch.float64
NUM_ROWS = 12  # of a batch; a multiple of all numbers of ranks
APIS = ("FSDP", "FSDP flat", "fully_shard")
KINDS = (
    "linear",
    "linear",
    "tied",
    "frozen",
    "half",
    "buffers",
    "one",
    "idle",
    "spare",
)
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-4}),
    "amsgrad": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-4, "amsgrad": True}),
}
FILES = ("files", "files over others", "files in a thread")
WAYS = (*FILES, "dcp", "full", "methods")


@dataclass(frozen=True)
class Leg:
    """A part of a run, in processes of its own."""

    api: str
    world_size: int
    strategy: str
    mesh: tuple[int, ...] | None
    units: frozenset[int]
    """The parts of the model that are units of their own."""
    kept: int
    """Seed of what keep_whole() keeps; 0: nothing."""
    thaws: bool
    """Whether what was frozen, or did not run, is trained from here on."""
    num_steps: int
    inner: str
    """A kind of state dict by which it is saved and loaded once more, or nothing."""
    way: str
    """By which it saves, for the next leg."""


@dataclass(frozen=True)
class Program:
    seed: int
    width: int
    kinds: tuple[str, ...]
    optimizer: str
    num_groups: int
    legs: tuple[Leg, ...]

    @property
    def lacks_states(self) -> bool:
        """Whether some parameters have no gradient, or none in the first leg.

        Some ways and classes make states of zeros for them.
        """
        is_idle = bool({"idle", "spare"} & {*self.kinds})
        return is_idle or any(leg.thaws for leg in self.legs)


def draw(seed: int) -> Program:
    numbers = random.Random(f"checkpoints {seed}")
    kinds = [numbers.choice(KINDS) for _ in range(numbers.randint(1, 4))]
    optimizer = numbers.choice(list(OPTIMIZERS))
    thaw = numbers.randint(0, 3) if optimizer == "momentum" else 0
    legs = [
        _draw_leg(numbers, len(kinds), thaws=0 < thaw <= number)
        for number in range(numbers.randint(2, 3))
    ]
    everything = frozenset(range(len(kinds)))
    is_flat = any(leg.api == "FSDP flat" for leg in legs)
    if is_flat and optimizer != "momentum":
        # A flat parameter has one step counter, and torch's FSDP1 zeros for gradients.
        kinds = ["linear" if kind in ("idle", "spare") else kind for kind in kinds]
    can_group = all(leg.units == everything for leg in legs if leg.api == "FSDP flat")
    return Program(
        seed=seed,
        width=numbers.choice([2, 3, 5, 8]),
        kinds=tuple(kinds),
        optimizer=optimizer,
        num_groups=numbers.choice([1, 2, 3]) if can_group else 1,
        legs=tuple(legs),
    )


def _draw_leg(numbers: random.Random, num_parts: int, *, thaws: bool) -> Leg:
    api, world_size = numbers.choice(APIS), numbers.choice([1, 2, 2, 3, 4])
    strategy, mesh = numbers.choice(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]), None
    if numbers.random() < 0.3:
        replicas = numbers.choice([n for n in (1, 2, 4) if world_size % n == 0])
        strategy, mesh = "HYBRID_SHARD", (replicas, world_size // replicas)
    elif api == "fully_shard" and strategy == "NO_SHARD":
        mesh = (world_size, 1)
    elif numbers.random() < 0.3:
        mesh = (world_size,)
    parts = range(num_parts)
    units = numbers.choice([{*parts}, {*parts}, set(), {numbers.choice(parts)}])
    inner = numbers.choice(["", "", "full", "rank0", "sharded", "local"])
    kept = numbers.randrange(1, 1000) if numbers.random() < 0.4 else 0
    if api == "fully_shard":
        inner, kept = "", 0
    if (inner == "local" and (kept or mesh)) or (
        inner == "sharded" and strategy[0] == "N"
    ):
        inner = "full"
    return Leg(
        api=api,
        world_size=world_size,
        strategy=strategy,
        mesh=mesh,
        units=frozenset(units),
        kept=kept,
        thaws=thaws,
        num_steps=numbers.randint(1, 3),
        inner=inner,
        way=numbers.choice(WAYS),
    )


class Part(nn.Module):
    def __init__(self, kind: str, width: int, *, thaws: bool) -> None:
        super().__init__()
        self.kind, self.thaws = kind, thaws
        self.fc = nn.Linear(width, width, dtype=DTYPE)
        if kind in ("tied", "spare"):
            self.second = nn.Linear(width, width, dtype=DTYPE)
        if kind == "tied":
            self.second.weight = self.fc.weight
        if kind == "frozen" and not thaws:
            self.requires_grad_(False)
        if kind == "half":
            self.fc.bias.requires_grad_(thaws)
        if kind == "one":
            self.gain = nn.Parameter(torch.ones(1, dtype=DTYPE))
        if kind == "buffers":
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.register_buffer("last", torch.rand(3, dtype=DTYPE))
            self.register_buffer("by", torch.tensor(0.5, dtype=DTYPE), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.fc(x))
        if self.kind == "tied" or (self.kind == "spare" and self.thaws):
            x = torch.tanh(self.second(x))
        if self.kind == "one":
            x = x * self.gain
        if self.kind == "buffers":
            self.seen += 1
            self.last *= self.by
            x = x * (self.last.sum() + self.seen)
        return x


class Unit(Part):
    """A part that is sharded by itself."""


class Net(nn.Module):
    def __init__(self, program: Program, leg: Leg) -> None:
        super().__init__()
        width = program.width
        self.inp = nn.Linear(4, width, dtype=DTYPE)
        self.parts = nn.ModuleList()
        for number, kind in enumerate(program.kinds):
            part = Unit if number in leg.units else Part
            self.parts.append(part(kind, width, thaws=leg.thaws))
        self.out = nn.Linear(width, 3, bias=False, dtype=DTYPE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for part in self.parts:
            if part.kind != "idle" or part.thaws:  # else its unit is not gathered
                x = part(x)
        return self.out(x)


def make_optimizer(program: Program, model: nn.Module, **options: Any) -> Any:
    """Return it over groups by part; ``options`` are wrong ones, before a load."""
    groups: list[list[nn.Parameter]] = [[] for _ in range(program.num_groups)]
    for name, param in model.named_parameters():
        path = clean_name(name).split(".")
        number = int(path[1]) if path[0] == "parts" else 0
        groups[number % program.num_groups].append(param)
    kind, own = OPTIMIZERS[program.optimizer]
    # It tells a gradient of zeros from None.
    decay = 0.0 if program.lacks_states else 0.1
    filled = [(number, each) for number, each in enumerate(groups) if each]
    return kind(
        [
            {
                "params": each,
                "lr": own["lr"] * (number + 1),
                "weight_decay": decay,
                **options,
            }
            for number, each in filled
        ],
        **own,
    )


def train(
    model: Any, optim: Any, steps: range, rank: int = 0, world_size: int = 1
) -> None:
    for step in steps:
        numbers = generator("checkpoint batch", step)
        inputs = torch.randn(NUM_ROWS, 4, generator=numbers, dtype=DTYPE)
        labels = torch.randn(NUM_ROWS, 3, generator=numbers, dtype=DTYPE)
        rows = slice(rank, None, world_size)
        optim.zero_grad()
        nn.functional.mse_loss(model(inputs[rows]), labels[rows]).backward()
        optim.step()
