"""The numbers of `summary.json`, against sums done by hand or by other code."""

import numpy as np
import pytest

from deploy.run.summary import Summary, summarise
from tests.support.run_records import records, report, status, summary, worker
from worker.training.figures import UpdateTally
from worker.training.worker_times import WorkerTimes


def test_the_keys_are_those_agreed_upon() -> None:
    """`summary.json` has exactly these keys, on which users rely."""
    assert Summary.__struct_fields__ == (
        *(
            "test_accuracy",
            "test_loss",
            "seconds",
            "earlier_seconds",
            "samples",
            "updates",
            "workers",
            "shards",
        ),
        *("staleness_bound", "max_clock_gap", "staleness_mean", "staleness_max", "duplicates"),
        *("worker_restarts", "samples_per_second", "compute_share", "data_share", "wait_share"),
        *("network_share", "serialise_share", "transports", "devices"),
        *("goodput", "dropped", "observers_cpu_s", "start"),
    )


def test_a_tally_of_pieces_is_the_tally_of_the_whole() -> None:
    """However the records are divided, also with empty parts, the counts are the same."""
    rng = np.random.default_rng(20)
    rows = records(500, staleness=rng.integers(0, 9, 500), clock_gap=rng.integers(0, 6, 500))
    cuts = sorted(rng.integers(0, 501, 7).tolist())
    pieces = [rows[a:b] for a, b in zip([0, *cuts], [*cuts, 500], strict=True)]
    tally = UpdateTally.of(pieces)
    assert tally == UpdateTally.of([rows])
    assert tally.staleness_mean == np.mean(rows["staleness"])
    assert tally.staleness_max == np.max(rows["staleness"])
    assert tally.max_clock_gap == np.max(rows["clock_gap"])
    assert (tally.rows, tally.samples) == (500, 500 * 64)


def test_a_run_is_summed_up() -> None:
    """Each figure of a run of two shards and two workers is the one computed by hand."""
    shards = [records(3, staleness=[0, 1, 2]), records(3, staleness=[0, 1, 5])]
    statuses = [
        status(0, [worker("w0", takeovers=1), worker("w1")], version=3, samples=192, duplicates=2),
        status(1, [worker("w0"), worker("w1", takeovers=2)], version=3, samples=192, duplicates=1),
    ]
    reports = [
        report(3.0, compute_s=2.0, waited_s=0.5, network_s=0.25, serialise_s=0.1),
        report(1.0, compute_s=1.0, data_s=0.2),
    ]
    got = summarise(
        statuses,
        UpdateTally.of(shards),
        reports,
        workers=2,
        staleness_bound=4,
        seconds=4.0,
    )
    assert got == Summary(
        test_accuracy=None,
        test_loss=None,
        seconds=4.0,
        samples=192,
        updates=3,
        workers=2,
        shards=2,
        staleness_bound=4,
        max_clock_gap=0,
        staleness_mean=1.5,
        staleness_max=5,
        duplicates=3,
        worker_restarts=3,
        samples_per_second=48.0,
        compute_share=0.75,
        data_share=0.05,
        wait_share=0.125,
        network_share=0.0625,
        serialise_share=0.025,
        devices=("cpu",),
    )


def test_each_worker_has_its_own_goodput() -> None:
    """Without dropped steps and what a death has cost; none without any time. Pushes that came too
    late are added up over all lives.
    """
    reports = [report(3.0, worker="w1", dropped=2), report(1.0, worker="w1", dropped=1)]
    got = summarise(
        [status()],
        UpdateTally(),
        reports,
        workers=3,
        staleness_bound=None,
        seconds=4.0,
        times_s={
            "w1": WorkerTimes(compute=3.0, wait=0.5, lost=0.5),
            "w0": WorkerTimes(compute=1.0, data=1.0),
            "w2": WorkerTimes(),
        },
    )
    assert got.goodput == {"w0": 0.5, "w1": 0.75}
    assert got.dropped == 3


def test_an_update_counts_once_every_shard_has_it() -> None:
    """A push that an interrupted run applied at only one of two shards is not an update."""
    statuses = [status(0, version=11, samples=704), status(1, version=10, samples=640)]
    got = summarise(statuses, UpdateTally(), [], workers=1, staleness_bound=None, seconds=1.0)
    assert (got.updates, got.samples, got.staleness_bound) == (10, 640, None)


def test_the_largest_gap_is_the_largest_that_anything_saw() -> None:
    """The gaps of statuses and records count, of this part of the run and of the one before."""
    sources = [
        {"fresh": UpdateTally(rows=1, max_clock_gap=7)},
        {"earlier": UpdateTally(rows=1, max_clock_gap=7)},
        {},
    ]
    for options in sources:
        statuses = [status(max_clock_gap=2 if options else 7), status(1)]
        arguments = {"fresh": UpdateTally(), "reports": [], **options}
        got = summarise(
            statuses,
            **arguments,  # type: ignore[arg-type]
            workers=1,
            staleness_bound=6,
            seconds=1.0,
        )
        assert got.max_clock_gap == 7


def test_a_run_that_moved_counts_what_it_left() -> None:
    """Duplicates and gaps at former shards count; samples per second count each update once,
    whatever the number of shards at the time."""
    got = summarise(
        [status(duplicates=1, max_clock_gap=2)],
        UpdateTally(rows=10, samples=100),
        [],
        workers=1,
        staleness_bound=None,
        seconds=2.0,
        fresh_samples=60,
        former=[status(duplicates=2, max_clock_gap=5)] * 2,
    )
    assert (got.shards, got.duplicates, got.max_clock_gap) == (1, 5, 5)
    assert got.samples_per_second == 30.0


def test_a_resumed_run_is_timed_as_a_whole() -> None:
    """Seconds and staleness are over both parts; samples per second are of this part alone."""
    got = summary(
        UpdateTally.of([records(10, staleness=4)]),
        earlier=UpdateTally.of([records(30, staleness=0)]),
        seconds=2.0,
        earlier_s=40.0,
    )
    assert (got.seconds, got.earlier_seconds) == (42.0, 40.0)
    assert got.staleness_mean == pytest.approx(1.0)
    assert got.samples_per_second == 10 * 64 / 2.0


def test_what_was_not_measured_is_none() -> None:
    """Without updates, reports or a test set, these figures are None, not zero."""
    got = summary(seconds=0.0)
    missing = {name for name in Summary.__struct_fields__ if getattr(got, name) is None}
    assert missing == {
        *("test_accuracy", "test_loss", "staleness_mean", "staleness_max"),
        *("compute_share", "data_share", "wait_share", "network_share", "serialise_share"),
    }
    assert got.samples_per_second == 0


def test_devices_are_those_that_workers_computed_on() -> None:
    """Each name once; none if no worker has reported."""
    reports = [report(1.0), report(1.0, device="gpu:1"), report(1.0, device="gpu:0"), report(2.0)]
    found = summarise(
        [status(version=1)], UpdateTally(), reports, workers=4, staleness_bound=4, seconds=2.0
    )
    assert found.devices == ("cpu", "gpu:0", "gpu:1")
    assert summary().devices == ()
