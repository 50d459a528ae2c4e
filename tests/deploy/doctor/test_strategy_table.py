"""The kept figures of strategies by link and stragglers: the page shows them, and doctor quotes."""

from pathlib import Path

import pytest

from deploy.doctor import strategy_table
from deploy.doctor.strategy_table import keep, load_figures, quote, table
from deploy.experiments.sweeps import read_sweep

ROOT = Path(__file__).parents[3]


def test_the_page_shows_the_kept_figures() -> None:
    """One row for each strategy and place of the sweep."""
    page = (ROOT / "docs" / "measurements" / "choice.md").read_text()
    assert table(load_figures()) in page
    points = read_sweep(ROOT / "deploy" / "examples" / "choice.toml").points
    shown = {(one.name.partition(",")[0], one.place) for one in load_figures()}
    places = {
        (
            point.values["strategy"],
            (point.values["cluster.link"], bool(point.values["cluster.stragglers"])),
        )
        for point in points
    }
    assert shown == places


def test_new_figures_are_read_where_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a benchmark keeps is what doctor quotes next."""
    few = load_figures()[:2]
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(strategy_table, "FIGURES", tmp_path / "figures.json")
        keep(few)
        assert load_figures() == few
    load_figures.cache_clear()
    assert load_figures()[:2] == few


def test_doctor_quotes_the_link_that_is_like_its_own() -> None:
    """Messages that take longer than a step are those of the slow link; the fastest is first."""
    slow, fast = quote(0.2, 0.1), quote(0.01, 0.1)
    assert "100 ms and 100 Mbit" in slow
    assert "takes no time" in fast
    best = min(
        (one for one in load_figures() if one.link and not one.straggler), key=lambda one: one.rank
    )
    assert f"equal workers: {best.name} {best.seconds:.0f} s" in slow
