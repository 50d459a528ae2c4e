"""The language of the project: plain English in every text, and one meaning for each class name."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.structure import (
    Count,
    Source,
    count_idioms,
    count_openings,
    count_participles,
    list_tracked,
    parse_sources,
)

ROOT = Path(__file__).parents[1]

IDIOMS = {
    "who for a component": r"\b[Ww]ho(?:ever|m)?\b|\b[Ww]hose\b",
    "tell": r"\b[Tt]el(?:l|ls|ling)\b|\b[Tt]old\b",
    "goes on": r"\b(?:goes?|going|went|gone) on\b",
    "anew": r"\banew\b",
    "data that lies": r"\b(?:lies|lying)\b",
    "beside": r"\bbeside\b",
    "so many": r"\b[Ss]o (?:many|much|long)\b",
}
MOST = 3.0
"""Idioms in 10,000 words, at most. Well-known Python projects measure about 1.6."""

SHARED_NAMES = {
    "Convolution": "the shape of the operation in the kernels, and Caffe's layer",
    "Pooling": "the shape of the operation in the kernels, and Caffe's layer",
    "Sigmoid": "the activation, and Caffe's rate policy",
    "Exp": "the activation, and Caffe's rate policy",
    "Threshold": "the activation, and a codec of pushes",
    "Job": "a job of the SDK, and a training job on Spark",
    "Network": "the simulated network between processes, and a neural network",
}


@cache
def sources() -> list[tuple[Path, ast.Module]]:
    return [(ROOT / path, tree) for path, tree in parse_sources()]


def docstrings(tree: ast.Module) -> Iterator[str]:
    """The docstrings of a file; a string that follows a constant is one as well."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            for statement in statements if isinstance(statements, list) else []:
                match statement:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield text


@cache
def comments(text: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def messages(tree: ast.Module) -> Iterator[str]:
    """String literals that hold a sentence: errors, help, log lines."""
    documentation = set(docstrings(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if text not in documentation and text.count(" ") > 1:
                yield text


def idioms(texts: list[str]) -> tuple[float, dict[str, int]]:
    """Banned idioms in 10,000 words, and how often each occurs."""
    whole = "\n".join(texts)
    counts = {name: len(re.findall(pattern, whole)) for name, pattern in IDIOMS.items()}
    return 1e4 * sum(counts.values()) / len(re.findall(r"[A-Za-z']+", whole)), counts


def written_in_code() -> list[str]:
    return [
        text
        for path, tree in sources()
        for text in (*docstrings(tree), *comments(path.read_text()))
    ]


def prose_of_pages() -> list[str]:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    fence = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    return [fence.sub("", page.read_text()) for page in pages]


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(written_in_code, id="docstrings and comments"),
        pytest.param(lambda: [t for _, tree in sources() for t in messages(tree)], id="messages"),
        pytest.param(prose_of_pages, id="pages"),
    ],
)
def test_plain_english(texts: object) -> None:
    """The idioms that nobody but this project used are gone."""
    assert callable(texts)
    rate, counts = idioms(texts())
    assert rate <= MOST, counts


def test_the_counter_sees_idioms() -> None:
    """The check can fail: each idiom is found where it stands."""
    sample = [
        "Whoever asks is told; whose number lies beside it, goes on anew",
        "it may tell so many of them",
    ]
    rate, counts = idioms(sample)
    assert all(counts.values()), counts
    assert rate > MOST


def test_one_class_name_one_meaning() -> None:
    """A class name is defined once in the shipped packages; exceptions are listed with reasons."""
    defined = defaultdict(list)
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                defined[node.name].append(path.relative_to(ROOT).as_posix())
    assert {name for name, files in defined.items() if len(files) > 1} == set(SHARED_NAMES)
    assert len(SHARED_NAMES) <= 8


def test_a_file_that_a_docstring_names_exists() -> None:
    """A reader who is sent to a file finds it; files of other projects are listed with reasons."""
    foreign = {"train_mnist.py": "an example of Chainer, whose setting an experiment takes"}
    files = [f"/{path.relative_to(ROOT)}" for path in list_tracked(".")]
    mention = re.compile(r"(?<![\w./-])[\w/]+\.(?:py|md|toml|cu|cuh)\b")
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in sources()
        for text in (*docstrings(tree), *comments(path.read_text()))
        for name in mention.findall(text)
        if name not in foreign and not any(file.endswith(f"/{name}") for file in files)
    }
    assert not missing


@pytest.mark.parametrize(
    ("count", "most"), [(count_participles, 15), (count_idioms, 3), (count_openings, 20)]
)
def test_functions_are_verbs_and_variables_nouns(
    count: Callable[[list[Source]], Count], most: float
) -> None:
    """In 1,000 names or docstrings at most so few are participles, pronouns or questions."""
    counted = count(sources())
    assert counted.per_thousand <= most, "\n".join(map(str, counted.occurrences))


def test_the_counters_see_names() -> None:
    """The check can fail: a name or an opening of each kind is counted."""
    code = 'def settled(job, own):\n    """What it is."""\n    found = own\n\ndef apply(job): ...\n'
    source = [(Path("example.py"), ast.parse(code))]
    assert [item.text for item in count_participles(source).occurrences] == ["settled"]
    assert {item.text for item in count_idioms(source).occurrences} == {"own", "found"}
    assert [item.text for item in count_openings(source).occurrences] == ["What it is."]
