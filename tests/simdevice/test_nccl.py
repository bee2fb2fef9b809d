"""csrc/nccl's own code over the fake libnccl and simulated streams."""

import subprocess
from pathlib import Path

import pytest

from simdevice.build import build_fake_nccl, build_nccl

TIMEOUT_S = 120
SANITIZERS = [
    pytest.param("plain", marks=pytest.mark.only_full),
    "thread",
    "address,undefined",
]


@pytest.fixture(scope="module", params=SANITIZERS)
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Return the library and the program, with a sanitizer or without."""
    sanitizer = request.param
    flags = [] if sanitizer == "plain" else [f"-fsanitize={sanitizer}", "-O1"]
    return build_nccl(tmp_path_factory.mktemp("nccl"), *flags)


def run(built: tuple[Path, Path], folder: Path, *arguments: str) -> str:
    """Run the program; return what it printed."""
    library, program = built
    command = [str(program), str(library), str(folder), *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives(built: tuple[Path, Path], tmp_path: Path, world_size: int) -> None:
    assert run(built, tmp_path, str(world_size), "20").endswith("ok\n")


def test_killed_rank(built: tuple[Path, Path], tmp_path: Path) -> None:
    output = run(built, tmp_path, "3", "3", "kill")
    assert "rank 0 of 3: the communicator failed" in output
    assert output.endswith("ok\n")


def test_library_for_the_device() -> None:
    path = build_fake_nccl()
    result = subprocess.run(
        ["nm", "-D", "--defined-only", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    names = {line.split()[-1] for line in result.stdout.splitlines()}
    assert {"ncclAllGather", "ncclCommAbort", "sim_nccl_num_launches"} <= names
    assert not {name for name in names if name.startswith("fsdp_")}
