"""Two experiments side by side, or the simulated and the real runs of one.

Simulated trials are paired by their seeds. A real run sees other batches at other times than any
simulated one, so its figures stand next to the means of the simulated ones, with the distance of
the distributions of staleness.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

from deploy.experiments.accept_rules import FIGURES, staleness_distance
from deploy.experiments.imported_runs import ImportedRun, load_imported
from deploy.experiments.runner import Folder
from deploy.experiments.statistics import interval_of_pairs, mean_interval
from deploy.experiments.sweeps import Point, read_sweep
from deploy.experiments.trials import TrialResult
from shards.errors import BadInput

_SHOWN = ("error", "staleness", "wait_share", "seconds")


class PointRuns(NamedTuple):
    """The runs of a point: simulated ones by seed, and real ones."""

    simulated: dict[int, TrialResult]
    real: list[ImportedRun]


def compare_experiments(first: Path, second: Path | None) -> list[str]:
    """A line for each point and each real run: every figure of `second` less that of `first`.

    Without `second` the real runs of `first` are compared with its simulated trials. Points that
    one of them lacks are named last. Raises BadInput for folders without a point in common, and for
    one folder without real runs.
    """
    first_runs = _load_runs(first)
    other = first_runs if second is None else _load_runs(second)
    shared = [label for label in first_runs if label in other]
    if not shared:
        raise BadInput(f"expected a point in common of {first} and {second}, got none")
    if second is None and not any(runs.real for runs in first_runs.values()):
        raise BadInput(first, expected="a second folder, or runs of `exp import`", got="neither")
    lines = []
    if second is None:
        lines.append(f"{first}: real runs, and means of the simulated trials of their points:")
    else:
        lines.append(f"{second} less {first}, means and 95 % intervals over the seeds of both:")
    for label in shared:
        if second is not None and first_runs[label].simulated and other[label].simulated:
            lines.append(
                f"  {label}: {_apart(first_runs[label].simulated, other[label].simulated)}"
            )
        elif second is not None and not other[label].real:
            lines.append(f"  {label}: no trial is done in both")
        lines += [f"  {label}: {_beside(run, first_runs[label])}" for run in other[label].real]
    for path, runs, others in ((first, first_runs, other), (second, other, first_runs)):
        lines += [f"  {label}: only in {path}" for label in runs if label not in others]
    return lines


def _load_runs(path: Path) -> dict[str, PointRuns]:
    """The runs of a folder, by the label of their point."""
    folder, runs_by_label = Folder(path), dict[str, PointRuns]()
    real = load_imported(path)
    if folder.sweep.exists():
        for point in read_sweep(folder.sweep, consent=True).points:
            runs_by_label[_label(point.values)] = PointRuns(_by_seed(folder, point), [])
    elif not real:
        raise BadInput(
            path, expected="the folder of a sweep or of imported runs", got="one with neither"
        )
    for run in real:
        runs_by_label.setdefault(_label(run.point), PointRuns({}, [])).real.append(run)
    return runs_by_label


def _label(values: dict[str, Any]) -> str:
    """The point's values in the order of their keys, which two files may write differently."""
    return Point(dict(sorted(values.items())), []).label


def _by_seed(folder: Folder, point: Point) -> dict[int, TrialResult]:
    loaded = ((trial.seed, folder.load(trial)) for trial in point.trials)
    return {seed: result for seed, result in loaded if result is not None}


def _apart(first: dict[int, TrialResult], other: dict[int, TrialResult]) -> str:
    seeds = sorted(first.keys() & other.keys())
    if not seeds:
        return "no seed is done in both"
    parts = []
    for name in _SHOWN:
        figure = FIGURES[name]
        apart = interval_of_pairs(
            [figure(other[at]) for at in seeds], [figure(first[at]) for at in seeds]
        )
        parts.append(f"{name} {apart}")
    return f"{', '.join(parts)} ({len(seeds)} seeds)"


def _beside(run: ImportedRun, runs: PointRuns) -> str:
    """A real run next to the others of its point in the first folder: simulated, or else real."""
    kind = "simulated" if runs.simulated else "real"
    others = list(runs.simulated.values()) or [
        real_run.result for real_run in runs.real if real_run.name != run.name
    ]
    if not others:
        return f"{run.name}: no trial to compare with"
    parts = []
    for name in _SHOWN:
        figure = FIGURES[name]
        real_figure, figures = figure(run.result), [figure(result) for result in others]
        if math.isfinite(real_figure) and all(map(math.isfinite, figures)):
            parts.append(f"{name} {real_figure:.3g} real, {mean_interval(figures)} {kind}")
    distance = staleness_distance([run.result], others)
    return f"{run.name}: {'; '.join(parts)}; staleness KS {distance:.3f}"
