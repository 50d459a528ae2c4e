"""The commands that pages and docstrings show exist: each parses against the command line, or the
Makefile and its tables of programs."""

import re
import shlex

import pytest
import typer

from tests.bench.__main__ import commands as bench_commands
from tests.bench.__main__ import describe, list_benchmarks
from tests.programs.__main__ import TABLES
from tests.programs.table import Command, check_request
from tests.support.command_parser import parse
from tests.support.doc_pages import PAGES, ROOT, commands, fences, read
from tests.support.structure import list_tracked

SHELLS = {"bash", "sh", "console"}
# Typer brings a Click of its own, which it does not export.
UsageError = typer.BadParameter.__mro__[1]


_RULE = re.compile(r"^([a-z-]+):.*\n((?:\t.*\n)*)", re.MULTILINE)
_VARIABLE = re.compile(r"\$\((?:if \$\()?([A-Z]+)\)")
_QUOTED_MAKE = re.compile(r"`make ([a-z][^`]*)`")
PROGRAMS = [
    (target, variable, name) for target, (variable, programs) in TABLES.items() for name in programs
]


def targets() -> dict[str, set[str]]:
    """The targets of the Makefile, each with the variables that its recipe reads."""
    rules = _RULE.findall((ROOT / "Makefile").read_text())
    return {target: {"PYTHON", *_VARIABLE.findall(recipe)} for target, recipe in rules}


def check_make(words: list[str]) -> None:
    """Check the words after `make`: targets, and variables that these read.

    Raises SystemExit or AssertionError for what there is not.
    """
    given = dict(word.split("=", 1) for word in words if "=" in word)
    for target in (word for word in words if "=" not in word):
        assert target in targets(), words
        if target in TABLES and given:
            variable, programs = TABLES[target]
            check_request(programs, variable, given)
        else:
            assert given.keys() <= targets()[target], words
        if target == "bench":
            list(bench_commands(given.get("B", "").split(), []))


def words_after_application(words: list[str]) -> list[str]:
    """The words that `spark_submit.py` gets from a command of spark-submit, if it runs that."""
    names = [word.rpartition("/")[2] for word in words]
    return words[names.index("spark_submit.py") + 1 :] if "spark_submit.py" in names else []


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page: str) -> None:
    """A line of `downpour` or `spark_submit.py` has options, one of `make` targets that exist."""
    for fence in fences(read(page)):
        if fence.language not in SHELLS:
            continue
        for words in commands(fence.text):
            if words[0] == "downpour":
                parse(words)
            elif words[0] == "make":
                check_make(words[1:])
            elif words[0] == "spark-submit" and (ours := words_after_application(words)):
                parse(["downpour", *ours])


def test_quoted_make_commands_exist() -> None:
    """So does a `make` command that is quoted in a sentence, a docstring or a comment."""
    files = list_tracked(".", ".md", ".py", ".toml", ".txt")
    quoted = [text for file in files for text in _QUOTED_MAKE.findall(file.read_text())]
    assert len(quoted) > 50
    for text in quoted:
        check_make(shlex.split(text))


def test_a_wrong_make_command_is_found() -> None:
    """An unknown target, variable, benchmark, check or option of a check is an error."""
    for text in ("tests", "demo DIR=x"):
        with pytest.raises(AssertionError, match=text.split()[0]):
            check_make(shlex.split(text))
    for text, named in (
        ("bench B=smal", "smal"),
        ("check C=choas", "choas"),
        ("check C=chaos KILS=3", "KILS; it has SECONDS, KILLS"),
        ("experiment SHAPES=1", "E="),
    ):
        with pytest.raises(SystemExit, match=named):
            check_make(shlex.split(text))


def test_few_targets_are_documented() -> None:
    """A newcomer reads `make help` in one look."""
    documented = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert 0 < len(documented) <= 15
    assert set(documented) <= targets().keys()


def check_command(command: Command) -> None:
    """Check that a command of a program is known: its module with its flags, or `downpour`."""
    words = [str(word) for word in command]
    if words[0].endswith("downpour"):
        parse(["downpour", *words[1:]])
    elif words[1] == "-m":
        module = ROOT.joinpath(*words[2].split("."))
        module = module / "__main__.py" if module.is_dir() else module.with_suffix(".py")
        source = module.read_text()
        flags = [word for word in words[3:] if word.startswith("--")]
        assert all(f'"{flag}"' in source for flag in flags), words


@pytest.mark.parametrize(("target", "variable", "name"), PROGRAMS)
def test_programs_start_what_exists(target: str, variable: str, name: str) -> None:
    """Every command of a check or an experiment is a module or a command, with flags it knows."""
    program, _ = check_request(TABLES[target][1], variable, {variable: name})
    options = {key.lower(): value or "1" for key, value in program.options.items()}
    for given in ({}, options):
        steps = list(program.yield_commands(**given))
        assert steps
        for command in steps:
            check_command(command)
    assert program.summary


def test_benchmarks_have_a_line_each() -> None:
    """Every benchmark is a module that says in a line what it measures."""
    for name, file in list_benchmarks().items():
        assert describe(file), name
        (command,) = bench_commands([name], [])
        check_command(command)


def test_a_wrong_command_is_found() -> None:
    """The parser that judges the pages refuses what the command line refuses."""
    parse(commands("downpour train --shards 2 \\\n  --no-shuffle --resume runs/demo  # why")[0])
    with pytest.raises(UsageError, match="--shard-count"):
        parse(["downpour", "train", "--shard-count", "2"])
    with pytest.raises(UsageError, match="trian"):
        parse(["downpour", "trian"])
