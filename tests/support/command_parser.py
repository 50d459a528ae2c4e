"""Parses `downpour` commands as the command line does, for tests of what shows such commands."""

from itertools import dropwhile
from typing import Any

from typer.core import TyperGroup

from deploy.cli.app import command_line

_A_JOB = "0" * 17


def parse(words: list[str]) -> None:
    """Parse a `downpour` command as the command line does, and run nothing.

    On the pages `ID` stands for the id of a job.
    """
    group = command_line()
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
