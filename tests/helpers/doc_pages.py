"""README.md and the pages in docs as tests see them: code, commands, links.

A block of code that cannot run where tests do says why, in a comment on the line above
its fence that a reader of the page does not see: ``<!-- not run: needs a GPU -->``.
"""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^ *```(.*)$")
_NOT_RUN = re.compile(r"^ *<!-- not run: (.+) -->$")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_COMMAND = re.compile(r"python -m fsdp_c +([^`\n#]*)")


@dataclass(frozen=True)
class Block:
    """One block of code between fences.

    Attributes:
        page: Path of its page, from the root of the repository.
        line: Number of its first line of code on the page.
        language: What stands behind the opening fence.
        code: Its lines, without the indentation that they have in common.
        not_run: Why it cannot run; empty if it can.
    """

    page: str
    line: int
    language: str
    code: str
    not_run: str

    def new_side(self) -> str:
        """Return the code of a diff after the change."""
        return self._side("+ ")

    def old_side(self) -> str:
        """Return the code of a diff before the change."""
        return self._side("- ")

    def _side(self, kept: str) -> str:
        lines = self.code.splitlines()
        return "\n".join(line[1:] for line in lines if (line[:1] or " ") in kept)


def pages() -> list[str]:
    """Return the paths of all pages, from the root of the repository."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in found]


def text_of(page: str) -> str:
    """Return the whole text of a page."""
    return (ROOT / page).read_text("utf-8")


def blocks_of(page: str, text: str | None = None) -> list[Block]:
    """Return the blocks of a page in order.

    Args:
        page: As :func:`pages` names it.
        text: Its text, if it is not what is in the file.

    Raises:
        ValueError: A fence is not closed, or a reason stands above no fence.
    """
    lines = (text_of(page) if text is None else text).splitlines()
    found: list[Block] = []
    language: str | None = None
    begin, not_run = 0, ""
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if language is not None:
            if fence and not fence[1].strip():
                code = textwrap.dedent("\n".join(lines[begin - 1 : number - 1]))
                found.append(Block(page, begin, language, code, not_run))
                language, not_run = None, ""
        elif fence:
            language, begin = fence[1].strip(), number + 1
        elif not_run:
            raise ValueError(f"{page}:{number - 1}: a reason, and no fence below it")
        else:
            reason = _NOT_RUN.match(line)
            not_run = reason[1] if reason else ""
    if language is not None:
        raise ValueError(f"{page}:{begin - 1}: a fence that is not closed")
    return found


def prose_of(page: str) -> str:
    """Return a page without its blocks of code and its comments."""
    kept, inside = [], False
    for line in _COMMENT.sub("", text_of(page)).splitlines():
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            kept.append(line)
    return "\n".join(kept)


def links_of(page: str) -> list[str]:
    """Return the targets of a page's links to files of the repository."""
    return [
        target
        for target in _LINK.findall(prose_of(page))
        if not re.match(r"[a-z]+:", target)
    ]


def anchors_of(page: str) -> set[str]:
    """Return the names by which links reach a page's headings."""
    found = set()
    for line in prose_of(page).splitlines():
        heading = re.match(r"#+ +(.*)", line)
        if heading:
            kept = re.sub(r"[^\w\- ]", "", heading[1].lower())
            found.add(kept.strip().replace(" ", "-"))
    return found


def commands_of(page: str) -> list[str]:
    """Return what stands behind ``python -m fsdp_c`` on a page, each time."""
    text = text_of(page).replace("\\\n", " ")
    found = (each.strip() for each in _COMMAND.findall(text))
    return [each for each in found if each]
