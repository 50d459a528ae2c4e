"""The results of a finished run as numbers: the content of `summary.json`.

Pure functions compute them from the shards' counters and the workers' reports. For a resumed run,
`seconds`, `samples`, `updates`, `max_clock_gap`, `worker_restarts` and the staleness figures cover
the whole run; rates and shares cover only the time since it was resumed.
"""

from collections.abc import Mapping, Sequence

import msgspec

from shards.shard_status import ShardStatus
from worker.training.figures import UpdateTally
from worker.training.training_loop import WorkerReport
from worker.training.worker_times import WorkerTimes, goodput


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `summary.json`, in this order. None (null) means not measured.

    The texts below the fields are those of docs/reference/run-folder.md.
    """

    test_accuracy: float | None
    """Share of the test set that the final weights classify correctly. Null without a test set."""
    test_loss: float | None
    """Mean loss of the final weights over the test set. Null without one."""
    seconds: float
    """Wall time of the training in seconds, without starting Ray and Spark and the last test. Of a
    resumed run, that of its parts together.
    """
    earlier_seconds: float = 0.0
    """The part of `seconds` from before the run was last resumed, up to the last update that was
    kept.
    """
    samples: int
    """Training examples in all pushes, dropped ones included."""
    updates: int
    """The version of the final weights: pushes that every shard has applied."""
    workers: int
    """The configured number of workers."""
    shards: int
    """The number of shards."""
    staleness_bound: int | None
    """The staleness bound in steps. Null means none."""
    max_clock_gap: int
    """The largest clock gap after any update, in steps. At most the bound + 1 for workers that push
    one step for each read. It may be more if a shard was rolled back, or if workers repeat pushes
    after a move to other shards where a new worker has just joined.
    """
    staleness_mean: float | None
    """Mean of the column `staleness` of `updates.parquet`, in versions."""
    staleness_max: int | None
    """The largest value of that column."""
    duplicates: int
    """Repeated pushes, added up over the shards. None was applied twice."""
    worker_restarts: int
    """Takeovers by a later incarnation, added up over the workers."""
    samples_per_second: float
    """Training examples a second, since the run was started or last resumed."""
    compute_share: float | None
    """Share of the workers' time spent on gradients and on their own copies of the weights."""
    data_share: float | None
    """Share spent waiting for the next batch."""
    wait_share: float | None
    """Share spent waiting at the gate."""
    network_share: float | None
    """Share spent waiting for answers that the gate did not hold back."""
    serialise_share: float | None
    """Share spent packing and unpacking messages."""
    transports: tuple[str, ...] = ()
    """What carried weights and gradients between workers and shards: `shm`, `ipc`, `tcp`."""
    devices: tuple[str, ...] = ()
    """What workers computed on: `cpu`, or `gpu:N`, a GPU of the worker's host."""
    goodput: dict[str, float] = {}
    """The share of each worker's time in useful steps, since the run was started or last resumed.
    Steps of dropped pushes are not useful, and the time that a death has cost is lost.
    """
    dropped: int = 0
    """Pushes that a shard dropped because they came too late for their round or quorum."""
    observers_cpu_s: dict[str, float] = {}
    """CPU seconds of this process while it trained: `rows` to collect, record and show the updates,
    `tests` to test the weights.
    """
    start: dict[str, float] = {}
    """Seconds from the start of the process until each part was ready, the last being the first
    step: `inputs`, `ray`, `spark`, `shards`, `workers`, `step`. The parts overlap.
    """


def summarise(
    statuses: Sequence[ShardStatus],
    fresh: UpdateTally,
    reports: Sequence[WorkerReport],
    *,
    workers: int,
    staleness_bound: int | None,
    seconds: float,
    earlier: UpdateTally | None = None,
    earlier_s: float = 0.0,
    fresh_samples: int | None = None,
    former: Sequence[ShardStatus] = (),
    times_s: Mapping[str, WorkerTimes] | None = None,
) -> Summary:
    """The summary of an untested run: its shards' last statuses, one per shard, and its workers'
    reports.

    `fresh` tallies the updates since the run was started or resumed, `earlier` those before;
    `workers` is the configured number, `seconds` the wall time of the training since
    then, and `earlier_s` that of the parts before. An update counts once every
    shard has applied it. For a run that was resharded, `former` has the last statuses of its former
    shards, and `fresh_samples` counts the samples of each fresh update once. `times_s` are the
    times of each worker, as its records say.
    """
    samples = fresh.samples / len(statuses) if fresh_samples is None else fresh_samples
    gaps = (status.max_clock_gap for status in (*former, *statuses))
    all_updates = fresh + (earlier or UpdateTally())
    return Summary(
        test_accuracy=None,
        test_loss=None,
        seconds=earlier_s + seconds,
        earlier_seconds=earlier_s,
        samples=min(status.samples for status in statuses),
        updates=min(status.version for status in statuses),
        workers=workers,
        shards=len(statuses),
        staleness_bound=staleness_bound,
        max_clock_gap=max(all_updates.max_clock_gap, *gaps),
        staleness_mean=all_updates.staleness_mean,
        staleness_max=all_updates.largest_staleness,
        duplicates=sum(status.duplicates for status in (*former, *statuses)),
        worker_restarts=_restarts(statuses),
        samples_per_second=samples / seconds if seconds > 0 else 0.0,
        compute_share=_share(reports, "compute_s"),
        data_share=_share(reports, "data_s"),
        wait_share=_share(reports, "waited_s"),
        network_share=_share(reports, "network_s"),
        serialise_share=_share(reports, "serialise_s"),
        transports=tuple(sorted({kind for report in reports for kind in report.transports})),
        devices=tuple(sorted({report.device for report in reports})),
        goodput=_goodput(times_s or {}),
        dropped=sum(report.dropped for report in reports),
    )


def _restarts(statuses: Sequence[ShardStatus]) -> int:
    """The number of incarnations after each worker's first.

    The maximum over shards counts, because an incarnation may die before it greets every shard.
    """
    takeovers: dict[str, int] = {}
    for status in statuses:
        for worker in status.workers:
            known = takeovers.get(worker.worker, 0)
            takeovers[worker.worker] = max(known, worker.takeovers)
    return sum(takeovers.values())


def _goodput(times_s: Mapping[str, WorkerTimes]) -> dict[str, float]:
    """The goodput of each worker for which one was measured."""
    shares = {name: goodput([times]) for name, times in sorted(times_s.items())}
    return {name: share for name, share in shares.items() if share is not None}


def _share(reports: Sequence[WorkerReport], part: str) -> float | None:
    """One part of the time as a fraction of all seconds of all workers; None without any."""
    total = sum(report.seconds for report in reports)
    return sum(getattr(report, part) for report in reports) / total if total > 0 else None
