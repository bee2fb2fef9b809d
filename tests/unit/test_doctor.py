"""python -m fsdp_c doctor: what it says, when it fails, what the table holds."""

import json
import re
from pathlib import Path

import pytest

from fsdp_c import _native
from fsdp_c.tools import doctor
from fsdp_c.tools.doctor import Machine, Row
from fsdp_c.tools.doctor._environment import BUILD_SWITCHES, SWITCHES
from helpers import programs

# Of a machine with a GPU, on which everything works.
PARTS = {
    "why_no_shm": "",
    "why_no_nccl": "",
    "nccl_path": "/lib/libnccl.so.2",
    "nccl_origin": "already loaded",
    "nccl_version": "2.27.3",
    "why_no_cuda_kernels": "",
}
ROOT = Path(__file__).resolve().parents[2]
HEALTHY = Machine(
    env={"TORCH_FR_BUFFER_SIZE": "0", "OMP_NUM_THREADS": "1"},
    num_cores=4,
    shared_nbytes=1 << 30,
    open_files=65536,
    parts=PARTS,
    accelerator="",
    cpu_features=frozenset({"avx2", "avx512_bf16"}),
    has_nccl=False,
)

# How a name is read: as a literal, or as a constant that holds it.
_LITERAL = re.compile(
    r'(?:getenv|environ(?:\.get|\.setdefault)?|switch|is_switched_off|is_switched_on|find_compiler)\s*[(\[]\s*"(\w+)"'
)
_CONSTANT = re.compile(r"environ(?:\.get)?[(\[]\s*([A-Z_]+)\b")
# How a value is compared with: in a call, or as "..." == of what was read.
_COMPARED = (
    (re.compile(r'has_value\("(\w+)", "(\w+)"\)'), None),
    (re.compile(r'is_switched_off\("(\w+)"\)'), "0"),
    (re.compile(r'is_switched_on\("(\w+)"\)'), "1"),
    (re.compile(r'environ\.get\("?(\w+)"?\) == "(\w+)"'), None),
    (re.compile(r'getenv\("(\w+)"\);[^;{]*== "(\w+)"'), None),
)
# In the meaning of a switch: "0: what it does; copy: what it does".
_EXPLAINED = re.compile(r"(?:^|; )(\w+): ")


def _values_read_by(paths: list[Path]) -> set[tuple[str, str]]:
    """Return the environment variables that sources compare, each with a value."""
    found = set()
    for text in (path.read_text() for path in paths):
        constants = dict(re.findall(r'^([A-Z_]+) = "(\w+)"', text, re.MULTILINE))
        for form, value in _COMPARED:
            for match in form.finditer(text):
                name = constants.get(match[1], match[1])
                found.add((name, match[2] if value is None else value))
    return found


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
    launcher = {"RANK"}
    assert _read_by(_sources()) - launcher == {switch.name for switch in SWITCHES}
    build = [ROOT / "setup.py", ROOT / "csrc" / "cuda" / "build.py"]
    assert _read_by(build) == {switch.name for switch in BUILD_SWITCHES}


def test_every_value_is_in_the_table() -> None:
    table = {
        (switch.name, value)
        for switch in SWITCHES
        for value in _EXPLAINED.findall(switch.meaning)
    }
    assert ("FSDP_C_TRANSPORT", "copy") in table
    assert _values_read_by(_sources()) == table


def test_the_search_for_values_finds_all_forms(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text(
        'LEVEL = "A"\nx = os.environ.get(LEVEL) == "1"\n'
        'has_value("B", "copy")\nis_switched_off("C")\nis_switched_on("D")\n'
        'choice = std::getenv("E");\nif (std::string(choice) == "0") {\n'
        'std::getenv("F");\n'
    )
    expected = {("A", "1"), ("B", "copy"), ("C", "0"), ("D", "1"), ("E", "0")}
    assert _values_read_by([source]) == expected


def test_the_search_for_switches_finds_all_forms(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text(
        'LEVEL = "A_LEVEL"\nos.environ.get(LEVEL)\nos.environ["B"]\n'
        'os.environ.setdefault("C", "1")\nstd::getenv("D")\nswitch("E")\n'
        'is_switched_off("F")\n'
    )
    assert _read_by([source]) == {"A_LEVEL", "B", "C", "D", "E", "F"}


def _found(machine: Machine) -> dict[str, Row]:
    return {row.name: row for row in doctor.rows(machine) if row.level != "ok"}


def test_healthy() -> None:
    report = doctor.rows(HEALTHY)
    assert not doctor.is_broken(report)
    assert not [row for row in report if row.section == "found"]
    names = {row.name for row in report}
    assert {"fsdp_c", "torch", "compiler", "accelerator", "gloo, one host"} <= names
    assert {switch.name for switch in SWITCHES} <= names


@pytest.mark.parametrize(
    ("change", "name", "level", "remedy"),
    [
        ({"env": {}}, "flight recorder", "note", "TORCH_FR_BUFFER_SIZE=0"),
        (
            {"env": {"OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": "4"}},
            *("threads", "warning", "OMP_NUM_THREADS=1"),
        ),
        ({"shared_nbytes": 1 << 20}, "/dev/shm", "warning", "--shm-size"),
        ({"shared_nbytes": -1}, "/dev/shm", "warning", "--shm-size"),
        ({"open_files": 256}, "open files", "warning", "ulimit -n"),
        ({"cpu_features": frozenset({"avx2"})}, "bf16", "note", "step in fp32"),
        (
            {"env": {"TORCH_DISTRIBUTED_DEBUG": "detail"}},
            "TORCH_DISTRIBUTED_DEBUG",
            "note",
            "unset",
        ),
        (
            {"parts": {**PARTS, "why_no_shm": "rank 0: memfd_create failed"}},
            "gloo, one host",
            "warning",
            "more memory",
        ),
        (
            {"env": {"FSDP_C_TRANSPORT": "c10d"}},
            "gloo, one host",
            "note",
            "unset FSDP_C_TRANSPORT",
        ),
        (
            {"has_nccl": True, "parts": {**PARTS, "why_no_nccl": "2.17 is too old"}},
            "nccl",
            "warning",
            "2.18",
        ),
        (
            {
                "has_nccl": True,
                "env": {"FSDP_C_NCCL_LIBRARY": "/x"},
                "parts": {**PARTS, "why_no_nccl": "/x is not there"},
            },
            "nccl",
            "warning",
            "FSDP_C_NCCL_LIBRARY",
        ),
        (
            {
                "env": {"FSDP_C_CUDA": "0"},
                "accelerator": "cuda",
                "parts": {**PARTS, "why_no_cuda_kernels": "FSDP_C_CUDA=0"},
            },
            "GPU kernels",
            "note",
            "unset FSDP_C_CUDA",
        ),
    ],
)
def test_problems_come_with_a_remedy(
    change: dict[str, object], name: str, level: str, remedy: str
) -> None:
    row = _found(Machine(**{**vars(HEALTHY), **change}))[name]
    assert row.level == level
    assert remedy in row.remedy


def _value(name: str, **change: object) -> str:
    machine = Machine(**{**vars(HEALTHY), **change})
    (row,) = [row for row in doctor.rows(machine) if row.name == name]
    return row.value


def test_what_carries_gloo_groups() -> None:
    assert _value("gloo, one host").startswith("shared memory")
    assert "shared memory" in _value("gloo, several hosts")
    flat = _value("gloo, several hosts", env={"FSDP_C_TRANSPORT": "flat"})
    assert flat.startswith("c10d's gloo: ")
    parts = {**PARTS, "why_no_shm": "rank 0: memfd_create failed (EPERM)"}
    value = _value("gloo, one host", parts=parts)
    assert value.startswith("c10d's gloo")
    assert value.endswith("no shared memory, memfd_create failed (EPERM)")
    value = _value("gloo, one host", env={"FSDP_C_TRANSPORT": "c10d"})
    assert "FSDP_C_TRANSPORT=c10d" in value


@pytest.mark.parametrize(
    ("has_nccl", "env", "start"),
    [
        (False, {}, "no such groups"),
        (True, {}, "NCCL directly"),
        (
            True,
            {"FSDP_C_TRANSPORT": "c10d"},
            "the group's own c10d backend: switched off",
        ),
        (False, {"FSDP_C_TRANSPORT": "c10d"}, "no such groups"),
        (False, {"FSDP_C_NCCL_LIBRARY": "/x"}, "no such groups"),
    ],
)
def test_what_carries_nccl_groups(
    has_nccl: bool, env: dict[str, str], start: str
) -> None:
    assert _value("nccl", has_nccl=has_nccl, env=env).startswith(start)


def test_which_libnccl() -> None:
    assert _value("libnccl") == "2.27.3, already loaded: /lib/libnccl.so.2"
    parts = {**PARTS, "why_no_nccl": "libnccl.so.2: no such file"}
    value = _value("libnccl", parts=parts, has_nccl=True)
    assert value == "none: libnccl.so.2: no such file"
    assert _value("libnccl", parts=parts) == "none (not needed)"
    assert _value("nccl", parts=parts).startswith("no such groups")


def test_what_packs_on_cuda() -> None:
    assert _value("GPU kernels", accelerator="cuda").startswith("used")
    parts = {**PARTS, "why_no_cuda_kernels": "no sm_80"}
    value = _value("GPU kernels", accelerator="cuda", parts=parts)
    assert value == "not used (no sm_80): ATen's kernels need more launches"
    assert "not used: no sm_80" in _value("GPU kernels", parts=parts)


def test_parts_are_tried() -> None:
    parts = _native.parts()
    assert set(parts) == set(PARTS)
    assert parts["why_no_shm"] == ""  # this machine runs the tests of shared memory
    assert bool(parts["why_no_nccl"]) != bool(parts["nccl_path"])
    # Each try gives back what it took.
    files = list(Path("/proc/self/fd").iterdir())
    maps = Path("/proc/self/maps").read_text().count("fsdp_c_shm")
    _native.parts()
    assert len(list(Path("/proc/self/fd").iterdir())) == len(files)
    assert Path("/proc/self/maps").read_text().count("fsdp_c_shm") == maps


def test_a_forced_libnccl_that_is_none(tmp_path: Path) -> None:
    env = {"FSDP_C_NCCL_LIBRARY": "/nowhere/libnccl.so"}
    process = programs.start(_print_why_no_nccl, tmp_path / "output", **env)
    process.join()
    assert env["FSDP_C_NCCL_LIBRARY"] in (tmp_path / "output").read_text()


def _print_why_no_nccl() -> None:
    print(_native.parts()["why_no_nccl"])


@pytest.mark.parametrize(
    ("built", "loaded", "remedy"),
    [("2.12.0", "2.13.0+cpu", "pip install"), ("2.10.1", "2.10.1", "torch >= 2.11")],
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


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(programs.run_program("fsdp_c", "doctor", "--json"))
    assert content["is_broken"] is False
    assert {"section", "name", "value", "level", "remedy"} == set(content["rows"][0])
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "build"
    assert "transports" in text
