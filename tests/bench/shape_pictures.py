"""The pictures of shapes 1 to 4, 6 to 12 and 14 to 18, from the outcomes in a folder.

    python -m tests.bench.shape_pictures [--out runs/experiments/shapes-ci] [--only 15 17]

Writes docs/images/shape-N.png, of the newest registration. Shapes 14 and 17 have no trials that are
kept: they are measured again, which gives the same figures.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

from deploy.experiments.shapes import averages, failures
from deploy.experiments.shapes.base import ShapeOutcome, load_outcomes, times_to
from deploy.experiments.shapes.local_updates import read_perplexities
from deploy.experiments.shapes.second_windows import (
    MOMENTA,
    PUBLISHED,
    SHARES,
    find_targets,
    measure_speedups,
)
from deploy.experiments.statistics import mean_interval, median_interval
from deploy.experiments.trials import TrialResult
from shards.aggregation import Average
from tests.bench.pictures import save_small

mpl.use("agg")

from matplotlib import pyplot as plt

_IMAGES = Path(__file__).parents[2] / "docs" / "images"
_BLUE, _RED, _GREY = "#2a6fbb", "#c2410c", "#7b8794"
_HOUR_S = 3600.0


def draw_softsync(axes: Sequence[Any], outcome: ShapeOutcome | None) -> None:
    """Draw the error over n, at the rate of rounds, which is divided by n, and at n times it."""
    (axis,) = axes
    levels = _by_strategy(outcome)
    (rounds,) = [level for text, level in levels.items() if text == "bsp"]
    divided = rounds[0].trial.rate
    softsync = {
        int(text.removeprefix("softsync:n=")): level
        for text, level in levels.items()
        if text != "bsp"
    }
    for name, colour, is_divided in (("rate / n", _BLUE, True), ("fixed rate", _RED, False)):
        medians = {
            n: median_interval([result.error for result in level])
            for n, results in softsync.items()
            if (level := [r for r in results if (r.trial.rate == divided) is is_divided])
        }
        _band(axis, list(medians), list(medians.values()), colour, name)
    axis.axhline(median_interval([r.error for r in rounds]).mean, color=_GREY, label="rounds")
    axis.plot((15, 30), (90, 90), "x", color="black", label="published")
    axis.set(xscale="log", yscale="log", xlabel="n", ylabel="error, %")
    axis.set_xticks(list(softsync), [str(n) for n in softsync])
    axis.minorticks_off()
    axis.set_yticks([5, 20, 90], ["5", "20", "90"])


def draw_bounds(axes: Sequence[Any], outcome: ShapeOutcome | None) -> None:
    """Draw waits, updates and seconds to the target over the bound, of reads through a cache."""
    assert outcome is not None, "the shape has been run"
    target = _read_target(outcome)
    levels: dict[int, list[TrialResult]] = {}
    for result in outcome.trials:
        if result.trial.strategy == "cached_ssp" and result.trial.staleness is not None:
            levels.setdefault(result.trial.staleness, []).append(result)
    waits = [mean_interval([100 * r.wait_share for r in level]) for level in levels.values()]
    updates, seconds = (
        [
            median_interval(times_to(level, target, updates=counts).values)
            for level in levels.values()
        ]
        for counts in (True, False)
    )
    figures = {"time waited, %": waits, "updates": updates, "virtual seconds": seconds}
    for axis, (name, intervals) in zip(axes, figures.items(), strict=True):
        _band(axis, range(len(levels)), intervals, _BLUE, "")
        axis.set_xticks(range(len(levels)), [str(bound) for bound in levels])
        axis.set_ylim(0, None)
        axis.set_xlabel("bound s")
        axis.set_title(name if axis is axes[0] else f"{name} to {target:g} %", fontsize=9)
    axes[0].plot(*_PUBLISHED_WAITS[outcome.number], "x", color="black")


_PUBLISHED_WAITS: dict[int, tuple[Sequence[float], Sequence[float]]] = {
    2: ((), ()),
    3: ((0, 5), (50, 1.7)),
}
"""The published shares of waits in percent, at the places of their bounds on the axis."""


def _read_target(outcome: ShapeOutcome) -> float:
    """The target error in percent, rounded, as the outcome's checks name it."""
    return next(
        float(found[1])
        for check in outcome.checks
        if (found := re.match(r"(?:updates|seconds) to ([\d.]+) % error", check.claim))
    )


def draw_speedups(axes: Sequence[Any], outcome: ShapeOutcome | None) -> None:
    """Draw the speed-up of rounds over one worker, by the number of workers, as published too."""
    (axis,) = axes
    levels: dict[tuple[str, int, str], list[TrialResult]] = {}
    for text, results in _by_strategy(outcome).items():
        for result in results:
            cluster = result.trial.cluster
            levels.setdefault((text, cluster.workers, cluster.link), []).append(result)
    (serial,) = [level for (_, workers, _), level in levels.items() if workers == 1]
    targets = find_targets(serial, SHARES)
    gains = [
        measure_speedups(serial, levels["sparknet:tau=50", workers, "rtt=20s"], targets)
        for workers in PUBLISHED
    ]
    places = range(len(PUBLISHED))
    _band(axis, places, gains, _BLUE, "rounds of 50 steps")
    axis.plot(places, list(PUBLISHED.values()), "x", color="black", label="published")
    axis.set_xticks(places, [str(workers) for workers in PUBLISHED])
    axis.set(xlabel="workers", ylabel="speed-up over one worker", ylim=(0, None))


def draw_compensation(axes: Sequence[Any], outcome: ShapeOutcome | None) -> None:
    """Draw the errors of SGD, ASGD and DC-ASGD by seed, for each number of workers at its rate."""
    assert outcome is not None, "the shape has been run"
    levels: dict[tuple[int, bool, float], list[float]] = {}
    for result in outcome.trials:
        trial = result.trial
        key = trial.cluster.workers, trial.strategy.startswith("dc_asgd"), trial.rate
        levels.setdefault(key, []).append(result.error)
    rates = {workers: rate for workers, compensated, rate in levels if compensated}
    for axis, (workers, rate) in zip(axes, rates.items(), strict=True):
        keys = [(1, False, rate), (workers, False, rate), (workers, True, rate)]
        for place, key in enumerate(keys):
            _dots(axis, place, levels[key])
        axis.set_xticks(range(3), ["SGD", "ASGD", "DC-ASGD-a"])
        axis.set_title(f"{workers} workers, rate {rate:.3g}", fontsize=9)
    axes[0].set_ylabel("error, %")


def draw_windows(axes: Sequence[Any], outcome: ShapeOutcome | None) -> None:
    """Draw the perplexity over H in rounds, and what losses and asynchrony cost, by seed."""
    rounds: dict[int, NDArray[np.float64]] = {}
    others: dict[str, NDArray[np.float64]] = {}
    names = {"lossy": "half lost", "n=1": "naive", "speeds=": "DN + DyLU"}
    for text, results in _by_strategy(outcome).items():
        for workers in {result.trial.cluster.workers for result in results}:
            level = [result for result in results if result.trial.cluster.workers == workers]
            found = read_perplexities(level)
            if text.startswith("diloco") and workers == 4:
                rounds[int(text.partition("h=")[2].partition(",")[0])] = found
            else:
                name = next((name for part, name in names.items() if part in text), "rounds of 8")
                others[name] = found
    first, second = axes
    _band(first, list(rounds), [mean_interval(level) for level in rounds.values()], _BLUE, "")
    first.set_xscale("log")
    first.set_xticks(list(rounds), [str(h) for h in rounds])
    first.minorticks_off()
    first.set(xlabel="steps in a round, H", ylabel="perplexity of a character")
    eight = others.pop("rounds of 8")
    published = {"half lost": 2.0, "naive": 100 * (44.27 / 41.35 - 1), "DN + DyLU": -0.5}
    for place, name in enumerate(published):
        _dots(second, place, 100 * (others[name] / (eight if place == 0 else rounds[25]) - 1))
    second.plot(range(len(published)), list(published.values()), "x", color="black")
    second.axhline(0, color="black", lw=0.7)
    second.set_xticks(range(len(published)), list(published))
    second.set_ylabel("perplexity above that of rounds, %")


def draw_delays(axes: Sequence[Any], outcome: ShapeOutcome | None) -> None:
    """Draw the updates to the target over the delay, relative to those without: depths, rules."""
    assert outcome is not None, "the shape has been run"
    target = outcome.trials[0].trial.until_error
    levels: dict[tuple[str, str], dict[int, list[TrialResult]]] = {}
    for result in outcome.trials:
        trial = result.trial
        kind = trial.workload.removeprefix("deep:"), trial.rule.partition(":")[0]
        levels.setdefault(kind, {}).setdefault(trial.cluster.delays, []).append(result)
    depths = {f"depth {depth}": by for (depth, rule), by in levels.items() if rule == "sgd"}
    rules = {rule: by for (depth, rule), by in levels.items() if depth == "2"}
    colours = (_GREY, _BLUE, _RED, "#15803d", "#7c3aed")
    for axis, kinds in zip(axes, (depths, rules), strict=True):
        for (name, by_delay), colour in zip(kinds.items(), colours, strict=False):
            times = {s: times_to(found, target, updates=True) for s, found in by_delay.items()}
            known = {s: np.array(found.values) for s, found in times.items() if found.comparable}
            shares = [median_interval(list(values / known[0])) for values in known.values()]
            _band(axis, list(known), shares, colour, name)
        axis.set_xlabel("delay s, updates")
        axis.set_yscale("log")
        axis.minorticks_off()
        axis.set_yticks([1, 2, 4], ["1", "2", "4"])
        axis.legend(frameon=False, fontsize=7)
    axes[0].set_ylabel(f"T(s) / T(0), to {target:g} % error")


def draw_momenta(axes: Sequence[Any], outcome: ShapeOutcome | None) -> None:
    """Draw the error over the explicit momentum, by the number of workers."""
    assert outcome is not None, "the shape has been run"
    (axis,) = axes
    levels: dict[int, dict[float, list[float]]] = {}
    for result in outcome.trials:
        _, _, momentum = result.trial.rule.partition("momentum=")
        by_momentum = levels.setdefault(result.trial.cluster.workers, {})
        by_momentum.setdefault(float(momentum), []).append(result.error)
    for (workers, found), colour in zip(levels.items(), (_GREY, _BLUE, _RED), strict=True):
        intervals = [mean_interval(found[momentum]) for momentum in MOMENTA]
        _band(axis, MOMENTA, intervals, colour, f"W = {workers}")
    axis.set(xlabel="explicit momentum", ylabel="error, %")


def draw_backups(axes: Sequence[Any], outcome: ShapeOutcome | None) -> None:
    """Draw the seconds to the target over the number of backups, and those without rounds."""
    assert outcome is not None, "the shape has been run"
    (axis,) = axes
    target = _read_target(outcome)
    medians = {
        text: median_interval(times_to(results, target).values)
        for text, results in _by_strategy(outcome).items()
        if text == "asp" or text.startswith("bsp:b=")
    }
    asynchronous = medians.pop("asp")
    places = range(len(medians))
    _band(axis, places, list(medians.values()), _BLUE, "rounds of 100 less the backups")
    axis.axhline(asynchronous.mean, color=_RED, label="asynchronously")
    axis.axhspan(asynchronous.low, asynchronous.high, color=_RED, alpha=0.2, lw=0)
    axis.set_xticks(places, [text.removeprefix("bsp:b=") for text in medians])
    axis.set(xlabel="backups", ylabel=f"virtual seconds to {target:g} % error", ylim=(0, None))


def draw_accuracies(axes: Sequence[Any], outcome: ShapeOutcome | None) -> None:
    """Draw the accuracy of five workers, of four, and of five with each remedy, by seed."""
    assert outcome is not None, "the shape has been run"
    (axis,) = axes
    names = {
        ("asp:scale=1", 5): "five",
        ("asp:scale=1", 4): "four",
        ("downpour:scale=1,warm_steps=1000", 5): "warm start",
        ("stale_rate", 5): "rate/stale",
        ("asp", 5): "rate/W",
    }
    for place, (strategy, workers) in enumerate(names):
        accuracies = [
            100 - result.error
            for result in outcome.trials
            if (result.trial.strategy, result.trial.cluster.workers) == (strategy, workers)
        ]
        axis.plot([place] * len(accuracies), accuracies, ".", color=_BLUE)
    axis.plot([0, 0], [10, 12], "x", color="black")
    axis.set_xticks(range(len(names)), list(names.values()))
    axis.set(ylabel="accuracy, %", ylim=(0, 100))


def draw_crossing(axes: Sequence[Any], outcome: ShapeOutcome | None) -> None:
    """Draw the error over virtual time, asynchronously and in rounds: medians with intervals."""
    (axis,) = axes
    for (text, results), colour in zip(_by_strategy(outcome).items(), (_RED, _BLUE), strict=True):
        last = min(result.curve[-1].seconds for result in results)
        grid = np.geomspace(100, last, 50)
        errors = np.array([[result.error_at(at) for at in grid] for result in results])
        spans = [median_interval(list(at)) for at in errors.T]
        name = "in rounds" if text == "bsp" else "asynchronously"
        axis.plot(grid, [span.mean for span in spans], color=colour, label=name)
        lows, highs = [span.low for span in spans], [span.high for span in spans]
        axis.fill_between(grid, lows, highs, color=colour, alpha=0.2, lw=0)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set(xlabel="virtual seconds", ylabel="error, % of the first loss")


def draw_lengths(axes: Sequence[Any], _: ShapeOutcome | None) -> None:
    """Draw the length of merged reports over M, by seed, with the root of M."""
    (axis,) = axes
    seeds = range(averages.FIRST_SEED, averages.FIRST_SEED + averages.SEEDS)
    runs = [averages.measure_lengths(seed) for seed in seeds]
    counts = averages.LEARNERS
    for average, colour in ((Average.RADIAL, _BLUE), (Average.MEAN, _RED)):
        means = [mean_interval([run[average, count] for run in runs]) for count in counts]
        _band(axis, counts, means, colour, average)
    axis.plot(counts, np.array(counts) ** -0.5, color=_GREY, ls="--", lw=1.2, label="1/sqrt(M)")
    axis.axhspan(0.95, 1.05, color="#e4e7eb", zorder=0)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_yticks([0.25, 0.5, 1], ["1/4", "1/2", "1"])
    axis.set(xlabel="learners M", ylabel="merged length / a learner's")


def draw_costs(axes: Sequence[Any], outcome: ShapeOutcome | None) -> None:
    """Draw what each overlap costs of the loss without one, by seed, with intervals."""
    (axis,) = axes
    levels = _by_strategy(outcome)
    without, *overlapped = levels.values()
    for overlap, results in enumerate(overlapped, 1):
        costs = 100 * (_losses(results) / _losses(without) - 1)
        _dots(axis, overlap, costs)
    axis.axhline(1, color=_GREY, ls="--", lw=1.2)
    axis.axhline(0, color="black", lw=0.7)
    axis.set_xticks(range(1, len(overlapped) + 1))
    axis.set(xlabel="overlap T, steps", ylabel="loss above that without overlap, %")


def draw_times(axes: Sequence[Any], outcome: ShapeOutcome | None) -> None:
    """Draw the loss and the time of both ways for the same gradients, by seed."""
    (axis,) = axes
    for (text, results), colour in zip(_by_strategy(outcome).items(), (_RED, _BLUE), strict=True):
        seconds = [result.curve[-1].seconds for result in results]
        name = "all reports" if text.startswith("streaming") else "K = 1 with grace"
        axis.plot(seconds, _losses(results), "o", color=colour, label=name)
    axis.set_xlim(0, None)
    axis.set(xlabel="virtual seconds for the same gradients", ylabel="test loss at the end")


def draw_goodput(axes: Sequence[Any], _: ShapeOutcome | None) -> None:
    """Draw the goodput over the time between failures, a panel a number of learners."""
    hours = np.geomspace(0.25, 24 * 28, 13)
    for axis, learners in zip(axes, failures.LEARNERS, strict=True):
        runs = [failures.simulate(learners, between, 4000) for between in hours * _HOUR_S]
        by_way = 100 * np.array([np.mean(cell, axis=0) for cell in runs]).T
        ways = ("synchronous", "elastic", "decoupled")
        for name, shares, colour in zip(ways, by_way, (_GREY, _RED, _BLUE), strict=True):
            axis.plot(hours, shares, color=colour, label=name)
        axis.set_xscale("log")
        axis.set_xticks([1, 24, 168], ["hour", "day", "week"])
        axis.minorticks_off()
        axis.set_ylim(0, 102)
        axis.set_title(f"{learners:,} learners", fontsize=9)
        axis.set_xlabel("time between failures", fontsize=8)
    axes[0].set_ylabel("goodput, %")


def draw_uneven(axes: Sequence[Any], outcome: ShapeOutcome | None) -> None:
    """Draw the test loss over virtual time: the median of the seeds, and all of them."""
    (axis,) = axes
    for (text, results), colour in zip(_by_strategy(outcome).items(), (_RED, _BLUE), strict=True):
        grid = np.linspace(0, min(result.curve[-1].seconds for result in results), 60)
        losses = np.array([_losses_at(result, grid) for result in results])
        axis.plot(grid, np.median(losses, 0), color=colour, label=text.partition(":")[0])
        axis.fill_between(grid, losses.min(0), losses.max(0), color=colour, alpha=0.15, lw=0)
    axis.set_yscale("log")
    axis.set(xlabel="virtual seconds", ylabel="test loss")


def _losses_at(result: TrialResult, grid: Any) -> list[float]:
    """The loss of the last measurement up to each time."""
    times = np.array([point.seconds for point in result.curve])
    return [result.curve[place].loss for place in np.searchsorted(times, grid, "right") - 1]


def _by_strategy(outcome: ShapeOutcome | None) -> dict[str, list[TrialResult]]:
    assert outcome is not None, "the shape has been run"
    levels: dict[str, list[TrialResult]] = {}
    for result in outcome.trials:
        levels.setdefault(result.trial.strategy, []).append(result)
    return levels


def _losses(results: Sequence[TrialResult]) -> Any:
    return np.array([result.curve[-1].loss for result in results])


def _band(axis: Any, at: Sequence[float], means: Sequence[Any], colour: str, name: str) -> None:
    axis.plot(at, [one.mean for one in means], "o-", color=colour, label=name, ms=4)
    low, high = [one.low for one in means], [one.high for one in means]
    axis.fill_between(at, low, high, color=colour, alpha=0.2, lw=0)


def _dots(axis: Any, at: float, values: Any) -> None:
    axis.plot(np.full(len(values), at - 0.1), values, ".", color=_GREY)
    one = mean_interval(values)
    axis.errorbar(
        [at], [one.mean], [[one.mean - one.low], [one.high - one.mean]], fmt="o", color=_BLUE
    )


Draw = Callable[[Sequence[Any], ShapeOutcome | None], None]
PICTURES: dict[int, tuple[Draw, int]] = {
    1: (draw_softsync, 1),
    2: (draw_bounds, 3),
    3: (draw_bounds, 3),
    4: (draw_speedups, 1),
    6: (draw_compensation, 2),
    7: (draw_windows, 2),
    8: (draw_momenta, 1),
    9: (draw_backups, 1),
    10: (draw_crossing, 1),
    11: (draw_accuracies, 1),
    12: (draw_delays, 2),
    14: (draw_lengths, 1),
    15: (draw_costs, 1),
    16: (draw_times, 1),
    17: (draw_goodput, len(failures.LEARNERS)),
    18: (draw_uneven, 1),
}
"""How each shape is drawn, and in how many panels."""


def draw(number: int, outcome: ShapeOutcome | None, path: Path) -> None:
    """Draw one shape."""
    fill, panels = PICTURES[number]
    size = (5.2, 3.3) if panels == 1 else (max(2.6 * panels, 6.4), 2.7)
    same = fill not in (draw_bounds, draw_windows)  # their panels have different units
    figure, axes = plt.subplots(1, panels, figsize=size, sharey=same, squeeze=False)
    fill(axes[0], outcome)
    for axis in axes[0]:
        axis.grid(color="#e4e7eb", linewidth=0.7)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.xaxis.label.set_size(8)
        axis.yaxis.label.set_size(8)
    if outcome is not None and panels == 1:
        axes[0][0].set_title(f"shape {outcome.name}: {outcome.verdict}", fontsize=9)
    if axes[0][0].get_legend_handles_labels()[0]:
        axes[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    save_small(figure, path)


def main() -> None:
    """Draw the pictures of all these shapes, or of some."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--out", type=Path, default=Path("runs/experiments/shapes-ci"))
    options.add_argument("--only", type=int, nargs="*", default=list(PICTURES))
    chosen = options.parse_args()
    outcomes = {one.number: one for one in load_outcomes(chosen.out) if not one.control}
    for number in chosen.only:
        draw(number, outcomes.get(number), _IMAGES / f"shape-{number}.png")


if __name__ == "__main__":
    main()
