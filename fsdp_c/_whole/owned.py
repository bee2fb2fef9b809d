"""Whole parameters: the rank that owns each, and the way there and back.

Note [Grids]
The ranks that have a parameter are a grid: those of a row shard it, those of a column
have the same part. An owner is one rank of the grid. A whole comes together in the
owner's row; what goes back is cut in the owner's row, and then each rank there passes
its part on along its column. So replicas do nothing twice. Tensor parallel ranks are
replicas here: parts are gathered over them before, and cut after. A column of several
groups is passed along one after the other, the last one first.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_c._fully_shard.row_parts import GroupRows, parts_in
from fsdp_c._native import Placement, deal_out
from fsdp_c._state.exchange import (
    Move,
    begin_exchange_in,
    exchange_in,
    runs_beside,
)
from fsdp_c._state.parts import ParamPart, names_of_params, whole_part
from fsdp_c._units.collectives import gathered_objects
from fsdp_c._units.owner import owners_in

# Where torch places tensors on a CPU. Kernels choose their way by it, so that an
# optimizer on other memory would round otherwise than the unsharded one.
ALIGNMENT_NBYTES = 64


def parts_of(model: nn.Module) -> dict[str, ParamPart]:
    """Return the parts of all parameters by first name; wholes, if none is sharded."""
    if owners_in(model):
        return parts_in(model)
    return {
        names[0]: whole_part(param, names, None)
        for param, names in names_of_params(model).items()
    }


class Grid(NamedTuple):
    """The ranks that have a parameter; see Note [Grids]."""

    shard_group: ProcessGroup | None  # None: each rank of the row has the whole
    replica_groups: tuple[ProcessGroup, ...]  # whose product are columns
    device: torch.device  # of the collectives

    @classmethod
    def of(cls, part: ParamPart) -> "Grid":
        """Return the grid of a parameter; this rank alone, if it is in no unit."""
        parallel: list[ProcessGroup] = []
        if isinstance(part.home, GroupRows):
            arguments = part.home.owner.arguments
            data = arguments.data
            shards, replicas = data.shard_group, data.replica_group
            parallel = part.home.cut.parallel_groups
            device = arguments.device
        elif part.module is not None:
            groups = part.module._sharded.groups
            shards, replicas = groups.shard_group, groups.replica_group
            device = part.module.compute_device
        else:
            shards = replicas = None
            device = part.param.device
        columns = [replicas, *parallel]
        return cls(
            None if shards is None or shards.size() == 1 else shards,
            tuple(each for each in columns if each is not None and each.size() > 1),
            device,
        )

    @property
    def num_shards(self) -> int:
        return 1 if self.shard_group is None else self.shard_group.size()

    @property
    def shard_rank(self) -> int:
        return 0 if self.shard_group is None else self.shard_group.rank()

    @property
    def num_replicas(self) -> int:
        return math.prod(group.size() for group in self.replica_groups)

    @property
    def replica_rank(self) -> int:
        rank = 0
        for group in self.replica_groups:
            rank = rank * group.size() + group.rank()
        return rank

    def ranks_in_column(self, replica_rank: int) -> list[int]:
        """Return a replica's rank in each of ``replica_groups``."""
        ranks: list[int] = []
        for group in reversed(self.replica_groups):
            replica_rank, rank = divmod(replica_rank, group.size())
            ranks.insert(0, rank)
        return ranks

    @property
    def runs_beside(self) -> bool:
        """Whether a gather over a row goes on while this rank does other work."""
        return self.shard_group is not None and runs_beside(
            self.shard_group, self.device
        )

    @property
    def groups(self) -> list[ProcessGroup]:
        """The groups over which all of its ranks hear of each other, in this order."""
        shards = [] if self.shard_group is None else [self.shard_group]
        return [*self.replica_groups, *shards]


@dataclass(frozen=True, eq=False)
class WholeParam:
    """A parameter that one rank of its grid steps as a whole.

    ``shard_rank`` and ``replica_rank`` are the owner's in the grid; ``round`` says
    when it steps: see csrc/core/layout/owners.h. ``travels``: the owner's shard does
    not have all of it.
    """

    part: ParamPart
    grid: Grid
    shard_rank: int
    replica_rank: int
    round: int
    travels: bool

    @property
    def is_in_my_row(self) -> bool:
        return self.replica_rank == self.grid.replica_rank

    @property
    def is_mine(self) -> bool:
        return self.is_in_my_row and self.shard_rank == self.grid.shard_rank

    @property
    def shape(self) -> torch.Size:
        return self.part.shape

    @property
    def sharded(self) -> Placement:
        """Where the parts lie in a row of the grid."""
        return self.part.spread.sharded(self.part.index)

    @property
    def owned(self) -> Placement:
        """The whole, on the owner's rank of its row."""
        return self.part.spread.whole(self.shard_rank, self.shard_rank + 1)

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first of its row that has elements, if any has."""
        place, index = self.sharded, self.part.index
        ranks = range(self.grid.num_shards)
        holders = [rank for rank in ranks if place.numel(index, rank) > 0]
        return self.grid.shard_rank == (holders or ranks)[0]


def _shard_of_whole(part: ParamPart, grid: Grid) -> int:
    """Return the shard that has all of a parameter; -1: none has."""
    if grid.shard_group is None:
        return 0
    if isinstance(part.home, GroupRows):
        return -1  # of one row at most
    shards = set(part.spread.sharded(part.index).buffers(part.index))
    return shards.pop() if len(shards) == 1 else -1


class Travelling(NamedTuple):
    """A parameter, or what belongs to its elements, on the way."""

    whole: WholeParam
    values: Tensor | None  # 1-D: this rank's part, or all of it; None for nothing
    dtype: torch.dtype


class Dealt:
    """All parameters of an optimizer, with their owners; the same on all ranks.

    Those of a grid are dealt out together.

    Attributes:
        wholes: In the order of ``parts``.
        grids: Theirs.
        shown: Of those that this rank owns: what its optimizer steps. Without memory,
            but in a step.
        num_rounds: Of a step.
    """

    def __init__(
        self, parts: Sequence[ParamPart], costs: Sequence[int], round_nbytes: int
    ) -> None:
        of_grid: dict[Grid, list[int]] = {}
        for index, part in enumerate(parts):
            of_grid.setdefault(Grid.of(part), []).append(index)
        dealt: dict[int, WholeParam] = {}
        for grid, members in of_grid.items():
            shards = [_shard_of_whole(parts[i], grid) for i in members]
            deals = deal_out(
                [costs[i] for i in members],
                [parts[i].shape.numel() * parts[i].param.itemsize for i in members],
                num_owners=grid.num_shards * grid.num_replicas,
                num_shards=grid.num_shards,
                # The next round may be under way.
                round_nbytes=max(1, round_nbytes // (2 if grid.runs_beside else 1)),
                shards=shards,
            )
            for index, shard, (owner, number) in zip(
                members, shards, deals, strict=True
            ):
                row, column = divmod(owner, grid.num_shards)
                dealt[index] = WholeParam(
                    parts[index], grid, column, row, number, travels=shard < 0
                )
        self.wholes = [dealt[index] for index in range(len(parts))]
        self.grids = list(of_grid)
        self.shown = {each: _placeholder(each) for each in self.wholes if each.is_mine}
        self.num_rounds = 1 + max((each.round for each in self.wholes), default=0)

    def reports(
        self, mine: Callable[[WholeParam], dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return what the ranks report of each parameter. Collective.

        ``mine`` returns this rank's report, empty if another one of the grid reports.
        """
        known: dict[Grid, dict[int, dict[str, Any]]] = {g: {} for g in self.grids}
        for index, whole in enumerate(self.wholes):
            if report := mine(whole):
                known[whole.grid][index] = report
        merged: dict[int, dict[str, Any]] = {}
        for grid, own in known.items():
            its = own
            for group in grid.groups:
                what = "comparison of optimizer states"
                gathered = gathered_objects(its, group, what)
                its = {i: report for each in gathered for i, report in each.items()}
            merged.update(its)
        return [merged.get(index, {}) for index in range(len(self.wholes))]

    def union(self, mine: set[str]) -> set[str]:
        """Return the names of all ranks of the grids. Collective."""
        found = set(mine)
        for grid in self.grids:
            for group in grid.groups:
                what = "comparison of optimizer states"
                found = set().union(*gathered_objects(found, group, what))
        return found


def gather(travelling: Sequence[Travelling], what: str) -> list[Tensor | None]:
    """Return the wholes of parts, 1-D, of the parameters that this rank owns.

    All ranks must call it with the same parameters. A whole may be the part itself, if
    that lies as torch places a tensor: see ALIGNMENT_NBYTES.
    """
    return begin_gather(travelling, what)()


def begin_gather(
    travelling: Sequence[Travelling], what: str
) -> Callable[[], list[Tensor | None]]:
    """Begin :func:`gather`; what is returned ends it, and is called once."""
    results: list[Tensor | None] = [None] * len(travelling)
    rows: dict[Grid, list[int]] = {}
    for index, (whole, values, _) in enumerate(travelling):
        if whole.travels:
            if whole.is_in_my_row:
                rows.setdefault(whole.grid, []).append(index)
        elif whole.is_mine and values is not None:
            is_aligned = values.data_ptr() % ALIGNMENT_NBYTES == 0
            results[index] = values if is_aligned else values.clone()
    under_way = []
    for grid, members in rows.items():
        moves = [
            Move(values, dtype, whole.part.index, whole.sharded, whole.owned)
            for whole, values, dtype in (travelling[i] for i in members)
        ]
        assert grid.shard_group is not None
        label = f"gather of {what}"
        end_one = begin_exchange_in(grid.shard_group, grid.device, moves, label)
        under_way.append((members, end_one))

    def end() -> list[Tensor | None]:
        for members, end_one in under_way:
            for index, values in zip(members, end_one(), strict=True):
                if travelling[index].whole.is_mine:
                    results[index] = values
        return results

    return end


def scatter(travelling: Sequence[Travelling], what: str) -> list[Tensor]:
    """Return this rank's parts of wholes, 1-D, which their owners have.

    All ranks must call it with the same parameters. A part may be the whole itself.
    """
    parts: list[Tensor | None] = [None] * len(travelling)
    rows: dict[Grid, list[int]] = {}
    columns: dict[Grid, list[int]] = {}
    for index, (whole, values, _) in enumerate(travelling):
        if whole.grid.replica_groups:
            columns.setdefault(whole.grid, []).append(index)
        if not whole.is_in_my_row:
            continue
        if whole.travels:
            rows.setdefault(whole.grid, []).append(index)
        elif whole.is_mine:
            parts[index] = values
        else:
            device = whole.part.param.device
            parts[index] = torch.empty(0, dtype=travelling[index].dtype, device=device)
    label = f"scatter of {what}"
    for grid, members in rows.items():
        moves = [
            Move(values, dtype, whole.part.index, whole.owned, whole.sharded)
            for whole, values, dtype in (travelling[i] for i in members)
        ]
        assert grid.shard_group is not None
        arrived = exchange_in(grid.shard_group, grid.device, moves, label)
        for index, part in zip(members, arrived, strict=True):
            parts[index] = part
    for grid, members in columns.items():
        _pass_on(grid, [(i, travelling[i]) for i in members], parts, label)
    return [part for part in parts if part is not None]


def _pass_on(
    grid: Grid,
    members: Sequence[tuple[int, Travelling]],
    parts: list[Tensor | None],
    label: str,
) -> None:
    """Fill in the members' ``parts``, which the owners' rows have, along columns."""
    own = grid.ranks_in_column(grid.replica_rank)
    for depth, group in reversed(list(enumerate(grid.replica_groups))):
        moves = {}
        for index, (whole, _, dtype) in members:
            owner = grid.ranks_in_column(whole.replica_rank)
            if owner[:depth] == own[:depth]:
                numel, sender = whole.part.part_numel, owner[depth]
                held = Placement.on_ranks([numel], sender, sender + 1)
                needed = Placement.on_ranks([numel], 0, group.size())
                moves[index] = Move(parts[index], dtype, 0, held, needed)
        arrived = exchange_in(group, grid.device, list(moves.values()), label)
        for index, part in zip(moves, arrived, strict=True):
            parts[index] = part


def _placeholder(whole: WholeParam) -> nn.Parameter:
    return nn.Parameter(_without_memory(whole))


def _without_memory(whole: WholeParam) -> Tensor:
    """Return a tensor of the whole's shape that takes no memory.

    Its values are NaN, so that an optimizer that reads them too early is not wrong
    without a word.
    """
    param = whole.part.param
    one = _one_value(param.dtype, param.device)
    return one.expand(whole.shape.numel()).view(whole.shape)


@functools.cache
def _one_value(dtype: torch.dtype, device: torch.device) -> Tensor:
    fill = float("nan") if dtype.is_floating_point else 0
    return torch.full((1,), fill, dtype=dtype, device=device)


def lend(shown: nn.Parameter, whole: WholeParam, values: Tensor, grad: Tensor) -> None:
    """Let a placeholder show the whole and its gradient, which come 1-D."""
    device = whole.part.param.device
    shown.data = values.view(whole.shape).to(device)
    shown.grad = grad.view(whole.shape).to(device)


def take_back(shown: nn.Parameter, whole: WholeParam) -> None:
    """Let a placeholder have no memory again."""
    shown.grad = None
    shown.data = _without_memory(whole)
