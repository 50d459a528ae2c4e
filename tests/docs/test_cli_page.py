"""The page of the command line tells of every option, with the default that holds."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from deploy.cli import app
from tests.support.doc_pages import read, rows, section

PAGE = "docs/reference/cli.md"
GROUP = typer.main.get_command(app)
assert isinstance(GROUP, TyperGroup)


def flat(group: TyperGroup, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by its words, those of a group behind its name."""
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from flat(command, f"{before}{name} ")
        else:
            yield before + name, command


COMMANDS: dict[str, Any] = dict(flat(GROUP))


def told_options(name: str) -> list[Any]:
    """A command's options; its arguments are told in the text."""
    return [p for p in COMMANDS[name].params if p.opts[0].startswith("--")]


def options(name: str) -> list[list[str]]:
    """The rows of a command's table."""
    return [row for row in rows(section(read(PAGE), f"## `downpour {name}`")) if "--" in row[0]]


def default(option: Any) -> str:
    """The default that `--help` shows; empty for none."""
    told = re.search(r"\\\[default: (.*)\]", option.help)
    if told:
        return told[1]
    if isinstance(option.show_default, str):
        return str(option.show_default)
    return "" if option.default is None or option.is_flag else str(option.default)


def test_every_command_has_a_section() -> None:
    """The sections are the commands, in order."""
    assert re.findall(r"^## `downpour ([\w ]+)`$", read(PAGE), re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_told(name: str) -> None:
    """A command's table has a row for each of its options, and for no other, in the same order."""
    told = [re.findall(r"`(--[a-z-]+)`", row[0]) for row in options(name)]
    assert told == [[*p.opts, *p.secondary_opts] for p in told_options(name)]


@pytest.mark.parametrize("name", COMMANDS)
def test_defaults_hold(name: str) -> None:
    """The defaults on the page are those that the command shows."""
    assert [row[1] for row in options(name)] == [default(p) for p in told_options(name)]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_meaning(name: str) -> None:
    """A row ends in a sentence."""
    assert all(row[2].endswith(".") for row in options(name))
