"""Two sweeps side by side: the points that both have, with the differences of their figures."""

from pathlib import Path
from typing import Any

from deploy.experiments.expectations import FIGURES
from deploy.experiments.runner import Folder
from deploy.experiments.statistics import paired
from deploy.experiments.sweeps import Point, read_sweep
from deploy.experiments.trials import TrialResult
from shards.errors import BadInput

_SHOWN = ("error", "staleness", "wait_share", "seconds")


def compare_sweeps(first: Path, second: Path) -> list[str]:
    """A line for each point: every figure of `second` less that of `first`, with its interval.

    Seeds are paired. Points that one of them lacks are named last. Raises BadInput for folders
    without a point in common.
    """
    one, other = _found(first), _found(second)
    shared = [label for label in one if label in other]
    if not shared:
        raise BadInput(f"expected a point in common of {first} and {second}, got none")
    lines = [f"{second} less {first}, means and 95 % intervals over the seeds of both:"]
    lines += [f"  {label}: {_apart(one[label], other[label])}" for label in shared]
    for path, mine, theirs in ((first, one, other), (second, other, one)):
        lines += [f"  {label}: only in {path}" for label in mine if label not in theirs]
    return lines


def _found(path: Path) -> dict[str, dict[int, TrialResult]]:
    """The results of a folder, by the label of their point and by seed."""
    folder = Folder(path)
    if not folder.sweep.exists():
        raise BadInput(f"{path}: expected the folder of a sweep, got one without sweep.toml")
    points = read_sweep(folder.sweep, consent=True).points
    return {_label(point): _by_seed(folder, point) for point in points}


def _label(point: Point) -> str:
    """The point's values in the order of their keys, which two files may write differently."""
    values: dict[str, Any] = dict(sorted(point.values.items()))
    return Point(values, []).label


def _by_seed(folder: Folder, point: Point) -> dict[int, TrialResult]:
    loaded = ((trial.seed, folder.load(trial)) for trial in point.trials)
    return {seed: result for seed, result in loaded if result is not None}


def _apart(one: dict[int, TrialResult], other: dict[int, TrialResult]) -> str:
    seeds = sorted(one.keys() & other.keys())
    if not seeds:
        return "no seed is done in both"
    parts = []
    for name in _SHOWN:
        figure = FIGURES[name]
        apart = paired([figure(other[at]) for at in seeds], [figure(one[at]) for at in seeds])
        parts.append(f"{name} {apart}")
    return f"{', '.join(parts)} ({len(seeds)} seeds)"
