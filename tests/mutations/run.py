"""Shows which test of the short suite notices each planted fault.

    python tests/mutations/run.py                  all faults; a table
    python tests/mutations/run.py prefetch nccl    with such a word in name or folder
    python tests/mutations/run.py --apply          only check that all faults apply
    python tests/mutations/run.py --fake nccl      what pytest on the fake CUDA notices

All faults are built into one copy of the tree, in build/mutations, each behind a test
of the environment variable FSDP_C_MUTANT. So there is one build, and each fault costs
the tests that it takes to notice it: for the core first the C tests, then pytest with
its default, pairs of parameters; so for csrc/shm; for csrc/nccl only the C tests. A
fault that only a device shows, or with tests of tests/fakecuda, and each with --fake,
is run on the fake CUDA, which needs a CUDA build of torch. Needs what `make build` and
`make c-test` need. Ends with 1 if nothing notices a fault.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import faults
import faults_of_bridge
import faults_of_transports
import faults_on_a_device
from fault import CORE, NCCL, SHM, Fault

FAULTS = (
    *faults.FAULTS,
    *faults_of_bridge.FAULTS,
    *faults_of_transports.FAULTS,
    *faults_on_a_device.FAULTS,
)
ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "mutations"
C_TESTS = {
    CORE: ("test_engine", "test_arena", "test_order", "test_offload"),
    NCCL: ("test_nccl",),
    SHM: ("test_shm",),
}
# Run after the fault's own tests, until one fails.
GENERAL = (
    "test_strategies.py",
    "test_memory.py",
    "test_traps_gradients.py",
    "test_traps_backward.py",
    "test_mixed_precision.py",
    "test_summon.py",
    "test_random_models.py",
)
# On the fake CUDA, one set of parameters of each test.
GENERAL_ON_FAKE = (
    "fakecuda/test_waits.py",
    "fakecuda/test_step_streams.py",
    "fakecuda/test_captured_step.py",
    "fakecuda/test_bridge.py",
    "fakecuda/test_memory.py",
    "fakecuda/test_ending.py",
    "fakecuda/test_gloo.py",
    "fakecuda/test_offload.py",
    "test_strategies.py",
    "test_gradient_accumulation.py",
    "test_mixed_precision.py",
    "test_summon.py",
)
TEST_TIMEOUT_S = 1200
C_TEST_TIMEOUT_S = 120
BUILD_TIMEOUT_S = 3600
HEADER = """\
#ifndef FSDP_C_MUTANT_H
#define FSDP_C_MUTANT_H
#include <stdlib.h>
#include <string.h>
static inline int fsdp_is_mutant(const char *name) {
  const char *chosen = getenv("FSDP_C_MUTANT");
  return chosen != NULL && strcmp(chosen, name) == 0;
}
#endif
"""


def body_of(text: str, function: str) -> tuple[int, int] | None:
    """Return where the body of a function begins and ends."""
    result = "" if "~" in function else r"[A-Za-z][\w:<>,*&\s]*[\s*&]"
    definition = re.compile(
        rf"^[ \t]*{result}{re.escape(function)}\([^;{{}}]*\)"
        r"\s*(?:const|noexcept|override|\s)*\{",
        re.MULTILINE,
    )
    found = definition.search(text)
    if found is None:
        return None
    depth, end = 1, found.end()
    while depth > 0:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return found.end(), end


def plant(fault: Fault, texts: dict[Path, str]) -> str | None:
    """Change the text of the file that holds the fault's function.

    Of several functions of that name it is the one that holds the code. Return what is
    wrong if there is not one such place.
    """
    words = r"\s*".join(map(re.escape, fault.old.split()))
    old = re.compile(words.replace("ANY", r"\w+"))
    places = {
        path: body
        for path, text in texts.items()
        if str(path.relative_to(ROOT)).startswith(fault.folder)
        and (body := body_of(text, fault.function)) is not None
        and old.search(text, *body) is not None
    }
    if len(places) != 1:
        return (
            f"'{fault.name}': {len(places)} functions {fault.function} hold\n"
            f"  {fault.old}"
        )
    ((path, (begin, end)),) = places.items()
    new = fault.new.replace("MUTANT", f'fsdp_is_mutant("{fault.name}")')
    body = old.sub(
        lambda found: new.replace("OLD", found[0]), texts[path][begin:end], count=1
    )
    texts[path] = texts[path][:begin] + body + texts[path][end:]
    return None


def plant_all() -> dict[Path, str]:
    """Return the sources that have faults, with all of them."""
    paths = [p for each in ("*.c", "*.cpp") for p in (ROOT / "csrc").rglob(each)]
    before = {path: path.read_text() for path in paths}
    texts = dict(before)
    wrong = [each for fault in FAULTS if (each := plant(fault, texts)) is not None]
    if wrong:
        sys.exit("\n".join(wrong))
    include = f'#include "{TREE}/mutant.h"\n'
    return {p: include + text for p, text in texts.items() if text != before[p]}


def write(path: Path, content: bytes) -> None:
    """Write a file, unless it is like that already: then nothing is built anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)


def copy_tree(changed: dict[Path, str]) -> None:
    """Copy what git knows, with changes."""
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True)
    for path in (ROOT / name for name in names.splitlines()):
        if not path.is_file():
            continue
        content = changed[path].encode() if path in changed else path.read_bytes()
        write(TREE / path.relative_to(ROOT), content)
    write(TREE / "mutant.h", HEADER.encode())


def run(
    command: list[str], folder: Path, limit_s: int = TEST_TIMEOUT_S, **env: str
) -> subprocess.CompletedProcess:
    """Run a command in the copy."""
    return subprocess.run(
        command,
        cwd=TREE / folder,
        env={**os.environ, "PYTHONPATH": str(TREE), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s,
    )


def c_tests_of(*folders: str) -> list[str]:
    """Return the names of the C tests for faults in these folders."""
    wanted = tuple(start for each in folders for start in C_TESTS.get(each, ()))
    files = (ROOT / "tests" / "c").glob("test_*.c")
    return sorted(path.stem for path in files if path.stem.startswith(wanted))


def build(folders: set[str], *, with_c_tests: bool) -> None:
    """Build what faults in these folders need.

    Without the kernels for GPUs: nvcc takes minutes, and the fake has its own.
    """
    if folders - {NCCL} or not with_c_tests:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        made = run(command, Path(), BUILD_TIMEOUT_S, CFLAGS="-w", FSDP_C_CUDA="0")
        if made.returncode != 0:
            sys.exit(made.stdout[-3000:] + made.stderr[-3000:])
    names = c_tests_of(*folders)
    if not names or not with_c_tests:
        return
    jobs = f"-j{os.cpu_count()}"
    make = ["make", jobs, "asan", "CC=gcc -w", f"TESTS={' '.join(names)}"]
    made = run(make, Path("tests/c"))
    if made.returncode != 0:
        sys.exit(made.stdout[-3000:] + made.stderr[-3000:])


def noticed_in_c(fault: str, tests: list[str]) -> str | None:
    """Return the first C test that fails, and its message."""
    for test in tests:
        try:
            result = run(
                ["build/asan/some_tests", test],
                Path("tests/c"),
                C_TEST_TIMEOUT_S,
                FSDP_C_MUTANT=fault,
            )
        except subprocess.TimeoutExpired:
            return f"{test}.c: does not end"
        if result.returncode != 0:
            output = result.stdout
            names = re.findall(r"^FAILED (\S+)", output, re.MULTILINE)
            return f"{test}.c: {names[0] if names else 'ends by a signal'}"
    return None


def noticed_in_python(
    fault: str, tests: tuple[str, ...], *, on_fake: bool
) -> str | None:
    """Return the first test of pytest that fails."""
    names = dict.fromkeys((*tests, *(GENERAL_ON_FAKE if on_fake else GENERAL)))
    files = [f"tests/{n}" if "/" in n else f"tests/distributed/{n}" for n in names]
    command = [sys.executable, "-m", "pytest", "-qxp", "no:cacheprovider", "--pairs"]
    env = {"FSDP_C_MUTANT": fault}
    if on_fake:
        command = [sys.executable, "-m", "fakecuda", *command, "--one-each"]
        env["FSDP_C_TEST_DEVICE"] = "cuda"
        env["PYTHONPATH"] = os.pathsep.join((str(TREE), str(TREE / "tests")))
    try:
        result = run([*command, *files], Path(), **env)
    except subprocess.TimeoutExpired:
        return f"{files[0]} does not end"
    if result.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) tests/\w+/(\S+)", result.stdout, re.MULTILINE)
    return found.group(1) if found else result.stdout[-300:]


def main() -> int:
    """Print one row of a table for each fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of names or folders")
    parser.add_argument("--apply", action="store_true", help="build and run nothing")
    parser.add_argument("--fake", action="store_true", help="only on the fake CUDA")
    arguments = parser.parse_args()
    changed = plant_all()
    if arguments.apply:
        return 0
    copy_tree(changed)
    chosen = [
        fault
        for fault in FAULTS
        if not arguments.words
        or any(word in f"{fault.folder} {fault.name}" for word in arguments.words)
    ]
    build({fault.folder for fault in chosen}, with_c_tests=not arguments.fake)
    unnoticed = 0
    for fault in chosen:
        noticed = None
        on_fake = arguments.fake or fault.on_device
        on_fake = on_fake or any(name.startswith("fakecuda/") for name in fault.tests)
        if not arguments.fake:
            noticed = noticed_in_c(fault.name, c_tests_of(fault.folder))
        if on_fake or fault.folder != NCCL:
            noticed = noticed or noticed_in_python(
                fault.name, fault.tests, on_fake=on_fake
            )
        unnoticed += noticed is None
        print(f"| {fault.name} | {noticed or '**nothing**'} |", flush=True)
    print(f"{unnoticed} faults that nothing noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
