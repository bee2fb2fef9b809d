"""No C++ exception leaves the bridge: each C function of csrc/torch is guarded.

Guarded means that its body is a ``GUARDED(...)``, torch's own ``HANDLE_TH_ERRORS``
(where the result is a Python object) or a ``try`` with a ``catch (...)``. A function
that has no way to report may instead be ``noexcept``, or call nothing that throws.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.c_calls import DIRECTIVE, blank, end_of
from helpers.rooms import CSRC

FILES = sorted((CSRC / "torch").glob("*.cpp"))

GUARD = re.compile(
    r"\bGUARDED\w*\s*\(|\bguarded\s*\(|\bHANDLE_TH_ERRORS\b|"
    r"\bcatch\s*\(\s*\.\.\.\s*\)"
)
CALL = re.compile(r"\b([A-Za-z_]\w*)\s*(?:<[^<>;()]*>)?\s*\(")
# The C core cannot throw; neither can these.
SAFE_CALL = re.compile(
    r"fsdp_(?!torch_)\w+|if|for|while|switch|return|sizeof|static_cast|const_cast|"
    r"reinterpret_cast|size|data|get|empty|is_cpu|THPVariable_Check|lock"
)


class Function(NamedTuple):
    """A C function that a .cpp file defines."""

    name: str
    is_noexcept: bool
    body: str


def c_functions(source: str) -> list[Function]:
    """Return the definitions with C linkage: all named ``fsdp_torch_...``."""
    text = DIRECTIVE.sub("", blank(source))
    found = []
    for match in re.finditer(r"\b(fsdp_torch_\w+)\s*\(", text):
        end = end_of(text, match.end() - 1)
        tail = re.compile(r"\s*(noexcept)?\s*(?=\{)").match(text, end)
        if tail is not None:
            body = text[tail.end() : end_of(text, tail.end())]
            found.append(Function(match[1], tail[1] is not None, body))
    return found


def is_safe(function: Function) -> bool:
    """Return whether no exception can leave ``function``."""
    if GUARD.search(function.body):
        return True
    calls = CALL.findall(function.body)
    return function.is_noexcept or all(map(SAFE_CALL.fullmatch, calls))


def test_the_lint_itself() -> None:
    guarded, getter, bare = c_functions(
        'fsdp_status fsdp_torch_a(int *x) { return GUARDED(e, f("}");); }\n'
        "int fsdp_torch_b(const s *x) noexcept { return x->b; }\n"
        "// fsdp_torch_d() {\n"
        "int fsdp_torch_c(s *x) { return fsdp_torch_b(x); }\n"
    )
    assert is_safe(guarded)
    assert is_safe(getter)
    assert not is_safe(bare)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_c_functions_are_guarded(path: Path) -> None:
    wrong = [f.name for f in c_functions(path.read_text()) if not is_safe(f)]
    assert not wrong, f"an exception could leave {', '.join(wrong)}"
