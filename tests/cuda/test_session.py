"""The scripts of a session on a GPU, as far as they run without one."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SESSION = ROOT / "tests" / "cuda" / "session"
SCRIPTS = [SESSION / "gpu_session.sh", ROOT / "tests/cuda/compute_sanitizer.sh"]


def run(*command: object, code: int = 0) -> str:
    """Run a command at the root; return what it printed."""
    done = subprocess.run(
        [str(part) for part in command],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_parse(script: Path) -> None:
    run("bash", "-n", script)


def test_every_step_is_there_and_listed() -> None:
    text = (SESSION / "gpu_session.sh").read_text()
    found = re.search(r"^ALL_STEPS=\((.*)\)$", text, re.MULTILINE)
    assert found is not None
    steps = found[1].split()
    functions = re.findall(r"^(\w+)\(\) \{", text, re.MULTILINE)
    assert set(steps) <= set(functions)
    usage = run("bash", SESSION / "gpu_session.sh", "--help")
    for step in steps:
        assert re.search(rf"gpu_session\.sh .*\b{step}\b", usage), step
    run("bash", SESSION / "gpu_session.sh", "nonsense", code=2)


def test_every_file_of_the_suites_is_there() -> None:
    text = (SESSION / "gpu_session.sh").read_text()
    found = re.findall(r"\btests/[\w/{},.]+", text)
    assert len(found) > 10
    for name in found:
        before, brace, rest = name.partition("{")
        middles, _, after = rest.partition("}")
        for middle in middles.split(",") if brace else [""]:
            assert (ROOT / (before + middle + after).rstrip(".,")).exists(), name


@pytest.mark.only_full
def test_the_probe_as_a_rank_of_a_fake_world() -> None:
    probe = [sys.executable, SESSION / "gpu_probe.py", "--device", "cpu"]
    output = run(*probe, *("--steps", 1, "--warmup", 2, "--profile", "--limit", 100))
    result = json.loads(output)
    assert result["codes"] == [0]
    assert result["step_ms"] > 0
    assert len(result["losses"]) == 2


@pytest.mark.only_full
def test_the_probe_notices_a_rank_that_dies() -> None:
    probe = [sys.executable, SESSION / "gpu_probe.py", "--device", "cpu"]
    group = ["--group", "gloo", "--ranks", 2, "--group-timeout", 10]
    output = run(*probe, *group, "--die-at", 1, "--warmup", 3, "--limit", 100)
    result = json.loads(output.splitlines()[0])
    assert result["codes"] == [1, 1]
    assert "rank 1" in result["error"]
