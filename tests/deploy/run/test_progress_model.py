"""The figures of the display, computed from statuses and compared with sums done by hand."""

import math
from typing import Any

import pytest

from deploy.run.progress_model import LinkReading, Meter, Readings, WorkerReading, quantile
from shards.messages import LiveSettings
from shards.shard_status import Histogram, Standing
from tests.support.run_records import records, status, worker


def meter(steps: int = 100, workers: int = 2, bound: int | None = 4) -> Meter:
    return Meter(steps=steps, workers=workers, bound=bound, started=1000.0)


def test_the_first_look_has_no_speeds() -> None:
    """With nothing to compare, speeds and the figures derived from them are unknown, not zero."""
    got = meter().update([status(steps=3, samples=192)], [records(0)], 1002.0)
    assert got == Readings(
        elapsed_s=2.0,
        steps=3,
        planned=200,
        remaining_s=None,
        samples_per_s=None,
        loss=None,
        rate=0.01,
        epoch=None,
        staleness_mean=None,
        staleness_max=None,
        bound=4,
        absent=2,
        workers=(),
        shards=got.shards,
    )
    shard = got.shards[0]
    assert (shard.updates_per_s, shard.bytes_in_per_s, shard.bytes_out_per_s) == (None, None, None)


def test_speeds_come_from_the_last_ten_seconds() -> None:
    """A slow start is forgotten: the rate is that between the looks at 10 s and at 20 s."""
    watch = meter()
    looks = [(0.0, 0), (5.0, 1), (10.0, 2), (15.0, 32), (20.0, 62)]
    for time, steps in looks:
        counters: dict[str, Any] = {
            "version": steps,
            "steps": steps,
            "samples": steps * 64,
            "bytes_in": steps * 1000,
            "bytes_out": steps * 2000,
        }
        got = watch.update([status(**counters)], [records(0)], 1000.0 + time)
    assert got.samples_per_s == 60 / 10 * 64
    assert got.remaining_s == (200 - 62) / 6
    shard = got.shards[0]
    assert (shard.updates_per_s, shard.bytes_in_per_s) == (6.0, 6000.0)
    assert shard.bytes_out_per_s == 12000.0


def test_a_job_that_moves_is_measured_anew() -> None:
    """Other shards count from zero, so the counters of the former ones give no speed."""
    watch = meter()
    watch.update([status(version=9, bytes_in=900)], [records(0)], 1000.0)
    got = watch.update([status(version=9)] * 2, [records(0)] * 2, 1001.0)
    assert [shard.updates_per_s for shard in got.shards] == [None, None]
    got = watch.update([status(version=12)] * 2, [records(0)] * 2, 1002.0)
    assert [shard.updates_per_s for shard in got.shards] == [3.0, 3.0]


def test_a_shard_that_was_rolled_back_is_measured_anew() -> None:
    """It counts from its last autosave: the run slows down for a while, but never goes
    backwards."""
    watch = meter()
    both = [status(version=9, steps=9, samples=576)] * 2
    watch.update(both, [records(0)] * 2, 1000.0)
    back = [status(version=4, steps=4, samples=256), both[1]]
    got = watch.update(back, [records(0)] * 2, 1001.0)
    assert (got.samples_per_s, got.remaining_s, got.steps) == (None, None, 4)
    assert [shard.updates_per_s for shard in got.shards] == [None, None]
    on = [status(version=6, steps=6, samples=384), status(version=11, steps=11, samples=704)]
    got = watch.update(on, [records(0)] * 2, 1002.0)
    assert got.samples_per_s == 128.0
    assert [shard.updates_per_s for shard in got.shards] == [2.0, 2.0]


def test_a_run_that_stands_still_has_no_end() -> None:
    """At zero steps per second the time left is unknown, and the last loss stays."""
    watch = meter()
    watch.update([status(steps=5)], [records(1, loss=0.25)], 1000.0)
    for time in range(1, 40):
        got = watch.update([status(steps=5)], [records(0)], 1000.0 + time)
    assert (got.samples_per_s, got.remaining_s, got.loss) == (0.0, None, 0.25)


def test_the_loss_is_the_mean_of_recent_updates() -> None:
    """Updates of the last ten seconds count equally, whichever look brought them; only shard
    0's."""
    watch = meter()
    watch.update([status(), status(1)], [records(1, loss=50.0), records(1)], 1000.0)
    watch.update([status(), status(1)], [records(3, loss=[1, 2, 3]), records(3)], 1012.0)
    watch.update([status(), status(1)], [records(0), records(0)], 1015.0)
    got = watch.update([status(), status(1)], [records(1, loss=6.0), records(1)], 1022.0)
    assert got.loss == pytest.approx((1 + 2 + 3 + 6) / 4)


def test_the_loss_may_be_the_mean_of_so_many_updates() -> None:
    """As a solver's average_loss defines it, whatever the time between looks."""
    watch = Meter(steps=100, workers=2, bound=4, started=1000.0, average=3)
    watch.update([status()], [records(3, loss=[9, 9, 1])], 1000.0)
    assert watch.update([status()], [records(2, loss=[2, 3])], 1100.0).loss == 2.0


def test_epochs_are_passes_over_the_rows() -> None:
    """Samples of all workers together, over the rows of the training data."""
    watch = Meter(steps=100, workers=2, bound=4, started=1000.0, rows=200)
    got = watch.update([status(samples=500, rate=0.02)], [records(0)], 1000.0)
    assert (got.epoch, got.rate) == (2.5, 0.02)


def test_staleness_is_over_all_updates_seen() -> None:
    """Mean and maximum cover every record of every shard since the start."""
    watch = meter()
    watch.update([status(), status(1)], [records(1, staleness=7), records(1, staleness=1)], 1000.0)
    got = watch.update([status(), status(1)], [records(2, staleness=2), records(0)], 1100.0)
    assert (got.staleness_mean, got.staleness_max) == (3.0, 7)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "runs"),
        ({"waiting": True}, "waits at the bound"),
        ({"standing": Standing.KNOWN}, "joins"),
        ({"standing": Standing.KNOWN, "waiting": True}, "waits for the warm start"),
        ({"standing": Standing.LEFT, "step": 100}, "is done"),
        ({"standing": Standing.LEFT, "step": 99}, "has left"),
        ({"standing": Standing.EXPIRED}, "is silent, no longer waited for"),
    ],
)
def test_a_standing_is_told_in_words(fields: dict[str, Any], words: str) -> None:
    """Each state that the shards know of a worker reads differently."""
    got = meter().update([status(workers=[worker(**fields)])], [records(0)], 1000.0)
    assert got.workers[0].standing == words


def test_a_worker_waits_if_it_waits_anywhere() -> None:
    """Shards are combined: waiting at any of them counts, and so does the highest restart count."""
    statuses = [
        status(0, [worker("w0", clock=7, takeovers=1), worker("w1", seq=0)]),
        status(1, [worker("w0", clock=8, waiting=True, takeovers=2)]),
    ]
    got = meter().update(statuses, [records(0), records(0)], 1000.0)
    assert got.workers == (
        WorkerReading("w0", 7, 10, "waits at the bound", True, 0.5, 2),
        WorkerReading("w1", 10, 10, "runs", False, None, 0),
    )
    assert got.waiting == ["w0"]
    assert got.absent == 0


def test_workers_stand_in_the_order_of_their_numbers() -> None:
    """w10 comes after w2, and a worker that only a later shard knows is included."""
    statuses = [status(0, [worker("w10"), worker("w2")]), status(1, [worker("w1")])]
    got = meter(workers=5).update(statuses, [records(0), records(0)], 1000.0)
    assert [one.name for one in got.workers] == ["w1", "w2", "w10"]
    assert got.absent == 2


def test_a_quantile_is_that_of_the_last_seconds() -> None:
    """Slow updates from before the window do not count; the first look has all there are."""
    slow = Histogram((0.001, 0.01, 0.1), (0, 0, 50, 0), 4.0)
    later = Histogram((0.001, 0.01, 0.1), (90, 9, 51, 0), 4.2)
    assert quantile(slow, later, 0.5) == 0.001
    assert quantile(slow, later, 0.99) == 0.01
    assert quantile(slow, slow, 0.5) == 0.1
    assert quantile(Histogram(), later, 0.5) == 0.001
    assert quantile(Histogram(), Histogram(), 0.5) is None
    assert quantile(later, slow, 0.5) is None, "the shard's process began again"
    assert quantile(Histogram(), Histogram((1.0,), (0, 3), 9.0), 0.5) == 1.0, "the largest bound"
    watch = meter()
    for time, applied in ((0.0, slow), (5.0, later)):
        got = watch.update([status(apply_s=applied)], [records(0)], 1000.0 + time)
    assert got.shards[0].apply_p99_ms == 10.0
    assert got.shards[0].apply_s == later


def test_the_bound_is_the_one_in_force() -> None:
    """An operator may have changed it since the job began."""
    changed = LiveSettings(9, revision=1)
    assert meter().update([status()], [records(0)], 1000.0).bound == 4
    assert meter().update([status(settings=changed)], [records(0)], 1000.0).bound == 9


def test_links_are_grouped_by_their_hosts() -> None:
    """The median round trip of a pair, and the bytes that its workers pushed in the last seconds; a
    worker that has not renewed its lease yet has no host."""
    watch = meter()
    far = [worker(f"w{n}", host="far", rtt_s=0.001 * rtt) for n, rtt in enumerate((10, 30, 0, 20))]
    workers = [*far, worker("w9", host="near"), worker("w8")]
    rows = records(6, worker=[b"w0", b"w1", b"w9", b"w9", b"w8", b"w0"])
    rows["bytes"] = [100, 200, 1, 2, 5000, 300]
    statuses = [status(0, workers, host="a"), status(1, workers, host="b")]
    watch.update(statuses, [rows, rows], 1000.0)
    got = watch.update(statuses, [rows, rows[:1]], 1002.0)
    assert got.links == (
        LinkReading("far", "a", 20.0, 300.0),
        LinkReading("far", "b", 20.0, 50.0),
        LinkReading("near", "a", None, 1.5),
        LinkReading("near", "b", None, 0.0),
    )
    assert meter().update([status(0, workers)], [rows], 1000.0).links == ()


@pytest.mark.parametrize("average", [None, 5])
def test_a_loss_that_is_no_number_shows(average: int | None) -> None:
    """Also among others, and with a solver's average_loss: a run that diverges is seen."""
    watch = Meter(steps=100, workers=2, bound=4, started=1000.0, average=average)
    assert watch.update([status()], [records(2, loss=[1, 3])], 1000.0).loss == 2.0
    loss = watch.update([status()], [records(2, loss=[1, math.nan])], 1001.0).loss
    assert loss is not None
    assert math.isnan(loss)
