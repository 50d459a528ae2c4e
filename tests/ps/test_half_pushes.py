"""A worker that dies during a push: what its shards keep, and where its next life begins.

Table `a` is on shard 0 and table `b` on shard 1, both at rate 1, so the weights are the sums of the
pushes that each shard has applied.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import ps
from tests.support.eventually import eventually

SIZE = 4096


@contextmanager
def two_shards(on: str) -> Iterator[ps.Job]:
    zeros = np.zeros(SIZE, np.float32)
    tables = ps.Tables(**{name: ps.Dense({"w": zeros}, rate=1.0) for name in "ab"})
    with ps.start(tables, shards=2, on=on) as job:
        yield job


def push(worker: ps.Worker, value: float) -> ps.AckFuture:
    """Push `value` to both tables."""
    with worker.step() as step:
        step.pull()
        for table in "ab":
            step.push(table, {"w": np.full(SIZE, value, np.float32)})
    return step.ack


def sums(job: ps.Job) -> tuple[float, float]:
    """The sums of the pushes that the shards of `a` and of `b` have applied."""
    with job.reader() as reader:
        weights = reader.pull()
    held = [set((-weights[table]["w"]).tolist()) for table in "ab"]
    assert [len(values) for values in held] == [1, 1], "no part of a table is torn"
    return held[0].pop(), held[1].pop()


def die_halfway(job: ps.Job, reached: int, values: Sequence[float]) -> None:
    """Push `values` in a first life, which dies when only shard `reached` has the last push."""
    worker = job.worker("w", transport="tcp")
    *whole, last = values
    for value in whole:
        push(worker, value).result()
    before = sums(job)
    with worker.step() as step:
        step.pull()
        links: Any = worker.client.links
        send = links.send_together
        links.send_together = lambda shard, *rest: send(shard, *rest) if shard == reached else None
        for table in "ab":
            step.push(table, {"w": np.full(SIZE, last, np.float32)})
    eventually(lambda: sums(job) != before, because=f"shard {reached} has its half")
    worker.abort()


@pytest.mark.parametrize("reached", [0, 1])
def test_half_a_push_is_not_completed_by_another(reached: int) -> None:
    """The next life begins after the push that one shard has, and its own first push reaches both:
    under one number, no shard holds another push than the others."""
    with two_shards("threads") as job:
        die_halfway(job, reached, [1, 1, 1, 100])
        with job.worker("w", incarnation=1) as second:
            assert (second.seq, second.clock) == (4, 4)
            ack = push(second, 7).result()
            assert (ack.seq, ack.duplicate, ack.dropped) == (5, False, False)
            held = sums(job)
        assert held == ((110, 10) if reached == 0 else (10, 110))
