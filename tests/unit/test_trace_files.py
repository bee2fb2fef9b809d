"""Trace-event files, rank files, the picture and the command line."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fsdp_c.tools.trace import Recorded, Trace, TraceError, load
from fsdp_c.tools.trace._chrome import THREADS
from fsdp_c.tools.trace._command import main
from fsdp_c.tools.trace._data import from_json, prepare_folder, rank_path, write_json
from helpers.commands import exit_status
from helpers.traces import UNIT, Times, recording

# What a viewer may rely on: https://perfetto.dev, "trace event format".
PHASES = {"X", "M", "C", "i", "s", "f"}


def check_trace_events(content: dict[str, Any]) -> dict[tuple[int, int], list[Any]]:
    """Assert that a viewer will show this as it is meant; return slices by thread."""
    assert json.loads(json.dumps(content)) == content
    assert content["displayTimeUnit"] == "ms"
    slices = defaultdict(list)
    arrows = defaultdict(list)
    named = set()
    for event in content["traceEvents"]:
        assert event["ph"] in PHASES
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
            continue
        assert isinstance(event["ts"], float)
        assert event["ts"] >= 0.0
        if event["ph"] == "X":
            assert event["dur"] >= 0.0
            slices[event["pid"], event["tid"]].append(event)
        elif event["ph"] in "sf":
            arrows[event["id"]].append(event)
        elif event["ph"] == "C":
            assert all(isinstance(v, int) for v in event["args"].values())
    assert set(slices) <= named
    for thread, events in slices.items():
        check_nesting(events, thread)
    for pair in arrows.values():
        first, last = pair
        assert (first["ph"], last["ph"]) == ("s", "f")
        assert first["name"] == last["name"]
        assert first["ts"] <= last["ts"]
        # An arrow ends in a slice that is there at that time.
        assert any(
            slice_["ts"] <= last["ts"] <= slice_["ts"] + slice_["dur"] + 1e-6
            for slice_ in slices[last["pid"], last["tid"]]
        )
    return slices


def check_nesting(events: list[Any], thread: object) -> None:
    """Slices of a thread are apart, or one is inside of the other."""
    ends: list[float] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        end = event["ts"] + event["dur"]
        while ends and ends[-1] <= event["ts"] + 1e-6:
            ends.pop()
        assert not ends or end <= ends[-1] + 1e-6, (thread, event)
        ends.append(end)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_trace_events(is_ahead: bool) -> None:
    ranks = [recording(rank=r, is_ahead=is_ahead, begin_us=1000 + r) for r in (0, 1)]
    slices = check_trace_events(Trace(ranks).chrome())
    threads = {thread for _, thread in slices}
    assert {THREADS[thread] for thread in threads} == {
        "steps",
        "compute",
        "calls of fsdp_c",
        "unshard",
        "reduce",
    }
    steps = [e for e in slices[0, 0] if e["name"].startswith("step")]
    assert [e["name"] for e in steps] == ["step 0", "step 1"]
    assert steps[0]["ts"] == 0.0
    gathers = slices[1, THREADS.index("unshard")]
    assert gathers[0]["args"]["bytes"] == 4 << 20
    t = Times()
    assert gathers[0]["dur"] == pytest.approx(t.start + t.gather_wait)  # microseconds
    assert gathers[0]["ts"] == pytest.approx(1.0 + t.host)
    compute = slices[0, THREADS.index("compute")]
    assert compute[1]["name"] == "forward a"
    assert compute[1]["dur"] == pytest.approx(t.forward)


def test_the_check_of_nesting_finds_overlaps() -> None:
    with pytest.raises(AssertionError):
        check_nesting([{"ts": 0.0, "dur": 5.0}, {"ts": 3.0, "dur": 5.0}], "x")
    check_nesting([{"ts": 0.0, "dur": 5.0}, {"ts": 3.0, "dur": 2.0}], "x")


def test_arena_and_prefetches_are_there() -> None:
    events = Trace([recording(is_ahead=True)]).chrome()["traceEvents"]
    held = [e["args"]["held"] for e in events if e["ph"] == "C"]
    assert max(held) == 2 * (4 << 20)
    assert all(a != b for a, b in pairwise(held))
    marks = [e["name"] for e in events if e["ph"] == "i"]
    assert marks[:3] == ["prefetch miss (root)", "prefetch hit a", "prefetch hit b"]


def test_times_of_another_clock_are_moved() -> None:
    far = 10**15
    base = recording(begin_us=5000)
    spans = tuple(s._replace(begin=s.begin + far, end=s.end + far) for s in base.spans)
    other = replace(
        base,
        rank=1,
        clock="two",
        spans=spans,
        begin=base.begin + far,
        end=base.end + far,
    )
    content = Trace([base, other]).chrome()
    check_trace_events(content)
    alignment = content["otherData"]["alignment"][1]
    assert alignment["uncertainty_us"] <= 205
    assert abs(alignment["offset_us"] + far / 1e3) <= alignment["uncertainty_us"]


def test_a_recording_survives_its_file() -> None:
    for recorded in (recording(), recording(num_steps=0), recording(num_lost=3)):
        plain = json.loads(json.dumps(recorded.to_json()))
        assert from_json(plain) == recorded


# Folders ----------------------------------------------------------------------


def write(folder: Path, *ranks: Recorded) -> None:
    """What `Timeline.write` leaves."""
    for recorded in ranks:
        content = {**Trace([recorded]).chrome(), "fsdp_c": recorded.to_json()}
        write_json(rank_path(folder, recorded.rank), content)


def test_a_rank_file_is_a_trace_by_itself(tmp_path: Path) -> None:
    write(tmp_path, recording())
    check_trace_events(json.loads((tmp_path / "rank0.json").read_text()))
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.json"]


def test_load_and_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, *(recording(rank=rank) for rank in (1, 0)))
    assert [each.rank for each in load(tmp_path).recorded] == [0, 1]

    assert main(["merge", str(tmp_path)]) == 0
    merged = json.loads((tmp_path / "trace.json").read_text())
    slices = check_trace_events(merged)
    assert {rank for rank, _ in slices} == {0, 1}
    assert "2 ranks" in capsys.readouterr().out

    assert main(["summary", str(tmp_path)]) == 0
    assert "2 of 2 ranks" in capsys.readouterr().out
    assert main(["summary", str(tmp_path), "--rank", "1"]) == 0
    assert "1 of 2 ranks" in capsys.readouterr().out
    assert main(["summary", str(tmp_path), "--rank", "5"]) == 1
    assert "holds ranks 0, 1, not 5" in capsys.readouterr().err

    pytest.importorskip("matplotlib")
    assert main(["show", str(tmp_path)]) == 0
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    assert main(["show", str(tmp_path), "--step", "7"]) == 1
    assert "there are 0 to 1" in capsys.readouterr().err
    assert exit_status("trace", "nonsense") == 2
    capsys.readouterr()


def test_pictures(tmp_path: Path) -> None:
    """Every lane, more ranks than are drawn, no step."""
    pytest.importorskip("matplotlib")
    trace = Trace([recording(rank=rank, is_ahead=True) for rank in range(6)])
    trace.draw(tmp_path / "x.svg", step=0)
    text = (tmp_path / "x.svg").read_text()
    for word in ("rank 3", "forward", "backward", "unshard in flight", "arena"):
        assert word in text.replace("<!-- ", "")
    assert "rank 4" not in text
    with pytest.raises(TraceError, match="nothing to draw"):
        Trace([recording(num_steps=0)]).draw(tmp_path / "y.png")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not what fsdp_c.trace writes"),
        ("[]", "is not what fsdp_c.trace writes"),
        ('{"traceEvents": []}', "is not what fsdp_c.trace writes"),
        ('{"fsdp_c": {"version": 99}}', "version 99"),
        ('{"fsdp_c": {"version": 1}}', "damaged"),
        ('{"fsdp_c": {"version": 1, "units": [], "spans": [[1]]}}', "damaged"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "rank0.json").write_text(content)
    with pytest.raises(TraceError, match=message) as error:
        load(tmp_path)
    assert "rank0.json" in str(error.value)


def test_folders_that_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TraceError, match="is not a folder"):
        load(tmp_path / "x")
    with pytest.raises(TraceError, match="nothing was recorded there"):
        load(tmp_path)
    assert main(["merge", str(tmp_path)]) == 1
    assert "nothing was recorded there" in capsys.readouterr().err
    write(tmp_path, recording(), replace(recording(rank=1), world_size=4))
    with pytest.raises(TraceError, match="runs with 2 and 4 ranks"):
        load(tmp_path)
    with pytest.raises(TraceError, match="one rank several times"):
        Trace([recording(), recording()])


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="rank 3 cannot write traces there") as error:
        prepare_folder(tmp_path / "file" / "traces", 3)
    assert "file" in str(error.value)
    made = prepare_folder(tmp_path / "a" / "b", 0)
    assert list(made.iterdir()) == []


# Words ------------------------------------------------------------------------


def summary(recorded: Recorded) -> str:
    return Trace([recorded]).summary()


def test_summary_says_what_the_numbers_say() -> None:
    text = summary(recording())
    t = Times()
    waited_ms = (5 * t.gather_wait + t.reduce_wait) / 1e3
    exposed_ms = waited_ms + 8 * t.start / 1e3
    assert f"{exposed_ms:.3f} ms" in text
    assert "forward   0 hits, 6 misses (0% hits)" in text
    assert "Unit a waits longest: 0.500 ms per step" in text
    assert "at most 8.00 MiB" in text


def test_advice_follows_from_the_recording() -> None:
    text = summary(recording())
    assert "forward_prefetch=True: in forward 6 unshards" in text
    assert "BACKWARD_PRE" not in text  # it is on
    assert "SHARD_GRAD_OP" in text
    assert "saves 2 all-gathers and" in text
    on = replace(UNIT, forward_prefetch=True, backward_prefetch="BACKWARD_POST")
    text = summary(recording(unit=on))
    assert "forward_prefetch=True" not in text
    assert "BACKWARD_PRE (it is BACKWARD_POST)" in text
    kept = replace(UNIT, strategy="SHARD_GRAD_OP")
    assert "_HYBRID_SHARD_ZERO2" not in summary(recording(unit=kept))


def test_no_advice_where_nothing_is_to_be_had() -> None:
    quick = Times(gather_wait=1, reduce_wait=3)
    text = summary(recording(times=quick))
    assert "Advice:" not in text
    assert "No advice: " in text


def test_advice_on_reductions_knows_their_dtype() -> None:
    slow = Times(reduce_wait=3000)
    assert "reduce_dtype=torch.bfloat16" in summary(recording(times=slow))
    low = replace(UNIT, reduce_dtypes=("bfloat16",))
    text = summary(recording(times=slow, unit=low))
    assert "3.00 ms" in text
    assert "no_sync()" in text  # the rule still speaks, without that remedy
    assert "reduce_dtype" not in text


def test_advice_on_a_late_rank() -> None:
    short = Times(forward=100, backward=100)
    both = [recording(times=short), recording(rank=1, times=short, begin_us=1190)]
    text = Trace(both).summary()
    assert "most of it" in text
    assert "for rank 1" in text


def test_advice_on_small_units() -> None:
    base = recording(times=Times(forward=50, backward=50))
    small = tuple(
        s._replace(nbytes=1024) if s.kind == "all_gather" else s for s in base.spans
    )
    assert "Larger units" in summary(replace(base, spans=small))
    assert "pieces of 1 KiB" in summary(replace(base, spans=small))
    assert "Larger units" not in summary(base)  # of 4 MiB each


def test_notes() -> None:
    base = recording()
    assert "overwritten" in summary(replace(base, num_lost=7))
    text = summary(replace(base, device="cuda"))  # and no marks
    assert "is unknown" in text
    assert "exposed  " not in text
    assert "No step was recorded" in summary(recording(num_steps=0))
    dropped = tuple(
        s._replace(is_unused=True) if s.kind == "reshard" else s for s in base.spans
    )
    assert "dropped unused" in summary(replace(base, spans=dropped))
