"""Plots of a run, drawn from its `updates.parquet`: its loss, its staleness, and what a loss costs.

The file is read in batches and points are thinned out, so that a long run needs no more memory than
a short one; counts and extremes come from every row. matplotlib is imported only when a plot is
drawn. It writes to files and needs no display.
"""

import io
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from deploy.run.evaluations_csv import read_evaluations
from deploy.run.folder import EVALUATIONS, UPDATES
from deploy.run.summary import Summary
from deploy.run.updates_parquet import read_updates
from shards.errors import GiveUp
from shards.extras import missing
from worker.training.evaluation import Evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_MAX_POINTS = 12_000
_SPANS = 120
_MAX_BARS = 40
_COLOURS = 128  # of a picture
_MAX_NAMES = 10
_INK, _FAINT, _MAIN, _LIMIT = "#1f2933", "#616e7c", "#2a6fbb", "#c0392b"
_TEST = "#1b7837"


class Losses(msgspec.Struct, frozen=True):
    """A sample of the updates that shard 0 applied, in order, as arrays of equal length.

    `samples` is the total number trained on by then; `seconds` is the time since the first update;
    `pushed` are the bytes that all shards got by then, reckoned from shard 0's share of the whole.
    """

    worker: NDArray[np.object_]
    loss: Floats
    samples: Integers
    seconds: Floats
    pushed: Floats


class Gaps(msgspec.Struct, frozen=True):
    """The clock gap on shard 0 over consecutive spans of updates, as arrays of equal length."""

    seconds: Floats
    least: Floats
    mean: Floats
    most: Floats


def plot_loss(updates: Path, summary: Summary, out: Path, tests: Sequence[Evaluation] = ()) -> None:
    """Draw the loss of the updates, against samples and against seconds, into the PNG `out`.

    Each point is an update, in its worker's colour; the line is the running mean. All shards apply
    the same pushes, so only shard 0's are drawn. The accuracy of the `tests`, or their loss if they
    have none, is drawn against samples on its own axis. Raises BadInput for a file without the
    columns of updates, GiveUp if the disk is full or fails.
    """
    losses = read_losses(updates)
    figure, (by_samples, by_seconds) = _figure()
    _draw_losses(by_samples, losses.samples / 1e3, losses)
    _draw_losses(by_seconds, losses.seconds, losses)
    by_samples.set(xlabel="samples trained on, thousands", ylabel="training loss")
    by_samples.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    by_seconds.set(xlabel="seconds since the first update")
    _draw_tests(by_samples, tests)
    if len(losses.loss):
        _draw_updates_axis(by_samples, max(1, summary.updates) / max(1, losses.samples[-1]) * 1e3)
        by_seconds.legend(loc="upper right", frameon=False, fontsize=9)
    _finish(figure, _test_heading(summary), _ran(summary), out)


def plot_staleness(updates: Path, summary: Summary, out: Path) -> None:
    """Draw how stale the updates were, and the clock gap over time, into the PNG `out`.

    Left: a histogram over all shards' updates. Right: the range and mean of the gap on shard 0 in
    spans with equal numbers of updates, and its limit, the bound + 1. Raises the errors of
    `plot_loss`.
    """
    figure, (histogram, gaps) = _figure()
    _draw_histogram(histogram, count_staleness(updates), summary)
    _draw_gaps(gaps, read_gaps(updates), summary.staleness_bound)
    _finish(figure, _how_stale(summary), _ran(summary), out)


def plot_costs(runs: Mapping[str, Path], out: Path) -> None:
    """Draw the loss of runs against samples, seconds and bytes pushed, into the PNG `out`.

    `runs` are run folders by the label of each. Of one run each point is an update, as in
    `plot_loss`, and its tests' loss is drawn as well. Of several each is a curve: of its tests'
    loss, or without any the running mean of its updates' loss. Raises BadInput for a folder without
    a record of updates, GiveUp if the disk is full or fails.
    """
    figure, panels = _figure(3)
    for number, (label, folder) in enumerate(runs.items()):
        losses = read_losses(folder / UPDATES)
        tests = _read_test_losses(folder)
        samples = np.array([test.samples for test in tests], np.float64)
        seconds = np.array([test.seconds for test in tests], np.float64)
        pushed = np.interp(samples, [0, *losses.samples], [0, *losses.pushed])
        points = samples, seconds, pushed
        xs = losses.samples.astype(np.float64), losses.seconds, losses.pushed
        heights = [test.figures["loss"] for test in tests]
        for axes, x, x_of_tests, scale in zip(panels, xs, points, (1e3, 1, 1e6), strict=True):
            if len(runs) == 1:
                _draw_losses(axes, x / scale, losses)
            elif not tests:
                axes.plot(x / scale, running_mean(losses.loss), color=f"C{number}", label=label)
            if tests:
                colour, name = (_TEST, "test") if len(runs) == 1 else (f"C{number}", label)
                axes.plot(x_of_tests / scale, heights, ".-", color=colour, label=name)
    labels = "samples trained on, thousands", "seconds", "MB pushed"
    for axes, xlabel in zip(panels, labels, strict=True):
        axes.set_xlabel(xlabel)
        axes.autoscale(axis="x")  # over all runs and their tests
        axes.set_xlim(left=0)
    panels[0].set_ylabel("loss")
    panels[-1].legend(loc="upper right", frameon=False, fontsize=9)
    _finish(figure, "Loss by samples, time and bytes", ", ".join(runs), out)


# --- reading --------------------------------------------------------------------------------------


def read_losses(updates: Path, most: int = _MAX_POINTS) -> Losses:
    """The losses on shard 0, thinned to about `most` updates; skips updates without a loss."""
    # Randomly, not every nth: workers take turns, so every nth update may be the same worker's.
    rng, chosen = np.random.default_rng(0), min(1.0, most / max(1, _rows(updates)))
    workers, losses, samples, seconds, pushed = [], [], [], [], []
    seen, sent = 0, 0.0
    for batch in read_updates(updates, ("worker", "loss", "samples", "time", "bytes"), shard=0):
        total = seen + batch.column("samples").to_numpy().cumsum()
        total_bytes = sent + batch.column("bytes").to_numpy().cumsum()
        loss = batch.column("loss").to_numpy(zero_copy_only=False)
        drawn = np.isfinite(loss) & (rng.random(len(loss)) < chosen)
        workers.append(batch.column("worker").to_numpy(zero_copy_only=False)[drawn])
        losses.append(loss[drawn])
        samples.append(total[drawn])
        seconds.append(batch.column("time").to_numpy()[drawn])
        pushed.append(total_bytes[drawn])
        seen, sent = (int(total[-1]), float(total_bytes[-1])) if len(total) else (seen, sent)
    share = sent / max(1, _count_bytes(updates)) or 1.0
    return Losses(
        np.concatenate([np.empty(0, object), *workers]),
        np.concatenate([np.empty(0), *losses]),
        np.concatenate([np.empty(0, np.int64), *samples]),
        np.concatenate([np.empty(0), *seconds]),
        np.concatenate([np.empty(0), *pushed]) / share,
    )


def count_staleness(updates: Path) -> Integers:
    """The number of rows by staleness: index 0 counts those of staleness 0, and so on."""
    counts = np.zeros(1, np.int64)
    for batch in read_updates(updates, ("staleness",)):
        more = np.bincount(batch.column("staleness").to_numpy(), minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    return counts


def read_gaps(updates: Path, spans: int = _SPANS) -> Gaps:
    """The clock gap on shard 0 in at most `spans` spans with equal numbers of updates."""
    length = max(1, -(-_rows(updates) // spans))
    sums = np.zeros((3, spans))
    least, most = np.full(spans, np.inf), np.full(spans, -np.inf)
    first = 0
    for batch in read_updates(updates, ("clock_gap", "time"), shard=0):
        gap = batch.column("clock_gap").to_numpy()
        span = np.arange(first, first + len(gap)) // length
        for row, values in enumerate((np.ones(len(gap)), batch.column("time").to_numpy(), gap)):
            np.add.at(sums[row], span, values)
        np.minimum.at(least, span, gap)
        np.maximum.at(most, span, gap)
        first += len(gap)
    filled = sums[0] > 0
    count, seconds, total = sums[:, filled]
    return Gaps(seconds / count, least[filled], total / count, most[filled])


def _read_test_losses(folder: Path) -> list[Evaluation]:
    """The tests of a run that have a loss; none if the run made no tests."""
    path = folder / EVALUATIONS
    tests = read_evaluations(path) if path.exists() else []
    return [test for test in tests if "loss" in test.figures]


def _count_bytes(updates: Path) -> int:
    """The bytes of all pushes to all shards."""
    return sum(
        int(batch.column("bytes").to_numpy().sum()) for batch in read_updates(updates, ("bytes",))
    )


def _rows(updates: Path) -> int:
    return sum(batch.num_rows for batch in read_updates(updates, ("shard",), shard=0))


# --- drawing --------------------------------------------------------------------------------------


def _draw_losses(axes: "Axes", x: Floats, losses: Losses) -> None:
    names = sorted(set(losses.worker), key=lambda name: (len(name), name))
    palette = _colours(len(names))
    colour = {name: palette[number] for number, name in enumerate(names)}
    # All workers in one call and in order, or the last worker's points would cover the others'.
    points = [colour[name] for name in losses.worker]
    axes.scatter(x, losses.loss, s=7, c=points or None, alpha=0.45, linewidths=0)
    for name in names if len(names) <= _MAX_NAMES else ():
        axes.scatter([], [], s=30, color=colour[name], label=name)
    smooth = running_mean(losses.loss)
    axes.plot(x, smooth, color=_INK, linewidth=1.6, label="running mean")
    if len(smooth) and 0 < smooth.min() * 10 < smooth.max():
        axes.set_yscale("log")
        axes.set_ylim(bottom=max(smooth.min() / 30, losses.loss[losses.loss > 0].min() / 1.3))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(0, x[-1] if len(x) and x[-1] > 0 else 1)


def _draw_tests(axes: "Axes", tests: Sequence[Evaluation]) -> None:
    """Draw the tests' accuracy, or their loss, on a second scale on the right."""
    names = {name for test in tests for name in test.figures}
    name = next((name for name in ("accuracy", "loss") if name in names), None)
    if name is None:
        return
    points = [(test.samples / 1e3, test.figures[name]) for test in tests if name in test.figures]
    scale = 100.0 if name == "accuracy" else 1.0
    right = axes.twinx()
    samples, values = zip(*points, strict=True)
    heights = [value * scale for value in values]
    right.set_ylabel(f"test {name}{', %' if name == 'accuracy' else ''}", color=_TEST)
    right.tick_params(axis="y", colors=_TEST)
    right.spines[["top", "left"]].set_visible(False)
    low, high = axis_range(heights)
    right.set_ylim(low, min(high, 100.0) if name == "accuracy" else high)
    right.plot(samples, heights, "D--", color=_TEST, markersize=6, markeredgecolor="white")
    last = f"{heights[-1]:.2f} %" if name == "accuracy" else f"{heights[-1]:.4g}"
    right.annotate(
        last,
        (samples[-1], heights[-1]),
        xytext=(-6, 7),
        textcoords="offset points",
        horizontalalignment="right",
        color=_TEST,
        fontweight="bold",
        bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1},
    )


def axis_range(heights: Sequence[float]) -> tuple[float, float]:
    """The range of an axis on which the later values can be told apart.

    The first tests of a run are often far from the others, which would then be one flat line. So
    the first quarter of them, at least one of several, does not count.
    """
    later = heights[min(max(1, len(heights) // 4), len(heights) - 1) :]
    low, high = min(later), max(later)
    margin = max(0.35 * (high - low), 0.001 * abs(high), 1e-6)
    return low - margin, high + margin


def _draw_updates_axis(axes: "Axes", in_a_thousand: float) -> None:
    """Add a second scale in updates at the top of an axis in thousands of samples."""
    from matplotlib.ticker import MaxNLocator

    to_updates, to_samples = (
        partial(np.multiply, in_a_thousand),
        partial(np.multiply, 1 / in_a_thousand),
    )
    top = axes.secondary_xaxis("top", functions=(to_updates, to_samples))
    top.set_xlabel("updates", color=_FAINT, fontsize=9)
    top.tick_params(colors=_FAINT, labelsize=8)
    top.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    top.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def running_mean(values: Floats) -> Floats:
    """The centred running mean over a fiftieth of the values, at least 5, fewer at the ends."""
    count = len(values)
    reach = max(2, count // 100)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    low = np.maximum(np.arange(count) - reach, 0)
    high = np.minimum(np.arange(count) + reach + 1, count)
    means: Floats = (sums[high] - sums[low]) / (high - low)
    return means


def _draw_histogram(axes: "Axes", counts: Integers, summary: Summary) -> None:
    total = int(counts.sum())
    width = max(1, -(-len(counts) // _MAX_BARS))
    starts = np.arange(0, len(counts), width)
    shares = np.add.reduceat(counts, starts) / max(1, total)
    axes.bar(starts + (width - 1) / 2, shares * 100, width * 0.9, color=_MAIN)
    axes.set(xlabel="staleness of an update, in updates", ylabel="% of updates")
    axes.locator_params(axis="x", integer=True)
    if summary.staleness_mean is not None:
        axes.axvline(summary.staleness_mean, color=_INK, linewidth=1.2, linestyle="--")
        axes.set_ylim(top=shares.max() * 112)
        axes.annotate(
            f"mean {summary.staleness_mean:.2f}",
            (summary.staleness_mean, 0.99),
            xycoords=("data", "axes fraction"),
            xytext=(6, 0),
            textcoords="offset points",
            verticalalignment="top",
            color=_INK,
        )


def _draw_gaps(axes: "Axes", gaps: Gaps, bound: int | None) -> None:
    axes.fill_between(
        gaps.seconds, gaps.least, gaps.most, color=_MAIN, alpha=0.25, linewidth=0, label="range"
    )
    axes.plot(gaps.seconds, gaps.mean, color=_MAIN, linewidth=1.6, label="mean")
    top = gaps.most.max(initial=1.0)
    if bound is not None:
        axes.axhline(
            bound + 1, color=_LIMIT, linewidth=1.4, linestyle="--", label=f"bound + 1 = {bound + 1}"
        )
        top = max(top, bound + 1)
    axes.set(
        xlabel="seconds since the first update",
        ylabel="clock gap, in steps",
        ylim=(0, top * 1.25),
    )
    axes.set_xlim(0, gaps.seconds.max(initial=0) or 1)
    axes.locator_params(axis="y", integer=True)
    axes.legend(loc="upper right", ncols=3, frameon=False, fontsize=9)


def _colours(count: int) -> list[tuple[float, ...]]:
    from matplotlib import colormaps

    if count <= _MAX_NAMES:
        return [colormaps["tab10"](number) for number in range(count)]
    return [colormaps["turbo"](number / (count - 1)) for number in range(count)]


def _figure(count: int = 2) -> "tuple[Figure, NDArray[np.object_]]":
    """An empty figure with some panels. It avoids pyplot, which never frees figures.

    Raises BadInput where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:  # the extra `service` does without
        raise missing("a picture", "matplotlib", "cli") from None

    figure = Figure(figsize=(11, 4.6), layout="constrained", facecolor="white")
    panels = figure.subplots(1, count)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, panels


def _finish(figure: "Figure", heading: str, subject: str, out: Path) -> None:
    from PIL import Image

    figure.suptitle(f"{heading}\n", fontsize=14, fontweight="bold", color=_INK)
    figure.text(0.5, 0.925, subject, ha="center", va="top", fontsize=10, color=_FAINT)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=130)
    # Thousands of translucent points in full colour take half a megabyte; a palette, a fifth of it.
    picture = Image.open(drawn).convert("RGB")
    try:
        picture.quantize(_COLOURS, dither=Image.Dither.NONE).save(out, optimize=True)
    except OSError as error:
        raise GiveUp(f"picture {out}: {error.strerror}") from None


# --- headings -------------------------------------------------------------------------------------


def _test_heading(summary: Summary) -> str:
    parts = []
    if summary.test_accuracy is not None:
        parts.append(f"test accuracy {summary.test_accuracy:.2%}")
    if summary.test_loss is not None:
        parts.append(f"test loss {summary.test_loss:.4g}")
    return ", ".join(parts).capitalize() or "Training loss"


def _how_stale(summary: Summary) -> str:
    if summary.staleness_mean is None:
        return "No update was applied"
    return (
        f"Staleness {summary.staleness_mean:.2f} on average, at most {summary.staleness_max};"
        f" clock gap at most {summary.max_clock_gap}"
    )


def _ran(summary: Summary) -> str:
    bound = "none" if summary.staleness_bound is None else summary.staleness_bound
    return (
        f"workers {summary.workers}   shards {summary.shards}   staleness bound {bound}"
        f"   updates {summary.updates:,}   samples {summary.samples:,}"
    )
