"""One picture of twelve shapes, from the committed table of their first registrations' trials.

    python -m tests.bench.record_pictures

Writes docs/images/shapes.png. Dots are trials, lines means of the seeds, crosses published figures.
Shape 10 has a picture of its own.
"""

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from tests.bench.pictures import save_small

mpl.use("agg")

from matplotlib import pyplot as plt

_DOCS = Path(__file__).parents[2] / "docs"
TABLE = _DOCS / "measurements" / "reports" / "shapes.csv"
_BLUE, _RED, _GREY, _GREEN, _BLACK = "#2a6fbb", "#c2410c", "#7b8794", "#2f855a", "#111111"
_COLOURS = (_BLUE, _RED, _GREEN, _BLACK, _GREY)

Row = dict[str, str]
Rows = Sequence[Row]


def read_rows(number: int, **settings: str) -> list[Row]:
    """The rows of a shape with these values in their columns, a trial once."""
    with TABLE.open(newline="") as file:
        rows = {
            row["name"]: row for row in csv.DictReader(file) if row["from"] == f"shape {number}"
        }
    return [row for row in rows.values() if settings.items() <= row.items()]


def column(rows: Rows, name: str) -> list[float]:
    """The figures of a column."""
    return [float(row[name]) for row in rows]


def draw_softsync(axis: Any) -> None:
    """Draw the error over n, at the fixed rate and at rate/n."""
    counts = (1, 2, 15, 30)
    for name, colour, times in (("rate / n", _BLUE, False), ("fixed rate", _RED, True)):
        levels = [
            [
                row
                for row in read_rows(1, strategy=f"softsync:n={n}")
                if np.isclose(float(row["rate"]), 0.064 * (n if times else 1))
            ]
            for n in counts
        ]
        _line(axis, counts, [column(level, "error") for level in levels], colour, name)
    rounds = float(np.mean(column(read_rows(1, strategy="bsp"), "error")))
    axis.axhline(rounds, color=_GREY, lw=1, label="rounds")
    axis.plot((15, 30), (90, 90), "x", color="black")
    axis.set(xscale="log", yscale="log", xlabel="n", ylabel="error, %")
    axis.set_xticks(counts, [str(n) for n in counts])
    axis.minorticks_off()
    axis.set_yticks([5, 20, 90], ["5", "20", "90"])


def draw_waits(axis: Any) -> None:
    """Draw the share of waits over the bound, of shapes 2 and 3."""
    bounds = (0, 1, 2, 4, 8, 16)
    for number, colour, name in ((2, _BLUE, "shape 2"), (3, _RED, "shape 3")):
        levels = [read_rows(number, staleness_bound=str(bound)) for bound in bounds]
        waits = [[100 * share for share in column(level, "wait_share")] for level in levels]
        _line(axis, bounds, waits, colour, name)
    axis.plot((0, 16), (50, 1.7), "x", color="black")
    axis.set(xlabel="bound s", ylabel="time waited, %")


def draw_speedups(axis: Any) -> None:
    """Draw the speed-up over one worker, over the number of workers."""
    alone = np.median(column(read_rows(4, workers="1"), "seconds"))
    counts = (3, 5, 10)
    levels = [
        read_rows(4, workers=str(count), strategy="sparknet:tau=50", link="rtt=20s")
        for count in counts
    ]
    ratios = [[alone / seconds for seconds in column(level, "seconds")] for level in levels]
    _line(axis, counts, ratios, _BLUE, "")
    axis.plot(counts, (2.4, 3.8, 4.4), "x", color="black")
    axis.set(xlabel="workers", ylabel="times as fast as one")


def draw_windows(axis: Any) -> None:
    """Draw the error with windows of one step and of 64."""
    texts = {
        "Downpour": "downpour:n_push={0},n_fetch={0},scale=1",
        "EASGD": "easgd:tau={0}",
        "EAMSGD": "eamsgd:tau={0},momentum=0.99",
    }
    for (name, text), colour in zip(texts.items(), (_RED, _BLUE, _GREEN), strict=True):
        levels = [column(read_rows(5, strategy=text.format(tau)), "error") for tau in (1, 64)]
        _line(axis, (1, 64), levels, colour, name)
    axis.set(xscale="log", xlabel="steps between exchanges", ylabel="error, %")
    axis.set_xticks([1, 64], ["1", "64"])
    axis.minorticks_off()


def draw_compensation(axis: Any) -> None:
    """Draw the errors of one worker, of sixteen, and of sixteen with compensation."""
    levels = [
        read_rows(6, workers="1"),
        read_rows(6, workers="16", strategy="asp:scale=1"),
        read_rows(6, strategy="dc_asgd:adaptive=true,scale=1"),
    ]
    names = ("SGD", "ASGD", "DC-ASGD-a")
    _columns(axis, names, [column(level, "error") for level in levels])
    axis.plot(range(3), (8.65, 9.27, 8.19), "x", color="black")
    axis.set(ylabel="error, %")


def draw_exchanges(axis: Any) -> None:
    """Draw the perplexity of each way to exchange."""
    texts = {
        "H 10": "diloco:h=10",
        "H 50": "diloco:h=50",
        "H 250": "diloco:h=250",
        "drop": "lossy_diloco:h=50,drop=0.5",
        "naive": "async_diloco:h=50,n=1,outer_lr=0.7",
        "DN": "async_diloco:h=50,speeds=worker-0/1+worker-1/1+worker-2/2+worker-3/4",
    }
    levels = [
        np.exp(column(read_rows(7, strategy=text), "loss")).tolist() for text in texts.values()
    ]
    _columns(axis, tuple(texts), levels)
    axis.set(ylabel="perplexity")


def draw_momenta(axis: Any) -> None:
    """Draw the error over the explicit momentum, by the number of workers."""
    momenta = (0.0, 0.3, 0.6, 0.9)
    for workers, colour in zip((1, 4, 16), _COLOURS, strict=False):
        levels = [
            column(read_rows(8, workers=str(workers), rule=f"momentum:momentum={value}"), "error")
            for value in momenta
        ]
        _line(axis, momenta, levels, colour, f"W {workers}")
    axis.set(xlabel="explicit momentum", ylabel="error, %")


def draw_backups(axis: Any) -> None:
    """Draw the error over staleness, after 6,000 gradients of one step time."""
    levels = [read_rows(9, workers=str(workers), strategy="asp:scale=1") for workers in (1, 9, 33)]
    staleness = [float(np.mean(column(level, "staleness"))) for level in levels]
    _line(axis, staleness, [column(level, "error") for level in levels], _BLUE, "")
    axis.set(xlabel="staleness", ylabel="error, %")


def draw_accuracies(axis: Any) -> None:
    """Draw the accuracy of five workers at the rate of one, and of the remedies."""
    texts = {
        "plain": "asp:scale=1",
        "warm": "downpour:scale=1,warm_steps=1000",
        "rate/stale": "stale_rate",
        "rate/W": "asp",
    }
    levels = [
        [100 - error for error in column(read_rows(11, strategy=text), "error")]
        for text in texts.values()
    ]
    _columns(axis, tuple(texts), levels)
    axis.plot([0, 0], [10, 12], "x", color="black")
    axis.set(ylabel="accuracy, %")


def draw_depths(axis: Any) -> None:
    """Draw T(s)/T(0) by depth, with SGD."""
    _draw_delays(axis, {f"hidden layers: {depth}": (f"deep:{depth}", "sgd") for depth in (1, 2, 6)})


def draw_rules(axis: Any) -> None:
    """Draw T(s)/T(0) by rule, with two layers."""
    rules = ("adam", "momentum:momentum=0.9", "rmsprop:decay_rate=0.9", "sgd", "adagrad")
    _draw_delays(axis, {rule.partition(":")[0]: ("deep:2", rule) for rule in rules})


def draw_late(axis: Any) -> None:
    """Draw the difference that one update of delay makes, in each seed."""
    prompt, late = (column(read_rows(13, workers=str(workers)), "error") for workers in (1, 2))
    apart = np.sort(np.subtract(late, prompt))
    axis.plot(apart, np.arange(1, len(apart) + 1) / len(apart), color=_BLUE)
    axis.axvspan(-0.3, 0.3, color="#e4e7eb", zorder=0)
    axis.axvline(float(apart.mean()), color=_RED, lw=1, label="mean")
    axis.set(xlabel="error more than without delay, points", ylabel="share of seeds")


def _draw_delays(axis: Any, kinds: dict[str, tuple[str, str]]) -> None:
    """Draw medians; a level at which a run in ten or more missed the target is left out."""
    for (name, (workload, rule)), colour in zip(kinds.items(), _COLOURS, strict=False):
        medians = {}
        for delays in (0, 8, 32):
            rows = read_rows(12, workload=workload, rule=rule, delays=str(delays))
            if all(float(row["error"]) <= float(row["until_error"]) for row in rows):
                medians[delays] = float(np.median(column(rows, "updates")))
        ratios = [updates / medians[0] for updates in medians.values()]
        axis.plot(list(medians), ratios, "o-", color=colour, ms=3, lw=1.2, label=name)
    axis.set(xlabel="delays 0 to s", ylabel="T(s) / T(0)")


def _line(
    axis: Any, at: Sequence[float], levels: Sequence[Sequence[float]], colour: str, name: str
) -> None:
    axis.plot(at, [np.mean(level) for level in levels], "-", color=colour, lw=1.2, label=name)
    for place, level in zip(at, levels, strict=True):
        axis.plot([place] * len(level), level, ".", color=colour, ms=3)


def _columns(axis: Any, names: Sequence[str], levels: Iterable[Sequence[float]]) -> None:
    for place, level in enumerate(levels):
        axis.plot([place] * len(level), level, ".", color=_BLUE, ms=3)
        mean = float(np.mean(level))
        axis.plot([place - 0.25, place + 0.25], [mean, mean], color=_RED, lw=1.4)
    axis.set_xticks(range(len(names)), names)
    axis.set_xlim(-0.6, len(names) - 0.4)


PANELS: dict[str, Callable[[Any], None]] = {
    "1 n-softsync": draw_softsync,
    "2, 3 waiting at a bound": draw_waits,
    "4 SparkNet": draw_speedups,
    "5 EASGD": draw_windows,
    "6 DC-ASGD": draw_compensation,
    "7 DiLoCo": draw_exchanges,
    "8 implicit momentum": draw_momenta,
    "9 backup workers": draw_backups,
    "11 mxnet#5287": draw_accuracies,
    "12 delays, by depth": draw_depths,
    "12 delays, by rule": draw_rules,
    "13 one update late": draw_late,
}


def draw(path: Path) -> None:
    """Draw all panels."""
    figure, axes = plt.subplots(4, 3, figsize=(9.2, 9.6))
    for axis, (title, fill) in zip(axes.flat, PANELS.items(), strict=True):
        fill(axis)
        axis.set_title(title, fontsize=9)
        axis.grid(color="#e4e7eb", linewidth=0.7)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=7)
        axis.xaxis.label.set_size(8)
        axis.yaxis.label.set_size(8)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=7)
    figure.tight_layout()
    save_small(figure, path)


if __name__ == "__main__":
    draw(_DOCS / "images" / "shapes.png")
