"""The table of strategies agrees with their classes: names, options and defaults."""

import re

import pytest
from msgspec.structs import fields

from tests.support.doc_pages import read, rows, section
from worker.strategies import STRATEGIES

TABLE = {
    re.findall(r"`(\w+)`", cells[0])[0]: cells
    for cells in rows(section(read("docs/how-to/strategies.md"), "## The table"))
}


def test_the_table_has_every_strategy() -> None:
    """One row each, and no other."""
    assert set(TABLE) == set(STRATEGIES)
    assert all(len(cells) == 6 and all(cells) for cells in TABLE.values())


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_row_names_the_options(name: str) -> None:
    """All of them, each with its default; what a strategy has of another is said so."""
    cell = TABLE[name][0]
    own = fields(STRATEGIES[name])
    inherited = re.search(r"as `(\w+)`, and", cell)
    if inherited:
        own = tuple(f for f in own if f not in fields(STRATEGIES[inherited[1]]))
    shown = dict(re.findall(r"`(\w+)` ([\w./]+)", cell.partition(":")[2]))
    shown.pop(inherited[1] if inherited else "", None)
    named = {field.name for field in own}
    if inherited:
        named -= {field.name for field in fields(STRATEGIES[inherited[1]])}
    assert set(shown) == named
    for field in own:
        if field.name in named and isinstance(field.default, int | float):
            assert shown[field.name] == f"{field.default:g}".replace("False", "false") or (
                shown[field.name] == str(field.default).lower()
            )


def test_the_table_of_optimisers_has_every_strategy() -> None:
    """It says for each one whether an optimiser of PyTorch can take its local steps."""
    table = rows(section(read("docs/how-to/pytorch.md"), "## Which optimiser takes the steps"))
    shown = {name: cells[2] for cells in table for name in re.findall(r"`(\w+)`", cells[0])}
    assert {name: not text.startswith("refused") for name, text in shown.items()} == {
        name: kind.takes_optimizer for name, kind in STRATEGIES.items()
    }
