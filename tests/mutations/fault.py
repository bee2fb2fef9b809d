"""What a planted fault is: a small change of the core, a transport, bridge or module.

A fault replaces the first `old` in the body of a function by `new`. In `old` white
space matches any, and ANY a word; in `new` OLD is what was matched, and MUTANT tells
whether this fault is the one under test.
"""

from dataclasses import dataclass

CORE = "csrc/core"
NCCL = "csrc/nccl"
SHM = "csrc/shm"
TORCH = "csrc/torch"
PYTHON = "csrc/python"


@dataclass(frozen=True)
class Fault:
    """One fault, and the tests of pytest that should notice it first.

    On a host no test of pytest can notice a fault that is ``on_device``.
    """

    name: str
    folder: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    on_device: bool = False


def skip(call: str) -> tuple[str, str]:
    """Return a replacement that leaves a call out."""
    return call, "if (!MUTANT) OLD"


def never(condition: str) -> tuple[str, str]:
    """Return a replacement that makes an `if` false."""
    return f"if ({condition})", f"if (({condition}) && !MUTANT)"


def before(code: str, statement: str) -> tuple[str, str]:
    """Return a replacement that adds a statement."""
    return code, f"{statement} OLD"


def core_fault(name: str, function: str, change: tuple[str, str], *tests: str) -> Fault:
    return Fault(name, CORE, function, *change, tests)


def nccl_fault(name: str, function: str, change: tuple[str, str]) -> Fault:
    return Fault(name, NCCL, function, *change)


def shm_fault(name: str, function: str, change: tuple[str, str], *tests: str) -> Fault:
    return Fault(name, SHM, function, *change, tests)


def bridge_fault(
    name: str, function: str, change: tuple[str, str], *tests: str
) -> Fault:
    return Fault(name, TORCH, function, *change, tests)


def module_fault(
    name: str, function: str, change: tuple[str, str], *tests: str
) -> Fault:
    return Fault(name, PYTHON, function, *change, tests)
