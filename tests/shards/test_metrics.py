"""A shard's metrics: records, counters and the learning rate that follows from them."""

import msgspec
import numpy as np
import pytest

from shards import wire_format
from shards.messages import MAX_STEPS, AskRecords, AskStatus, LiveSettings, Records, Status
from shards.metrics import MAX_RECORDS, Metrics
from shards.schedules import Exp, Step
from shards.shard_status import Histogram, ShardStatus, Standing, WorkerStatus
from shards.update_records import RECORD
from tests.support.shard_dsl import REAL, SIZE, Talk, as_bytes, gradient, pull, push


def test_records_are_numbered_and_kept_until_collected() -> None:
    """A request for records from n on drops those before n; repeating it gives the same."""
    talk = Talk(bound=None)
    talk.enter("w")
    for seq in range(1, 6):
        talk.say(push("w", seq, read_version=seq - 1), gradient(1))

    def ask(after: int) -> tuple[int, list[int]]:
        ((_, reply),) = talk.say(AskRecords(1, "job", after))
        assert isinstance(reply, Records)
        rows = np.frombuffer(as_bytes(talk.frames)[0] if talk.frames else b"", RECORD)
        return reply.first, rows["seq"].tolist()

    assert ask(0) == (0, [1, 2, 3, 4, 5])
    assert ask(3) == ask(3) == ask(0) == (3, [4, 5])
    assert ask(5) == (5, [])
    talk.say(push("w", 6), gradient(1))
    assert ask(5) == (5, [6])


def test_what_a_record_says() -> None:
    """The shard measures staleness, age, gap, rate and norm; the worker reports the rest."""
    talk = Talk(schedule=Step(base_rate=0.5, gamma=0.5, step_size=1), workers=2)
    talk.enter("a", "b")
    talk.now = 2.0
    talk.say(pull("a", 0))
    talk.say(push("b", 1), gradient(1))
    talk.now = 5.0
    times = {"rtt_s": 0.25, "wait_s": 0.125, "compute_s": 0.5, "data_s": 0.75, "network_s": 1.0}
    talk.say(push("a", 1, steps=2, clock=2, **times), gradient(3))
    talk.say(AskRecords(1, "job", 1))
    (row,) = np.frombuffer(as_bytes(talk.frames)[0], RECORD)
    expected = {
        "worker": b"a",
        "incarnation": 0,
        "seq": 1,
        "clock": 2,
        "steps": 2,
        "samples": 64,
        "read_version": 0,
        "apply_version": 2,
        "staleness": 1,
        "wall_age_s": 3.0,
        "clock_gap": 1,
        "bytes": 4 * SIZE,
        **times,
        "rate": 0.5,
        "gradient_norm": np.sqrt(9.0 * len(REAL)),
        "loss": 0.5,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_records_that_nobody_collects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest records are kept, under their own numbers."""
    assert MAX_RECORDS >= 100_000
    talk = Talk(bound=None)
    monkeypatch.setattr("shards.metrics.MAX_RECORDS", 3)
    talk.shard.metrics._records = type(talk.shard.metrics._records)(maxlen=3)
    talk.enter("w")
    for seq in range(1, 6):
        talk.say(push("w", seq), gradient(1))
    ((_, reply),) = talk.say(AskRecords(1, "job", 0))
    assert reply == Records(1, 0, 1, 2)
    assert np.frombuffer(as_bytes(talk.frames)[0], RECORD)["seq"].tolist() == [3, 4, 5]


def test_the_status() -> None:
    """Counters count payload bytes and answers; each worker has its standing."""
    talk = Talk(bound=0, workers=1)
    talk.enter("a", "b")
    talk.say(pull("a", 0))
    talk.say(push("a", 1, loss=0.75), gradient(1))
    talk.say(push("a", 1), gradient(1))
    talk.say(push("a", 3), gradient(1))
    talk.say(pull("a", 1))
    assert talk.say(AskStatus(1, "job")) == [("operator", Status(1, 0, 1))]
    status = wire_format.decode_state(as_bytes(talk.frames)[0], ShardStatus)
    none = Histogram()
    unmeasured = msgspec.structs.replace(status, apply_s=none, queues=none, parked=none)
    assert unmeasured == ShardStatus(
        shard=0,
        version=1,
        steps=1,
        samples=64,
        rate=1.0,
        pushes=1,
        pulls=1,
        duplicates=1,
        dropped=0,
        refused=1,
        bytes_in=4 * SIZE,
        bytes_out=4 * SIZE,
        max_clock_gap=1,
        workers=(
            WorkerStatus("a", Standing.ACTIVE, 0, 0, 1, 1, 1, True, 0.75),
            WorkerStatus("b", Standing.ACTIVE, 0, 0, 0, 0, 0, False, 0.0),
        ),
        waiting=1,
        settings=LiveSettings(0),
    )


def test_turns_are_counted_in_histograms() -> None:
    """A push counts with its share of its turn, a turn without one only with its queue, and a value
    at a bound belongs to the interval below."""
    metrics = Metrics()
    metrics.turn(3, 2, 0, 0.002)
    metrics.turn(1, 0, 5, 0.001)
    metrics.turn(100, 1, 300, 60.0)
    apply_s, queues, parked = metrics.histograms()
    assert dict(zip(apply_s.bounds, apply_s.counts, strict=False))[0.001] == 2
    assert (apply_s.counts[-1], sum(apply_s.counts), apply_s.total) == (1, 3, 60.002)
    assert (queues.counts, queues.total) == ((1, 0, 1, 0, 0, 0, 0, 1), 104)
    assert (parked.counts[0], parked.counts[4], parked.counts[-1]) == (1, 1, 1)
    assert (metrics.queue, metrics.busy_s) == (100, 60.003)


def test_a_rate_that_grows_beyond_numbers() -> None:
    """The rate becomes infinite, as Caffe's does, and the shard still answers."""
    talk = Talk(schedule=Exp(base_rate=1.0, gamma=10.0), bound=None)
    talk.enter("w")
    talk.say(push("w", 1, steps=MAX_STEPS), gradient(0))
    assert talk.shard.updates.rate == float("inf")
    assert talk.say(AskStatus(1, "job")) == [("operator", Status(1, 0, 1))]


def test_the_schedule_counts_steps_of_the_whole_system() -> None:
    """With two workers the iteration rises by one every two steps, whichever worker takes them."""
    talk = Talk(schedule=Step(base_rate=1.0, gamma=0.5, step_size=1), workers=2, bound=None)
    talk.enter("a", "b")
    rates = []
    for seq in range(1, 6):
        rates.append(talk.shard.updates.rate)
        talk.say(push("a", seq), gradient(0))
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25]
