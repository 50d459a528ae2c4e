"""The plots: their input figures are correct, and every kind of run can be drawn."""

import gc
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from deploy.run.plots import (
    axis_range,
    count_staleness,
    plot_loss,
    plot_staleness,
    read_gaps,
    read_losses,
    running_mean,
)
from deploy.run.summary import Summary
from deploy.run.updates_parquet import UpdatesWriter
from shards.errors import BadInput, GiveUp
from tests.support.run_records import records, summary
from worker.training.evaluation import Evaluation
from worker.training.figures import Rows, UpdateTally

PNG = b"\x89PNG\r\n\x1a\n"


def write(path: Path, *shards: Rows) -> Path:
    with UpdatesWriter(path / "updates.parquet", job="j", seed=0) as writer:
        writer.write(shards)
    return path / "updates.parquet"


def summed(rows: Rows, bound: int | None = 4) -> Summary:
    made: Summary = summary(UpdateTally.of([rows]), staleness_bound=bound)
    return made


def test_losses_are_shard_0s_in_order(tmp_path: Path) -> None:
    """Samples accumulate over all workers; an update without a loss is not drawn, but counted."""
    rows = records(4, loss=[2.0, np.nan, 1.0, np.inf], samples=[10, 20, 30, 40])
    rows["worker"] = [b"w0", b"w1", b"w1", b"w0"]
    got = read_losses(write(tmp_path, rows, records(4, loss=9.0)))
    assert got.loss.tolist() == [2.0, 1.0]
    assert got.samples.tolist() == [10, 60]
    assert got.seconds.tolist() == [0.0, 2.0]
    assert got.worker.tolist() == ["w0", "w1"]


def test_many_losses_are_thinned_without_preferring_a_worker(tmp_path: Path) -> None:
    """Of workers that take turns, each keeps about its share, and the last sample count is
    exact."""
    rows = records(8000, loss=1.0)
    rows["worker"] = [b"w%d" % (number % 4) for number in range(8000)]
    got = read_losses(write(tmp_path, rows), most=800)
    assert 700 < len(got.loss) < 900
    shares = np.unique(got.worker, return_counts=True)[1] / len(got.worker)
    assert np.abs(shares - 0.25).max() < 0.05
    assert set((got.samples / 64 - 1).tolist()) <= set(got.seconds.tolist())


def test_staleness_is_counted_over_all_shards(tmp_path: Path) -> None:
    """The histogram equals NumPy's over all rows."""
    rng = np.random.default_rng(8)
    one, two = (records(300, staleness=rng.integers(0, most, 300)) for most in (4, 9))
    got = count_staleness(write(tmp_path, one, two))
    assert (
        got.tolist() == np.bincount(np.concatenate([one["staleness"], two["staleness"]])).tolist()
    )


@pytest.mark.parametrize(("count", "length"), [(7, 1), (100, 10), (95, 10), (101, 11)])
def test_gaps_are_taken_over_spans_of_updates(tmp_path: Path, count: int, length: int) -> None:
    """Minimum, mean and maximum of each span equal NumPy's, also for the shorter last span."""
    rng = np.random.default_rng(count)
    rows = records(count, clock_gap=rng.integers(0, 9, count))
    got = read_gaps(write(tmp_path, rows, records(count)), spans=10)
    spans = [rows["clock_gap"][first : first + length] for first in range(0, count, length)]
    assert got.least.tolist() == [span.min() for span in spans]
    assert got.most.tolist() == [span.max() for span in spans]
    np.testing.assert_allclose(got.mean, [span.mean() for span in spans])
    np.testing.assert_allclose(got.seconds[0], np.arange(len(spans[0])).mean())


def test_a_running_mean_shrinks_at_the_ends() -> None:
    """It equals the mean over the existing neighbours, computed one by one."""
    values = np.random.default_rng(1).standard_normal(400)
    expected = [values[max(0, at - 4) : at + 5].mean() for at in range(400)]
    np.testing.assert_allclose(running_mean(values), expected, rtol=1e-12, atol=1e-12)
    assert running_mean(np.empty(0)).tolist() == []


RUNS = {
    "ordinary": (records(300, loss=np.linspace(2.3, 0.01, 300), staleness=1, clock_gap=3), 4),
    "no bound": (records(50, loss=1.0, staleness=np.arange(50)), None),
    "many workers": (records(64, worker=[b"w%d" % n for n in range(64)], loss=0.5), 0),
    "one update": (records(1, loss=2.3), 4),
    "zero losses": (records(30, loss=0.0), 4),
    "no losses": (records(30, loss=np.nan), 4),
    "nothing": (records(0), 4),
    "many points": (
        records(
            20_000,
            worker=[b"w%d" % (n % 4) for n in range(20_000)],
            loss=np.random.default_rng(1).lognormal(size=20_000),
        ),
        4,
    ),
    "enormous staleness": (records(9, loss=1.0, staleness=[0] * 8 + [100_000]), 4),
}


@pytest.fixture
def no_garbage() -> None:
    """Collect the garbage of earlier tests, which may warn, before a test forbids warnings."""
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.usefixtures("no_garbage")
@pytest.mark.filterwarnings("error")
def test_every_kind_of_run_can_be_drawn(tmp_path: Path, name: str) -> None:
    """Both plots are PNGs of one size, for a page to load at once, drawn without a warning."""
    rows, bound = RUNS[name]
    updates = write(tmp_path, rows)
    for draw in (plot_loss, plot_staleness):
        draw(updates, summed(rows, bound), tmp_path / "out.png")
        content = (tmp_path / "out.png").read_bytes()
        assert content.startswith(PNG)
        assert len(content) < 200_000
        width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
        assert (width, height) == (1430, 598)


@pytest.mark.parametrize(
    "figures", [{"accuracy": 0.97, "loss": 0.1}, {"loss": 2.3}, {"top5": 0.9}], ids=str
)
@pytest.mark.usefixtures("no_garbage")
@pytest.mark.filterwarnings("error")
def test_tests_are_drawn(tmp_path: Path, figures: dict[str, float]) -> None:
    """The tests' accuracy is drawn, else their loss; a net with neither leaves the plot
    unchanged."""
    updates = write(tmp_path, records(300, loss=np.linspace(2.3, 0.01, 300), samples=64))
    run, pictures = summed(records(300)), []
    for tests in ((), [Evaluation(n, 64 * n, n, figures) for n in (0, 100, 200)]):
        plot_loss(updates, run, tmp_path / "out.png", tests)
        pictures.append((tmp_path / "out.png").read_bytes())
    assert (pictures[0] != pictures[1]) == ("top5" not in figures)


@pytest.mark.parametrize(
    "heights", [[11.86, 98.01, 98.48, 98.78], [10.0, 98.78], [98.78], [50.0, 50.0, 50.0]]
)
def test_the_later_tests_can_be_told_apart(heights: list[float]) -> None:
    """The axis shows all tests but the first ones, and they fill a good part of it."""
    low, high = axis_range(heights)
    shown = heights[1:] or heights
    assert low < min(shown) <= max(shown) < high
    assert high - low <= max(2 * (max(shown) - min(shown)), 0.01 * max(shown))


def test_errors_name_the_file(tmp_path: Path) -> None:
    """A missing file of updates and an unwritable plot are one-line errors."""
    rows = records(3, loss=1.0)
    with pytest.raises(BadInput, match=r"nowhere\.parquet: "):
        plot_loss(tmp_path / "nowhere.parquet", summed(rows), tmp_path / "out.png")
    with pytest.raises(GiveUp, match=r"gone/out\.png"):
        plot_staleness(write(tmp_path, rows), summed(rows), tmp_path / "gone" / "out.png")


def test_matplotlib_is_loaded_only_to_draw() -> None:
    """Importing the module loads neither matplotlib nor a window toolkit."""
    code = "import deploy.run.plots, sys; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra `service` does without it; the error says how to install it."""
    rows = records(4, loss=1.0)
    updates = write(tmp_path, rows)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BadInput, match=r"a picture: expected matplotlib .*\[cli\]"):
        plot_loss(updates, summed(rows), tmp_path / "loss.png")
