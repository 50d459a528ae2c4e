"""The pages that users read, and what stands in them: code, commands, tables, links."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = tuple(
    path.relative_to(ROOT).as_posix() for path in [*sorted(ROOT.glob("*.md")), *DOCS.rglob("*.md")]
)

_FENCE = re.compile(r"^```([^`\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ASSIGNMENT = re.compile(r"\w+=\S*")


class Fence(NamedTuple):
    """A block of code: its language, its text, the line of the page where it begins."""

    language: str
    text: str
    line: int


def read(page: str) -> str:
    return (ROOT / page).read_text()


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return _FENCE.sub("", text)


def fences(text: str) -> list[Fence]:
    return [
        Fence(found[1], found[2], text.count("\n", 0, found.start()) + 1)
        for found in _FENCE.finditer(text)
    ]


def commands(script: str) -> list[list[str]]:
    """The commands of a shell script as words, without comments, prompts and assignments."""
    found = []
    for line in script.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and (words[0] == "$" or _ASSIGNMENT.fullmatch(words[0])):
            words = words[1:]
        if words:
            found.append([Path(words[0]).name, *words[1:]])
    return found


def section(text: str, heading: str) -> str:
    """What stands under a heading of a page, up to the next of its level or above."""
    level = heading.partition(" ")[0]
    _, _, rest = text.partition(f"\n{heading}\n")
    assert rest, f"no heading {heading}"
    return re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of all table rows in a text, without headings and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    rules = [n for n, row in enumerate(cells) if all(re.fullmatch(":?-+:?", c) for c in row)]
    headings = {n - 1 for n in rules}
    return [row for n, row in enumerate(cells) if n not in headings and n not in rules]
