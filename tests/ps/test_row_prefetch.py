"""Rows that are requested ahead: one request a step, of one version, within the staleness bound."""

from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np
import pytest

import ps
from ps.job_spec import shard_specs
from ps.session.events import Pulled, Send
from ps.session.row_requests import Gather
from ps.session.session import Session
from ps.start_job import OwnJob
from shards.first_values import Uniform
from shards.ledger import Ledger
from shards.messages import Pull
from shards.row_frames import RowGradient
from shards.rules import SGD
from shards.shard import Shard
from shards.shard_state import SavedProgress, ShardState, empty_tables
from shards.spec import TableSpec
from shards.tables import SparseTable
from tests.support.row_oracle import RowOracle

DIM, RATE, SEED = 3, 0.5, 7
TABLE = SparseTable("user", DIM, Uniform(0.1), SEED)
IDS = np.array([5, 1, 5, 2**62, 9], np.uint64)
ONES = np.ones((len(IDS), DIM), np.float32)


def oracle_after(pushes: int, ids: Any = IDS) -> RowOracle:
    """Rows after some pushes of ones for each of `ids`."""
    rows = RowOracle(TABLE, SGD())
    distinct, counts = np.unique(ids, return_counts=True)
    for _ in range(pushes):
        rows.push(distinct, np.repeat(counts[:, None], DIM, 1).astype(np.float32), RATE)
    return rows


@contextmanager
def job_of(**options: Any) -> Iterator[OwnJob]:
    user = ps.Sparse(DIM, rate=RATE, init=ps.Uniform(0.1), seed=SEED)
    tables = ps.Tables(net=ps.Dense.zeros({"w": (4,)}, rate=1.0), user=user)
    with ps.local(tables, shards=2, transport="tcp", **options) as job:
        yield job


def count_requests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clocks of the pulls that sessions are asked for from now on."""
    clocks: list[int] = []
    real = Session.pull

    def pull(self: Session, clock: int, *rest: Any, **options: Any) -> Any:
        clocks.append(clock)
        return real(self, clock, *rest, **options)

    monkeypatch.setattr(Session, "pull", pull)
    return clocks


def take_step(me: ps.Worker, ids: Any = IDS, ahead: Any = None) -> Any:
    """One step that pushes ones; returns its rows and its weights."""
    with me.step(gather={"user": ids}) as step:
        rows, weights = step.rows("user"), step.pull("net")["w"]
        if ahead is not None:
            me.prefetch(gather={"user": ahead})
        step.scatter("user", np.ones((len(ids), DIM), np.float32))
        step.push("net", {"w": -np.ones(4, np.float32)})
    step.ack.result()
    return rows, weights


def test_one_request_and_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes the rows and weights that were requested for it, in whatever order its ids are;
    they lack the push of the step in which they were requested.
    """
    with job_of() as job, job.worker("w0") as me:
        clocks = count_requests(monkeypatch)
        me.prefetch(gather={"user": IDS})
        for number in range(5):
            ids = IDS if number % 2 else IDS[::-1]
            rows, weights = take_step(me, ids, ahead=IDS)
            pushes = max(0, number - 1)
            assert np.array_equal(rows, oracle_after(pushes).gather(ids))
            assert weights.tolist() == [pushes] * 4
        assert clocks == [0, 1, 2, 3, 4, 5]


def test_the_bound_holds_for_rows_requested_ahead() -> None:
    """At bound 0 what is requested a step early waits for that step's push, and includes it."""
    with job_of(staleness=0) as job, job.worker("w0") as me:
        for number in range(4):
            rows, weights = take_step(me, ahead=IDS)
            assert np.array_equal(rows, oracle_after(number).gather(IDS))
            assert weights.tolist() == [number] * 4


def test_several_steps_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is for the step after the last that was requested, up to 64 of them."""
    with job_of() as job, job.worker("w0") as me:
        clocks = count_requests(monkeypatch)
        batches = [np.arange(number, number + 3, dtype=np.uint64) for number in range(64)]
        for ids in batches:
            me.prefetch(gather={"user": ids})
        with pytest.raises(ps.BadInput, match="prefetch: expected at most 64 steps ahead, got one"):
            me.prefetch(gather={"user": IDS})
        first = RowOracle(TABLE, SGD())
        for ids in batches[:5]:
            rows, _ = take_step(me, ids)
            assert np.array_equal(rows, first.gather(ids))
        assert clocks == list(range(64))
        me.prefetch(gather={"user": IDS})
        assert clocks[-1] == 64


def test_a_step_of_other_ids_reads_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were requested for other ids are not taken, nor are those of a step without any."""
    with job_of() as job, job.worker("w0") as me:
        clocks = count_requests(monkeypatch)
        me.prefetch(gather={"user": IDS})
        rows, _ = take_step(me, np.array([5, 1], np.uint64))
        assert np.array_equal(rows, oracle_after(0).gather(np.array([5, 1], np.uint64)))
        me.prefetch(gather={"user": IDS})
        with me.step() as step:
            step.pull("net")
        assert clocks == [0, 0, 1, 1]
        rows, _ = take_step(me)
        assert np.array_equal(rows, oracle_after(1, [5, 1]).gather(IDS))


def test_a_step_that_raises_leaves_the_next_one_its_rows() -> None:
    """A step that failed is taken again with the same ids, and reads them."""
    with job_of() as job, job.worker("w0") as me:
        me.prefetch(gather={"user": IDS})
        with pytest.raises(ps.BadInput, match="int64 or uint64"):
            take_step(me, ahead=[1.5])
        rows, _ = take_step(me)
        assert np.array_equal(rows, oracle_after(0).gather(IDS))


def test_rows_requested_before_a_move_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits at the former shards is requested again of the new ones, once."""
    with job_of(staleness=0) as job, job.worker("w0") as me:
        clocks = count_requests(monkeypatch)
        take_step(me, ahead=IDS)
        me.prefetch(gather={"user": IDS})  # at the bound until the next step is pushed
        job.reshard(3)
        for number in (1, 2):
            rows, weights = take_step(me)
            assert np.array_equal(rows, oracle_after(number).gather(IDS))
            assert weights.tolist() == [number] * 4
        assert clocks.count(2) == 2


def test_ids_that_are_none() -> None:
    """Ids are checked as those of a step are, and nothing is requested."""
    with job_of() as job, job.worker("w0") as me:
        for gather, text in (
            ({"net": IDS}, "gather: expected one of the sparse tables user, got 'net'"),
            ({"user": [1.5]}, "gather: user: expected int64 or uint64"),
            ([1], "gather: expected a dict of ids by table, got a list of 1"),
        ):
            with pytest.raises(ps.BadInput) as raised:
                me.prefetch(gather=gather)  # type: ignore[arg-type]
            assert text in str(raised.value)
            assert raised.value.worker == "w0"


class VirtualLink:
    """A worker's session and one shard, with messages that take half of a round trip each way.

    Time is a number that advances with what happens.
    """

    def __init__(self, round_trip_s: float) -> None:
        (spec,) = shard_specs([TableSpec(TABLE)])
        self.shard = Shard(spec, boot=1)
        arrays = empty_tables(spec.layout)
        self.shard.restore(ShardState(SavedProgress(0, 0, 0, Ledger()), arrays))
        self.session = Session(
            job=spec.job, worker="w", incarnation=0, layout=spec.layout, shard_map=spec.map
        )
        self.now, self.one_way_s = 0.0, round_trip_s / 2
        self.pulled: dict[int, Pulled] = {}
        self.pulls = 0
        self._under_way: list[tuple[float, int, Any]] = []
        self._order = count()
        self.send(self.session.hello(0.0))
        while self.session.ready is None:
            self._carry()

    def send(self, messages: list[Send]) -> None:
        for message in messages:
            self.pulls += isinstance(message.message, Pull)
            heappush(self._under_way, (self.now + self.one_way_s, next(self._order), message))

    def _carry(self) -> None:
        """Let the next message arrive."""
        self.now, _, message = heappop(self._under_way)
        if isinstance(message, Send):
            frames = [bytes(frame) for frame in message.frames]
            for out in self.shard.handle(b"w", message.message, frames, self.now):  # type: ignore[arg-type]
                heappush(self._under_way, (self.now + self.one_way_s, next(self._order), out))
            return
        frames = [bytes(frame) for frame in message.frames]
        sends, events = self.session.receive(0, message.message, frames, self.now)
        self.pulled |= {event.request: event for event in events if isinstance(event, Pulled)}
        self.send(sends)

    def take_steps(self, steps: int, ahead: int, compute_s: float) -> float:
        """Take steps with rows that are requested `ahead` of them; returns the seconds taken."""
        began, requests = self.now, list[int]()
        for step in range(steps):
            while len(requests) < min(step + ahead + 1, steps):
                ids = np.arange(len(requests), len(requests) + 8, dtype=np.uint64)
                request, sends = self.session.pull(
                    len(requests), self.now, gather=Gather({"user": ids})
                )
                requests.append(request)
                self.send(sends)
            while requests[step] not in self.pulled:
                self._carry()
            pulled = self.pulled.pop(requests[step])
            until = self.now + compute_s
            while self._under_way and self._under_way[0][0] <= until:
                self._carry()
            self.now = until
            ids = np.arange(step, step + 8, dtype=np.uint64)
            gradient = RowGradient(ids, np.ones_like(pulled.rows["user"].rows))
            _, sends = self.session.push(
                {"user": gradient},
                pulled.versions,
                clock=step + 1,
                step=step + 1,
                steps=1,
                samples=1,
                loss=0.0,
                now=self.now,
            )
            self.send(sends)
        return self.now - began


def test_a_long_link_costs_little() -> None:
    """Over a link of 100 ms, rows that are requested early enough leave a worker nine tenths of its
    rate, with one request a step; requested when they are needed, a tenth.
    """
    steps, compute_s = 200, 0.01
    at_home = VirtualLink(2e-4).take_steps(steps, 0, compute_s)
    far = VirtualLink(0.1)
    assert at_home / far.take_steps(steps, 12, compute_s) >= 0.9
    assert far.pulls == steps
    assert at_home / VirtualLink(0.1).take_steps(steps, 0, compute_s) < 0.1
