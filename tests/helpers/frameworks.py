"""What the tests of frameworks share: models, data, and how a user calls them.

Lightning runs its FSDPStrategy on GPUs only, but looks at the class itself: a subclass
runs on the CPU. There torch's FSDP1 does not run in it (it passes no device_id), so the
unsharded model is what is compared with.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.models import DIM, MLP, Block
from helpers.seeds import generator


class _Empty(ModuleType):
    """A module that has every name, and nothing behind it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextmanager
def _replaced(names: Sequence[str]) -> Iterator[None]:
    """Have empty modules in the place of those that are not imported yet."""
    empty = {name: _Empty(name) for name in names if name not in sys.modules}
    sys.modules.update(empty)
    for name, module in empty.items():
        parent, _, child = name.rpartition(".")
        if parent in empty:
            setattr(empty[parent], child, module)
    try:
        yield
    finally:
        for name in empty:
            del sys.modules[name]


def require(name: str) -> None:
    """Skip the test where the package is not installed; do not import it."""
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")


def framework(name: str, *unused: str) -> Any:
    """Import a framework's module; skip the test where it is not installed.

    Nothing that uses transformers is called here, and its import takes half a minute:
    it is left out, and so are the modules ``unused``.
    """
    require(name.partition(".")[0])
    with _replaced(["transformers", *unused]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(name)


LR = 1e-2
STEPS = 2
VOCAB = 16


@dataclass(frozen=True)
class Task:
    """What is trained."""

    build: Callable[[int], nn.Module]
    """From a seed."""
    loss: Callable[[nn.Module, int, int], Tensor]
    """Of a step and a rank."""
    units: set[type[nn.Module]]


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MLP()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, DIM, generator=generator(100 * step + rank))


def _loss(model: nn.Module, step: int, rank: int) -> Tensor:
    out: Tensor = model(batch(step, rank))
    return out.square().mean()


MLP_TASK = Task(build, _loss, {Block})


def litgpt_task() -> Task:
    """Return a small model of litgpt, with its loss."""
    litgpt = framework("litgpt")
    cross_entropy = framework("litgpt.utils").chunked_cross_entropy
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": VOCAB}

    def build_gpt(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model: nn.Module = litgpt.GPT(litgpt.Config(name="tiny", block_size=8, **sizes))
        return model

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        ids = torch.randint(VOCAB, (2, 8), generator=generator(100 * step + rank))
        value: Tensor = cross_entropy(model(ids[:, :-1]), ids[:, 1:], chunk_size=0)
        return value

    return Task(build_gpt, loss, {framework("litgpt.model").Block})


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)


class Unsharded:
    """The reference: the model on all ranks' batches, with clipping."""

    def __init__(self, world_size: int, task: Task = MLP_TASK) -> None:
        self.task = task
        self.model = task.build(0)
        self.optim = optimizer(self.model)
        self.world_size = world_size

    def train(self, steps: range, max_norm: float | None = None) -> None:
        for step in steps:
            for rank in range(self.world_size):
                loss = self.task.loss(self.model, step, rank)
                (loss / self.world_size).backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            self.optim.step()
            self.optim.zero_grad()


# Lightning ---------------------------------------------------------------------


def fabric_of(
    kind: str, plugins: Sequence[Any], *, devices: int, task: Task, **options: Any
) -> Any:
    """Return a Fabric that is launched, with units of ``task``."""

    class OnCPU(framework("lightning.fabric.strategies").FSDPStrategy):
        """As it is."""

    strategy = OnCPU(auto_wrap_policy=task.units, state_dict_type=kind, **options)
    fabric = framework("lightning.fabric").Fabric(
        accelerator="cpu", devices=devices, strategy=strategy, plugins=[*plugins]
    )
    fabric.launch()
    return fabric


def fabric_setup(fabric: Any, task: Task, seed: int) -> dict[str, Any]:
    """Return model and optimizer as one state, which Fabric saves and loads."""
    model = fabric.setup_module(task.build(seed))
    return {
        "model": model,
        "optim": fabric.setup_optimizers(optimizer(model)),
        "step": 0,
    }


def fabric_train(
    fabric: Any,
    task: Task,
    state: dict[str, Any],
    steps: range,
    max_norm: float | None = None,
) -> None:
    for step in steps:
        loss = task.loss(state["model"], step, fabric.global_rank)
        fabric.backward(loss)
        if max_norm is not None:
            fabric.clip_gradients(state["model"], state["optim"], max_norm=max_norm)
        state["optim"].step()
        state["optim"].zero_grad()
        state["step"] = step + 1


def trainer_of(
    kind: str, plugins: Sequence[Any], *, devices: int, steps: int, folder: str
) -> Any:
    pl = framework("lightning.pytorch")

    class OnCPU(framework("lightning.pytorch.strategies").FSDPStrategy):
        """As it is."""

    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=OnCPU(auto_wrap_policy={Block}, state_dict_type=kind),
        plugins=[*plugins],
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )


def lightning_module(seed: int) -> Any:
    pl = framework("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = build(seed)

        def training_step(self, _: Tensor, __: int) -> Tensor:
            return _loss(self.net, self.trainer.global_step, self.global_rank)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer(self)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(range(100), batch_size=None)

    return Module()


@contextmanager
def installed() -> Iterator[None]:
    """Have fsdp_c in the place of torch's FSDP; say nothing of the frameworks' news."""
    import fsdp_c  # a script that knows nothing of it imports this module, too

    fsdp_c.install()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        fsdp_c.uninstall()


def environment(rank: int, world_size: int) -> Any:
    """Return Lightning's view of processes that somebody else has started."""
    environments = framework("lightning.fabric.plugins.environments")

    class Ready(environments.LightningEnvironment):
        creates_processes_externally = True

        def __init__(self) -> None:
            super().__init__()
            self._global_rank, self._world_size = rank, world_size

        def local_rank(self) -> int:
            return rank

        def teardown(self) -> None:
            """Leave the processes alone."""

    return Ready()
