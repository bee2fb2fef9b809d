"""reshard: a checkpoint written again as if another number of ranks had saved it."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fsdp_c import _native
from fsdp_c.checkpoint._errors import CheckpointError
from fsdp_c.checkpoint._files import (
    Advance,
    Chunk,
    Slot,
    entry_file,
    rank_file,
    write_document,
    write_tensors,
)
from fsdp_c.checkpoint._folders import TemporaryFolder
from fsdp_c.checkpoint._holders import Holders, make_layout
from fsdp_c.checkpoint._manifest import (
    MANIFEST,
    Manifest,
    ParamSpec,
    SegmentSpec,
    UnitSpec,
    WholeSpec,
)
from fsdp_c.checkpoint._plain import tensor_keys
from fsdp_c.checkpoint._plan import Part, find_parts, find_plain
from fsdp_c.checkpoint._progress import progress as progress_bar
from fsdp_c.checkpoint._rank_entry import RankEntry, model_key, state_key
from fsdp_c.checkpoint._source import RankSource, Source


class _RankPlan:
    """What one new rank's file will hold, and where that is now."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.parts: list[list[Part]] = []
        self.plain: dict[str, Any] = {}

    def add(self, slot: Slot, parts: list[Part]) -> None:
        self.slots.append(slot)
        self.parts.append(parts)

    def chunks(self) -> Iterator[Chunk]:
        for parts in self.parts:
            for part in parts:
                yield from part.chunks()


def reshard(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    world_size: int,
    *,
    overwrite: bool = False,
    progress: bool | None = None,
) -> list[str]:
    """Write a checkpoint to ``target`` for ``world_size`` ranks.

    Loading works without it: any number of ranks can load any checkpoint. After it
    each rank reads its own file instead of those of several ranks. One process does
    it, without a model and without communication, in 64 MiB of memory; ``target``
    appears complete or not at all.

    Args:
        path: The checkpoint.
        target: Another folder.
        world_size: The new number of ranks; every unit is sharded over all of them.
        overwrite: Replace a checkpoint that is at ``target``.
        progress: Show bars; None: if stderr is a terminal.

    Returns:
        What was left out: values that each rank had of its own, if their number
        changes.

    Raises:
        CheckpointError: The checkpoint is damaged, or holds optimizer state that is
            not element-wise of parameters that would be cut elsewhere.
        ValueError: ``world_size`` or ``target`` is not possible.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be >= 1, got {world_size}")
    if os.path.realpath(path) == os.path.realpath(target):
        raise ValueError("target is the checkpoint itself: write to another folder")
    with Source(path) as source:
        old = source.manifest
        new = _new_manifest(old, world_size)
        plans = _plan(source, new)
        with progress_bar("checking", source.nbytes, progress) as advance:
            problems = source.check(advance)
        if problems:
            raise CheckpointError(f"{source.path} was not resharded", problems)
        temporary = TemporaryFolder(os.fspath(target), overwrite=overwrite)
        try:
            with progress_bar("resharding", source.nbytes, progress) as advance:
                nbytes = sum(
                    _write_rank(source, temporary, rank, plan, new, advance)
                    for rank, plan in enumerate(plans)
                )
            new = replace(new, save_id=temporary.save_id, nbytes=nbytes)
            write_document(os.path.join(temporary.folder, MANIFEST), new.dump())
            temporary.publish()
        finally:
            temporary.discard()
        return _left_out(old, new)


def _left_out(old: Manifest, new: Manifest) -> list[str]:
    left = []
    if old.has_random_states and not new.has_random_states:
        left.append("random states")
    if old.has_rank_extra and not new.has_rank_extra:
        left.append("rank_extra")
    return left


def _new_manifest(old: Manifest, world_size: int) -> Manifest:
    is_same = world_size == old.world_size
    return replace(
        old,
        world_size=world_size,
        units=tuple(_new_unit(unit, world_size) for unit in old.units),
        has_random_states=old.has_random_states and is_same,
        has_rank_extra=old.has_rank_extra and is_same,
    )


def _new_unit(unit: UnitSpec, world_size: int) -> UnitSpec:
    layout = make_layout(unit.params, world_size, unit.alignment, by_rows=unit.by_rows)
    return replace(
        unit,
        ranks=tuple(range(world_size)),
        segments=tuple(
            SegmentSpec(old.dtype, old.requires_grad, segment[4])
            for old, segment in zip(unit.segments, layout.segments, strict=True)
        ),
        params=tuple(
            replace(param, segment=slot[0], offset=slot[1])
            for param, slot in zip(unit.params, layout.slots, strict=True)
        ),
        is_placed=False,  # a checkpoint needs no whole blocks
    )


def _plan(source: Source, new: Manifest) -> list[_RankPlan]:
    holders = Holders(new)
    plans = [_RankPlan() for _ in range(new.world_size)]
    for unit in new.units:
        layout = holders.layout(unit)
        for segment in range(len(unit.segments)):
            for index, begin, end, shard, _ in _native.Placement.flat(
                layout, segment
            ).pieces:
                param = unit.params[index]
                _plan_part(source, plans[shard], shard, param, begin, end)
    for whole in new.wholes:
        _plan_part(source, plans[0], 0, whole, 0, whole.numel)
    first = source.rank(0)
    if first is not None:
        optim = new.optim
        values = [new.modules, new.scheduler, new.extra]
        if optim is not None:
            values += [optim.groups, optim.others]
        _keep_tensors(first, plans[0], tensor_keys(values))
    if new.has_random_states or new.has_rank_extra:
        for rank, plan in enumerate(plans):
            mine = source.rank(rank)
            if mine is not None:
                values = [mine.entry.random_states, mine.entry.rank_extra]
                _keep_tensors(mine, plan, tensor_keys(values))
    return plans


def _plan_part(
    source: Source,
    plan: _RankPlan,
    rank: int,
    spec: ParamSpec | WholeSpec,
    begin: int,
    end: int,
) -> None:
    """Plan elements ``[begin, end)`` of a tensor, and of its optimizer state."""
    is_buffer = isinstance(spec, WholeSpec) and not spec.is_param
    if begin == end and not is_buffer:
        return
    shape = spec.shape if isinstance(spec, WholeSpec) else (end - begin,)
    states: dict[str, str] = {}
    plain_keys: Sequence[str] = ()
    optim = source.manifest.optim
    if optim is not None and spec.name in optim.states:
        states = optim.states[spec.name].sharded
        plain_keys = optim.states[spec.name].plain
    for state in (None, *states.items()):
        what = repr(spec.name) if state is None else f"{state[0]!r} of {spec.name!r}"
        parts = find_parts(source, what, spec, (begin, end), state)
        for part in parts:
            part.rank.want(part.byte(part.begin), part.byte(part.end), what)
        if state is None:
            plan.add(Slot(model_key(spec.name), begin, spec.dtype, shape), parts)
        else:
            key = state_key(spec.name, state[0])
            plan.add(Slot(key, begin, state[1], (end - begin,)), parts)
    if plain_keys:
        plain = find_plain(source, spec, plain_keys, (begin, end), is_of_whole=False)
        if plain is None:
            return
        plan.plain[spec.name] = plain.values
        keys = tensor_keys(plain.values)
        if keys and plain.rank is not source.rank(rank):
            source.problems.append(
                f"optimizer state of {spec.name!r} is not element-wise, and another "
                "rank would hold it: load it with the number of ranks that saved it"
            )
            return
        _keep_tensors(plain.rank, plan, keys)


def _keep_tensors(source: RankSource, plan: _RankPlan, keys: Sequence[str]) -> None:
    """Plan tensors of plain values, which keep their keys."""
    for key in keys:
        piece = source.entry.pieces.get(key)
        if piece is None:
            continue  # a load says so
        source.want_tensor(key)
        slot = Slot(key, piece.begin, piece.dtype, (piece.end - piece.begin,))
        plan.add(slot, [Part(source, piece, piece.begin, piece.end)])


def _write_rank(
    source: Source,
    temporary: TemporaryFolder,
    rank: int,
    plan: _RankPlan,
    new: Manifest,
    advance: Advance,
) -> int:
    """Write a new rank's file and entry; return their bytes."""
    slots = []
    for slot, parts in zip(plan.slots, plan.parts, strict=True):
        shape = slot.shape
        if slot.key.startswith("plain/"):
            shape = parts[0].rank.reads.tensors[slot.key].shape
        slots.append(slot._replace(shape=shape))
    path = os.path.join(temporary.folder, rank_file(rank, new.world_size))
    written = write_tensors(
        path, slots, plan.chunks(), save_id=temporary.save_id, advance=advance
    )
    entry = RankEntry(
        save_id=temporary.save_id,
        rank=rank,
        nbytes=written.nbytes,
        checksums=written.checksums,
        pieces=written.pieces,
        plain=plan.plain,
    )
    if new.has_random_states or new.has_rank_extra:
        mine = source.rank(rank)
        assert mine is not None  # it was checked
        entry = replace(
            entry,
            random_states=mine.entry.random_states,
            rank_extra=mine.entry.rank_extra,
        )
    data = entry.dump()
    name = entry_file(rank, new.world_size)
    write_document(os.path.join(temporary.folder, name), data)
    return written.nbytes + len(data)
