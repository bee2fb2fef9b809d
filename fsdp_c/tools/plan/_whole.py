"""The step of a whole_parameter_optimizer: who owns what, and what travels."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from fsdp_c import _native
from fsdp_c._whole.optimizer import ROUND_NBYTES, product_cost
from fsdp_c.tools.plan._errors import PlanError
from fsdp_c.tools.plan._units import ParamInfo, PlacedUnit

# What Muon is not used for, by parts of a name.
_NOT_HIDDEN = ("embed", "head", "wte", "wpe")


def is_hidden_matrix(name: str, shape: torch.Size) -> bool:
    """Whether Muon is for this parameter: a matrix of neither embedding nor head."""
    return len(shape) == 2 and not any(part in name for part in _NOT_HIDDEN)


# Of a parameter, by name and unsharded shape: whether it is stepped whole.
Chooser = Callable[[str, torch.Size], bool]


@dataclass(frozen=True)
class WholeStep:
    """What one rank has and sends in a step, of parameters that are stepped whole.

    Attributes:
        num_params: Parameters that it owns.
        state_nbytes: The optimizer's state for them: a momentum, as Muon's.
        num_rounds: Of a step, on all ranks.
        round_nbytes: Values and gradients of its largest round.
        held_nbytes: The most that is held with what travels.
        wire_nbytes: Bytes that it sends: parts to owners, new values back.
        is_peak: Whether the rank's memory is highest then.
    """

    num_params: int
    state_nbytes: int
    num_rounds: int
    round_nbytes: int
    held_nbytes: int
    wire_nbytes: int
    is_peak: bool = False


@dataclass(frozen=True)
class _Chosen:
    """A parameter, where it lies, and whether it gets gradients."""

    param: ParamInfo
    layout: _native.Layout
    index: int
    is_trained: bool

    @property
    def nbytes(self) -> int:
        return self.param.numel * self.param.dtype.itemsize

    def shard_of_whole(self, *, by_rows: bool) -> int:
        """Return the shard that has all of it; -1: none, or rows."""
        layout = self.layout
        if layout.world_size == 1:
            return 0
        segment = layout.slots[self.index][0]
        if by_rows or self.param.numel > layout.segments[segment][4]:
            return -1
        whole = (0, self.param.numel)
        parts = layout.parts(self.index)
        return parts.index(whole) if whole in parts else -1


def plan_whole_step(
    units: Sequence[PlacedUnit],
    chooses: Chooser,
    *,
    trained: Collection[str],
    by_rows: bool,
    on_cpu: bool,
    rank: int,
) -> tuple[WholeStep, frozenset[str]]:
    """Return a rank's step, and the names of what is stepped whole.

    Owners and rounds are chosen by the code of training, in the order of ``units``. The
    parameters ``trained`` get gradients. Units are those of fully_shard() if they are
    ``by_rows``. Unless ``on_cpu``, the next round is under way during a step.

    Raises:
        PlanError: Nothing is chosen.
    """
    grids: dict[tuple[int, int], list[_Chosen]] = {}
    for unit, layout, _, replicas, _ in units:
        if not unit.config.use_orig_params:
            raise PlanError(
                "--optimizer muon steps the matrices of a unit and AdamW the rest, "
                "which flat parameters cannot tell apart: add --use-orig-params"
            )
        for index, param in enumerate(unit.params):
            if param.requires_grad and chooses(param.name, param.shape):
                chosen = _Chosen(param, layout, index, param.name in trained)
                grids.setdefault((layout.world_size, replicas), []).append(chosen)
    if not grids:
        raise PlanError(
            "--optimizer muon: no parameter is chosen, name matrices with --whole"
        )
    num_params = state = wire = num_rounds = 0
    rounds: Counter[int] = Counter()
    for (num_shards, num_replicas), members in grids.items():
        shards = [each.shard_of_whole(by_rows=by_rows) for each in members]
        deals = _native.deal_out(
            [product_cost(each.param.shape) for each in members],
            [each.nbytes for each in members],
            num_owners=num_shards * num_replicas,
            num_shards=num_shards,
            round_nbytes=ROUND_NBYTES // (1 if on_cpu or num_shards == 1 else 2),
            shards=shards,
        )
        row, column = divmod(rank % (num_shards * num_replicas), num_shards)
        for each, shard, (owner, number) in zip(members, shards, deals, strict=True):
            begin, end, _, _ = each.layout.intersect(each.index, column)
            part = (end - begin) * each.param.dtype.itemsize
            num_rounds = max(num_rounds, number + 1)
            if owner == row * num_shards + column:
                num_params += 1
                state += each.nbytes if each.is_trained else 0
                if shard < 0:
                    rounds[number] += 2 * each.nbytes
            if not each.is_trained or owner // num_shards != row:
                continue
            if shard < 0:
                is_mine = owner % num_shards == column
                wire += each.nbytes - part if is_mine else 2 * part
            wire += (num_replicas - 1) * part
    largest = max(rounds.values(), default=0)
    names = frozenset(each.param.name for members in grids.values() for each in members)
    held = (2 if on_cpu else 4) * largest
    return WholeStep(num_params, state, num_rounds, largest, held, wire), names
