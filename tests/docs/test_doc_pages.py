"""Links, commands and fences of README.md and the pages in docs are what they say."""

import re
from importlib import import_module
from typing import Any

import pytest

from fsdp_c.__main__ import COMMANDS
from helpers.doc_pages import (
    ROOT,
    anchors_of,
    blocks_of,
    commands_of,
    links_of,
    pages,
    text_of,
)

LANGUAGES = {"", "python", "diff", "json", "yaml", "bash", "text"}
# Signatures, and examples of docstrings: only where docs/make_api.py writes them.
IN_API = {"py", "pycon"}

FILE = re.compile(
    r"`((?:tests|benchmarks|examples|fsdp_c|csrc(?!/distributed))/"
    r"[\w/.*-]+\.(?:py|c|h|cpp|hpp|cu|sh))`"
)

PAGE = """# One: two `three`

<!-- not run: needs a GPU -->
```python
a
```

- item

  ```diff
  -x = 1
  +x = 2
   y = x
  ```
"""


def test_blocks_are_found() -> None:
    python, diff = blocks_of("page", PAGE)
    assert (python.language, python.line, python.code) == ("python", 5, "a")
    assert python.not_run == "needs a GPU"
    assert (diff.language, diff.line, diff.not_run) == ("diff", 11, "")
    assert diff.new_side() == "x = 2\ny = x"
    assert diff.old_side() == "x = 1\ny = x"


@pytest.mark.parametrize(
    "text", ["```python\na\n", "<!-- not run: because -->\n\n```python\na\n```\n"]
)
def test_a_page_that_is_not_whole_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="page:1"):
        blocks_of("page", text)


@pytest.mark.parametrize("page", pages())
def test_fences(page: str) -> None:
    """A misspelt language would be code that nobody runs."""
    unknown = [
        f"{block.page}:{block.line}: {block.language}"
        for block in blocks_of(page)
        if block.language
        not in (IN_API if page == "docs/reference/api.md" else LANGUAGES)
    ]
    assert not unknown


@pytest.mark.parametrize("page", pages())
def test_links(page: str) -> None:
    broken = []
    for link in links_of(page):
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        is_there = target.exists()
        if is_there and anchor:
            is_there = anchor in anchors_of(str(target.resolve()))
        if not is_there:
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", pages())
def test_files_that_pages_name_exist(page: str) -> None:
    """Files of this repository; torch's also lie below csrc/distributed."""
    named = set(FILE.findall(text_of(page)))
    assert not [name for name in sorted(named) if not list(ROOT.glob(name))]


def _is_placeholder(word: str) -> bool:
    """Whether a word stands for what a user fills in, or for a choice."""
    return bool(set(word) & set("[]|<>\u2026")) or "..." in word or word.isupper()


def _check_command(words: list[str]) -> None:
    """Fail unless ``python -m fsdp_c <words>`` is a command that would start.

    Of a line with placeholders only the command is looked at.
    """
    assert words, "no command"
    name = words[0].rstrip(".,:;")
    assert name in COMMANDS, f"{name!r} is not a command of fsdp_c"
    module: Any = import_module(COMMANDS[name][0])
    make_parser = getattr(module, "_parser", None)
    if len(words) == 1 or make_parser is None or any(map(_is_placeholder, words)):
        return
    try:
        make_parser().parse_args(words[1:])
    except SystemExit as error:
        if error.code:
            pytest.fail(f"{' '.join(words)}: wrong words")


def test_commands_are_checked() -> None:
    _check_command(["checkpoint", "info", "folder"])
    _check_command(["doctor."])
    _check_command(["checkpoint", "reshard", "PATH", "--world-size", "N"])
    for words in ([], ["docter"]):
        with pytest.raises(AssertionError):
            _check_command(words)
    with pytest.raises(pytest.fail.Exception):
        _check_command(["checkpoint", "inform", "folder"])


@pytest.mark.parametrize("page", [p for p in pages() if commands_of(p)])
def test_commands(page: str) -> None:
    for command in commands_of(page):
        words = command.split(";")[0].split()
        if words[0] not in ("COMMAND", "..."):
            _check_command(words)


def test_all_commands_are_documented() -> None:
    named = {c.split()[0].rstrip(".,:;") for p in pages() for c in commands_of(p)}
    assert not COMMANDS.keys() - named


@pytest.mark.parametrize("name", ["checkpoint", "trace"])
def test_help_names_the_words_of_a_command(name: str) -> None:
    module: Any = import_module(COMMANDS[name][0])
    (words,) = (each for each in module._parser()._actions if each.choices)
    assert COMMANDS[name][1].split()[0].split("|") == list(words.choices)


def test_all_pages_are_reachable() -> None:
    """From README.md, by links."""
    seen: set[str] = set()
    waiting = ["README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        for link in links_of(page):
            target = ((ROOT / page).parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.is_relative_to(ROOT):
                waiting.append(str(target.relative_to(ROOT)))
    assert not set(pages()) - seen
    assert text_of("README.md")
