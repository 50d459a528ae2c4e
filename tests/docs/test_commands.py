"""The commands that the pages show exist: each parses against the command line or the Makefile."""

import re
from itertools import dropwhile
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from deploy.cli.app import app
from tests.support.doc_pages import PAGES, ROOT, commands, fences, prose, read

SHELLS = {"bash", "sh", "console"}
_A_JOB = "0" * 17
# Typer brings a Click of its own, which it does not export.
UsageError = typer.BadParameter.__mro__[1]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def parse(words: list[str]) -> None:
    """Parse a `downpour` command as the command line does, and run nothing.

    On the pages `ID` stands for the id of a job.
    """
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    words = [word for word in words if word not in {"-h", "--help"}]
    words = [_A_JOB if word == "ID" else word for word in words]
    with group.make_context("downpour", words[1:]) as context:
        own = dropwhile(lambda word: word.startswith("-"), words[1:])  # options of all commands
        _parse(group, context, list(own))


def _parse(group: TyperGroup, context: Any, words: list[str]) -> None:
    name, command, rest = group.resolve_command(context, words)
    assert command is not None
    if isinstance(command, TyperGroup):
        _parse(command, command.make_context(name, rest, parent=context), rest)
    else:
        command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page: str) -> None:
    """A `downpour` line has options that exist, a `make` line targets that exist."""
    for fence in fences(read(page)):
        if fence.language not in SHELLS:
            continue
        for words in commands(fence.text):
            if words[0] == "downpour":
                parse(words)
            elif words[0] == "make":
                assert {word for word in words[1:] if "=" not in word} <= targets(), words


@pytest.mark.parametrize("page", PAGES)
def test_inline_make_targets_exist(page: str) -> None:
    """So does a target that is named in a sentence."""
    assert set(re.findall(r"`make ([a-z-]+)`", prose(read(page)))) <= targets()


def test_a_wrong_command_is_found() -> None:
    """The parser that judges the pages refuses what the command line refuses."""
    parse(commands("downpour train --shards 2 \\\n  --no-shuffle --resume runs/demo  # why")[0])
    with pytest.raises(UsageError, match="--shard-count"):
        parse(["downpour", "train", "--shard-count", "2"])
    with pytest.raises(UsageError, match="trian"):
        parse(["downpour", "trian"])
