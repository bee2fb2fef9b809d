"""Calls go one way: between rooms down their list, within a room without a circle."""

from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest

from helpers.c_calls import SOURCES, blank, definitions_in, uses_of
from helpers.rooms import ROOMS, ROOT, room_of


def test_rooms_use_only_rooms_above() -> None:
    order = {room: i for i, room in enumerate(ROOMS)}
    wrong = [
        f"{path.relative_to(ROOT)} uses {name} of {other.relative_to(ROOT)}"
        for path in SOURCES
        for name, other in uses_of(path).items()
        if order[room_of(other)] > order[room_of(path)]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", ROOMS)
def test_no_circle(room: str) -> None:
    files = [path for path in SOURCES if room_of(path) == room]
    graph = {path: set(uses_of(path).values()) & set(files) for path in files}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = error.args[1]
        calls = [
            f"{user.name} uses {name} of {used.name}"
            for used, user in pairwise(circle)
            for name, other in uses_of(user).items()
            if other == used
        ]
        pytest.fail(
            "these files use each other in a circle; turn one call around (a callback, "
            "or the caller does it):\n" + "\n".join(calls)
        )


SAMPLE = """
namespace fsdp_torch {
namespace {
void hidden(int x) { other(); }
}  // namespace
Tensor &shown(Unit &unit) { if (unit.ok()) { hidden(1); } return unit.x; }
void Engine::say(const std::string &words) noexcept { shown(words); }
static const Ops g_ops = {.run = hidden};
const Ops table[] = {{1}, {2}};
}  // namespace fsdp_torch
"""


@pytest.mark.parametrize(
    ("name", "is_method", "is_external"),
    [
        ("hidden", False, False),
        ("shown", False, True),
        ("say", True, True),
        ("g_ops", False, False),
        ("table", False, True),
    ],
)
def test_definitions_are_found(name: str, is_method: bool, is_external: bool) -> None:
    found = {d.name: d for d in definitions_in(blank(SAMPLE))}
    assert (found[name].is_method, found[name].is_external) == (is_method, is_external)
