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
from deploy.run.updates_parquet import read_updates
from deploy.runner import job_folder
from deploy.runner.readings import SeriesPoint

_POINTS = 2000
_COLUMNS = ("loss", "samples", "steps", "staleness", "clock_gap", "time")
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
    size = max(1, -(-rows // _POINTS))
    steps = samples = most = 0
    before = 0.0
    for columns in _chunks(updates, size):
        fresh, seconds = int(columns["samples"].sum()), float(columns["time"][-1])
        steps, samples = steps + int(columns["steps"].sum()), samples + fresh
        most = max(most, int(columns["staleness"].max()))
        losses = columns["loss"][np.isfinite(columns["loss"])]
        p50, p99 = np.quantile(columns["staleness"], (0.5, 0.99)).tolist()
        yield SeriesPoint(
            time=began + seconds,
            seconds=seconds,
            updates=steps,
            samples=samples,
            loss=float(losses.mean()) if len(losses) else None,
            samples_per_s=fresh / (seconds - before) if seconds > before else None,
            staleness_p50=p50,
            staleness_p99=p99,
            staleness_max=most,
            clock_gap=int(columns["clock_gap"].max()),
            waiting=0,
        )
        before = seconds


def _chunks(updates: Path, size: int) -> Iterator[_Columns]:
    """The columns of shard 0, `size` rows at a time; the last chunk may have fewer."""
    chunk: _Columns = {name: np.empty(0) for name in _COLUMNS}
    for batch in read_updates(updates, _COLUMNS, shard=0):
        fresh = {name: batch.column(name).to_numpy(zero_copy_only=False) for name in _COLUMNS}
        chunk = {name: np.concatenate([chunk[name], fresh[name]]) for name in _COLUMNS}
        whole = len(chunk["time"]) // size * size
        for start in range(0, whole, size):
            yield {name: chunk[name][start : start + size] for name in _COLUMNS}
        chunk = {name: chunk[name][whole:] for name in _COLUMNS}
    if len(chunk["time"]):
        yield chunk


if __name__ == "__main__":
    sys.stdout.write(f"{adopt(Path(sys.argv[1]))}\n")
