"""Every C function that other files may call is called by one of them.

What nothing calls goes, what only tests call lives in the tests, and what one file
calls is static there.
"""

import re
from collections import Counter
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
# Called by tests alone, and meant to be.
SEAMS = {
    "fsdp_alloc_fail_at": "lets an allocation fail",
    "fsdp_alloc_live": "finds leaks",
    "fsdp_crc32c_by_table": "the path of processors without the instruction",
    "fsdp_host_pages_kept_nbytes": "finds pages that are kept",
    "fsdp_host_priv_lanes_at": "the paths of other processors",
    "fsdp_nccl_priv_has_watchdog": "whether the thread has ended",
    "fsdp_placement_create": "a placement of any pieces",
    "fsdp_unit_event_name": "names in the table of transitions",
}
COMMENT_OR_TEXT = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL)
DEFINITION = re.compile(
    r"^(?!static)(?:[\w:]+[\s*&]+)+(fsdp_\w+)\([^;{]*\)[^;{]*\{", re.MULTILINE
)
NAME = re.compile(r"\bfsdp_\w+")


def uncalled_functions() -> set[str]:
    """Return the functions that are not static and have no caller elsewhere."""
    defined: dict[str, Path] = {}
    names: dict[Path, Counter[str]] = {}
    for path in sorted(CSRC.rglob("*")):
        if path.suffix not in {".c", ".h", ".cpp", ".hpp", ".cu"}:
            continue
        text = COMMENT_OR_TEXT.sub("", path.read_text())
        names[path] = Counter(NAME.findall(text))
        if path.suffix in {".c", ".cpp", ".cu"}:
            defined.update(dict.fromkeys(DEFINITION.findall(text), path))

    def is_called(name: str) -> bool:
        # A header declares it once; more often: an inline function calls it.
        return any(
            count[name] > (1 if path.suffix in {".h", ".hpp"} else 0)
            for path, count in names.items()
            if path != defined[name]
        )

    return {name for name in defined if not is_called(name)}


def test_functions_are_called() -> None:
    found = uncalled_functions()
    assert found == set(SEAMS), (
        f"called by no other file: {sorted(found - set(SEAMS))}; "
        f"not seams any more: {sorted(set(SEAMS) - found)}"
    )
