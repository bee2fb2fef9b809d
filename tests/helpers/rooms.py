"""The rooms of csrc, from the first to the last, and their files."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"

CORE_ROOMS = (
    "base",
    "layout",
    "unit",
    "order",
    "port",
    "transports",
    "arena",
    "offload",
    "runtime",
    "plan",
    "state",
)
ROOMS = (
    *(f"core/{room}" for room in CORE_ROOMS),
    "host",
    "shm",
    "nccl",
    "cuda",
    "torch",
    "python",
)
SUFFIXES = {".c", ".h", ".cpp", ".hpp", ".cu"}
FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in SUFFIXES)


def room_of(path: Path) -> str:
    """Return the room of a file, ``core/base`` or ``torch``."""
    parts = path.relative_to(CSRC).parts
    return "/".join(parts[:2]) if parts[0] == "core" else parts[0]
