"""The trials of an experiment as one table, a row each: what a report's figures are made of."""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from deploy.experiments.accept_rules import FIGURES
from deploy.experiments.cluster import ClusterModel, StepTimes
from deploy.experiments.imported_runs import load_imported
from deploy.experiments.runner import Folder
from deploy.experiments.shapes.base import load_outcomes
from deploy.experiments.sweeps import read_sweep
from deploy.experiments.trials import Trial, TrialResult
from shards.errors import BadInput

_SETTINGS = (
    *(
        "workload",
        "batch",
        "tested",
        "held_out",
        "fragments",
        "strategy",
        "rule",
        "rate",
        "decay",
        "schedule",
    ),
    *("staleness", "on_stale", "look_every", "until_error", "seed"),
)
_CLUSTER = ("workers", "shards", "link", "delays")
_TIMES = StepTimes.__struct_fields__
_COUNTS = ("gradients", "dropped", "clock_gap", "diverged_at")
_SETTING_COLUMNS = ("staleness_bound" if name == "staleness" else name for name in _SETTINGS)
_TIME_COLUMNS = (name if name.startswith("slow_") else f"step_{name}" for name in _TIMES)
COLUMNS = (
    *("from", "name", *_SETTING_COLUMNS),
    *(*_CLUSTER, "stragglers", *_TIME_COLUMNS),
    *(*FIGURES, *_COUNTS),
)


class TableTrial(NamedTuple):
    """A trial of an experiment. `origin` is sweep, shape N or real, `name` its id or run's name.

    `point` is the label of its point, or the settings of a shape's trial; `values` are those of the
    point, by key.
    """

    origin: str
    name: str
    point: str
    values: Mapping[str, Any]
    result: TrialResult

    def row(self) -> list[object]:
        """The values of COLUMNS."""
        trial, result = self.result.trial, self.result
        return [
            self.origin,
            self.name,
            *(getattr(trial, key) for key in _SETTINGS),
            *(getattr(trial.cluster, key) for key in _CLUSTER),
            list_stragglers(trial.cluster),
            *(getattr(trial.cluster.times, key) for key in _TIMES),
            *(figure(result) for figure in FIGURES.values()),
            *(getattr(result, key) for key in _COUNTS),
        ]


_FIGURES = slice(COLUMNS.index(next(iter(FIGURES))), -len(_COUNTS))


def write_table(path: Path, out: Path) -> int:
    """Write the trials of a folder to a CSV file; returns their number.

    Raises BadInput for a folder without trials.
    """
    rows = [trial.row() for trial in list_trials(path)]
    if not rows:
        raise BadInput(path, expected="an experiment with trials", got="none")
    with out.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for row in rows:
            row[_FIGURES] = [f"{figure:.6g}" for figure in row[_FIGURES]]
            table.writerow(row)
    return len(rows)


def list_trials(path: Path) -> Iterator[TableTrial]:
    """The trials in a folder that are done, of its sweep, its shapes and its imported runs."""
    folder = Folder(path)
    if folder.sweep.exists():
        sweep = read_sweep(folder.sweep, consent=True)
        points = {trial.id: p for p in reversed(sweep.points) for trial in p.trials}
        for trial in sweep.trials:
            if result := folder.load(trial):
                point = points[trial.id]
                yield TableTrial("sweep", trial.id, point.label, point.values, result)
    for outcome in load_outcomes(path):
        origin = f"shape {outcome.name}{' control' if outcome.control else ''}"
        for result in outcome.trials:
            trial = result.trial
            label = f"{trial.strategy}, rate {trial.rate:g}, {trial.cluster.workers} workers"
            label = f"{label}; {describe_setting(trial)}"
            yield TableTrial(origin, trial.id, label, {}, result)
    for run in load_imported(path):
        yield TableTrial("real", run.name, run.label, run.point, run.result)


def list_stragglers(cluster: ClusterModel) -> str:
    """The slow workers of a cluster and their factors, as worker-3=4."""
    return " ".join(f"{name}={factor:g}" for name, factor in sorted(cluster.stragglers.items()))


def describe_setting(trial: Trial) -> str:
    """The other settings of a trial in which it differs from its neighbours."""
    cluster, times = trial.cluster, trial.cluster.times
    texts = [f"{trial.workload}, batch {trial.batch}", trial.rule, f"steps {times}"]
    if trial.staleness is not None:
        texts.append(f"bound {trial.staleness}")
    if cluster.link:
        texts.append(f"link {cluster.link}")
    if cluster.delays:
        texts.append(f"delays 0 to {cluster.delays}")
    if cluster.stragglers:
        texts.append(f"slow {list_stragglers(cluster)}")
    texts.append(f"tested on {trial.tested}{' held out' if trial.held_out else ''}")
    if trial.until_error >= 0:
        texts.append(f"until {trial.until_error:g} %")
    usual = Trial()
    others = ("schedule", "decay", "fragments", "on_stale")
    texts += [
        f"{name} {value}"
        for name in others
        if (value := getattr(trial, name)) != getattr(usual, name)
    ]
    return "; ".join(texts)
