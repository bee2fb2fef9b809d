"""python -m fsdp_c plan: words, models, order of units, estimates; no rank is needed.

tests/distributed/test_plan_bytes.py holds the bytes against training.
"""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy
from torch.nn import functional

from fsdp_c import _native
from fsdp_c.tools.plan import (
    Link,
    ModelSource,
    PlanError,
    RankPlan,
    Settings,
    Sharding,
    find_model,
    plan_model,
)
from fsdp_c.tools.plan._recorder import trace_step
from fsdp_c.tools.plan._trace import Inputs
from helpers.commands import exit_status

WIDTH, TOKENS, NUM_BLOCKS = 64, 32, 3


class Block(nn.Module):
    """One matrix; keeps its input and the input of relu's backward, its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Net(nn.Module):
    """Blocks that run in the reverse order of their registration, if asked to."""

    def __init__(self, *, reverse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.register_buffer("mask", torch.zeros(100, dtype=torch.float32))
        self.reverse = reverse

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in reversed(self.blocks) if self.reverse else self.blocks:
            x = block(x)
        return self.head(x)


def make() -> nn.Module:
    return Net()


def make_with_inputs() -> tuple[nn.Module, Tensor]:
    return Net(), torch.zeros(1, TOKENS, dtype=torch.long)


def make_reversed() -> tuple[nn.Module, dict[str, Tensor]]:
    """The same, with keywords."""
    return Net(reverse=True), {"tokens": torch.zeros(1, TOKENS, dtype=torch.long)}


def make_nothing() -> int:
    return 3


def make_raising() -> nn.Module:
    raise RuntimeError("no luck")


HERE = __name__
SOURCE = f"{HERE}:make_with_inputs"


@pytest.fixture(autouse=True)
def _no_group() -> Any:
    assert not dist.is_initialized()
    yield
    assert not dist.is_initialized()


def run(capsys: Any, *words: str) -> tuple[int, str, str]:
    status = exit_status("plan", *words)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def plan(source: str = SOURCE, world_size: int = 4, **options: Any) -> RankPlan:
    return plan_model(find_model(source), [world_size], **options).ranks[0]


# Words ------------------------------------------------------------------------


def test_text(capsys: Any) -> None:
    status, out, err = run(capsys, "--model", SOURCE, "--world-size", "8,64")
    assert (status, err) == (0, "")
    assert "units: 4, the class that is repeated in a list and holds the most" in out
    assert "ModuleWrapPolicy({Block" in out
    assert "blocks.0 ... blocks.2" in out
    assert "Activations are those of a forward and a backward on meta" in out
    numel = WIDTH * WIDTH * (1 + NUM_BLOCKS) + 10 * WIDTH
    assert f"{numel:,} parameters" in out


def test_fully_shard(capsys: Any) -> None:
    """The calls are in the output; what fully_shard() lacks is refused."""
    words = ("--model", SOURCE, "--world-size", "3", "--fully-shard")
    status, out, err = run(capsys, *words)
    assert (status, err) == (0, "")
    assert "fully_shard() of each Block and Embedding, the innermost first" in out
    for more in (
        ("--strategy", "NO_SHARD"),
        ("--keep-low-precision-grads",),
        ("--backward-prefetch", "none"),
    ):
        status, _, err = run(capsys, *words, *more)
        assert status == 2
        assert "fully_shard() has nothing like it" in err


def test_json_of_a_sweep_to_a_hundred_thousand_ranks(capsys: Any) -> None:
    status, out, err = run(capsys, "--model", SOURCE, "--world-size", "sweep", "--json")
    assert (status, err) == (0, "")
    ranks = json.loads(out)["ranks"]
    assert [each["world_size"] for each in ranks][0::11] == [8, 100_000]
    shards = [each["shard_nbytes"] for each in ranks]
    assert shards == sorted(shards, reverse=True)
    assert shards[-1] == 4 * (1 + NUM_BLOCKS)  # an element of each unit


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world-size", "0"], "'0' is not a number of ranks: write one from 1 to"),
        (["--world-size", "8,x"], "'x' is not a number of ranks"),
        (["--world-size", "1000001"], "from 1 to 1,000,000"),
        (["--mesh", "2"], "'2' is not a mesh: write REPLICASxSHARDS"),
        (["--mesh", "2x4"], "is for HYBRID_SHARD and --strategy is FULL_SHARD"),
        (["--strategy", "HYBRID_SHARD"], "needs --mesh REPLICASxSHARDS, such as"),
        (
            ["--strategy", "HYBRID_SHARD", "--mesh", "2x3"],
            "--mesh 2x3 does not divide 8 ranks",
        ),
        (
            ["--strategy", "HYBRID_SHARD", "--mesh", "4x4"],
            "--mesh 4x4 has 16 ranks and --world-size is 8",
        ),
        (["--link-gbps", "-1"], "expected a number > 0, got '-1'"),
        (["--tflops", "nan"], "expected a number > 0, got 'nan'"),
        (["--latency-us", "-3"], "expected microseconds >= 0, got '-3'"),
        (["--batch", "0"], "expected an integer >= 1, got '0'"),
        (["--wrap", "Bloc"], "no module of the model is a 'Bloc'; its classes are"),
        (["--wrap", "size:few"], "--wrap size:few: write the least number"),
        (["--freeze", "nothing*"], "matches no parameter: the first is"),
        (["--model", "nowhere.json"], "No such file or directory: nowhere.json"),
        (["--model", "no_such_package:f"], "'no_such_package' cannot be imported"),
        (["--model", f"{HERE}:f"], f"{HERE} has no function 'f'"),
        (["--model", f"{HERE}:make_nothing"], "the factory returned a int"),
        (["--model", f"{HERE}:make_raising"], "(RuntimeError: no luck)"),
        (["--strategy", "SOME"], "invalid choice: 'SOME'"),
        (["--optimizer", "lion"], "invalid choice: 'lion'"),
    ],
)
def test_wrong_words(capsys: Any, words: list[str], message: str) -> None:
    status, out, err = run(capsys, "--model", SOURCE, "--world-size", "8", *words)
    assert status == 2
    assert message in err
    assert out == ""


def test_model_files(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    words = ("--world-size", "2", "--model")
    file.write_text("{")
    assert "is not JSON" in run(capsys, *words, str(file))[2]
    pytest.importorskip("transformers")
    file.write_text('{"hidden_size": 3}')
    assert 'has no "model_type"' in run(capsys, *words, str(tmp_path))[2]


def test_without_transformers(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, _, err = run(capsys, "--model", str(tmp_path), "--world-size", "2")
    assert status == 2
    assert "pip install transformers, or pass a factory" in err


def test_a_name_that_transformers_does_not_find(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")

    def find(name: str) -> Any:
        raise OSError(f"no {name} here\nand more")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", find)
    status, _, err = run(capsys, "--model", "some/model", "--world-size", "2")
    assert status == 2
    assert "--model some/model: no such folder or file, and transformers finds" in err
    assert "(no some/model here)" in err


def test_help_names_the_command(capsys: Any) -> None:
    assert exit_status("--help") == 0
    assert "plan --model MODEL --world-size N" in capsys.readouterr().out


# Hugging Face -----------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2}
T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("config", "block", "num_units"),
    [(LLAMA, "LlamaDecoderLayer", 3), (GPT2, "GPT2Block", 3), (T5, "T5Block", 5)],
    ids=["llama", "gpt2", "t5"],
)
def test_hugging_face(
    tmp_path: Path, config: dict[str, Any], block: str, num_units: int
) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    source = find_model(str(file), batch=2, sequence=16, dtype=torch.float32)
    result = plan_model(source, [8], sharding=Sharding(param_dtype=torch.bfloat16))
    assert result.wrap == block
    assert result.num_tokens == 32
    assert len(result.ranks[0].units) == num_units
    assert result.ranks[0].activation_nbytes  # the forward ran on meta
    # More than two operations for every element of a block's matrices.
    in_blocks = sum(u.numel for u in result.ranks[0].units if u.kind == block)
    assert result.flops > 2 * 16 * in_blocks


# What the numbers mean ---------------------------------------------------------


def test_shards_and_optimizer() -> None:
    """Of one block: 4,096 elements over 4 ranks in fp32."""
    flat = plan(settings=Settings(on_cpu=True))
    block = flat.units[1]
    assert (block.name, block.kind, block.numel) == ("blocks.0", "Block", 4096)
    assert block.shard_nbytes == 4096
    assert block.unsharded_nbytes == block.grad_nbytes == 4 * 4096
    total = sum(unit.shard_nbytes for unit in flat.units)
    assert flat.shard_nbytes == flat.grad_shard_nbytes == total
    assert flat.optimizer_nbytes == 2 * total + 4 * len(flat.units)
    assert flat.buffer_nbytes == 400
    for name, states in (("sgd", 0), ("sgd-momentum", 1)):
        settings = Settings(on_cpu=True, optimizer=name)
        assert plan(settings=settings).optimizer_nbytes == states * total


def test_operations() -> None:
    """Two for each element of a matrix and token; backward has two such products."""
    result = plan_model(find_model(SOURCE), [4])
    matrices = NUM_BLOCKS * WIDTH * WIDTH + 10 * WIDTH
    assert result.flops == 2 * TOKENS * matrices
    assert result.ranks[0].compute_seconds == pytest.approx(3 * result.flops / 4e14)


def test_operations_of_recomputation() -> None:
    once = plan_model(find_model(SOURCE), [4])
    again = plan_model(find_model(SOURCE), [4], settings=Settings(recomputes=True))
    in_blocks = 2 * TOKENS * NUM_BLOCKS * WIDTH * WIDTH
    more = again.ranks[0].compute_seconds - once.ranks[0].compute_seconds
    assert more == pytest.approx(in_blocks / 4e14)


def test_without_inputs_the_module_tree_is_the_order() -> None:
    with_inputs = plan_model(find_model(SOURCE), [4])
    without = plan_model(find_model(f"{HERE}:make", batch=1, sequence=TOKENS), [4])
    assert "Activations are not known: no inputs are known" in without.notes[0]
    assert without.ranks[0].activation_nbytes is None
    assert without.flops == with_inputs.flops
    assert without.ranks[0].arena_nbytes == with_inputs.ranks[0].arena_nbytes
    assert without.ranks[0].all_gather == with_inputs.ranks[0].all_gather


def test_units_run_in_the_order_of_forward() -> None:
    model, inputs = find_model(f"{HERE}:make_reversed").build()
    trace = trace_step(model, inputs, TOKENS)
    entered = [
        entry.name
        for entry in trace.forward
        if entry.kind == "enter" and entry.name.count(".") == 1
    ]
    assert entered == ["blocks.2", "blocks.1", "blocks.0"]
    assert not any(module._forward_hooks for module in model.modules())


class _Attention(nn.Module):
    """Uses torch's attention, a parameter of a child, and asks its data."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if (x == 0).all():
            x = x @ self.proj.weight
        q = x.view(1, 2, 16, 4)
        return functional.scaled_dot_product_attention(q, q, q)


def test_attention_is_a_fused_kernel() -> None:
    with torch.device("meta"):
        model = _Attention()
        inputs = Inputs((torch.zeros(16, 8),))
    before = functional.scaled_dot_product_attention
    trace = trace_step(model, inputs, 16)
    assert trace.no_forward == trace.no_backward == ""
    assert functional.scaled_dot_product_attention is before
    # The product, and the two of attention: no 16 x 16 weights are kept.
    assert trace.flops == 2 * 16 * 8 * 8 + 2 * 2 * (2 * 16 * 16 * 4)
    kept = sum(sum(entry.saved) for entry in trace.forward)
    assert kept == (16 * 8 * 2 + 2 * 16) * 4  # q, the output, the sums; x is an input
    backward = sum(entry.flops for entry in trace.backward)
    assert backward == 2 * 16 * 8 * 8 + 2 * 2 * 2 * (2 * 16 * 16 * 4)
    uses = [entry.name for entry in trace.backward if entry.kind == "use"]
    assert uses == ["proj.weight"]


def test_a_forward_that_fails_on_meta() -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise NotImplementedError("not here")

    with torch.device("meta"):
        model = Broken(4, 4)
        inputs = Inputs((torch.zeros(2, 4),))
    trace = trace_step(model, inputs, 5)
    assert "NotImplementedError: not here" in trace.no_forward
    assert [entry.kind for entry in trace.forward] == ["enter", "work", "leave"]
    assert trace.flops == 2 * 16 * 5


@pytest.mark.parametrize("numel", [5, (1 << 18) - 3], ids=["small", "large"])
def test_accelerators_align_large_units(numel: int) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(numel))
            self.b = nn.Parameter(torch.zeros(5))

    source = ModelSource("odd", lambda _batch, _sequence: (Odd(), None))
    on_cpu = plan_model(source, [2], settings=Settings(on_cpu=True)).ranks[0]
    on_gpu = plan_model(source, [2]).ranks[0]
    shapes_of_fsdp1 = (numel + 5) // 2 * 4
    aligned = ((numel + 3) // 4 * 4 + 8) // 2 * 4  # both start at multiples of 16 bytes
    assert on_cpu.shard_nbytes == shapes_of_fsdp1
    assert on_gpu.shard_nbytes == (shapes_of_fsdp1 if numel == 5 else aligned)


def test_time_follows_the_link() -> None:
    slow = Settings(link=Link(gbps=0.001, latency_us=0), tflops=1e-3)
    fast = Settings(link=Link(gbps=1e6, latency_us=0), tflops=1e-3)
    assert plan(settings=slow).exposed_seconds > plan(settings=fast).exposed_seconds
    result = plan(settings=slow)
    total = result.compute_seconds + result.exposed_seconds
    assert result.step_seconds == pytest.approx(total)
    seconds = result.all_gather.wire_nbytes / (0.001e9 / 8)
    assert result.all_gather.seconds == pytest.approx(seconds)


def test_time_by_hosts(capsys: Any) -> None:
    """2 hosts of 2 ranks: half of each launch's payload on each link."""
    words = ("--model", SOURCE, "--world-size", "4", "--json", "--latency-us", "0")
    links = ("--link-gbps", "8", "--ranks-per-host", "2", "--host-link-gbps", "1")
    _, out, _ = run(capsys, *words, *links)
    gather = json.loads(out)["ranks"][0]["all_gather"]
    half = gather["payload_nbytes"] / 2
    assert gather["seconds"] == pytest.approx(half / 1e9 + half / 0.125e9)


def test_frozen_parameters_have_no_gradients(capsys: Any) -> None:
    words = ("--model", SOURCE, "--world-size", "4", "--json")
    _, out, _ = run(capsys, *words, "--freeze", "blocks.*", "--device", "cpu")
    ranks = json.loads(out)["ranks"][0]
    assert ranks["grad_shard_nbytes"] == (WIDTH * WIDTH + 10 * WIDTH) * 4 // 4
    assert ranks["reduce_scatter"]["launches"] == 1


def test_offload_moves_shards_to_the_host() -> None:
    result = plan(sharding=Sharding(cpu_offload=True))
    here = plan()
    total = result.shard_nbytes + result.optimizer_nbytes
    assert result.host_nbytes >= total
    assert here.host_nbytes == 0
    assert here.peak_nbytes - result.peak_nbytes >= total - result.arena_nbytes


def test_accumulation_keeps_whole_gradients() -> None:
    settings = Settings(num_batches=4, accumulation=_native.SYNC_NONE)
    assert plan(settings=settings).arena_nbytes > plan().arena_nbytes
    assert plan(settings=settings).reduce_scatter == plan().reduce_scatter


def test_mesh_of_a_sweep() -> None:
    result = plan_model(
        find_model(SOURCE),
        [8, 16],
        sharding=Sharding(strategy=ShardingStrategy.HYBRID_SHARD),
        mesh=(2, 4),
    )
    assert [(each.replicas, each.shard_ranks) for each in result.ranks] == [
        (2, 4),
        (4, 4),
    ]
    assert result.ranks[0].all_reduce.launches == 1 + NUM_BLOCKS


# Suggestions ------------------------------------------------------------------


def test_suggestions_give_their_numbers() -> None:
    result = plan_model(find_model(SOURCE), [4])
    by_wrap = {each.wrap: each for each in result.suggestions}
    assert set(by_wrap) == {"Block", "Block,Embedding", "none"}
    peaks = [each.peak_nbytes for each in result.suggestions]
    assert peaks[0] <= 1.01 * min(peaks)
    assert by_wrap["none"].num_units == 1


def test_a_device_with_room_for_all_gets_the_fastest() -> None:
    source = find_model(SOURCE)
    slow = Settings(link=Link(gbps=1.0, latency_us=1000), tflops=1e-6)
    result = plan_model(source, [4], settings=slow, memory_nbytes=2**40)
    times = [each.step_seconds for each in result.suggestions]
    assert times[0] <= 1.01 * min(times)
    none = plan_model(source, [4], settings=slow, memory_nbytes=1)
    peaks = [each.peak_nbytes for each in none.suggestions]
    assert peaks[0] <= 1.01 * min(peaks)


def test_offloaded_activations() -> None:
    """All but the last block's, and less on the device; none on a CPU."""
    row = TOKENS * WIDTH * 4

    def plan(**settings: Any) -> RankPlan:
        options = Settings(offload_min_bytes=row, copy_gbps=1e6, **settings)
        return plan_model(
            find_model(SOURCE), [2], settings=options, wrap="Block"
        ).ranks[0]

    without = plan()
    for keep_last, num_rows in ((0, 0), (1, 3), (2, 2), (3, 0)):
        some = plan(offload_keep_last=keep_last)
        assert some.offloaded_nbytes == num_rows * row
        assert some.host_nbytes == some.pinned_nbytes == (1 << 24) * (num_rows > 0)
        assert some.peak_nbytes <= without.peak_nbytes
    assert plan(offload_keep_last=1, on_cpu=True).offloaded_nbytes == 0


def test_one_unit_and_by_size() -> None:
    assert len(plan(wrap="none").units) == 1
    assert len(plan(wrap="size:4096").units) == 1 + NUM_BLOCKS + 1


# Pictures ---------------------------------------------------------------------


def test_picture(capsys: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    words = ("--model", SOURCE, "--world-size", "2,4", "--picture", str(path))
    status, _, err = run(capsys, *words)
    assert (status, err) == (0, "")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_picture_without_matplotlib(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    path = tmp_path / "plan.png"
    words = ("--model", SOURCE, "--world-size", "2,4", "--picture", str(path))
    status, _, err = run(capsys, *words)
    assert status == 0
    assert "matplotlib is not installed" in err
    bars = path.with_suffix(".txt").read_text().splitlines()
    assert len(bars) == 3
    assert "P parameters" in bars[0]
    assert bars[1].startswith("2 |P")


# The native calls -------------------------------------------------------------

LINK = (1e9, 0.0)


def _unit(name: str = "a", num_params: int = 1) -> tuple[Any, ...]:
    layout = _native.Layout(
        [(8, torch.float32, True)] * num_params,
        2,
        align_params=False,
        align_shards=False,
    )
    dtypes = [(torch.float32,) * 4]
    prefetch = _native.PREFETCH_PRE
    return (name, layout, dtypes, 1, True, True, True, False, prefetch, False, False)


def _run(
    units: Any, forward: Any, backward: Any = (), **options: Any
) -> dict[str, Any]:
    return _native.plan_step(units, forward, backward, LINK, LINK, **options)


def test_native_plan_of_one_unit() -> None:
    events = [
        (_native.PLAN_ENTER, 0, 0, 0, 0, 0.0),
        (_native.PLAN_WORK, 0, 0, 0, 0, 1.0),
        (_native.PLAN_LEAVE, 0, 0, 0, 0, 0.0, 0, 0, True),
    ]
    backward = [
        (_native.PLAN_LEAVE, 0, 0, 0, 0, 0.0),
        (_native.PLAN_WORK, 0, 0, 0, 0, 2.0),
        (_native.PLAN_USE, 0, 0, 0, 0, 0.0),
    ]
    report = _run([_unit()], events, backward)
    assert report["shard_nbytes"] == report["grad_shard_nbytes"] == 16
    assert report["all_gather"]["payload_nbytes"] == 32
    assert report["compute_seconds"] == 3
    assert len(report["unit_exposed_seconds"]) == 1


@pytest.mark.parametrize(
    ("units", "events", "error", "message"),
    [
        ([], [], ValueError, "at least 1 unit"),
        ([3], [], TypeError, "units must be tuples, got 3"),
        ([_unit()[:4]], [], TypeError, "a unit of plan_step"),
        ([(*_unit()[:3], 0, *_unit()[4:])], [], ValueError, "'a': 0 replicas"),
        ([(*_unit()[:2], [], *_unit()[3:])], [], ValueError, "a layout of 1 segments"),
        (
            [(*_unit()[:2], [3], *_unit()[3:])],
            [],
            TypeError,
            "(param, reduce, held, grad)",
        ),
        (
            [(*_unit()[:2], [(1, 2, 3, 4)], *_unit()[3:])],
            [],
            TypeError,
            "must be torch.dtypes, got 1",
        ),
        ([_unit()], [3], TypeError, "events must be tuples, got 3"),
        ([_unit()], [(0, 0)], TypeError, "an event of plan_step"),
        ([_unit()], [(9, 0, 0, 0, 0, 0.0)], ValueError, "no such kind of event: 9"),
        ([_unit()], [(0, 5, 0, 0, 0, 0.0)], ValueError, "names unit 5 of 1"),
        ([_unit()], [(0, 0, 0, 0, 0, 0.0)], ValueError, "'a' is entered and never"),
    ],
)
def test_native_errors(
    units: Any, events: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        _run(units, events)
    assert message in str(caught.value)


def test_native_layout_by_rows() -> None:
    """Each parameter a segment of the rows that torch.chunk gives a rank."""
    params = [(35, torch.float32, True), (3, torch.bfloat16, False)]
    options: dict[str, Any] = {"align_params": False, "align_shards": False}
    layout = _native.Layout(params, 4, row_numels=[5, 1], **options)
    assert layout.slots == [(0, 0, 35), (1, 0, 3)]
    assert [layout.parts(index) for index in (0, 1)] == [
        [(0, 10), (10, 20), (20, 30), (30, 35)],
        [(0, 1), (1, 2), (2, 3), (0, 0)],
    ]
    assert [segment[4:] for segment in layout.segments] == [(10, 40), (1, 4)]
    with pytest.raises(ValueError, match="as many row_numels as params, got 1"):
        _native.Layout(params, 4, row_numels=[5], **options)
    with pytest.raises(ValueError, match="row"):
        _native.Layout(params, 4, row_numels=[4, 1], **options)


def test_native_options() -> None:
    with pytest.raises(ValueError, match="need one of the SYNC constants"):
        _run([_unit()], [], accumulation=7)
    with pytest.raises(TypeError):
        _native.plan_step([_unit()], [], [], 3, LINK)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="link of the replica group"):
        _native.plan_step([_unit()], [], [], LINK, (0.0, 0.0))


def test_too_large_a_model() -> None:
    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.empty(2**61, dtype=torch.bfloat16))

    source = ModelSource("huge", lambda _batch, _sequence: (Huge(), None))
    with pytest.raises(PlanError, match="does not fit"):
        plan_model(source, [2], sharding=Sharding(param_dtype=torch.float64))
