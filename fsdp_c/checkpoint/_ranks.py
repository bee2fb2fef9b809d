"""The ranks that save or load a checkpoint together."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from fsdp_c._units.collectives import gathered_objects, naming_ranks, object_of_first
from fsdp_c.checkpoint._errors import CheckpointError, reason


class Ranks:
    """A process group, or this process alone where nothing is initialised."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self.is_single = group is None and not (
            dist.is_available() and dist.is_initialized()
        )
        self.rank = 0 if self.is_single else dist.get_rank(group)
        self.world_size = 1 if self.is_single else dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("process_group does not contain this rank")

    def gather(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks on rank 0, None on the others."""
        if self.is_single:
            return [value]
        values = [None] * self.world_size if self.rank == 0 else None
        with naming_ranks(self._group, "gather of a checkpoint's description"):
            dist.gather_object(value, values, group=self._group, group_dst=0)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on all ranks."""
        if self.is_single:
            return value
        what = "broadcast of a checkpoint's description"
        return object_of_first(value, self._group, what)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on all ranks."""
        if self.is_single:
            return [value]
        return gathered_objects(value, self._group, "agreement about a checkpoint")

    @contextmanager
    def together(self, headline: str) -> Iterator[list[str]]:
        """Let all ranks go on behind the block, or none. Collective.

        Yields a list for problems; what the block raises is one, too.

        Raises:
            CheckpointError: A rank has a problem. It lists all.
        """
        problems: list[str] = []
        try:
            yield problems
        except CheckpointError as error:
            problems += [f"{error.headline}: {each}" for each in error.problems]
            problems = problems or [str(error)]
        except Exception as error:
            problems.append(reason(error))
        raise_if_any(headline, self.all_gather(problems))

    def positions(self, group: ProcessGroup | None) -> list[int]:
        """Return the ranks of ``group`` as ranks of this group.

        Raises:
            ValueError: A rank of ``group`` is not in this group.
        """
        if group is None or self.is_single:
            return [self.rank]
        mine = dist.get_process_group_ranks(self._group)
        position = {rank: index for index, rank in enumerate(mine)}
        found = [position.get(rank) for rank in dist.get_process_group_ranks(group)]
        if None in found:
            raise ValueError(
                "the model is sharded over ranks that are not in process_group: pass "
                "the group of all ranks that hold the model"
            )
        return [each for each in found if each is not None]


def raise_if_any(headline: str, problems_of_rank: Sequence[Sequence[str]]) -> None:
    """Raise if there is any problem.

    Raises:
        CheckpointError: It lists all of them.
    """
    found: dict[str, list[int]] = {}
    for rank, problems in enumerate(problems_of_rank):
        for problem in dict.fromkeys(problems):
            found.setdefault(problem, []).append(rank)
    if found:
        raise CheckpointError(
            headline,
            [
                problem
                if len(ranks) == len(problems_of_rank)
                else f"{problem} (rank{'s' if len(ranks) > 1 else ''} {_list(ranks)})"
                for problem, ranks in found.items()
            ],
        )


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... {len(ranks)} in all"
