"""Data flows down the list of rooms: a file uses its room and those above it."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from helpers.rooms import CSRC, FILES, ROOMS, ROOT, room_of

# The Python package likewise. Those beside the engine use nothing of each other.
BESIDE = (
    "checkpoint",
    "integrations",
    *(f"tools/{tool}" for tool in ("bench", "doctor", "plan", "trace")),
)
PYTHON_ROOMS = (
    "_native",
    "_torch_compat",
    "_text",
    "_units",
    "_engines",
    "_state",
    "_capture",
    "_fully_shard",
    "_fsdp1",
    "_whole",
    "tools",
    *BESIDE,
    "__init__",
    "__main__",
)

LIBC_NAMES = """
    assert complex ctype errno fenv float inttypes iso646 limits locale math setjmp
    signal stdalign stdarg stdatomic stdbool stddef stdint stdio stdlib stdnoreturn
    string tgmath time wchar wctype
"""
LIBC = {f"{name}.h" for name in LIBC_NAMES.split()}
# Beyond libc, by room; "*" is anything: torch's headers and the C++ library.
SYSTEM = {
    "nccl": {"dlfcn.h", "elf.h", "link.h", "pthread.h"},
    "host": {"cpuid.h", "immintrin.h", "sys/mman.h", "unistd.h"},
    "cuda": {"cuda_bf16.h", "cuda_fp16.h", "cuda_runtime.h"},
    "torch": {"*"},
    "python": {"Python.h", "frameobject.h", "structmember.h"},
    "shm": {
        *("fcntl.h", "linux/futex.h", "pthread.h", "sched.h", "unistd.h"),
        *(
            f"sys/{name}.h"
            for name in ("mman", "random", "resource", "stat", "syscall", "uio")
        ),
    },
}

INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)


def includes_of(path: Path, quote: str) -> list[str]:
    """Return what ``path`` includes with ``<`` or with ``"``."""
    return [name for mark, name in INCLUDE.findall(path.read_text()) if mark == quote]


def resolve(path: Path, name: str) -> Path:
    """Return the file of the quoted include ``name`` in ``path``."""
    for folder in (path.parent, CSRC / "core", CSRC):
        if (folder / name).is_file():
            return (folder / name).resolve()
    pytest.fail(f'{path.relative_to(ROOT)} includes "{name}", which does not exist')


def reachable(path: Path) -> set[Path]:
    """Return ``path`` and all of our files that it includes, directly or not."""
    found: set[Path] = set()
    rest = [path]
    while rest:
        file = rest.pop()
        if file not in found:
            found.add(file)
            rest += [resolve(file, name) for name in includes_of(file, '"')]
    return found


def test_every_file_is_in_a_room() -> None:
    strangers = {room_of(path) for path in FILES} - set(ROOMS)
    assert not strangers, f"no such room: {sorted(strangers)}"


def test_design_md_lists_the_rooms_in_order() -> None:
    text = (ROOT / "docs" / "internals" / "design.md").read_text()
    assert tuple(re.findall(r"^\| `csrc/([\w/]+)` \|", text, re.MULTILINE)) == ROOMS


def test_rooms_use_only_rooms_above() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} ({room_of(path)}) includes {name}"
        for path in FILES
        for name in includes_of(path, '"')
        if ROOMS.index(room_of(resolve(path, name))) > ROOMS.index(room_of(path))
    ]
    assert not wrong, "\n".join(wrong)


def test_private_headers_stay_in_their_room() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} includes {name}"
        for path in FILES
        for name in includes_of(path, '"')
        if name.endswith("_priv.h") and room_of(resolve(path, name)) != room_of(path)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_include_cycle() -> None:
    graph = {p: [resolve(p, n) for n in includes_of(p, '"')] for p in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(p.name for p in error.args[1]))


def test_system_headers() -> None:
    wrong = []
    for path in FILES:
        allowed = LIBC | SYSTEM.get(room_of(path), set())
        wrong += [
            f"{path.relative_to(ROOT)} includes <{name}>"
            for name in includes_of(path, "<")
            if name not in allowed and "*" not in allowed
        ]
    assert not wrong, "\n".join(wrong)


def test_c_files_see_no_torch_header() -> None:
    allowed = LIBC.union(*(SYSTEM[room] for room in SYSTEM if room != "torch"))
    wrong = [
        f"{path.relative_to(ROOT)} sees <{name}> through {file.relative_to(ROOT)}"
        for path in FILES
        if path.suffix == ".c"
        for file in reachable(path)
        for name in includes_of(file, "<")
        if name not in allowed
    ]
    assert not wrong, "\n".join(wrong)


# As in setup.py, which compiles the sources of one folder together.
TORCH_FOLDERS = ("torch/csrc/distributed/", "torch/csrc/")


def torch_folder(names: list[str]) -> str:
    """Return the folder of the most expensive of torch's headers among ``names``."""
    found = (each for each in TORCH_FOLDERS if any(n.startswith(each) for n in names))
    return next(found, "")


def test_expensive_torch_headers_are_included_by_those_who_need_them() -> None:
    """A header of ours that includes them costs each compiler run seconds."""
    wrong = []
    for path in FILES:
        if path.suffix == ".cpp":
            seen = [name for file in reachable(path) for name in includes_of(file, "<")]
            if torch_folder(seen) != torch_folder(includes_of(path, "<")):
                wrong.append(f"{path.relative_to(ROOT)} sees {torch_folder(seen)}*")
            if "ATen/ATen.h" in seen and not torch_folder(seen).endswith("uted/"):
                wrong.append(f"{path.relative_to(ROOT)} includes all operators")
    assert not wrong, "\n".join(wrong)


def module_name(path: Path) -> str:
    """Return the dotted name of a Python file of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.AST) -> bool:
    """Return whether ``node`` is ``if TYPE_CHECKING:``."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """Return which of ``modules`` a file imports, inside functions too."""
    name = module_name(path)
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    found = set()
    rest: list[ast.AST] = [ast.parse(path.read_text())]
    while rest:
        node = rest.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parts = parts[: len(parts) - node.level + 1]
                base = ".".join([*parts, *filter(None, [node.module])])
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                found.add(submodule if submodule in modules else base)
        elif not is_type_checking(node):
            rest += ast.iter_child_nodes(node)
    return found & modules


def python_imports() -> dict[str, set[str]]:
    """Return what every module of the package imports of it."""
    files = sorted((ROOT / "fsdp_c").rglob("*.py*"))
    files = [path for path in files if path.suffix in {".py", ".pyi"}]
    modules = {module_name(path) for path in files}
    return {module_name(path): imports_of(path, modules) for path in files}


def python_room(module: str) -> str:
    """Return the room of a module of the package, ``_units`` or ``tools/plan``."""
    parts = module.split(".")[1:] or ["__init__"]
    return "/".join(parts[:2]) if parts[0] == "tools" else parts[0]


def test_no_python_import_cycle() -> None:
    try:
        TopologicalSorter(python_imports()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_every_python_module_is_in_a_room() -> None:
    strangers = {python_room(module) for module in python_imports()}
    assert strangers <= set(PYTHON_ROOMS), strangers - set(PYTHON_ROOMS)


def test_python_rooms_use_only_rooms_above() -> None:
    wrong = []
    for module, imports in python_imports().items():
        room = python_room(module)
        allowed = set(PYTHON_ROOMS[: PYTHON_ROOMS.index(room) + 1])
        if room in BESIDE:
            allowed -= set(BESIDE) - {room}
        wrong += [
            f"{module} imports {each}"
            for each in imports
            if python_room(each) not in allowed
        ]
    assert not wrong, "\n".join(wrong)
