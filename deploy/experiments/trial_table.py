"""The trials of an experiment as one CSV table, a row each: what a report's figures are made of."""

import csv
from collections.abc import Iterator
from pathlib import Path

from deploy.experiments.accept_rules import FIGURES
from deploy.experiments.cluster import ClusterModel, StepTimes
from deploy.experiments.imported_runs import load_imported
from deploy.experiments.runner import Folder
from deploy.experiments.shapes.base import load_outcomes
from deploy.experiments.sweeps import read_sweep
from deploy.experiments.trials import TrialResult
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


def write_table(path: Path, out: Path) -> int:
    """Write the trials of a folder to a CSV file; returns their number.

    `from` is sweep, shape N or real, `name` the trial's id or the real run's name. Raises BadInput
    for a folder without trials.
    """
    rows = list(_rows(path))
    if not rows:
        raise BadInput(path, expected="an experiment with trials", got="none")
    with out.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        table.writerows(rows)
    return len(rows)


def _rows(path: Path) -> Iterator[list[object]]:
    folder = Folder(path)
    if folder.sweep.exists():
        for trial in read_sweep(folder.sweep, consent=True).trials:
            if trial_result := folder.load(trial):
                yield _row("sweep", trial.id, trial_result)
    for outcome in load_outcomes(path):
        origin = f"shape {outcome.name}{' control' if outcome.control else ''}"
        for result in outcome.trials:
            yield _row(origin, result.trial.id, result)
    for run in load_imported(path):
        yield _row("real", run.name, run.result)


def _row(origin: str, name: str, result: TrialResult) -> list[object]:
    trial = result.trial
    figures = (f"{figure(result):.6g}" for figure in FIGURES.values())
    return [
        origin,
        name,
        *(getattr(trial, key) for key in _SETTINGS),
        *(getattr(trial.cluster, key) for key in _CLUSTER),
        list_stragglers(trial.cluster),
        *(getattr(trial.cluster.times, key) for key in _TIMES),
        *figures,
        *(getattr(result, key) for key in _COUNTS),
    ]


def list_stragglers(cluster: ClusterModel) -> str:
    """The slow workers of a cluster and their factors, as worker-3=4."""
    return " ".join(f"{name}={factor:g}" for name, factor in sorted(cluster.stragglers.items()))
