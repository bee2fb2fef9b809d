"""explain: which unit holds what, in which dtypes, as a table."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from fsdp_c._engines.models import units_in
from fsdp_c._text import table
from fsdp_c._units.owner import UnitFacts


@dataclass(frozen=True)
class UnitSummary:
    """How one unit is sharded. Its dtypes are distinct, in the order of its segments.

    Attributes:
        name: Of the sharded module in the unwrapped model; empty for the root.
        strategy: Name of its ShardingStrategy; of fully_shard(), of the one that does
            the same.
        world_size: Ranks that its parameters are sharded over.
        master_dtypes: Of the shards.
        compute_dtypes: Of the unsharded parameters in forward and backward.
        reduce_dtypes: Of the reduction of gradients; none when all is frozen.
        buffer_dtypes: Of its own floating buffers in forward.
        numel: Elements of its parameters.
        frozen_numel: Those of them that need no gradient.
        padding_numel: Elements of padding, over all ranks.
        shard_nbytes: Bytes of this rank's shards, padding included.
    """

    name: str
    strategy: str
    world_size: int
    master_dtypes: tuple[torch.dtype, ...]
    compute_dtypes: tuple[torch.dtype, ...]
    reduce_dtypes: tuple[torch.dtype, ...]
    buffer_dtypes: tuple[torch.dtype, ...]
    numel: int
    frozen_numel: int
    padding_numel: int
    shard_nbytes: int

    @property
    def frozen_share(self) -> float:
        """The part of its elements that is frozen, from 0 to 1."""
        return self.frozen_numel / self.numel if self.numel else 0.0


@dataclass(frozen=True)
class ModelSummary:
    """All units of a model, parents first. ``print()`` shows a table."""

    units: tuple[UnitSummary, ...]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(unit.numel for unit in self.units)

    @property
    def shard_nbytes(self) -> int:
        """Bytes of this rank's shards."""
        return sum(unit.shard_nbytes for unit in self.units)

    @property
    def padding_numel(self) -> int:
        """Elements of padding, over all ranks."""
        return sum(unit.padding_numel for unit in self.units)

    @property
    def frozen_share(self) -> float:
        """The part of all elements that is frozen, from 0 to 1."""
        frozen = sum(unit.frozen_numel for unit in self.units)
        return frozen / self.numel if self.numel else 0.0

    def rows(self) -> list[dict[str, Any]]:
        """Return the units as dicts of plain data, dtypes as ``"float32"``."""
        return [
            {
                key: [_short(dtype) for dtype in value]
                if isinstance(value, tuple)
                else value
                for key, value in asdict(unit).items()
            }
            for unit in self.units
        ]

    def __str__(self) -> str:
        settings: dict[str, Callable[[UnitSummary], str]] = {
            "unit": lambda unit: unit.name or "(root)",
            "strategy": lambda unit: unit.strategy,
            "ranks": lambda unit: str(unit.world_size),
            "master": lambda unit: _join(unit.master_dtypes),
            "compute": lambda unit: _join(unit.compute_dtypes),
            "reduce": lambda unit: _join(unit.reduce_dtypes),
            "buffers": lambda unit: _join(unit.buffer_dtypes),
        }
        sizes: dict[str, Callable[[UnitSummary | ModelSummary], str]] = {
            "numel": lambda of: f"{of.numel:,}",
            "shard bytes": lambda of: f"{of.shard_nbytes:,}",
            "padding": lambda of: f"{of.padding_numel:,}",
            "frozen": lambda of: f"{of.frozen_share:.0%}",
        }
        lines = [
            [text(unit) for text in (*settings.values(), *sizes.values())]
            for unit in self.units
        ]
        lines.append(["total", *[""] * 6, *(text(self) for text in sizes.values())])
        return table([[*settings, *sizes], *lines], num_text=len(settings))


def explain(model: nn.Module) -> ModelSummary:
    """Return how ``model`` is sharded: a row per unit, with dtypes and sizes.

    Communicates nothing and changes nothing; ``print(explain(model))`` is a table.

    Args:
        model: A sharded module, of either API, or one that contains some.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: Nothing in ``model`` is sharded.
    """
    return ModelSummary(tuple(_summary(unit) for unit in units_in(model)))


def _summary(unit: UnitFacts) -> UnitSummary:
    segments = unit.segments
    return UnitSummary(
        name=unit.name,
        strategy=unit.strategy,
        world_size=1 if unit.shard_group is None else unit.shard_group.size(),
        master_dtypes=_unique(master for master, *_ in segments),
        compute_dtypes=_unique(
            _chosen(master, unit.param_dtype) for master, *_ in segments
        ),
        reduce_dtypes=_unique(
            _chosen(_chosen(master, unit.param_dtype), unit.reduce_dtype)
            for master, is_trainable, *_ in segments
            if is_trainable
        ),
        buffer_dtypes=_unique(
            _chosen(dtype, unit.buffer_dtype)
            for dtype in unit.buffer_dtypes
            if dtype.is_floating_point
        ),
        numel=sum(numel for _, _, _, numel, _, _ in segments),
        frozen_numel=sum(
            numel for _, is_trainable, _, numel, _, _ in segments if not is_trainable
        ),
        padding_numel=sum(padded - numel for _, _, _, numel, _, padded in segments),
        shard_nbytes=sum(
            shard_numel * master.itemsize for master, *_, shard_numel, _ in segments
        ),
    )


def _chosen(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype that floating data of ``dtype`` is held in."""
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def _unique(dtypes: Iterable[torch.dtype]) -> tuple[torch.dtype, ...]:
    return tuple(dict.fromkeys(dtypes))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _join(dtypes: Sequence[torch.dtype]) -> str:
    return "+".join(map(_short, dtypes)) or "-"
