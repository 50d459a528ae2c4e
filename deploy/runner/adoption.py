"""`python -m deploy.runner.adoption FOLDER`: the series of a job with a run of `train`.

The service lists such a run without having followed it. This reads its updates once, in a process
of its own because the service loads no Arrow, and writes the series that its page draws.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from deploy.run.folder import SETTINGS, UPDATES
from deploy.run.updates_parquet import columns_of, read_updates
from deploy.runner import job_folder
from deploy.runner.readings import SeriesPoint
from worker.training.figures import TALLIED, StalenessCounts, UpdateTally

_POINTS = 2000
_COLUMNS = (*TALLIED, "steps", "time")
_Columns = dict[str, np.ndarray]


def adopt(folder: Path) -> int:
    """Write the series of the job in `folder` from its run; returns the number of points."""
    run = job_folder.load_settings(folder).out
    if not (run / UPDATES).is_dir():
        return 0
    began = (run / SETTINGS).stat().st_mtime
    points = list(_points(run / UPDATES, began))
    content = b"".join(msgspec.json.encode(point) + b"\n" for point in points)
    (folder / job_folder.READINGS / job_folder.SERIES).write_bytes(content)
    return len(points)


def _points(updates: Path, began: float) -> Iterator[SeriesPoint]:
    rows = sum(batch.num_rows for batch in read_updates(updates, ("time",), shard=0))
    total, staleness, steps, before = UpdateTally(), StalenessCounts(), 0, 0.0
    for columns in _chunks(updates, max(1, -(-rows // _POINTS))):
        fresh, seconds = UpdateTally.of([columns]), float(columns["time"][-1])
        total, steps = total + fresh, steps + int(columns["steps"].sum())
        staleness.add(columns)
        yield SeriesPoint(
            time=began + seconds,
            seconds=seconds,
            steps=steps,
            samples=total.samples,
            loss=fresh.loss_mean,
            samples_per_s=fresh.samples / (seconds - before) if seconds > before else None,
            staleness_p50=staleness.quantile(0.5),
            staleness_p99=staleness.quantile(0.99),
            staleness_max=total.staleness_max,
            clock_gap=fresh.max_clock_gap,
            waiting=0,
        )
        before = seconds


def _chunks(updates: Path, size: int) -> Iterator[_Columns]:
    """The columns of shard 0, `size` rows at a time; the last chunk may have fewer."""
    chunk: _Columns = {}
    for batch in read_updates(updates, _COLUMNS, shard=0):
        fresh = columns_of(batch, _COLUMNS)
        chunk = {
            name: np.concatenate([chunk.get(name, fresh[name][:0]), fresh[name]])
            for name in _COLUMNS
        }
        whole = len(chunk["time"]) // size * size
        for start in range(0, whole, size):
            yield {name: chunk[name][start : start + size] for name in _COLUMNS}
        chunk = {name: chunk[name][whole:] for name in _COLUMNS}
    if chunk and len(chunk["time"]):
        yield chunk


if __name__ == "__main__":
    sys.stdout.write(f"{adopt(Path(sys.argv[1]))}\n")
