"""A job moves while shards of it are killed: nothing acknowledged is lost or counted twice.

Plain processes and kill -9, at chosen moments of a move. Workers push ones at rate 1, so what the
weights hold proves which pushes were applied.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ps
from ps import Durability, console, operations, process_shards, supervision
from ps.job_logs import newest_logs
from ps.process_host import ProcessShards
from shards.errors import DownpourError, GiveUp
from shards.schedules import Fixed
from tests.ps.test_durability import TABLE, more, pushing, quick_start, until
from worker.residence import Moved, Residence

__all__ = ["quick_start"]  # a fixture for each test here


class Wished:
    """A wish, and what came of it."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.answers: list[DownpourError | None] = []

    def answer(self, error: DownpourError | None) -> None:
        self.answers.append(error)


class Job:
    """A job of two shards at one level; `started` has every set of processes there was."""

    def __init__(self, durability: Durability, logs: Path | None, patience_s: float) -> None:
        specs = ps.shard_specs(
            TABLE, shards=2, bound=None, workers=3, schedule=Fixed(base_rate=1.0), lease_s=4.0
        )
        self.started: list[ProcessShards] = []
        self.notes: list[str] = []

        @contextmanager
        def start(specs: Any, ports: int, folder: Path | None) -> Iterator[ProcessShards]:
            with process_shards(specs, durability=durability, logs=folder) as hosts:
                self.started.append(hosts)
                yield hosts

        self.residence = Residence(
            specs, start, logs=logs, patience_s=patience_s, told=self.notes.append
        )
        self.residence.console.install(TABLE.empty())

    def moved(self, shards: int) -> Moved | None:
        """Move, and go over there if that came to something."""
        self.wish = Wished(shards)
        self.residence.begin(self.wish)
        moved = self.residence.ended(waits=True)
        if moved is not None:
            self.residence.enter(moved)
            self.residence.entered()
        assert len(self.wish.answers) == 1
        return moved

    def total(self) -> float:
        """How many pushes the weights hold; each shard as many."""
        held = set(self.residence.console.read()[:3000])
        assert len(held) == 1, held
        return -float(held.pop())


def kills_before(
    monkeypatch: pytest.MonkeyPatch, question: str, count: int, kill: Callable[[], None]
) -> None:
    """Kill just before the `count`th time that this is asked, counted from 1."""
    asked, real = [0], console._done

    def done(step: Any, by_side: Any) -> Any:
        if isinstance(step, operations.Ask) and type(step.question(0)).__name__ == question:
            asked[0] += 1
            if asked[0] == count:
                kill()
        return real(step, by_side)

    monkeypatch.setattr(console, "_done", done)


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError, ChildProcessError):
        # It is a child of ours; who waits for it next is told as before.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.timeout(600)
def test_kills_at_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new shard that dies before workers are told calls the move off, by its name, and the job
    goes on where it is. An old one that dies when another has sent its workers on is missed by
    nobody. One that dies before any has: the new shards hold all that was acknowledged."""
    job = Job(Durability.MEMORY, None, 2.0)
    with job.residence as residence:
        first = residence.cluster
        with pushing(first, 2) as pushers:
            more(pushers)
            with monkeypatch.context() as patch:
                kills_before(patch, "Install", 2, lambda: end(job.started[1].pids[1]))
                assert job.moved(3) is None
            (error,) = job.wish.answers
            line = "shard 1 has died: its process was ended by signal 9 (Killed)"
            assert (type(error), str(error)) == (GiveUp, line)
            assert job.notes[-1] == f"the job stays with its 2 shards: {line}"
            residence.check()
            more(pushers)

            with monkeypatch.context() as patch:
                kills_before(patch, "Retire", 2, lambda: end(job.started[0].pids[1]))
                moved = job.moved(1)
            assert moved is not None
            assert job.wish.answers == [None]
            residence.check()
            assert job.notes[-1].startswith("shard 1 has died: ")
            more(pushers)
            with ps.Client(first, worker="late", retry_s=0.2) as late:
                assert late.cluster == residence.cluster
        acknowledged = sum(one.acknowledged for one in pushers)
        assert job.total() == acknowledged

        with monkeypatch.context() as patch:
            kills_before(patch, "Retire", 1, lambda: end(job.started[2].pids[0]))
            moved = job.moved(2)
        assert moved is not None
        assert "the new shards hold what it had" in str(moved.untold)
        assert job.total() == acknowledged
        assert [status.version for status in residence.console.status()] == [acknowledged] * 2


@pytest.mark.timeout(600)
def test_kills_with_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that dies in the midst of a move is started again: the move is off, or it holds. Then
    everything is where the job is, and in its logs."""
    monkeypatch.setattr(supervision, "QUICK_S", 0.0)
    job = Job(Durability.PROCESS, tmp_path, 120.0)
    with job.residence as residence:
        with pushing(residence.cluster, 2) as pushers:
            for question, count, which, shard in (
                ("Export", 1, 0, 1),  # an old one forgets that it stands still
                ("Retire", 2, -1, 0),  # a new one has its state in its log
                ("Retire", 1, -2, 0),  # an old one, when the new ones hold all that it has
            ):
                more(pushers)
                with monkeypatch.context() as patch:
                    kills_before(
                        patch,
                        question,
                        count,
                        lambda which=which, shard=shard: end(job.started[which].pids[shard]),  # type: ignore[misc]
                    )
                    job.moved(5 - residence.cluster.map.shards)
                more(pushers)
        acknowledged = sum(one.acknowledged for one in pushers)
        assert job.total() == acknowledged
        assert sum(hosts.deaths for hosts in job.started) == 3
        shards = residence.cluster.map.shards
    found = newest_logs(tmp_path)
    assert found is not None
    assert found.manifest.map.shards == shards
    whole = found.manifest.table.empty()
    found.manifest.map.join([state.weights for state in found.states], whole)
    assert set(whole[:3000]) == {-float(acknowledged)}


@pytest.mark.timeout(300)
def test_a_worker_that_dies_in_the_midst_of_a_push() -> None:
    """Of a push that one shard has and another lacks, the move waits for the lease, no longer; the
    next life of its worker goes on behind it."""
    job = Job(Durability.MEMORY, None, 30.0)
    with job.residence as residence:
        client = ps.Client(residence.cluster, worker="w")
        client.pull()
        client.push(np.ones(TABLE.size, np.float32))
        client.flush()
        whole = client._links.send_together
        client._links.send_together = lambda *_: None  # type: ignore[method-assign]
        client.push(np.ones(TABLE.size, np.float32))
        for shard, message, frames in list(client._session.outstanding()):
            if shard == 0:
                whole(shard, [(message, frames)])
        until(lambda: residence.console.status()[0].version == 2, "the push has not come")
        client.abandon()
        assert job.moved(3) is not None
        with ps.Client(residence.cluster, worker="w", incarnation=1) as successor:
            assert (successor.seq, successor.step) == (2, 2)


def test_what_cannot_be_wished_for() -> None:
    """As many shards as there are, or more than the table can be cut into, are refused at once."""
    job = Job(Durability.MEMORY, None, 30.0)
    with job.residence as residence:
        for shards, line in (
            (2, "reshard: expected another number of shards than 2, got it"),
            (99, "table net has 12 blocks of 256 floats: expected 1 to 12 shards, got 99"),
        ):
            wish = Wished(shards)
            residence.begin(wish)
            assert not residence.moving
            assert [str(error) for error in wish.answers] == [line]
        assert len(job.started) == 1
