"""The results of an experiment as tables of pandas: its trials, and their curves.

pandas is no part of a base install, and is imported when a folder is loaded.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from deploy.experiments.runner import Folder
from deploy.experiments.sweeps import read_sweep
from deploy.experiments.training_simulation import CurvePoint
from deploy.experiments.trial_table import COLUMNS, TableTrial, list_trials
from shards.errors import BadInput
from shards.extras import missing

if TYPE_CHECKING:
    import pandas as pd


class ResultFrames(NamedTuple):
    """The trials of an experiment and their measurements, as DataFrames.

    Both have the columns `from`, `name` and `point`. `trials` has a row for each trial, with its
    settings and its figures at the end; `curves` has a row for each measurement.
    """

    trials: "pd.DataFrame"
    curves: "pd.DataFrame"


def load(folder: str | Path) -> ResultFrames:
    """Read the results of a sweep, of shapes and of imported runs in a folder.

    Keys of a sweep that are no settings, such as an option of a strategy, are columns as well.
    Raises BadInput for a folder without results, or with those of another build only.
    """
    try:
        import pandas as pd
    except ModuleNotFoundError:
        raise missing("deploy.experiments.load", "pandas", "executor") from None
    path = Path(folder)
    trials = list(list_trials(path))
    if not trials:
        raise _refuse(path)
    return ResultFrames(
        pd.DataFrame([_describe(trial) for trial in trials]),
        pd.DataFrame(
            [
                {**_name(trial), "seed": trial.result.trial.seed, **look._asdict()}
                for trial in trials
                for look in trial.result.curve
            ],
            columns=["from", "name", "point", "seed", *CurvePoint._fields],
        ),
    )


def _name(trial: TableTrial) -> dict[str, str]:
    return {"from": trial.origin, "name": trial.name, "point": trial.point}


def _describe(trial: TableTrial) -> dict[str, Any]:
    """The row of a trial, by column."""
    row = _name(trial) | dict(zip(COLUMNS, trial.row(), strict=True))
    names = {"staleness", *(key for key in trial.values if key.startswith("cluster."))}
    return row | {key: value for key, value in trial.values.items() if key not in {*row, *names}}


def _refuse(path: Path) -> BadInput:
    """The error of a folder without results of this build."""
    folder = Folder(path)
    if not folder.sweep.exists():
        return BadInput(
            path,
            expected="the folder of a sweep, of shapes or of imported runs",
            got="another" if path.is_dir() else "no folder there",
        )
    stale = folder.status(read_sweep(folder.sweep, consent=True)).stale
    if not stale:
        return BadInput(path, expected="an experiment with trials", got="none")
    return BadInput(
        path,
        expected="results of this build",
        got=f"{stale} of another build or of other settings",
        hint="read them with the version that wrote them, or run `downpour exp resume`",
    )
