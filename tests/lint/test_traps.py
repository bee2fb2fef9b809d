"""Every known trap has a test that would catch it.

A trap is a mistake that an earlier FSDP made, known from its bug reports or its
source. `@pytest.mark.trap(number)` stands at the tests that fail if it is made here.
"""

import ast
import functools
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]

TRAPS = {
    1: "post-backward may never fire: no gradient reaches a unit (pytorch#83129)",
    2: "a frozen unit has no AccumulateGrad hook (pytorch#101982, #117510)",
    3: "the first unit's input has no gradient: only the end of backward is left",
    4: "outputs in containers; in-place on a view drops the hook (pytorch#77812)",
    5: "units that run twice, several forwards before several backwards (#118118)",
    6: "a submodule that is used first becomes the root (fairscale#490)",
    7: "recomputation gathers a third time (fairscale#777, pytorch#82203)",
    8: "gradient blocks pile up where nothing is gathered (pytorch#98354)",
    9: "prefetch follows the wrong order or is not undone (pytorch#84085, #108190)",
    10: "no_sync keeps or frees the wrong thing (transformers#34645)",
    11: "accumulation outside no_sync overwrites (pytorch#73535, #73784, #85134)",
    12: "fresh and accumulated gradients in one reduction (pytorch#196996)",
    13: "division over- or underflows; mean over shard x replicate (pytorch#128918)",
    14: "the replicas' sum is read too early; (n, 1) and (1, n) (pytorch#154888)",
    15: "norms: ranks without gradients, NO_SHARD, ignored, dtype",
    16: "padding is not zero in gradients, norms and state dicts (pytorch#97531)",
    17: "parameters() differs by rank: keyed by id or shape (pytorch#99779, #97664)",
    18: "the user replaces param.data or .grad between steps",
    19: "frozen to trainable in mid-training (pytorch#110540)",
    20: "buffers: cast once, restored for the state dict (pytorch#97645)",
    21: "inputs: which are cast; batch norm in a unit of its own",
    22: "a gradient's dtype is not the parameter's (pytorch#85134)",
    23: "the scaler's infinity flag is not reduced or not waited for (#115710)",
    24: "shared parameters, inside a unit and across units (pytorch#83052)",
    25: "optimizer state: 0-dim step, missing state (pytorch#99624, #111499)",
    26: "a rank0_only state dict is collective all the same (accelerate#2000)",
    27: "states are synced before materialisation, or no buffers (pytorch#105840)",
    28: "the order of accelerate's prepare (accelerate#3394, #1902)",
    29: "a recomputed frozen unit looks like a forward (Automodel#3411)",
    30: "gloo: no AVG, no streams (pytorch#106099, #162344)",
    31: "deprecated collectives (torch 2.13)",
    32: "the baseline's cost without communication (FSDP_USE_FAKE_ALL_GATHER)",
}

NOT_YET = {
    28: "there is no Hugging Face integration in this version",
    32: "no trap of this library: an aid for benchmarks of torch's",
}


def _numbers(node: ast.FunctionDef) -> list[int]:
    """Return the numbers of the decorators ``pytest.mark.trap(number)``."""
    return [
        ast.literal_eval(call.args[0])
        for call in node.decorator_list
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.trap"
    ]


@functools.cache
def marked_tests() -> dict[int, list[str]]:
    """Return the tests of each trap."""
    found = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                for number in _numbers(node):
                    assert node.name.startswith("test_"), (path, node.name)
                    found[number].append(f"{path.name}::{node.name}")
    return found


def test_every_trap_has_a_test() -> None:
    missing = TRAPS.keys() - marked_tests().keys() - NOT_YET.keys()
    assert not missing, {number: TRAPS[number] for number in sorted(missing)}


def test_marks_are_of_known_traps() -> None:
    unknown = {n: tests for n, tests in marked_tests().items() if n not in TRAPS}
    assert not unknown


def test_what_has_a_test_is_not_listed_as_missing() -> None:
    done = {n: tests for n, tests in marked_tests().items() if n in NOT_YET}
    assert not done, f"take these out of NOT_YET: {done}"
