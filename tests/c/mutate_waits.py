"""Shows which C test notices when one order between lanes is missing.

    python tests/c/mutate_waits.py            all sites, a table
    python tests/c/mutate_waits.py reduce.c   the sites of some files

A site is a call in csrc/core that orders lanes or makes the host wait. One at a
time is made to do nothing but write its line on the recorder's tape, so that only
the recorder's search for races can notice. A site that no race shows is removed
altogether: then a tape may.

Sources are rewritten in a build folder; nothing in the tree changes.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CORE = ROOT / "csrc" / "core"
FLAGS = ("-std=c11", "-O0", "-g0", "-w", f"-I{CORE}", f"-I{HERE}")
TEST_TIMEOUT_S = 60
# What the tests of the arena and of the engine are linked with.
SUPPORT = ("arena_", "check", "elements", "engine_", "every_", "recorder")

# Calls, and what stands in for them. Definitions of the functions are no sites.
PORT_CALLS = {
    "ops->event_wait(": "mutated_event_wait(ops->event_wait, ",
    "ops->event_record(": "mutated_event_record(ops->event_record, ",
    "ops->event_synchronize(": "mutated_event_synchronize(ops->event_synchronize, ",
}
LANE_CALLS = {
    "fsdp_engine_priv_wait_lane(": "mutated_wait_lane(",
    "fsdp_engine_join_host(": "mutated_join_host(",
}

# Included first. `IS_REMOVED` says whether the call is left out altogether.
HEADER = """
#include "port/device.h"
#include "runtime/engine_priv.h"
extern bool recorder_ignores_order;
#define PASS(call) \\
  fsdp_status status = FSDP_OK; \\
  if (IS_REMOVED) return status; \\
  recorder_ignores_order = true; \\
  status = (call); \\
  recorder_ignores_order = false; \\
  return status;
typedef fsdp_status lane_call(void *, fsdp_lane, fsdp_event *, fsdp_error *);
typedef fsdp_status record_call(void *, fsdp_event *, fsdp_lane, fsdp_error *);
typedef fsdp_status host_call(void *, fsdp_event *, fsdp_error *);
static inline fsdp_status mutated_event_wait(lane_call *call, void *c,
    fsdp_lane lane, fsdp_event *event, fsdp_error *error) {
  PASS(call(c, lane, event, error)) }
static inline fsdp_status mutated_event_record(record_call *call, void *c,
    fsdp_event *event, fsdp_lane lane, fsdp_error *error) {
  PASS(call(c, event, lane, error)) }
static inline fsdp_status mutated_event_synchronize(host_call *call, void *c,
    fsdp_event *event, fsdp_error *error) {
  PASS(call(c, event, error)) }
static inline fsdp_status mutated_wait_lane(fsdp_engine *engine, fsdp_lane waiter,
    fsdp_lane recorder, fsdp_event *event, fsdp_error *error) {
  PASS(fsdp_engine_priv_wait_lane(engine, waiter, recorder, event, error)) }
static inline fsdp_status mutated_join_host(fsdp_engine *engine,
    fsdp_error *error) {
  PASS(fsdp_engine_join_host(engine, error)) }
"""


@dataclass(frozen=True)
class Site:
    path: Path
    offset: int
    call: str
    function: str

    @property
    def name(self) -> str:
        """Return file, line, function and call."""
        line = self.path.read_text()[: self.offset].count("\n") + 1
        call = (
            self.call.replace("fsdp_engine_priv_", "")
            .replace("fsdp_engine_", "")
            .strip("ops->(")
        )
        return f"{self.path.name}:{line} {self.function}: {call}"

    def mutated(self) -> str:
        text = self.path.read_text()
        stand_in = {**PORT_CALLS, **LANE_CALLS}[self.call]
        return text[: self.offset] + stand_in + text[self.offset + len(self.call) :]


def find_sites(names: list[str]) -> Iterator[Site]:
    """Yield the calls of the files whose names are given, or of all."""
    definition = re.compile(r"^[a-z].*?(\w+)\(", re.MULTILINE)
    for path in sorted(CORE.rglob("*.c")):
        if names and path.name not in names:
            continue
        text = path.read_text()
        for call in (*PORT_CALLS, *LANE_CALLS):
            for match in re.finditer(re.escape(call), text):
                line_begin = text.rfind("\n", 0, match.start()) + 1
                if not text[line_begin].isspace():
                    continue  # the definition
                before = list(definition.finditer(text, 0, match.start()))
                yield Site(path, match.start(), call, before[-1].group(1))


def run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"failed: {' '.join(command)}\n{result.stderr}")


class Bench:
    """Objects of the unchanged tree, and a race search that can be told to miss."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "mutated.h").write_text(HEADER)
        races = (HERE / "recorder_races.c").read_text()
        body = re.compile(r"(void recorder_priv_(?:record|wait)\([^)]*\) \{)")
        races, count = body.subn(r"\1 if (recorder_ignores_order) return;", races)
        assert count == 2, "recorder_races.c has changed: adapt mutate_waits.py"
        races = "#include <stdbool.h>\nbool recorder_ignores_order;\n" + races
        (folder / "recorder_races.c").write_text(races)
        tests = sorted(HERE.glob("test_engine*.c")) + sorted(HERE.glob("test_arena*.c"))
        self.tests = [path.stem for path in tests]
        support = [path for path in HERE.glob("*.c") if path.stem.startswith(SUPPORT)]
        sources = [*CORE.rglob("*.c"), *support, *tests]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(self.compile, sources))
        self.objects = {
            path: str(folder / f"{path.stem}.o") for path in sources[: -len(tests)]
        }

    def compile(self, path: Path) -> None:
        copy = self.folder / path.name
        source = copy if path.name == "recorder_races.c" else path
        run("gcc", *FLAGS, "-c", str(source), "-o", str(self.folder / f"{path.stem}.o"))

    def failures(self, site: Site | None, *, is_removed: bool) -> Iterator[str]:
        """Yield the tests that fail, with what they say first."""
        objects = dict(self.objects)
        if site is not None:
            source = self.folder / "mutated.c"
            source.write_text(site.mutated())
            objects[site.path] = str(self.folder / "mutated_file.o")
            header = ("-include", str(self.folder / "mutated.h"))
            flags = (*FLAGS, *header, f"-DIS_REMOVED={int(is_removed)}")
            flags = (*flags, f"-I{site.path.parent}")
            run("gcc", *flags, "-c", str(source), "-o", objects[site.path])
        program = str(self.folder / "tests")
        tests = [str(self.folder / f"{test}.o") for test in self.tests]
        run("gcc", *tests, *objects.values(), "-lm", "-lpthread", "-o", program)
        for test in self.tests:
            try:
                result = subprocess.run(
                    [program, test],
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=TEST_TIMEOUT_S,
                )
                failed, output = result.returncode != 0, result.stdout + result.stderr
            except subprocess.TimeoutExpired:
                failed, output = True, "timed out"
            if failed:
                yield f"{test} ({first_message(output)})"


def first_message(output: str) -> str:
    """Return the name of the first test that failed."""
    names = re.findall(r"^(?:FAIL\w*:?|not ok)\s+(\S+)", output, re.MULTILINE)
    if names:
        return str(names[0])
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[0][:90] if lines else "no output"


def main() -> int:
    """Print the table; fail if nothing notices a site."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="names of files in csrc/core")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutate_waits")
    arguments = parser.parse_args()
    bench = Bench(arguments.folder)
    broken = list(bench.failures(None, is_removed=False))
    if broken:
        sys.exit(f"tests fail without any change: {broken}")
    unnoticed = 0
    for site in find_sites(arguments.files):
        how, noticed = "race", next(bench.failures(site, is_removed=False), None)
        if noticed is None:
            how, noticed = "tape", next(bench.failures(site, is_removed=True), None)
        if noticed is None:
            how, noticed = "NONE", "nothing noticed"
            unnoticed += 1
        print(f"{how:5} {site.name:62} {noticed}", flush=True)
    print(f"{unnoticed} sites that nothing noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
