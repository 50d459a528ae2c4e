"""A job moves while shards of it die: nothing acknowledged is lost or counted twice.

Servers in threads, which stop and are made again at chosen moments of a move. Workers push ones at
rate 1, so what the weights hold proves which pushes were applied.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ps
from ps import Durability, console
from ps.hosts.hosting import ShardDevice, serve
from ps.hosts.keeper import ReplicatedShards
from ps.job import describe
from ps.logs.job_logs import newest_logs
from ps.protocol import operations
from ps.serving.server import Server
from ps.wire.transport import Transport
from shards.errors import DownpourError, GiveUp
from shards.schedules import Fixed
from shards.spec import ShardSpec
from tests.ps.hosts.test_durability import PATIENCE_S, TABLE, more, pushing, quick_start, until
from worker import residence as moving
from worker.residence import Moved, Residence

__all__ = ["quick_start"]  # a fixture


class Servers:
    """Shards that can die, and be started again if they keep logs."""

    risk = ""
    following = True

    def __init__(self, specs: Sequence[ShardSpec], logs: Path | None) -> None:
        self._specs, self._logs = specs, logs
        self._servers = [self._serve(spec, "tcp://127.0.0.1:*") for spec in specs]
        self._dead: set[int] = set()
        self.forgets = self.forgot = False
        self.lost: list[str] = []
        self.cluster = describe(specs, [server.endpoint for server in self._servers])

    def _serve(self, spec: ShardSpec, bind: str) -> Server:
        told = bind, Transport.TCP, ShardDevice.CPU, None
        if self._logs is None:
            return serve(spec, *told).start()
        return serve(spec, *told, Durability.PROCESS, self._logs / f"shard-{spec.shard}").start()

    def die(self, shard: int) -> None:
        """Die; one with a log comes back at once."""
        self._servers[shard].stop()
        if self._logs is None:
            self._dead.add(shard)
        else:
            endpoint = self._servers[shard].endpoint
            self._servers[shard] = self._serve(self._specs[shard], endpoint)

    def check(self) -> None:
        for shard in self._dead:
            raise GiveUp(f"shard {shard} has died")

    def losses(self) -> list[str]:
        told, self.lost = self.lost, []
        return told

    def forget_logs(self) -> None:
        """What `stop` would do on a disk that only the shards see."""
        self.forgets = True

    def stop(self) -> None:
        self.forgot = self.forgets
        for shard, server in enumerate(self._servers):
            if shard not in self._dead:
                server.stop()


class Wished:
    """A wish, and what came of it."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.answers: list[DownpourError | None] = []

    def answer(self, error: DownpourError | None) -> None:
        self.answers.append(error)


class Job:
    """A job of two shards; `started` has every set of servers there was."""

    def __init__(self, logs: Path | None, patience_s: float, lease_s: float = 60.0) -> None:
        specs = ps.shard_specs(
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
        # Not the residence's own console, which has as little patience as the test of a death.
        with ps.Console(self.residence.cluster, patience_s=PATIENCE_S) as console:
            held = set(console.read()[:3000])
            versions = [status.version for status in console.status()]
        assert len(held) == 1, held
        total = -float(held.pop())
        assert versions == [total] * len(versions)
        return total


def before(
    monkeypatch: pytest.MonkeyPatch, question: str, count: int, act: Callable[[], None]
) -> None:
    """Do something just before the `count`th time that this is asked, counted from 1."""
    asked, real = [0], console._done

    def done(step: Any, by_side: Any) -> Any:
        if isinstance(step, operations.Ask) and type(step.question(0)).__name__ == question:
            asked[0] += 1
            if asked[0] == count:
                act()
        return real(step, by_side)

    monkeypatch.setattr(console, "_done", done)


def test_deaths_at_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new shard that dies before workers are told calls the move off, by its name, and the job
    goes on where it is. An old one that dies when shard 0 has sent its workers on is missed by
    nobody. If shard 0 dies before it has, the new shards hold all that was acknowledged."""
    # A move waits for a dead shard as long as for a lease, and for its answer on top.
    job = Job(None, 2.0, lease_s=2.0)
    with job.residence as residence:
        first = residence.cluster
        with pushing(first, 2) as pushers:
            more(pushers)
            with monkeypatch.context() as patch:
                before(patch, "Install", 2, lambda: job.started[1].die(1))
                assert job.moved(3) is None
            (error,) = job.wish.answers
            assert (type(error), str(error)) == (GiveUp, "shard 1 has died")
            assert job.notes[-1] == "the job stays with its 2 shards: shard 1 has died"
            residence.check()
            more(pushers)

            with monkeypatch.context() as patch:
                before(patch, "Retire", 2, lambda: job.started[0].die(1))
                assert job.moved(1) is not None
            assert job.wish.answers == [None]
            residence.check()
            assert job.notes[-1].startswith("shard 1 has died; it held nothing any more")
            more(pushers)
            with ps.Client(first, worker="late", retry_s=0.2) as late:
                assert late.cluster == residence.cluster
        acknowledged = sum(one.acknowledged for one in pushers)
        assert job.total() == acknowledged

        with monkeypatch.context() as patch:
            before(patch, "Retire", 1, lambda: job.started[2].die(0))
            moved = job.moved(2)
        assert moved is not None
        assert "the new shards hold what it had" in str(moved.untold)
        assert job.total() == acknowledged
        assert residence.cluster.map.shards == 2


@pytest.mark.parametrize(
    ("question", "count", "which", "shard"),
    [
        ("Export", 1, 0, 1),  # an old one, which stands still
        ("Retire", 1, 1, 0),  # a new one, which has its state in its log
        ("Retire", 1, 0, 1),  # an old one, when the new ones hold all that it has
        ("Retire", 2, 0, 1),  # and when another has sent its workers on
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
    """A shard that dies in the midst of a move comes back and is as far in it as it was: the job
    moves, and everything is where it is then, and in its logs."""
    job = Job(tmp_path, 60.0)
    with job.residence as residence:
        with pushing(residence.cluster, 2) as pushers:
            more(pushers)
            before(monkeypatch, question, count, lambda: job.started[which].die(shard))
            assert job.moved(3) is not None
            more(pushers)
        acknowledged = sum(one.acknowledged for one in pushers)
        assert job.total() == acknowledged
    found = newest_logs(tmp_path)
    assert found is not None
    assert found.manifest.map == residence.cluster.map
    whole = found.manifest.table.empty()
    found.manifest.map.join([state.weights for state in found.states], whole)
    assert set(whole[:3000]) == {-float(acknowledged)}


@pytest.mark.timeout(600)  # eight processes start
def test_replicated_shards_that_are_killed(
    quick_start: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Primaries in processes, over CURVE, one that holds the job and one where it moves to, die of
    kill -9 just before workers are sent on: the job moves, and the copies left have everything."""
    specs = ps.shard_specs(
        TABLE, shards=2, bound=None, workers=3, schedule=Fixed(base_rate=1.0), lease_s=60.0
    )
    started: list[ReplicatedShards] = []

    @contextmanager
    def start(specs: Any, ports: int, folder: Path | None) -> Iterator[ReplicatedShards]:
        with ps.replicated_shards(specs, secure=True, silence_s=5.0) as hosts:
            started.append(hosts)
            yield hosts

    def kill() -> None:
        for hosts in started:
            os.kill(hosts.pids["shard 0 primary"], signal.SIGKILL)

    wish = Wished(1)
    notes: list[str] = []
    with Residence(specs, start, logs=None, patience_s=60.0, told=notes.append) as residence:
        residence.console.install(TABLE.empty())
        with pushing(residence.cluster, 2) as pushers:
            more(pushers)
            before(monkeypatch, "Retire", 1, kill)
            residence.begin(wish)
            moved = residence.ended(waits=True)
            assert moved is not None, notes
            residence.enter(moved)
            residence.entered()
            more(pushers)
        assert wish.answers == [None]
        assert len(started) == 2
        acknowledged = sum(one.acknowledged for one in pushers)
        assert set(residence.console.read()[:3000]) == {-float(acknowledged)}


def test_a_worker_that_dies_in_the_midst_of_a_push() -> None:
    """Of a push that one shard has and another lacks, the move waits for the lease, no longer; the
    next life of its worker goes on behind it."""
    job = Job(None, 30.0, lease_s=2.0)
    with job.residence as residence:
        client = ps.Client(residence.cluster, worker="w")
        client.pull()
        client.push(np.ones(TABLE.size, np.float32))
        client.flush()
        whole = client._stay.links.send_together
        client._stay.links.send_together = lambda *_: None  # type: ignore[method-assign]
        client.push(np.ones(TABLE.size, np.float32))
        for shard, message, frames in list(client._stay.session.outstanding()):
            if shard == 0:
                whole(shard, [(message, frames)])
        until(lambda: residence.console.status()[0].version == 2, "the push has not come")
        client.abandon()
        assert job.moved(3) is not None
        with ps.Client(residence.cluster, worker="w", incarnation=1) as successor:
            assert (successor.seq, successor.step) == (2, 2)


def test_a_move_that_comes_to_nothing_leaves_no_logs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The shards that it began remove theirs before they end, wherever those are; the job keeps
    its own, and the next move finds room."""

    def fails(*_: Any) -> None:
        raise GiveUp("no room")

    job = Job(tmp_path, 30.0)
    with job.residence as residence:
        with monkeypatch.context() as patch:
            patch.setattr(moving, "move", fails)
            assert job.moved(3) is None
        assert job.moved(4) is not None
        assert residence.cluster.map.shards == 4
    assert [servers.forgot for servers in job.started] == [False, True, False]


def test_nobody_is_followed_while_the_job_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """From before the first question until the job has gone over, or stays: then those that hold it
    are followed, and those that it has left never again. A wish that is refused changes nothing."""
    job = Job(None, 30.0)
    seen: list[list[bool]] = []

    def look() -> None:
        seen.append([servers.following for servers in job.started])

    def fail() -> None:
        look()
        raise GiveUp("no room")

    with job.residence as residence:
        look()
        residence.begin(Wished(2))
        look()
        with monkeypatch.context() as patch:
            before(patch, "Install", 1, fail)
            assert job.moved(3) is None
        look()
        with monkeypatch.context() as patch:
            before(patch, "Hold", 1, look)
            before(patch, "Retire", 1, look)
            residence.begin(Wished(3))
            moved = residence.ended(waits=True)
        assert moved is not None
        look()
        residence.enter(moved)
        look()
    assert seen == [
        [True],
        [True],
        [False, False],  # the one that fails
        [True, False],
        [False, False, False],  # asked to stand still,
        [False, False, False],  # to send its workers on,
        [False, False, False],  # and nobody has gone over yet
        [False, False, True],
    ]


def test_what_deaths_have_cost() -> None:
    """Is told once, also of shards that the job has left since."""
    job = Job(None, 30.0)
    with job.residence as residence:
        residence.check()
        assert job.notes == []
        job.started[0].lost = ["shard 1 has died", "shard 0 has died"]
        residence.check()
        assert job.moved(1) is not None
        job.started[0].lost = ["shard 0 has died again"]
        job.started[1].lost = ["the new shard 0 has died"]
        for _ in range(2):
            residence.check()
    assert job.notes == [
        "shard 1 has died",
        "shard 0 has died",
        "moving from 2 to 1 shard",
        "shard 0 has died again",
        "the new shard 0 has died",
    ]


def test_what_cannot_be_wished_for() -> None:
    """As many shards as there are, or more than the table can be cut into, are refused at once."""
    job = Job(None, 30.0)
    with job.residence as residence:
        for shards, line in (
            (2, "reshard: expected another number of shards than 2, got it"),
            (9999, "table net: expected 1 to 768 shards, got 9999"),
        ):
            wish = Wished(shards)
            residence.begin(wish)
            assert not residence.moving
            assert [str(error) for error in wish.answers] == [line]
        assert len(job.started) == 1
