"""A job is resharded while its shards die: no acknowledged push is lost or counted twice.

Servers run in threads, and stop and start again at chosen moments of a reshard. Workers push ones
at rate 1, so the weights prove which pushes were applied.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ps
from ps import admin_client
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.processes import process_replicas
from ps.launch.replica_supervisor import ReplicatedShards
from ps.session import admin_plans
from ps.wal.job_logs import newest_logs
from shards.errors import DownpourError, GiveUp
from shards.repartition import whole_weights
from shards.schedules import Fixed
from tests.support.eventually import eventually
from tests.support.pushers import PATIENCE_S, TABLE, more, pushing
from tests.support.stoppable_shards import Servers
from worker.job import shards as resharding
from worker.job.run_control import PendingOrder, ReshardOrder
from worker.job.shards import JobShards, ReshardedShards, Risks


class Request(PendingOrder):
    """An order to reshard, and its answers."""

    def __init__(self, shards: int) -> None:
        super().__init__(ReshardOrder(shards), lambda error, _: self.answers.append(error))
        self.shards = shards
        self.answers: list[DownpourError | None] = []


class Job:
    """A job of two shards; `started` has every set of servers that was started."""

    def __init__(self, logs: Path | None, patience_s: float, lease_s: float = 60.0) -> None:
        specs = shard_specs(
            TABLE, shards=2, bound=None, workers=3, schedule=Fixed(base_rate=1.0), lease_s=lease_s
        )
        self.started: list[Servers] = []
        self.notes: list[str] = []

        @contextmanager
        def start(specs: Any, ports: int, folder: Path | None) -> Iterator[Servers]:
            servers = Servers(specs, folder)
            self.started.append(servers)
            try:
                yield servers
            finally:
                servers.stop()

        self.job_shards = JobShards(
            specs, start, logs=logs, patience_s=patience_s, notify=self.notes.append
        )
        self.job_shards.admin.install(TABLE.empty())

    def moved(self, shards: int) -> ReshardedShards | None:
        """Reshard, and switch to the new shards if that succeeded."""
        self.request = Request(shards)
        self.job_shards.begin(self.request.shards, self.request)
        moved = self.job_shards.collect_reshard(waits=True)
        if moved is not None:
            self.job_shards.enter(moved)
            self.job_shards.report_success()
        assert len(self.request.answers) == 1
        return moved

    def total(self) -> float:
        """The number of pushes that the weights hold, the same on each shard."""
        # Not the client of `job_shards`: the tests of a death give it little patience.
        with ps.AdminClient(self.job_shards.cluster, patience_s=PATIENCE_S) as admin_client:
            held = set(admin_client.read()[:3000])
            versions = [status.version for status in admin_client.status()]
        assert len(held) == 1, held
        total = -float(held.pop())
        assert versions == [total] * len(versions)
        return total


def before(
    monkeypatch: pytest.MonkeyPatch, question: str, count: int, act: Callable[[], None]
) -> None:
    """Call `act` just before this question is asked for the `count`th time, counted from 1."""
    asked, real = [0], admin_client._carry_out_step

    def done(step: Any, by_side: Any) -> Any:
        if isinstance(step, admin_plans.Ask) and step.kind.__name__ == question:
            asked[0] += 1
            if asked[0] == count:
                act()
        return real(step, by_side)

    monkeypatch.setattr(admin_client, "_carry_out_step", done)


def test_deaths_at_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new shard that dies before the workers are redirected cancels the reshard, the error names
    it, and the job keeps its shards. An old shard that dies after shard 0 has redirected its
    workers is not needed. If shard 0 dies before that, the new shards hold every acknowledged push.
    """
    # A reshard waits a lease longer than usual for a dead shard.
    job = Job(None, 2.0, lease_s=2.0)
    with job.job_shards as job_shards:
        first = job_shards.cluster
        with pushing(first, 2) as pushers:
            more(pushers)
            with monkeypatch.context() as patch:
                before(patch, "Install", 2, lambda: job.started[1].die(1))
                assert job.moved(3) is None
            (error,) = job.request.answers
            assert (type(error), str(error)) == (GiveUp, "shard 1 has died")
            assert job.notes[-1] == "the job stays with its 2 shards: shard 1 has died"
            job_shards.check()
            more(pushers)

            with monkeypatch.context() as patch:
                before(patch, "HandOver", 2, lambda: job.started[0].die(1))
                assert job.moved(1) is not None
            assert job.request.answers == [None]
            job_shards.check()
            assert job.notes[-1].startswith("shard 1 has died; it held nothing any more")
            more(pushers)
            with Client(first, worker="late", retry_s=0.2) as late:
                assert late.cluster == job_shards.cluster
        acknowledged = sum(one.acknowledged for one in pushers)
        assert job.total() == acknowledged

        with monkeypatch.context() as patch:
            before(patch, "HandOver", 1, lambda: job.started[2].die(0))
            moved = job.moved(2)
        assert moved is not None
        assert "the new shards hold its state" in str(moved.unconfirmed)
        assert job.total() == acknowledged
        assert job_shards.cluster.map.shards == 2


@pytest.mark.parametrize(
    ("question", "count", "which", "shard"),
    [
        ("Export", 1, 0, 1),  # an old shard, which is quiesced
        ("HandOver", 1, 1, 0),  # a new shard, which has its state in its log
        ("HandOver", 1, 0, 1),  # an old shard, once the new ones hold all its state
        ("HandOver", 2, 0, 1),  # the same, once another has redirected its workers
    ],
)
def test_deaths_with_logs(
    question: str,
    count: int,
    which: int,
    shard: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shard that dies during a reshard restarts at the same point of it: the reshard succeeds,
    and the new shards and their logs hold everything."""
    job = Job(tmp_path, 60.0)
    with job.job_shards as job_shards:
        with pushing(job_shards.cluster, 2) as pushers:
            more(pushers)
            before(monkeypatch, question, count, lambda: job.started[which].die(shard))
            assert job.moved(3) is not None
            more(pushers)
        acknowledged = sum(one.acknowledged for one in pushers)
        assert job.total() == acknowledged
    found = newest_logs(tmp_path)
    assert found is not None
    assert found.manifest.map == job_shards.cluster.map
    whole = whole_weights(found.states, found.manifest.layout, found.manifest.map)
    assert set(whole[:3000]) == {-float(acknowledged)}


@pytest.mark.timeout(600)  # eight processes start
def test_replicated_shards_that_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old and a new primary, in processes, over CURVE, are killed by kill -9 just before workers
    are redirected: the reshard succeeds, and the remaining copies hold everything."""
    specs = shard_specs(
        TABLE, shards=2, bound=None, workers=3, schedule=Fixed(base_rate=1.0), lease_s=60.0
    )
    started: list[ReplicatedShards] = []

    @contextmanager
    def start(specs: Any, ports: int, folder: Path | None) -> Iterator[ReplicatedShards]:
        with process_replicas(specs, secure=True, silence_s=5.0) as hosts:
            started.append(hosts)
            yield hosts

    def kill() -> None:
        for hosts in started:
            os.kill(hosts.pids["shard 0 primary"], signal.SIGKILL)

    request = Request(1)
    notes: list[str] = []
    with JobShards(specs, start, logs=None, patience_s=60.0, notify=notes.append) as job_shards:
        job_shards.admin.install(TABLE.empty())
        with pushing(job_shards.cluster, 2) as pushers:
            more(pushers)
            before(monkeypatch, "HandOver", 1, kill)
            job_shards.begin(request.shards, request)
            moved = job_shards.collect_reshard(waits=True)
            assert moved is not None, notes
            job_shards.enter(moved)
            job_shards.report_success()
            more(pushers)
        assert request.answers == [None]
        assert len(started) == 2
        acknowledged = sum(one.acknowledged for one in pushers)
        assert set(job_shards.admin.read()[:3000]) == {-float(acknowledged)}


def test_a_worker_that_dies_in_the_midst_of_a_push() -> None:
    """If one shard has a push and another lacks it, the reshard waits for the worker's lease to
    expire, no longer; the worker's next incarnation continues after that push."""
    job = Job(None, 30.0, lease_s=2.0)
    with job.job_shards as job_shards:
        client = Client(job_shards.cluster, worker="w")
        client.pull()
        client.push(np.ones(TABLE.size, np.float32))
        client.flush()
        whole = client._current.links.send_together
        client._current.links.send_together = lambda *_: None  # type: ignore[method-assign]
        client.push(np.ones(TABLE.size, np.float32))
        for shard, message, frames in list(client._current.session.outstanding()):
            if shard == 0:
                whole(shard, [(message, frames)])
        eventually(
            lambda: job_shards.admin.status()[0].version == 2, because="shard 0 applies the push"
        )
        client.abort()
        assert job.moved(3) is not None
        with Client(job_shards.cluster, worker="w", incarnation=1) as successor:
            assert (successor.seq, successor.step) == (2, 2)


def test_a_move_that_comes_to_nothing_leaves_no_logs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The shards of a failed reshard delete their logs before they stop, on every node; the job
    keeps its own logs, and the next reshard succeeds."""

    def fails(*_: Any) -> None:
        raise GiveUp("no room")

    job = Job(tmp_path, 30.0)
    with job.job_shards as job_shards:
        with monkeypatch.context() as patch:
            patch.setattr(resharding, "reshard", fails)
            assert job.moved(3) is None
        assert job.moved(4) is not None
        assert job_shards.cluster.map.shards == 4
    assert [servers.forgot for servers in job.started] == [False, True, False]


def test_no_shard_is_restarted_while_the_job_reshards(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shard is restarted from the first question until the reshard has ended. After that the
    shards that hold the job are restarted, and former ones never. A refused request changes
    nothing."""
    job = Job(None, 30.0)
    seen: list[list[bool]] = []

    def look() -> None:
        seen.append([servers.restart_enabled for servers in job.started])

    def fail() -> None:
        look()
        raise GiveUp("no room")

    with job.job_shards as job_shards:
        look()
        job_shards.begin(2, Request(2))
        look()
        with monkeypatch.context() as patch:
            before(patch, "Install", 1, fail)
            assert job.moved(3) is None
        look()
        with monkeypatch.context() as patch:
            before(patch, "Quiesce", 1, look)
            before(patch, "HandOver", 1, look)
            job_shards.begin(3, Request(3))
            moved = job_shards.collect_reshard(waits=True)
        assert moved is not None
        look()
        job_shards.enter(moved)
        look()
    assert seen == [
        [True],
        [True],
        [False, False],  # the reshard that fails
        [True, False],
        [False, False, False],  # asked to quiesce,
        [False, False, False],  # to redirect its workers,
        [False, False, False],  # before the switch
        [False, False, True],
    ]


def test_what_deaths_have_cost() -> None:
    """Lost updates are reported once, those of former shards included."""
    job = Job(None, 30.0)
    with job.job_shards as job_shards:
        job_shards.check()
        assert job.notes == []
        job.started[0].lost = ["shard 1 has died", "shard 0 has died"]
        job_shards.check()
        assert job.moved(1) is not None
        job.started[0].lost = ["shard 0 has died again"]
        job.started[1].lost = ["the new shard 0 has died"]
        for _ in range(2):
            job_shards.check()
    assert job.notes == [
        "shard 1 has died",
        "shard 0 has died",
        "moving from 2 to 1 shard",
        "shard 0 has died again",
        "the new shard 0 has died",
    ]


def test_requests_that_are_refused() -> None:
    """A request for the present number of shards, or for more than the table allows, is refused at
    once."""
    job = Job(None, 30.0)
    with job.job_shards as job_shards:
        for shards, line in (
            (2, "reshard: the job already has 2 shards"),
            (999, "table net: expected 1 to 768 shards, got 999"),
        ):
            request = Request(shards)
            job_shards.begin(request.shards, request)
            assert not job_shards.moving
            assert [str(error) for error in request.answers] == [line]
        assert len(job.started) == 1


def test_what_lasts_is_told_once() -> None:
    """A copy replaced within seconds is not reported; a lasting loss is, and so is its end."""
    risks = Risks()
    for risk, now, told in (
        ("", 0.0, False),
        ("shard 0 has one copy only: x", 1.0, False),
        ("", 20.0, False),
        ("shard 0 has one copy only: x", 21.0, False),
        ("shard 0 has one copy only: y", 50.9, False),
        ("shard 0 has one copy only: y", 51.0, True),
        ("shard 0 has one copy only: z", 90.0, False),
    ):
        text = risks.due_message(risk, now)
        assert (text is not None) is told
    assert risks.due_message("", 91.0) == "every shard has two copies again, and a coordinator"
    assert risks.due_message("", 92.0) is None
    risks.due_message("no coordinator answers: w", 100.0)
    assert risks.due_message("no coordinator answers: w", 130.0) == (
        "for 30 s now no coordinator answers: w; training continues, but another death may take"
        " back acknowledged pushes, or end the run"
    )
