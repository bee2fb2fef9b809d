"""python -m fsdp_c bench: all implementations train the same, and what it says."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_c.tools.bench._implementations import IMPLEMENTATIONS
from fsdp_c.tools.bench._processes import run_ranks
from fsdp_c.tools.bench._report import differences, table
from fsdp_c.tools.bench._workload import Workload
from helpers.commands import exit_status
from helpers.distributed import TESTS_DIR, distributed

SMALL = Workload(
    device="cpu",
    num_ranks=2,
    width=16,
    num_layers=2,
    vocabulary=32,
    batch=2,
    length=8,
    dtype="float32",
    recomputes=False,
    seconds=0.01,
)


def rounds_of(*medians: float, losses: tuple[float, ...] = (1.0, 0.5)):
    return [
        {"step_ms": each, "host_ms": 1.0, "peak_nbytes": 2**20, "losses": losses}
        for each in medians
    ]


@pytest.mark.cpu_only("the measured units are told to use the CPU")
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@distributed(2)
def test_all_train_alike(dtype: str, recomputes: bool) -> None:
    from fsdp_c.tools.bench._worker import MIN_GROUPS, measure

    workload = replace(SMALL, dtype=dtype, recomputes=recomputes)
    results = {name: [measure(name, workload)] for name in IMPLEMENTATIONS}
    assert differences(workload, results) == []
    assert all(each[0]["num_steps"] >= MIN_GROUPS for each in results.values())
    losses = results["fsdp_c"][0]["losses"]
    assert losses[-1] < losses[0]


def test_the_table_has_the_smallest_median() -> None:
    results = {"fsdp_c": rounds_of(2.0, 4.0), "torch DDP": rounds_of(6.0, 5.0)}
    text = table(SMALL, results)
    assert "| fsdp_c | 2.00 | 1.00x | 4.00 | 16,000 | 1 |" in text
    assert "| torch DDP | 5.00 | 2.50x | 6.00 | 6,400 | 1 |" in text
    assert "host" not in text
    assert "host (ms)" in table(replace(SMALL, device="cuda"), results)


@pytest.mark.parametrize("other", [0.6, float("nan")])
def test_another_loss_is_found(other: float) -> None:
    results = {"fsdp_c": rounds_of(1.0), "torch DDP": rounds_of(1.0, losses=(1, other))}
    (line,) = differences(SMALL, results)
    assert "step 1" in line
    assert "torch DDP" in line


def test_the_first_losses_differ_less_than_later_ones_may() -> None:
    workload = replace(SMALL, dtype="bfloat16")

    def results(*losses: tuple[float, ...]):
        return {str(i): rounds_of(1.0, losses=each) for i, each in enumerate(losses)}

    assert not differences(workload, results((5.5, 5.0), (5.51, 5.1)))
    assert not differences(workload, results((), ()))
    wrong = differences(workload, results((5.5, 5.0), (5.6, 5.0), (5.5, float("nan"))))
    assert [line.partition(" differ")[0] for line in wrong] == [
        "the losses of step 0",
        "the losses of step 1",
    ]
    assert "2 nan" in wrong[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cuda"], "finds no GPU"),
        (["--width", "100"], "--width 100: expected a multiple of 64"),
        (["--ranks", "0"], "expected an integer >= 1, got '0'"),
        (["--seconds", "inf"], "expected seconds > 0, got 'inf'"),
    ],
)
def test_wrong_words(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert exit_status("bench", *words) == 2
    assert message in capsys.readouterr().err


def test_a_rank_ends_though_a_destructor_hangs(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import pathlib, sys, time\n"
        "from fsdp_c.tools.bench._processes import end_rank\n"
        "class Hangs:\n"
        "    def __del__(self): time.sleep(600)\n"
        "hangs = Hangs()\n"
        'pathlib.Path(sys.argv[1], "result.json").write_text("[1]")\n'
        'print("told", end="")\n'
        "end_rank()\n"
    )
    assert run_ranks([str(script)], 1, timeout_s=300.0) == [1]


@pytest.mark.only_full
def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    size = ["--width", "16", "--layers", "1", "--length", "8", "--vocabulary", "32"]
    words = ["--device", "cpu", "--seconds", "0.1", "--rounds", "1", *size]
    only = ["--only", "fsdp_c", "torch DDP", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "fsdp_c", "bench", *words, *only]
    done = subprocess.run(
        command, cwd=TESTS_DIR.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "| torch DDP |" in done.stdout
    found = {each.name for each in tmp_path.iterdir()}
    assert found == {"bench.json", "bench.md", "bench.png", "timeline"}
    assert (tmp_path / "timeline" / "trace.png").stat().st_size > 0
    data = json.loads((tmp_path / "bench.json").read_text())
    assert list(data["results"]) == ["fsdp_c", "torch DDP"]
