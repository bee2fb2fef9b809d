"""load: everything is checked on all ranks before anything is changed."""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from fsdp_c import _native
from fsdp_c._fully_shard.group import groups_in
from fsdp_c._units.base import ShardedModule
from fsdp_c._units.device import synchronize, wait_for_uploads
from fsdp_c.checkpoint._contents import find_contents
from fsdp_c.checkpoint._errors import CheckpointError, mismatches
from fsdp_c.checkpoint._load_optim import OptimLoad
from fsdp_c.checkpoint._model_targets import ModelTargets
from fsdp_c.checkpoint._plain import decode, tensor_keys
from fsdp_c.checkpoint._plan import plan_parameters
from fsdp_c.checkpoint._progress import progress as progress_bar
from fsdp_c.checkpoint._random_states import check_random_states, set_random_states
from fsdp_c.checkpoint._ranks import Ranks
from fsdp_c.checkpoint._save import wait_for_save
from fsdp_c.checkpoint._source import RankSource, Source

_HEADLINE = "the checkpoint was not loaded; the model is as it was"
_BROKEN = "the checkpoint was loaded in part only: load one again"


@dataclass(frozen=True)
class Loaded:
    """What :func:`load` found besides what it loaded.

    Attributes:
        extra: As given to save; None if nothing was.
        rank_extra: This rank's, if as many ranks saved as load now; else None.
        missing: Names that only the model has (strict=False).
        unexpected: Names that only the checkpoint has.
        world_size: The number of ranks that saved.
        random_states: Whether they were set; never for another number of ranks.
    """

    extra: Any
    rank_extra: Any
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    world_size: int
    random_states: bool


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optim: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    strict: bool = True,
    random_states: bool = True,
    process_group: ProcessGroup | None = None,
    progress: bool | None = None,
) -> Loaded:
    """Load a checkpoint that any number of ranks saved, in any wrapping.

    All ranks must call it, between steps. It waits for a save of this process that is
    still writing. Each rank reads the manifest, the entries of the ranks that hold
    what it needs, and only those blocks of their files. It reads the blocks twice:
    first to check everything, checksums included, then straight into place. Beside
    the optimizer's own state that needs a few MiB of memory.

    Args:
        path: What save was given.
        model: The wrapped model.
        optim: Its optimizer; the checkpoint must have its state then.
        scheduler: Anything with ``load_state_dict()``; likewise.
        strict: False: names that only one side has are no error, see Loaded.
        random_states: Set those of this rank, if as many ranks saved as load now.
        process_group: The ranks that hold the model; the default group if None.
        progress: Show bars on rank 0; None: if stderr is a terminal.

    Raises:
        CheckpointError: On all ranks, and all is left as it was: with everything that
            is missing, unexpected, of a wrong shape or dtype, truncated or corrupted.
    """
    wait_for_save()  # it may be the one to load
    ranks = Ranks(process_group)
    is_on = progress if ranks.rank == 0 else False
    headline = f"{_HEADLINE} ({os.fspath(path)})"
    with ExitStack() as stack:
        with ranks.together(headline) as problems:
            source = stack.enter_context(Source(path))
            loading = _Loading(source, model, optim, scheduler, ranks)
            problems.extend(
                loading.check(
                    strict=strict, with_random_states=random_states, is_on=is_on
                )
            )
        if len(set(ranks.all_gather(source.manifest.save_id))) > 1:
            problem = "the ranks found different checkpoints at the path"
            raise CheckpointError(headline, [problem])
        with progress_bar("loading", source.read_nbytes, is_on) as advance:
            _native.expect_writes()
            with ranks.together(_BROKEN):
                source.run(advance)
            with ranks.together(_BROKEN):
                loading.install()  # may communicate
        return loading.loaded()


class _Loading:
    """One load on one rank: check, then apply."""

    def __init__(
        self,
        source: Source,
        model: nn.Module,
        optim: torch.optim.Optimizer | None,
        scheduler: Any,
        ranks: Ranks,
    ) -> None:
        self._source = source
        self._scheduler = scheduler
        self._rank = ranks.rank
        self._contents = find_contents(model)
        manifest = source.manifest
        wait_for_uploads(m for m in model.modules() if isinstance(m, ShardedModule))
        arguments = [group.arguments for group in groups_in(model)]
        synchronize(each.device for each in arguments if each.offloads)
        self._targets = ModelTargets(self._contents)
        self._is_same_size = manifest.world_size == ranks.world_size
        self._optim: OptimLoad | None = None
        if optim is not None and manifest.optim is not None:
            self._optim = OptimLoad(model, optim, source, manifest.optim)
        elif optim is not None:
            source.problems.append(
                "it has no optimizer state: load without optim, or save with it"
            )
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._decoded: dict[str, Any] = {}

    def check(
        self, *, strict: bool, with_random_states: bool, is_on: bool | None
    ) -> list[str]:
        """Plan all reads, check what they will read; return all problems."""
        manifest, source = self._source.manifest, self._source
        missing, unexpected = plan_parameters(source, self._targets.targets)
        self._missing += missing
        self._unexpected += unexpected
        states = self._contents.stateful
        self._missing += [key for key in states if key not in manifest.modules]
        self._unexpected += [key for key in manifest.modules if key not in states]
        if self._optim is not None:
            self._optim.plan()
            self._missing += [f"optimizer: {name}" for name in self._optim.missing]
            self._unexpected += [
                f"optimizer: {name}" for name in self._optim.unexpected
            ]
            source.problems += self._optim.differences() if strict else []
        if strict:
            source.problems += mismatches(
                self._missing, self._unexpected, "the checkpoint"
            )
        plain = self._plain_values(with_random_states)
        for rank, value in plain.values():
            for key in tensor_keys(value):
                rank.want_tensor(key)
        with progress_bar("checking", source.nbytes, is_on) as advance:
            problems = source.check(advance)
        if problems:
            return problems
        for name, (rank, value) in plain.items():
            try:
                self._decoded[name] = decode(value, rank.tensor)
                self._check_decoded(name)
            except ValueError as error:
                problems.append(f"{name}: {error}")
        if self._optim is not None:
            try:
                self._optim.decode()
            except ValueError as error:
                problems.append(f"optimizer: {error}")
        return problems

    def _plain_values(
        self, with_random_states: bool
    ) -> dict[str, tuple[RankSource, Any]]:
        """Return encoded values by name, each with the rank that has its tensors.

        There are none of a rank whose entry is damaged, which is a problem already.
        """
        manifest, source = self._source.manifest, self._source
        modules = {
            key: value
            for key, value in manifest.modules.items()
            if key in self._contents.stateful
        }
        of_first = {"extra": manifest.extra, "modules": modules}
        if self._scheduler is not None:
            if manifest.scheduler is None:
                source.problems.append(
                    "it has no scheduler: load without scheduler, or save with it"
                )
            of_first["scheduler"] = manifest.scheduler
        values: dict[str, tuple[RankSource, Any]] = {}
        first = source.rank(0)
        if first is not None:
            values.update((name, (first, value)) for name, value in of_first.items())
        if self._is_same_size and (
            manifest.has_rank_extra
            or (with_random_states and manifest.has_random_states)
        ):
            mine = source.rank(self._rank)
            if mine is not None:
                values["rank_extra"] = (mine, mine.entry.rank_extra)
                if with_random_states and manifest.has_random_states:
                    values["random states"] = (mine, mine.entry.random_states)
        return values

    def _check_decoded(self, name: str) -> None:
        value = self._decoded[name]
        if name == "random states":
            check_random_states(value)
        elif name == "scheduler":
            _check_scheduler(self._scheduler, value)

    def install(self) -> None:
        """Put into place what was read beside its place, and what is plain."""
        if self._optim is not None:
            self._optim.install()
        self._targets.finish()
        for key, value in self._decoded["modules"].items():
            self._contents.stateful[key].set_extra_state(value)
        if "scheduler" in self._decoded:
            self._scheduler.load_state_dict(self._decoded["scheduler"])
        if "random states" in self._decoded:
            set_random_states(self._decoded["random states"])

    def loaded(self) -> Loaded:
        """Return what the load found."""
        return Loaded(
            extra=self._decoded["extra"],
            rank_extra=self._decoded.get("rank_extra"),
            missing=tuple(self._missing),
            unexpected=tuple(self._unexpected),
            world_size=self._source.manifest.world_size,
            random_states="random states" in self._decoded,
        )


def _check_scheduler(scheduler: Any, state: Any) -> None:
    now = scheduler.state_dict()
    if isinstance(now, dict) and (
        not isinstance(state, dict) or now.keys() != state.keys()
    ):
        saved = sorted(state) if isinstance(state, dict) else state
        raise ValueError(
            f"the saved one has {saved!r:.300} and a {type(scheduler).__name__} has "
            f"{sorted(now)}: pass the scheduler that was saved"
        )
