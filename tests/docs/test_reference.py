"""The reference agrees with the code: its generated parts are those that the code has now."""

import re

import pytest

import deploy
import ps
import worker
import worker.caffe
import worker.ml
import worker.strategies
import worker.torch
from deploy.cli.command_layout import GROUPS
from deploy.run.updates_parquet import COLUMNS
from shards.update_records import RECORD
from tests.support.doc_pages import PAGES, read
from tests.support.reference_generator import COMMANDS, PARTS, build_page, current, parts_of

GENERATED = [page for page in PAGES if parts_of(read(page))]


@pytest.mark.parametrize("page", GENERATED)
def test_generated_parts_are_current(page: str) -> None:
    """Nobody has edited a generated part, or the code without it; `make docs` mends both."""
    text = read(page)
    assert current(text) == text, f"{page}: run `make docs`"


def test_every_part_is_on_a_page() -> None:
    """Every command, file and public name is in the reference."""
    shown = {part for page in GENERATED for part in parts_of(read(page))}
    assert shown == set(PARTS)


def test_every_public_name_has_an_entry() -> None:
    """The built page of public names has a heading for every name that a package exports."""
    page = build_page(read("docs/reference/api.md"))
    entries = re.findall(r"^### `([\w.]+)`$", page, re.MULTILINE)
    packages = (ps, worker, worker.caffe, worker.strategies, worker.ml, worker.torch, deploy)
    public = {f"{package.__name__}.{name}" for package in packages for name in package.__all__}
    assert {name for name in public if "._" not in name} <= set(entries)
    assert len(entries) == len(set(entries))


def test_long_parts_are_not_in_the_repository() -> None:
    """What fills a page is built with the site: the committed text has its prose alone."""
    for page in ("docs/reference/api.md", "docs/reference/service-bodies.md"):
        text = read(page)
        assert len(build_page(text)) > 10 * len(text)


def test_an_edited_part_is_found() -> None:
    """The text between the markers is replaced as a whole, and the rest stays."""
    page = "docs/reference/run-folder.md"
    text = read(page)
    edited = text.replace("| `wall_age_s` |", "| `wall_age` |")
    assert edited != text
    assert current(edited) == text


def test_every_command_has_a_section() -> None:
    """The sections are the commands, in the order and the groups of `downpour --help`."""
    page = build_page(read("docs/reference/cli.md"))
    assert re.findall(r"^### `downpour ([\w -]+)`$", page, re.MULTILINE) == list(COMMANDS)
    groups = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert groups == ["All commands", *GROUPS]


def test_an_option_name_is_quoted_once_and_whole() -> None:
    """Text that is code already stays as it is, also where an option's name ends it."""
    page = build_page(read("docs/reference/cli.md"))
    assert "as in `downpour train --link`." in page
    assert not re.search(r"`-[a-z-]*`[a-z]", page)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help(name: str) -> None:
    """What `--help` and the page say of a command, an argument or an option ends in a sentence."""
    texts = [COMMANDS[name].help, *(parameter.help for parameter in COMMANDS[name].params)]
    assert all(re.search(r"\.( \\\[default: .*\])?\s*$", text) for text in texts), texts


def test_every_measurement_is_a_column() -> None:
    """All that a shard records of an update is in `updates.parquet`."""
    assert set(RECORD.names or ()) <= set(COLUMNS)
