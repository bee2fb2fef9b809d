"""Bytes per rank without activations, computed from the layout.

The formulas are for a GPT of equal blocks below one root unit, FULL_SHARD with torch's
defaults, fp32, AdamW, on the first rank. Memory peaks in backward; each formula names
the source of what is live then. ``gloo`` adds what gloo needs beyond the plain
collective, and NCCL does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from implementations import FSDP1_ORIG, FSDP2, FSDP_C_ORIG, GPT, Block
from torch import nn

ITEMSIZE = 4  # fp32
ALIGNMENT_NUMEL = 4  # 16 bytes: fsdp_c's and FSDP1's, in front of each parameter
SEGMENT_ALIGNMENT_NBYTES = 256  # fsdp_c: of a segment within a block
PACK_THRESHOLD_NBYTES = 2**20  # fsdp_c: gradients wait for so much before a copy
NUM_ADAMW_STATES = 2


@dataclass(frozen=True)
class Memory:
    """Bytes that are live at the busiest moment."""

    parameters: int
    gradients: int
    optimizer: int
    # Unsharded parameters and gradients, buffers of collectives, and the sharded sum
    # of an accumulation, which no parameter has as its gradient.
    unsharded: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.unsharded


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _flat_nbytes(params: Iterable[nn.Parameter], world_size: int) -> int:
    """Return the unsharded bytes of one flat parameter or segment, padded."""
    numel = 0
    for param in params:
        numel = _round_up(numel, ALIGNMENT_NUMEL) + param.numel()
    return _round_up(numel, world_size) * ITEMSIZE


def _dim0_nbytes(params: Iterable[nn.Parameter], world_size: int) -> int:
    """Return the unsharded bytes, each parameter padded along its first dimension."""
    numel = 0
    for param in params:
        rows = param.shape[0]
        numel += _round_up(rows, world_size) * (param.numel() // rows)
    return numel * ITEMSIZE


@dataclass(frozen=True)
class _Units:
    """A model in units: ``num_blocks`` equal ones and a root."""

    num_blocks: int
    block: list[nn.Parameter]
    root: list[nn.Parameter]
    head: list[nn.Parameter]  # of the root; its gradients come first of all
    late: list[nn.Parameter]  # of the root, in front of the blocks: they come last

    @classmethod
    def of(cls, model: GPT) -> _Units:
        inside = {
            param
            for module in model.modules()
            if isinstance(module, Block)
            for param in module.parameters()
        }
        root = [param for param in model.parameters() if param not in inside]
        head = list(model.head.parameters())
        late = list(model.embedding.parameters())
        block = list(model.blocks[0].parameters())
        return cls(len(model.blocks), block, root, head, late)


def _trainable(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [param for param in params if param.requires_grad]


def _frozen(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [param for param in params if not param.requires_grad]


def _pending_nbytes(params: Iterable[nn.Parameter], begin: int = 0) -> tuple[int, int]:
    """Return the most bytes of gradients that wait to be packed, and those at the end.

    ``params`` in the order of their gradients; ``begin`` wait already.
    """
    pending = most = begin
    for param in _trainable(list(params)):
        pending += param.numel() * ITEMSIZE
        most = max(most, pending)
        if pending >= PACK_THRESHOLD_NBYTES:
            pending = 0
    return most, pending


def _in_block(segments: Iterable[int]) -> int:
    """Return the bytes of a block of segments of so many bytes."""
    total = 0
    for segment in segments:
        total = _round_up(total, SEGMENT_ALIGNMENT_NBYTES) + segment
    return total


@dataclass(frozen=True)
class FsdpC:
    """Bytes that one rank's engine holds, each for the whole run but ``gradients``."""

    shards: int
    gradients: int  # of all units; a cleared one is freed and comes with its reduction
    arena: int
    scratch: int
    partial: int
    busiest: tuple[int, int]  # gradients, and gradients of autograd that wait

    @classmethod
    def of(
        cls, model: GPT, world_size: int, *, gloo: bool, accumulation: str | None
    ) -> FsdpC:
        """Compute them for a run of steps that end with ``zero_grad()``.

        Arena (docs/how-it-works.md, "Memory"): the root's parameters, two blocks of the
        size of a unit's parameters, the root's gradients, two of the size of a unit's
        gradients. A no_sync backward keeps the gradients of every unit instead of two.
        Scratch: gloo's reduction wants two blocks for the largest unit's gradients.
        no_sync(sharded=True) keeps one sharded sum per unit.
        """
        units = _Units.of(model)

        def params_nbytes(params: list[nn.Parameter]) -> int:
            segments = filter(None, (_trainable(params), _frozen(params)))
            return _in_block(_flat_nbytes(segment, world_size) for segment in segments)

        def shard_nbytes(params: list[nn.Parameter]) -> int:
            return _flat_nbytes(params, world_size) // world_size

        block_grads = _flat_nbytes(_trainable(units.block), world_size)
        root_grads = _flat_nbytes(_trainable(units.root), world_size)
        block_shard, root_shard = block_grads // world_size, root_grads // world_size
        frozen = units.num_blocks * shard_nbytes(_frozen(units.block))
        frozen += shard_nbytes(_frozen(units.root))
        gradients = units.num_blocks * block_shard + root_shard
        num_grad_blocks = units.num_blocks if accumulation == "unsharded" else 2

        # In backward's order: the root's last layers, the blocks, the root's first.
        late = set(units.late)
        early = [param for param in reversed(units.root) if param not in late]
        _, waiting = _pending_nbytes(early)
        in_block, _ = _pending_nbytes(reversed(units.block))
        at_end, _ = _pending_nbytes(units.late, waiting)
        moments = [
            ((units.num_blocks - 1) * block_shard, waiting + in_block),
            (units.num_blocks * block_shard, at_end),
            (gradients, 0),
        ]
        return cls(
            shards=gradients + frozen,
            gradients=gradients,
            arena=params_nbytes(units.root)
            + 2 * params_nbytes(units.block)
            + root_grads
            + num_grad_blocks * block_grads,
            scratch=2 * max(block_grads, root_grads) if gloo else 0,
            partial=gradients if accumulation == "sharded" else 0,
            busiest=max(moments, key=sum),
        )


def fsdp_c(
    model: GPT, world_size: int, *, gloo: bool, accumulation: str | None
) -> Memory:
    """Shards, the engine's blocks, and the gradients at the busiest moment.

    Gradients come while backward goes on. Most are there when the first block's
    gradients wait to be packed, when the root's do, or at the end.
    """
    engine = FsdpC.of(model, world_size, gloo=gloo, accumulation=accumulation)
    gradients, pending = engine.busiest
    return Memory(
        parameters=engine.shards,
        gradients=gradients,
        optimizer=NUM_ADAMW_STATES * engine.gradients,
        unsharded=engine.arena + engine.scratch + engine.partial + pending,
    )


def fsdp1(
    model: GPT, world_size: int, *, gloo: bool, accumulation: str | None
) -> Memory:
    """One flat parameter per unit; frozen parameters in it have gradients, too.

    Busiest (``_runtime_utils.py``, ``_flat_param.py``): the last unit but one in
    backward has its parameters' gradients and, from autograd's ``cat`` of them, the
    flat gradient; its own and the next unit's parameters are unsharded
    (BACKWARD_PRE), the root's are kept, the units before it are reduced.
    A no_sync backward keeps every unit's flat gradient, so that the first unit of
    the next backward is the busiest. gloo's buffers live at other moments.
    """
    del gloo
    units = _Units.of(model)
    block = _flat_nbytes(units.block, world_size)
    root = _flat_nbytes(units.root, world_size)
    has_root_grads = bool(_trainable(units.root))
    head = _flat_nbytes(_trainable(units.head), world_size)
    trainable = units.num_blocks * _flat_nbytes(_trainable(units.block), world_size)
    trainable += _flat_nbytes(_trainable(units.root), world_size)
    num_reduced = units.num_blocks - 2
    kept = 0
    if accumulation is not None:
        num_reduced = 0
        kept = units.num_blocks * block + (root if has_root_grads else 0)
    return Memory(
        parameters=(units.num_blocks * block + root) // world_size,
        gradients=num_reduced * block // world_size,
        optimizer=NUM_ADAMW_STATES * trainable // world_size,
        unsharded=root + 4 * block + head + kept,
    )


def fsdp2(
    model: GPT, world_size: int, *, gloo: bool, accumulation: str | None
) -> Memory:
    """One DTensor per parameter; only trainable ones have gradients.

    Two moments, of the last unit but one in backward (``_fsdp_param_group.py``,
    ``_fsdp_collectives.py``): it gathers the next unit (a buffer) while its own
    parameters are unsharded and the last reduction's input is held; or it copies its
    gradients into the reduction's input while the next unit's buffer is there.
    set_requires_gradient_sync(False) keeps every unit's unsharded gradients, so that
    the second unit of the next backward is the busiest;
    set_requires_all_reduce(False) keeps every unit's reduced shard.
    gloo gathers into, and reduces from, a buffer of its own.
    """
    units = _Units.of(model)
    block = _dim0_nbytes(units.block, world_size)
    grads = _dim0_nbytes(_trainable(units.block), world_size)
    root = _dim0_nbytes(units.root, world_size)
    root_grads = _dim0_nbytes(_trainable(units.root), world_size)
    head = _dim0_nbytes(_trainable(units.head), world_size)
    copies = 2 if gloo else 1
    gathering = block + copies * block + grads
    reducing = block + grads + copies * grads + grads // world_size
    num_reduced = units.num_blocks - 2
    kept = head
    if accumulation == "unsharded":
        num_reduced = 1
        kept = (units.num_blocks - 1) * grads + root_grads
    elif accumulation == "sharded":
        num_reduced = 0
        kept = head + (units.num_blocks * grads + root_grads) // world_size
    trainable = units.num_blocks * grads + root_grads
    return Memory(
        parameters=(units.num_blocks * block + root) // world_size,
        gradients=num_reduced * grads // world_size,
        optimizer=NUM_ADAMW_STATES * trainable // world_size,
        unsharded=root + kept + max(gathering, reducing),
    )


COMPUTE = {FSDP_C_ORIG: fsdp_c, FSDP1_ORIG: fsdp1, FSDP2: fsdp2}
