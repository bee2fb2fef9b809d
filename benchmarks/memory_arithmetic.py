"""Bytes per rank without activations, computed from the layout.

Every formula is for a GPT of equal blocks below one root unit, FULL_SHARD with
torch's defaults, fp32, AdamW, on the first rank. The busiest moment of a step is
in backward; what is live then follows from the sources named at each formula.
``gloo`` adds what gloo needs beyond the plain collective; with NCCL it is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    unsharded: int  # unsharded parameters and gradients, buffers of collectives

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.unsharded


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _flat_nbytes(params: Iterable[nn.Parameter], world_size: int) -> int:
    """Return the unsharded bytes of one flat parameter or segment, padded."""
    numel = sum(_round_up(param.numel(), ALIGNMENT_NUMEL) for param in params)
    shard_numel = _round_up(-(-numel // world_size), ALIGNMENT_NUMEL)
    return shard_numel * world_size * ITEMSIZE


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
        return cls(len(model.blocks), list(model.blocks[0].parameters()), root, head)


def _trainable(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [param for param in params if param.requires_grad]


def _frozen(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [param for param in params if not param.requires_grad]


def _pending_nbytes(block: list[nn.Parameter]) -> int:
    """Return the most bytes of gradients that wait to be packed, last layer first."""
    pending = most = 0
    for param in reversed(_trainable(block)):
        pending += param.numel() * ITEMSIZE
        most = max(most, pending)
        if pending >= PACK_THRESHOLD_NBYTES:
            pending = 0
    return most


def fsdp_c(
    model: GPT, world_size: int, *, gloo: bool, accumulation: str | None
) -> Memory:
    """Shards + gradient shards + blocks; all are kept for the whole run.

    Blocks (docs/design.md, "The arena"): the root's parameters, two of the size of a
    unit's parameters, the root's gradients, two of the size of a unit's gradients. A
    no_sync backward keeps the gradients of every unit instead of two. gloo's
    reduction wants scratch of the same size beside every gradient segment.
    A ``no_sync(sharded=True)`` keeps one more sharded gradient, the sum so far.
    """
    units = _Units.of(model)

    def params_nbytes(params: list[nn.Parameter]) -> int:
        total = 0
        for segment in filter(None, (_trainable(params), _frozen(params))):
            total = _round_up(total, SEGMENT_ALIGNMENT_NBYTES)
            total += _flat_nbytes(segment, world_size)
        return total

    def grads_nbytes(params: list[nn.Parameter]) -> int:
        nbytes = _flat_nbytes(_trainable(params), world_size)
        scratch = _round_up(nbytes, SEGMENT_ALIGNMENT_NBYTES) if gloo else 0
        return nbytes + scratch

    def shard_nbytes(select: Callable[[list[nn.Parameter]], list[nn.Parameter]]) -> int:
        whole = units.num_blocks * _flat_nbytes(select(units.block), world_size)
        return (whole + _flat_nbytes(select(units.root), world_size)) // world_size

    trainable = shard_nbytes(_trainable)
    num_grad_blocks = units.num_blocks if accumulation == "unsharded" else 2
    arena = (
        params_nbytes(units.root)
        + 2 * params_nbytes(units.block)
        + grads_nbytes(units.root)
        + num_grad_blocks * grads_nbytes(units.block)
    )
    return Memory(
        parameters=trainable + shard_nbytes(_frozen),
        gradients=trainable * (2 if accumulation == "sharded" else 1),
        optimizer=NUM_ADAMW_STATES * trainable,
        unsharded=arena + _pending_nbytes(units.block),
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
