"""python -m fsdp_c doctor: what it says, when it fails, what the table holds."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_c import doctor
from fsdp_c._environment import BUILD_SWITCHES, SWITCHES
from fsdp_c.doctor import Machine, Row

ROOT = Path(__file__).resolve().parents[2]
HEALTHY = Machine(
    env={"TORCH_FR_BUFFER_SIZE": "0", "OMP_NUM_THREADS": "1"},
    num_cores=4,
    shared_nbytes=1 << 30,
    open_files=65536,
)

# How a name is read: as a literal, or as a constant that holds it.
_LITERAL = re.compile(
    r'(?:getenv|environ(?:\.get|\.setdefault)?|switch|find_compiler)\s*[(\[]\s*"(\w+)"'
)
_CONSTANT = re.compile(r"environ(?:\.get)?[(\[]\s*([A-Z_]+)\b")


def _read_by(paths: list[Path]) -> set[str]:
    """Return the environment variables that sources read."""
    texts = [path.read_text() for path in paths]
    names = {name for text in texts for name in _LITERAL.findall(text)}
    for text in texts:
        for constant in _CONSTANT.findall(text):
            value = re.search(rf'^{constant} = "(\w+)"', text, re.MULTILINE)
            assert value is not None, f"what is {constant}?"
            names.add(value[1])
    return names


def _sources() -> list[Path]:
    c_files = [
        path
        for path in (ROOT / "csrc").rglob("*")
        if path.suffix in {".c", ".h", ".cpp", ".hpp", ".cu"}
    ]
    return [*c_files, *(ROOT / "fsdp_c").rglob("*.py")]


def test_every_switch_is_in_the_table() -> None:
    assert _read_by(_sources()) == {switch.name for switch in SWITCHES}
    assert _read_by([ROOT / "setup.py"]) == {switch.name for switch in BUILD_SWITCHES}


def test_the_search_for_switches_finds_all_forms(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text(
        'LEVEL = "A_LEVEL"\nos.environ.get(LEVEL)\nos.environ["B"]\n'
        'os.environ.setdefault("C", "1")\nstd::getenv("D")\nswitch("E")\n'
    )
    assert _read_by([source]) == {"A_LEVEL", "B", "C", "D", "E"}


def _found(machine: Machine) -> dict[str, Row]:
    return {row.name: row for row in doctor.rows(machine) if row.level != "ok"}


def test_healthy() -> None:
    report = doctor.rows(HEALTHY)
    assert not doctor.is_broken(report)
    assert not [row for row in report if row.section == "found"]
    names = {row.name for row in report}
    assert {"fsdp_c", "torch", "compiler", "accelerator", "gloo groups"} <= names
    assert {switch.name for switch in SWITCHES} <= names


@pytest.mark.parametrize(
    ("change", "name", "level", "remedy"),
    [
        ({"env": {}}, "flight recorder", "note", "TORCH_FR_BUFFER_SIZE=0"),
        (
            {"env": {"OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": "4"}},
            "threads",
            "warning",
            "OMP_NUM_THREADS=1",
        ),
        ({"shared_nbytes": 1 << 20}, "/dev/shm", "warning", "--shm-size"),
        ({"shared_nbytes": -1}, "/dev/shm", "warning", "--shm-size"),
        ({"open_files": 256}, "open files", "warning", "ulimit -n"),
        (
            {"env": {"TORCH_DISTRIBUTED_DEBUG": "detail"}},
            "TORCH_DISTRIBUTED_DEBUG",
            "note",
            "unset",
        ),
        (
            {"env": {"FSDP_C_POST_MORTEM_SECONDS": "soon"}},
            "the post-mortem after it",
            "warning",
            "seconds",
        ),
    ],
)
def test_problems_come_with_a_remedy(
    change: dict[str, object], name: str, level: str, remedy: str
) -> None:
    row = _found(Machine(**{**vars(HEALTHY), **change}))[name]
    assert row.level == level
    assert remedy in row.remedy


@pytest.mark.parametrize(
    ("built", "loaded", "remedy"),
    [
        ("2.12.0", "2.13.0+cpu", "pip install"),
        ("2.10.1", "2.10.1", "torch >= 2.11"),
    ],
)
def test_another_torch_is_broken(built: str, loaded: str, remedy: str) -> None:
    row = doctor._torch_row(built, loaded)
    assert row.level == "error"
    assert remedy in row.remedy
    assert doctor.is_broken([row])
    text = doctor.as_text([row])
    assert "1 broken" in text
    assert f"-> {row.remedy}" in text


def test_exit_status_follows_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Row("build", "torch", "?", "error", "install it")
    monkeypatch.setattr(doctor, "rows", lambda: [bad])
    assert doctor.main([]) == 1
    assert doctor.main(["--json"]) == 1
    monkeypatch.setattr(doctor, "rows", lambda: [Row("build", "torch", "2.13")])
    assert doctor.main([]) == 0
    assert doctor.main(["--nonsense"]) == 2
    capsys.readouterr()


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_command(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_c", "doctor", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if words:
        content = json.loads(done.stdout)
        assert content["is_broken"] is False
        assert {"section", "name", "value", "level", "remedy"} == set(
            content["rows"][0]
        )
    else:
        assert done.stdout.splitlines()[0] == "build"
        assert "transports" in done.stdout
