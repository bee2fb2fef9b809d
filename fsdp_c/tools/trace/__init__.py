"""A timeline of a few steps: what every unit did, and what it waited for.

    with fsdp_c.trace.record(model, steps=3, folder="traces") as timeline:
        for batch in batches:
            train_step(batch)
    print(timeline.summary())

Every rank writes one file. ``python -m fsdp_c trace summary traces`` says where the
time of all ranks went, ``trace merge`` makes one file of them for Perfetto, ``trace
show`` a picture. ``fsdp_c.trace`` is this module. See docs/guide/trace.md.
"""

from fsdp_c.tools.trace._data import Recorded, Span, TraceError, UnitInfo
from fsdp_c.tools.trace._recording import Timeline, record, start
from fsdp_c.tools.trace._traces import Trace, load

__all__ = [
    "Recorded",
    "Span",
    "Timeline",
    "Trace",
    "TraceError",
    "UnitInfo",
    "load",
    "record",
    "start",
]
