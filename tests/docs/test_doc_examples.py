"""The code in README.md and the pages in docs runs, on 2 ranks, page by page.

Blocks of a page run one after the other in one namespace. What they do not make
themselves is there before the first: see `_Page`, or the class of the page. Of a
diff the new side runs. What cannot run says so on the page, and is counted here.
"""

import contextlib
import copy
import os
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_c import FSDPModule
from helpers.distributed import distributed
from helpers.doc_pages import Block, blocks_of, pages
from helpers.groups import groups_destroyed
from helpers.impl import FSDP, MixedPrecision, StateDictType, fsdp
from helpers.models import DIM, MLP
from helpers.models import Block as ModelBlock
from helpers.reference import assert_same_tensors, full_state_dict
from helpers.state_dicts import everything

POLICY = ModuleWrapPolicy({ModelBlock})

# Blocks that cannot run, by page. Each says why above its fence.
NOT_RUN: dict[str, int] = {
    "docs/guide/captured_steps.md": 1,
    "docs/guide/frameworks.md": 1,
    "docs/guide/fully_shard.md": 5,
    "docs/guide/huggingface.md": 1,
    "docs/guide/migrate.md": 1,
}

RUNNABLE = [
    page
    for page in pages()
    if any(block.language in ("python", "diff") for block in blocks_of(page))
]


def _train_step(
    optimizer: torch.optim.Optimizer, model: nn.Module, batch: Tensor
) -> None:
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class _Page:
    """What is there before the first block of a page, and what is checked."""

    def __init__(self, rank: int, world_size: int, folder: str) -> None:
        import fsdp_c

        model = fsdp(MLP(), auto_wrap_policy=POLICY, use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters())
        self.rank = rank
        self.names: dict[str, Any] = {
            "torch": torch,
            "nn": nn,
            "dist": dist,
            "fsdp_c": fsdp_c,
            "FSDP": FSDP,
            "rank": rank,
            "world_size": world_size,
            "folder": folder,
            "policy": POLICY,
            "model": model,
            "optimizer": optimizer,
            "optim": optimizer,
            "batch": torch.randn(4, DIM),
            "batches": [torch.randn(4, DIM) for _ in range(6)],
            "train_step": partial(_train_step, optimizer),
        }

    def before(self, index: int) -> None:
        """Prepare for the block with this index."""

    def after(self, index: int) -> None:
        """Check what the block with this index has done."""


class _Readme(_Page):
    """The module is not wrapped yet."""

    def __init__(self, rank: int, world_size: int, folder: str) -> None:
        super().__init__(rank, world_size, folder)
        self.names["model"] = MLP()

    def after(self, index: int) -> None:
        assert isinstance(self.names["model"], FSDP)
        assert len(FSDP.fsdp_modules(self.names["model"])) == 4


class _Checkpoint(_Page):
    """The second block loads what the first saved, the last what the third did."""

    def __init__(self, rank: int, world_size: int, folder: str) -> None:
        super().__init__(rank, world_size, folder)
        model, optim = self.names["model"], self.names["optim"]
        model(self.names["batch"]).sum().backward()
        optim.step()
        self.names["scheduler"] = torch.optim.lr_scheduler.StepLR(optim, 1)
        self.expected = copy.deepcopy(full_state_dict(model))

    def before(self, index: int) -> None:
        if index in (1, 3):
            _zero(self.names["model"])

    def after(self, index: int) -> None:
        state = full_state_dict(self.names["model"])
        assert_same_tensors("state", state, self.expected, 0.0)
        if index == 1:
            assert self.names["step"] == 5


class _StateDicts(_Page):
    """The second block loads what the first saved; the others do both."""

    def __init__(self, rank: int, world_size: int, folder: str) -> None:
        super().__init__(rank, world_size, folder)
        self.reference, self.names["model"] = everything()

    def before(self, index: int) -> None:
        if index == 1:
            _zero(self.names["model"])

    def after(self, index: int) -> None:
        state = full_state_dict(self.names["model"])
        assert_same_tensors("state", state, self.reference.state_dict(), 0.0)


class _OutOfMemory(MLP):
    """Runs out of memory in the backward of a batch that is all zeros."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if not x.any():
            out.register_hook(_run_out_of_memory)
        return out


def _run_out_of_memory(grad: Tensor) -> None:
    msg = "a test"
    raise torch.OutOfMemoryError(msg)


class _Failures(_Page):
    """One batch of three does not fit; one rank fails; the group is replaced."""

    def __init__(self, rank: int, world_size: int, folder: str) -> None:
        super().__init__(rank, world_size, folder)
        model = fsdp(_OutOfMemory(), auto_wrap_policy=POLICY)
        optimizer = torch.optim.AdamW(model.parameters())
        reference = copy.deepcopy(full_state_dict(model))
        self.twin = MLP()
        self.twin.load_state_dict(reference)
        batches = [torch.randn(4, DIM), torch.zeros(4, DIM), torch.ones(4, DIM)]
        dist.broadcast(batches[0], 0)
        self.names.update(
            model=model,
            optimizer=optimizer,
            batches=batches,
            failed_here=rank == 0,
            build=_OutOfMemory,
            timedelta=timedelta,
            StateDictType=StateDictType,
        )

    def before(self, index: int) -> None:
        if index == 1:
            self.names["model"](torch.ones(4, DIM)).sum().backward()

    def after(self, index: int) -> None:
        if index == 0:
            optimizer = torch.optim.AdamW(self.twin.parameters())
            for batch in (self.names["batches"][0], self.names["batches"][2]):
                self.twin(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        state = full_state_dict(self.names["model"])
        assert_same_tensors("state", state, self.twin.state_dict(), 1e-5)


class _Matrices(_Page):
    """The matrices of an unsharded model are kept whole; the others go on after it."""

    def __init__(self, rank: int, world_size: int, folder: str) -> None:
        super().__init__(rank, world_size, folder)
        self.names["build"] = lambda: nn.Sequential(
            nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        )

    def before(self, index: int) -> None:
        if index == 4:
            self.names["model"] = self.trained

    def after(self, index: int) -> None:
        if index == 2:
            stats = self.names["optimizer"].memory_stats()
            assert stats["num_params"] > 0
            assert "steps of owners" in self.names["timeline"].summary()
            self.trained = self.names["model"]
        if index == 3:
            kept = self.names["model"].named_parameters()
            assert {param.numel() for _, param in kept} == {0, DIM, DIM * DIM}


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 3))


class _Faq(_Page):
    """The folder holds a safetensors file of the model."""

    def __init__(self, rank: int, world_size: int, folder: str) -> None:
        super().__init__(rank, world_size, folder)
        if rank == 0:
            save_file(_two_layers().state_dict(), f"{folder}/model.safetensors")
        dist.barrier()
        self.names["build"] = _two_layers


class _Migrate(_Page):
    """What FSDP2 saved is loaded, and trains on as it would have there."""

    def __init__(self, rank: int, world_size: int, folder: str) -> None:
        super().__init__(rank, world_size, folder)
        old = _two_layers()
        fully_shard(old, mesh=init_device_mesh("cpu", (world_size,)))
        optimizer = torch.optim.AdamW(old.parameters(), lr=1e-3)
        old(self.names["batch"]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model_state, optimizer_state = get_state_dict(old, optimizer)
        dcp.save(
            {"model": model_state, "optimizer": optimizer_state},
            checkpoint_id=f"{folder}/fsdp2",
        )
        self.names.update(
            precision=MixedPrecision(param_dtype=torch.bfloat16),
            build=_two_layers,
            old=old,
            old_optimizer=optimizer,
        )

    def after(self, index: int) -> None:
        names = self.names
        if not isinstance(names["model"], FSDP):
            assert isinstance(names["model"], FSDPModule)
            return
        if names.get("old") is None or "state" not in names:
            return
        for model, optimizer in (
            (names["old"], names["old_optimizer"]),
            (names["model"], names["optimizer"]),
        ):
            model(names["batch"]).sum().backward()
            optimizer.step()
        old = names.pop("old").state_dict()
        expected = {key: value.full_tensor() for key, value in old.items()}
        assert_same_tensors("state", full_state_dict(names["model"]), expected, 1e-6)


SETUPS: dict[str, type[_Page]] = {
    "README.md": _Readme,
    "docs/guide/checkpoint.md": _Checkpoint,
    "docs/reference/state_dicts.md": _StateDicts,
    "docs/guide/failures.md": _Failures,
    "docs/guide/faq.md": _Faq,
    "docs/guide/matrix_optimizers.md": _Matrices,
    "docs/guide/migrate.md": _Migrate,
}


def _zero(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Let relative paths on a page be in ``folder``."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _run(block: Block, names: dict[str, Any]) -> None:
    """Run one block; a traceback shows its place on the page."""
    code = block.new_side() if block.language == "diff" else block.code
    padded = "\n" * (block.line - 1) + code
    exec(compile(padded, block.page, "exec"), names)


@distributed(world_size=2, device="cpu")
@pytest.mark.parametrize("page", RUNNABLE)
def test_examples(rank: int, world_size: int, page: str, tmp_path: Path) -> None:
    blocks = [b for b in blocks_of(page) if b.language in ("python", "diff")]
    with groups_destroyed(), _inside(tmp_path):
        setup = SETUPS.get(page, _Page)(rank, world_size, str(tmp_path))
        try:
            for index, block in enumerate(blocks):
                if block.not_run:
                    continue
                setup.before(index)
                _run(block, setup.names)
                setup.after(index)
                dist.barrier()
        finally:
            setup.names.clear()
            del setup


@pytest.mark.parametrize("page", pages())
def test_code_compiles(page: str) -> None:
    """What is not run, and the old side of a diff, is Python all the same."""
    for block in blocks_of(page):
        if block.language == "python":
            compile(block.code, f"{page}:{block.line}", "exec")
        elif block.language == "diff":
            compile(block.old_side(), f"{page}:{block.line}, old", "exec")
            compile(block.new_side(), f"{page}:{block.line}, new", "exec")


def test_blocks_that_do_not_run_are_counted() -> None:
    found = {p: sum(bool(b.not_run) for b in blocks_of(p)) for p in pages()}
    assert {page: num for page, num in found.items() if num} == NOT_RUN


def test_setups_are_of_pages() -> None:
    assert set(SETUPS) <= set(RUNNABLE)
