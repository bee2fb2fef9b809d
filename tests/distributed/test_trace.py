"""fsdp_c.trace: what is recorded of real steps, and that nothing else changes."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_c
from fsdp_c import trace
from fsdp_c.tools.trace._lanes import lanes_of
from helpers.distributed import distributed
from helpers.groups import hybrid_groups
from helpers.impl import BackwardPrefetch, ShardingStrategy, fsdp
from helpers.matrix_optimizers import muon
from helpers.models import DIM, MLP, Block
from helpers.whole_runs import Run, is_hidden

ROOT = Path(__file__).resolve().parents[2]
NUM_BLOCKS = 3


def make(**kwargs: Any) -> Any:
    kwargs.setdefault("use_orig_params", True)
    return fsdp(MLP(NUM_BLOCKS), units={Block}, **kwargs)


def step(model: Any, *, backward: bool = True) -> None:
    loss = model(torch.ones(4, DIM)).sum()
    if backward:
        loss.backward()
    model.zero_grad()


def recorded_steps(model: Any, num_steps: int = 1, **options: Any) -> trace.Timeline:
    """Record steps, behind one that is not recorded."""
    step(model)
    with trace.record(model, **{"steps": num_steps, **options}) as timeline:
        for _ in range(num_steps):
            step(model)
    return timeline


def kinds_of(timeline: trace.Timeline, *kinds: str) -> list[tuple[str, str]]:
    recorded = timeline.recorded
    return [
        (span.kind, recorded.label(span.unit))
        for span in sorted(recorded.spans, key=lambda s: s.begin)
        if span.kind in kinds
    ]


def check_waits(lanes: Any) -> None:
    """Every collective was waited for, and seen to be complete after its start."""
    if lanes.recorded.device != "cpu":
        return  # the host waits for none
    for each in lanes.collectives:
        assert each.waits, each
        assert each.start.begin <= each.waits[0].begin
        assert each.end >= each.start.end


@distributed(world_size=(2, 3))
def test_a_step(world_size: int) -> None:
    """Units unshard, wait and reduce in the order in which they do."""
    model = make()
    step(model)
    step(model)
    with trace.record(model, steps=1) as timeline:
        assert timeline.is_recording
        step(model)
    blocks = [f"blocks.{i}" for i in range(NUM_BLOCKS)]
    assert [unit.label for unit in timeline.recorded.units] == ["(root)", *blocks]
    recorded = timeline.recorded
    assert (recorded.rank, recorded.world_size) == (dist.get_rank(), world_size)
    assert kinds_of(timeline, "pre_forward") == [
        ("pre_forward", name) for name in ["(root)", *blocks]
    ]
    assert kinds_of(timeline, "all_gather") == [
        ("all_gather", name) for name in ["(root)", *blocks, *blocks[::-1]]
    ]
    assert [name for _, name in kinds_of(timeline, "reduce_scatter")] == [
        *blocks[::-1],
        "(root)",
    ]
    lanes = lanes_of(recorded)
    gather = next(c for c in lanes.collectives if c.unit == 1)
    padded_numel = fsdp_c.FSDP.fsdp_modules(model)[1]._sharded.unit.segments[0][5]
    assert gather.nbytes == 4 * padded_numel
    check_waits(lanes)
    # In backward all but the first are ahead of their use.
    backward = [use for use in lanes.uses if use.phase == "backward"]
    assert [use.is_hit for use in backward] == [True] * NUM_BLOCKS
    assert [use.is_hit for use in lanes.uses if use.phase == "forward"] == [False] * 4
    assert fsdp_c.memory_stats(model)["num_iterations"] == 3


@distributed(world_size=2)
def test_spans_are_in_order_and_nested() -> None:
    model = make(forward_prefetch=True)
    timeline = recorded_steps(model, 2)
    recorded = timeline.recorded
    ends = [span.end for span in recorded.spans]
    assert ends == sorted(ends)
    assert recorded.begin <= min(span.begin for span in recorded.spans)
    assert recorded.end >= max(ends)
    assert recorded.num_lost == 0
    assert recorded.counts["num_iterations"] == 2
    assert recorded.counts["num_allocs"] == recorded.counts["num_frees"] > 0
    open_ends: list[int] = []
    for span in sorted(recorded.spans, key=lambda s: (s.begin, -s.end)):
        while open_ends and open_ends[-1] <= span.begin:
            open_ends.pop()
        assert not open_ends or span.end <= open_ends[-1], span
        if span.end > span.begin:
            open_ends.append(span.end)
    lanes = lanes_of(recorded)
    assert len(lanes.steps) == 2
    for each in lanes.steps:
        assert each.begin < each.forward_end <= each.backward_begin
        assert each.backward_begin < each.backward_end <= each.end
    # What is not in fsdp_c and not outside of the model is compute.
    numbers = timeline.trace.numbers()
    assert numbers.compute > 0
    assert numbers.host > 0
    parts = numbers.compute + numbers.exposed + numbers.host + numbers.rest
    if not numbers.on_device:  # which computes when the host has left the step
        assert parts <= numbers.step * 1.001
    assert {slice_.what for slice_ in lanes.compute} == {"forward", "backward"}
    assert {slice_.unit for slice_ in lanes.compute} == set(range(NUM_BLOCKS + 1))
    # With forward_prefetch all but the root are ahead.
    forward = [use.is_hit for use in lanes.uses if use.phase == "forward"]
    assert forward == [False, True, True, True] * 2


@distributed(world_size=2)
def test_the_arena_that_is_seen_is_the_arena() -> None:
    model = make()
    timeline = recorded_steps(model)
    held = [s.nbytes for s in timeline.recorded.spans if s.sequence < 0]
    stats = fsdp_c.memory_stats(model)
    known = [nbytes for nbytes in held if nbytes >= 0]
    assert 0 < max(known) <= stats["peak_nbytes"]
    assert timeline.recorded.spans[-1].kind == "finish_backward"
    assert timeline.recorded.spans[-1].nbytes == stats["held_nbytes"] == 0


@distributed(world_size=2)
def test_no_more_than_the_steps() -> None:
    model = make()
    step(model)
    with trace.record(model, steps=2) as timeline:
        for _ in range(4):
            step(model)
        assert not timeline.is_recording
    lanes = lanes_of(timeline.recorded)
    assert len(lanes.steps) == 2
    # The second step ends where the third began, not where recording was stopped.
    assert lanes.steps[1].end == timeline.recorded.end
    first = timeline.recorded
    timeline.stop()
    assert timeline.recorded is first


@distributed(world_size=2)
def test_a_small_ring_keeps_the_newest() -> None:
    model = make()
    timeline = recorded_steps(model, 3, steps=5, capacity=120)
    recorded = timeline.recorded
    assert len(recorded.spans) == 120
    assert recorded.num_lost > 0
    assert 1 <= len(lanes_of(recorded).steps) < 3
    assert "overwritten" in timeline.summary()


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
@distributed(world_size=2)
def test_strategies(strategy: str) -> None:
    model = make(sharding_strategy=ShardingStrategy[strategy])
    timeline = recorded_steps(model)
    lanes = lanes_of(timeline.recorded)
    operations = [each.operation for each in lanes.collectives]
    if strategy == "SHARD_GRAD_OP":
        assert operations.count("all_gather") == NUM_BLOCKS + 1
        assert not [use for use in lanes.uses if use.phase == "backward"]
    else:
        assert set(operations) == {"all_reduce"}
        assert lanes.uses == []
    check_waits(lanes)


@distributed(world_size=4)
def test_replicas(rank: int) -> None:
    with hybrid_groups(2, 2) as groups:
        model = make(
            sharding_strategy=ShardingStrategy.HYBRID_SHARD, process_group=groups
        )
        timeline = recorded_steps(model)
        lanes = lanes_of(timeline.recorded)
        operations = [each.operation for each in lanes.collectives]
        assert operations.count("reduce_scatter") == NUM_BLOCKS + 1
        assert operations.count("all_reduce") == NUM_BLOCKS + 1
        check_waits(lanes)
        first = rank - rank % 2
        unit = timeline.recorded.units[0]
        assert unit.shard_ranks == (first, first + 1)
        assert unit.replica_ranks == (rank % 2, rank % 2 + 2)
        del model, timeline


@distributed(world_size=2)
def test_started_between_forward_and_backward() -> None:
    """What comes before the first whole step is left out."""
    model = make()
    step(model)
    loss = model(torch.ones(4, DIM)).sum()
    with trace.record(model, steps=1) as timeline:
        loss.backward()
    assert timeline.recorded.spans
    assert lanes_of(timeline.recorded).compute == []
    assert "No step was recorded" in timeline.summary()
    loss = model(torch.ones(4, DIM)).sum()
    with trace.record(model, steps=1) as timeline:
        loss.backward()
        step(model)
    lanes = lanes_of(timeline.recorded)
    assert len(lanes.steps) == 1
    assert min(call.begin for call in lanes.calls) == lanes.steps[0].begin


@distributed(world_size=2)
def test_other_things_that_a_step_does() -> None:
    """Clipping, no_sync, checkpointing, a forward without backward, frozen units."""
    model = make(backward_prefetch=BackwardPrefetch.BACKWARD_POST)
    step(model)
    with trace.record(model, steps=3) as timeline:
        with model.no_sync():
            model(torch.ones(4, DIM)).sum().backward()
        model(torch.ones(4, DIM)).sum().backward()
        model.clip_grad_norm_(1.0)
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            model(torch.ones(4, DIM))
    lanes = lanes_of(timeline.recorded)
    assert len(lanes.steps) == 3
    assert lanes.steps[2].backward_begin == 0
    assert [c.kind for c in lanes.calls].count("clip_grad_norm") == 1
    reduced = [c for c in lanes.collectives if c.operation == "reduce_scatter"]
    assert len(reduced) == NUM_BLOCKS + 1
    assert min(c.start.begin for c in reduced) > lanes.steps[1].begin
    assert "clip_grad_norm_" in timeline.summary()


@pytest.mark.parametrize("api", ["FSDP", "fully_shard"])
@distributed(world_size=2)
def test_rounds_of_whole_parameters(
    api: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Seen with their bytes, outside of forward and backward, wherever it shows."""
    monkeypatch.setattr("fsdp_c._whole.optimizer.ROUND_NBYTES", 512)
    run = Run(api, muon, is_hidden)
    run.backward(0)
    run.optimizer.step()
    with trace.record(run.model, steps=2, folder=tmp_path) as timeline:
        for number in range(2):
            run.backward(number)
            run.optimizer.step()
    wholes = run.optimizer._dealt.wholes
    num_rounds = run.optimizer._dealt.num_rounds
    kinds = ["gather_wholes", "step_wholes", "scatter_wholes"]
    lanes = lanes_of(timeline.recorded)
    if api == "fully_shard":  # in a flat parameter some lie whole
        assert num_rounds > 1
        assert all(each.travels for each in wholes)
    assert [span.kind for span in lanes.wholes] == 2 * num_rounds * kinds
    numbers = timeline.trace.numbers()
    travelling = sum(4 * each.shape.numel() for each in wholes if each.travels)
    assert numbers.whole_nbytes["gather_wholes"] == 2 * travelling
    assert numbers.whole_nbytes["scatter_wholes"] == travelling
    assert numbers.num_rounds == num_rounds
    assert sum(numbers.wholes.values()) > 0
    if not numbers.on_device:  # which works when the host has left the step
        assert sum(numbers.wholes.values()) < numbers.rest
    assert numbers.arena_peak <= fsdp_c.memory_stats(run.model)["peak_nbytes"]
    summary = timeline.summary()
    assert "whole parameters, steps of owners" in summary
    assert f"Whole parameters: {num_rounds} rounds per step" in summary
    events = timeline.trace.chrome()["traceEvents"]
    gathers = [e for e in events if e["name"] == "gather_wholes" and e["tid"] == 2]
    assert sum(e["args"]["bytes"] for e in gathers) == 2 * 2 * travelling
    dist.barrier()
    assert "whole parameters, back home" in trace.load(tmp_path).summary()


@distributed(world_size=2)
def test_recomputation() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Any) -> Any:
            return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)

    torch.manual_seed(0)
    net = nn.Sequential(Checkpointed(), Checkpointed())
    model = fsdp(net, units={Block}, use_orig_params=True)
    timeline = recorded_steps(model)
    lanes = lanes_of(timeline.recorded)
    recomputed = {s.unit for s in lanes.compute if s.what == "recompute"}
    assert recomputed == {1, 2}
    (only,) = lanes.steps
    assert only.forward_end <= only.backward_begin


@distributed(world_size=2)
def test_results_do_not_change(rank: int) -> None:
    def train(*, is_recorded: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = make()
        optim = torch.optim.SGD(model.parameters(), lr=0.1)

        def run() -> None:
            for _ in range(3):
                model(torch.ones(4, DIM) * (rank + 1)).square().sum().backward()
                optim.step()
                optim.zero_grad()

        if is_recorded:
            with trace.record(model, steps=2):
                run()
        else:
            run()
        return [param.detach().clone() for param in model.parameters()]

    for plain, recorded in zip(
        train(is_recorded=False), train(is_recorded=True), strict=True
    ):
        assert torch.equal(plain, recorded)


@distributed(world_size=(2, 3))
def test_files_of_all_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    model = make()
    timeline = recorded_steps(model, 2, folder=tmp_path / "t")
    dist.barrier()
    found = trace.load(tmp_path / "t")
    assert [each.rank for each in found.recorded] == list(range(world_size))
    assert found.recorded[dist.get_rank()] == timeline.recorded
    assert found.recorded[0].clock == found.recorded[-1].clock
    content = json.loads((tmp_path / "t" / f"rank{rank}.json").read_text())
    assert {event["pid"] for event in content["traceEvents"]} == {rank}
    merged = found.chrome()
    assert "one clock" in merged["otherData"]["clocks"]
    # One clock, so nobody saw a collective complete before all had started it.
    lanes = found.lanes
    for mine in zip(*(each.collectives for each in lanes), strict=True):
        assert len({(c.operation, c.unit) for c in mine}) == 1
        last_start = max(c.start.begin for c in mine)
        if found.recorded[0].device == "cpu":
            assert all(c.end >= last_start for c in mine)
    numbers = found.numbers()
    assert numbers.num_ranks == world_size
    assert numbers.skew >= 0
    if found.recorded[0].device == "cpu":
        assert numbers.skew <= numbers.exposed
    assert f"{world_size} of {world_size} ranks" in found.summary()


@pytest.mark.bookkeeping
@distributed(world_size=2)
def test_errors(rank: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no FullyShardedDataParallel module in this"):
        trace.start(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="must be a module, got int"):
        trace.start(3)  # type: ignore[arg-type]
    model = make()
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"steps must be at least 1, got {bad}"):
            trace.start(model, steps=bad)
    with pytest.raises(TypeError, match="steps must be an int, got float"):
        trace.start(model, steps=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="steps must be an int, got bool"):
        trace.start(model, steps=True)
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        trace.start(model, capacity=0)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=f"rank {rank} cannot write traces there"):
        trace.start(model, folder=tmp_path / "file" / "t")
    timeline = trace.start(model)
    with pytest.raises(RuntimeError, match="being recorded already; stop that"):
        trace.start(model)
    with pytest.raises(RuntimeError, match="recording has not ended"):
        timeline.summary()
    step(model)
    timeline.stop()
    assert len(lanes_of(timeline.recorded).steps) == 1
    with pytest.raises(ValueError, match="pass the outermost sharded module"):
        trace.start(model.blocks[0])
    inside: list[str] = []

    def start_here(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="middle of a step") as error:
            trace.start(model)
        inside.append(str(error.value))

    def start_in_backward(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        output.register_hook(start_here)

    handles = [
        model.inp.register_forward_pre_hook(start_here),
        model.blocks[1].register_forward_hook(start_in_backward),
    ]
    step(model)
    assert len(inside) == 2
    for handle in handles:
        handle.remove()
    # A refused start leaves nothing behind.
    with trace.record(model, steps=1):
        step(model)


@distributed(world_size=2)
def test_a_block_that_raises_ends_the_recording(tmp_path: Path) -> None:
    model = make()

    def fails() -> None:
        with trace.record(model, folder=tmp_path / "t"):
            step(model)
            raise KeyError("x")

    with pytest.raises(KeyError):
        fails()
    assert list((tmp_path / "t").iterdir()) == []
    with trace.record(model) as timeline:
        with pytest.raises(RuntimeError):
            model(torch.ones(4, DIM + 1))
        fsdp_c.reset(model)
        step(model)
    lanes = lanes_of(timeline.recorded)
    assert len(lanes.steps) == 2
    assert timeline.summary()


@distributed(world_size=2)
def test_two_roots_in_one_model() -> None:
    """A plain module around wrapped ones: two engines, one timeline."""
    net = nn.Sequential(
        fsdp(Block(), use_orig_params=True), fsdp(Block(), use_orig_params=True)
    )
    step(net)
    with trace.record(net, steps=2) as timeline:
        step(net)
    recorded = timeline.recorded
    assert len(recorded.units) == 2
    lanes = lanes_of(recorded)
    assert {each.unit for each in lanes.collectives} == {0, 1}
    check_waits(lanes)


SCRIPT = """
    import sys
    import torch
    import torch.distributed as dist
    from fsdp_c import FSDP

    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    model = FSDP(torch.nn.Linear(8, 8))
    for _ in range(int(sys.argv[3])):
        model(torch.ones(2, 8)).sum().backward()
    dist.destroy_process_group()
"""


@pytest.mark.only_full
@pytest.mark.parametrize(
    ("num_steps", "num_recorded"),
    [(2, None), (4, 2), (5, 3), (7, 3)],
)
def test_a_script_that_cannot_be_changed(
    tmp_path: Path, num_steps: int, num_recorded: int | None
) -> None:
    """FSDP_C_TRACE: the third to fifth step, or as many as there are.

    In a push: test_fully_shard_tools.py.
    """
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    folder = tmp_path / "t"
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "FSDP_C_TRACE": str(folder),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    words = [str(tmp_path / "store"), str(num_steps)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), *words],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [process.communicate(timeout=300)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], texts
    if num_recorded is None:
        assert not folder.exists()
        return
    found = trace.load(folder)
    assert len(found.recorded) == 2
    assert [len(each.steps) for each in found.lanes] == [num_recorded] * 2
    assert "trace summary" in texts[0]
    assert texts[1] == ""
