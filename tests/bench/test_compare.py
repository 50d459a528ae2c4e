"""Two commits are compared by the figures that both have."""

import json
from pathlib import Path

from tests.bench.compare import figures_of, table


def test_figures_are_the_numbers_of_every_file(tmp_path: Path) -> None:
    """Items of a list become their median; of a goal only what was measured counts."""
    (tmp_path / "goals").mkdir()
    (tmp_path / "small.json").write_text(
        json.dumps({"ours": {"p50": 3, "runs": [{"s": 1}, {"s": 9}, {"s": 2}]}, "on": True})
    )
    goal = {"name": "updates/s", "measured": 7.5, "target": 8.0, "unit": "", "at_least": True}
    (tmp_path / "goals" / "bench_small.json").write_text(json.dumps([goal]))
    assert figures_of(tmp_path) == {
        "small ours p50": 3.0, "small ours runs s": 2.0, "goal: updates/s": 7.5,
    }  # fmt: skip


def test_a_row_has_medians_and_the_ratio_within_rounds() -> None:
    """A figure that one commit lacks has no row; a figure of zero has no ratio."""
    before = [{"s": 1.0, "zero": 0.0, "gone": 1.0}, {"s": 10.0, "zero": 0.0, "gone": 1.0}]
    after = [{"s": 2.0, "zero": 1.0}, {"s": 20.0, "zero": 1.0}]
    rows = [row.split() for row in table(before, after)[1:]]
    assert rows == [["s", "5.5", "11", "2.000"], ["zero", "0", "1", "-"]]
