"""Jobs next to each other: their curves, and the settings in which they differ."""

from itertools import accumulate
from typing import Any

from deploy.runner import job_folder
from deploy.runner.readings import read_series, thin_out
from deploy.service.job_rows import JobRow
from deploy.service.job_store import JobStore

MAX_JOBS = 32
FIGURES = (
    "loss",
    "accuracy",
    "samples_per_s",
    "goodput",
    "staleness_p50",
    "staleness_p99",
    "steps",
)
_OWN = {"out", "snapshots", "logs"}  # these differ by themselves


def compare(store: JobStore, rows: list[JobRow], name: str, x: str, points: int) -> dict[str, Any]:
    """The column `name` of each job's series over `x`, the newest figures and the settings.

    Of the settings only those are there that are not the same in all jobs.
    """
    curves = []
    for row in rows:
        across, columns = curve(store, row, [name], x, points)
        curves.append({"x": across, "y": columns[name]})
    return {
        "jobs": [{"id": row.id, "name": row.name, "state": row.state} for row in rows],
        "curves": curves,
        "figures": {figure: [row.head.get(figure) for row in rows] for figure in FIGURES},
        "settings": differences([row.settings for row in rows]),
    }


def differences(settings: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The values, one a job, of each setting that is not the same in all."""
    names = sorted({name for options in settings for name in options} - _OWN)
    columns = {name: [options.get(name) for options in settings] for name in names}
    return {
        name: values for name, values in columns.items() if values.count(values[0]) < len(values)
    }


def curve(
    store: JobStore, row: JobRow, names: list[str], x: str, points: int
) -> tuple[list[float], dict[str, list[Any]]]:
    """Columns of a job's series over steps, samples or seconds; `points` points at most.

    The newest point is among them. The axis never falls.
    """
    series = read_series(store.folder(row.id) / job_folder.READINGS / job_folder.SERIES)
    shown = thin_out(series, points)
    start = shown[0].time - shown[0].seconds if shown else 0.0
    across = [point.time - start if x == "seconds" else getattr(point, x) for point in shown]
    # The clock of a machine may be set back, and samples are those of the last report.
    across = list(accumulate(across, max))
    return across, {name: [getattr(point, name) for point in shown] for name in names}
