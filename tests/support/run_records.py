"""Made-up statuses, records and reports of runs, for tests of what is computed from them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deploy.run.summary import summarise
from shards.shard_status import ShardStatus, Standing, WorkerStatus
from shards.update_records import RECORD
from worker.training.figures import Rows, UpdateTally
from worker.training.training_loop import WorkerReport


def records(count: int, **columns: Any) -> Rows:
    """`count` updates by w0, applied as versions 1, 2 ..., one per second; columns as given."""
    rows = np.zeros(count, RECORD)
    rows["worker"] = b"w0"
    rows["seq"] = rows["apply_version"] = np.arange(1, count + 1)
    rows["read_version"] = np.arange(count)
    rows["time"] = np.arange(count)
    rows["steps"], rows["samples"], rows["rtt_s"], rows["wall_age_s"] = 1, 64, 0.01, 0.02
    for name, values in columns.items():
        rows[name] = values
    return rows


def worker(name: str = "w0", **fields: Any) -> WorkerStatus:
    """A running worker at step 10."""
    defaults: Mapping[str, Any] = {
        "standing": Standing.ACTIVE,
        "incarnation": 0,
        "takeovers": 0,
        "clock": 10,
        "step": 10,
        "seq": 10,
        "waiting": False,
        "loss": 0.5,
    }
    return WorkerStatus(worker=name, **{**defaults, **fields})


def status(shard: int = 0, workers: Sequence[WorkerStatus] = (), **fields: Any) -> ShardStatus:
    """A shard's counters, zero unless given."""
    counters = dict.fromkeys(
        (
            *("version", "steps", "samples", "pushes", "pulls", "duplicates", "dropped", "refused"),
            *("bytes_in", "bytes_out", "max_clock_gap"),
        ),
        0,
    )
    return ShardStatus(shard=shard, workers=tuple(workers), **{"rate": 0.01, **counters, **fields})


def report(seconds: float, **parts: Any) -> WorkerReport:
    """A worker's report of a life of this many seconds; its parts are zero unless given."""
    names = ("compute_s", "data_s", "waited_s", "network_s", "serialise_s")
    fields: dict[str, Any] = {"worker": "w0", **dict.fromkeys(names, 0.0), **parts}
    return WorkerReport(
        incarnation=0,
        steps=1,
        samples=1,
        seconds=seconds,
        duplicates=0,
        **fields,
    )


def summary(fresh: UpdateTally | None = None, **options: Any) -> Any:
    """A summary of one shard, with the `options` of `summarise`."""
    defaults = {"workers": 1, "staleness_bound": 4, "seconds": 2.0}
    return summarise([status(version=10)], fresh or UpdateTally(), [], **{**defaults, **options})
