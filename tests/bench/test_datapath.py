"""The benchmark of the data path measures what it says."""

import math
from pathlib import Path

import pytest

from shards.tables import PAGE_FLOATS, DenseTable, Layout, TensorSpec, cut_evenly
from tests.bench.bench_datapath import Case, Contender, Figures, judged, measure
from tests.bench.peers.contract import Setting, joined, take_updates


@pytest.mark.parametrize("module", ["ours", "raw_tcp"])
def test_a_contender_runs_and_is_measured(module: str) -> None:
    """Two workers and two shards take updates, which cost CPU seconds in some process."""
    figures = measure(Contender(module), Case(100_000, 2, 2), seconds=0.5)
    assert figures is not None
    assert figures.rate > 0
    assert figures.cpu_s_per_gb > 0
    assert figures.p50_s > 0


def test_what_cannot_run_is_named_and_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    """A contender that is not there gives no figures, and its reason is printed."""
    assert measure(Contender("nobody"), Case(10, 1, 1), seconds=0.1) is None
    assert "No module named" in capfd.readouterr().out


def test_a_contender_whose_packages_are_elsewhere_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One with an environment of its own is not run in another, and the line says who makes it."""
    lists = tmp_path / "tests" / "bench" / "peers"
    lists.mkdir(parents=True)
    (lists / "ps_lite.txt").write_text("mxnet\n")
    monkeypatch.setattr("tests.bench.bench_datapath._ROOT", tmp_path)
    assert measure(Contender("ps_lite"), Case(10, 1, 1), seconds=0.1) is None
    said = capfd.readouterr().out
    assert str(tmp_path / ".venv-peers" / "ps_lite") in said
    assert "make bench B=peers" in said


def test_every_contender_cuts_the_parameters_alike() -> None:
    """The peers' shards hold as many floats as ours, but for where our cuts are rounded to.

    A large table is cut where pages end, so each end of a part may be off by less than a page: of
    333,000 floats that is under 1 %, which no contender gains anything by.
    """
    wanted = Setting(1_000_000, 1, 3, 1.0)
    table = DenseTable("weights", (TensorSpec("all", (wanted.floats,)),))
    ours = [len(keys) for keys in cut_evenly(Layout((table,)), 3).ranges]
    theirs = [part.stop - part.start for part in wanted.parts()]
    assert sum(theirs) == wanted.floats
    assert all(abs(a - b) < 2 * PAGE_FLOATS for a, b in zip(ours, theirs, strict=True))


def test_rates_add_up_over_workers() -> None:
    """Each worker's updates over its own seconds; a span ends with the update it began."""
    took, latencies = take_updates(lambda: None, 0.01)
    assert took >= 0.01
    assert math.isclose(sum(latencies), took, rel_tol=1e-6)
    result = joined([(2.0, [1.0, 1.0]), (1.0, [1.0])])
    assert result.updates == 3
    assert math.isclose(result.rate, 2.0)


def test_a_goal_without_figures_is_not_judged() -> None:
    """What did not run is neither met nor short."""
    case = Case(10_000, 1, 1)
    rows = judged({case: {"ours:tcp": [Figures(6000.0, 1.0, 2e-4)]}})
    assert {row.name: row.met for row in rows} == {
        f"{case} updates/s": True,
        f"{case} push+pull p50": True,
    }
