"""Measure the structure and the language of the code: one row for each goal, `met` or `short`.

python -m tests.support.structure            # or: make structure
python -m tests.support.structure --list     # and every name that counts, with its place
"""

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.bench.report import Goal, show

ROOT = Path(__file__).parents[2]
PACKAGES = ("cupy_kernels", "shards", "ps", "worker", "deploy")
Source = tuple[Path, ast.Module]
"""A file, by its path below the root, and its syntax tree."""
TRAPS = ("shards", "ps/session", "ps/wal")
"""Folders where comments must say why."""

PARTICIPLES = """
begun born borne bought bound broken brought built caught chosen dealt done drawn driven fallen
fed felt forgotten found frozen given gone ground grown heard held hidden hung kept known laid
led left lent lost made meant met paid said seen sent shown slept sold sought spent spoken spun
stolen struck stuck sunk swept sworn taken taught thrown told torn understood woken worn wound
woven written
"""
NO_PARTICIPLES = """
bed bleed breed embed exceed feed heed need proceed red seed shed sled speed succeed
"""
IDIOMS = """
each found given held here kept left made mine one ours own place places taken theirs there told
wanted what whose wish wishes
"""
NO_OPENINGS = ("What", "How", "Whether", "The same", "Its")


@dataclass(frozen=True)
class Occurrence:
    """A name or text that counts against a goal."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Count:
    """Occurrences among `total` names or texts."""

    occurrences: list[Occurrence]
    total: int

    @property
    def per_thousand(self) -> float:
        return 1e3 * len(self.occurrences) / max(self.total, 1)


def parse_sources(folders: tuple[str, ...] = PACKAGES) -> Iterator[Source]:
    """Parse the shipped files below these folders, generated ones left out."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.name.endswith("_pb2.py"):
                yield path.relative_to(ROOT), ast.parse(path.read_text())


def is_participle(name: str) -> bool:
    """Whether the first word of a function's name is a past participle."""
    word = name.strip("_").split("_")[0].lower()
    return word in PARTICIPLES.split() or (
        word.endswith("ed") and word not in NO_PARTICIPLES.split()
    )


def count_participles(sources: list[Source]) -> Count:
    """Count functions and methods that are named by a participle, tests left out."""
    functions = [
        Occurrence(path, node.lineno, node.name)
        for path, tree in sources
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("__")
    ]
    return Count([item for item in functions if is_participle(item.text)], len(functions))


def count_idioms(sources: list[Source]) -> Count:
    """Count variables and arguments that are called by a pronoun or a participle."""
    names = [item for path, tree in sources for item in _bindings(path, tree)]
    idioms = frozenset(IDIOMS.split())
    return Count([item for item in names if item.text.strip("_") in idioms], len(names))


def _bindings(path: Path, tree: ast.Module) -> Iterator[Occurrence]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store(), lineno=line) | ast.arg(arg=name, lineno=line):
                yield Occurrence(path, line, name)
            case ast.Attribute(attr=name, ctx=ast.Store(), lineno=line):
                yield Occurrence(path, line, name)


def count_openings(sources: list[Source]) -> Count:
    """Count docstrings that open with a question word, or refer to the one before."""
    texts = []
    for path, tree in sources:
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    line = getattr(node, "lineno", 1)
                    texts.append(Occurrence(path, line, text.split("\n")[0]))
    opening = re.compile(rf"(?:{'|'.join(NO_OPENINGS)})\b")
    return Count([item for item in texts if opening.match(item.text)], len(texts))


def count_comments(folders: tuple[str, ...] = TRAPS) -> float:
    """Return the comment lines in 100 lines of these folders, without those that tools read."""
    comments = lines = 0
    for path, _ in parse_sources(folders):
        text = (ROOT / path).read_text()
        lines += text.count("\n")
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments += sum(
            token.type == tokenize.COMMENT
            and not re.search(r"noqa|type: ignore|pragma", token.string)
            for token in tokens
        )
    return 1e2 * comments / lines


def count_lines(paths: Iterable[Path]) -> int:
    """Return the lines of these files."""
    return sum(path.read_text().count("\n") for path in paths)


def count_words(paths: Iterable[Path]) -> int:
    """Return the words of these files."""
    return sum(len(path.read_text().split()) for path in paths)


def list_tracked(folder: str, *endings: str) -> list[Path]:
    """Return the files below a folder that are under version control, of these endings if any."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--", folder], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    listed = [name for name in names.split("\0") if name and name.endswith(endings or "")]
    return [ROOT / name for name in listed if (ROOT / name).exists()]


def measure() -> list[Goal]:
    """Measure everything here; a row for each goal."""
    sources = list(parse_sources())
    tests = list_tracked("tests", ".py")
    helpers = [path for path in tests if not path.name.startswith("test_")]
    share = 1e2 * count_lines(helpers) / count_lines(tests)
    targets = re.findall(r"^[a-z-]+:.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    at_roots = [len(list((ROOT / package).glob("*.py"))) for package in ("worker", "deploy")]
    participles, idioms = count_participles(sources), count_idioms(sources)
    openings = count_openings(sources)
    return [
        Goal("functions named by a participle", participles.per_thousand, 15, "/1000"),
        Goal("variables called by a pronoun", idioms.per_thousand, 3, "/1000"),
        Goal("docstrings that open with a question", openings.per_thousand / 10, 2, "%"),
        Goal("comments at the traps", count_comments(), 4, "/100 lines", at_least=True),
        Goal("files at the root of worker, deploy", max(at_roots), 6),
        Goal("lines of source", count_lines(ROOT / path for path, _ in sources), 86_000),
        Goal("helpers among the lines of tests", share, 30, "%"),
        Goal("words of the README", count_words([ROOT / "README.md"]), 900),
        Goal("lines of the changelog", count_lines([ROOT / "CHANGELOG.md"]), 60),
        Goal("words of the pages", count_words(list_tracked("docs", ".md")), 95_000),
        Goal("targets of make", len(targets), 15),
    ]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--list", action="store_true", help="and every name that counts")
    if options.parse_args().list:
        sources = list(parse_sources())
        for count in (count_participles, count_idioms, count_openings):
            print(*count(sources).occurrences, sep="\n")
    show(measure())


if __name__ == "__main__":
    main()
