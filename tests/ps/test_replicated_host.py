"""Replicated shards as real processes that are killed and stopped: no acknowledged push is lost.

Workers push ones to plain SGD at rate 1, so a weight is minus the number of pushes that were
applied: it proves that each was, and once.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest

import ps
from ps.keeper import ReplicatedShards
from ps.replicated_host import replicated_shards
from shards.errors import BadInput, GiveUp
from shards.schedules import Fixed

TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (256,)),))
PRIMARY, BACKUP, COORDINATOR = "shard 0 primary", "shard 0 backup", "coordinator"


class Worker:
    """Pushes ones until told to stop, in a thread."""

    def __init__(self, cluster: ps.Cluster, name: str) -> None:
        self.acknowledged = 0
        self._cluster, self._name = cluster, name
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with ps.Client(self._cluster, worker=self._name, patience_s=120) as client:
                client.pull()
                while not self._ended.wait(0.002):
                    client.push(np.ones(TABLE.size, np.float32))
                    client.flush()
                    self.acknowledged = client.seq
        except BaseException as error:  # noqa: BLE001  # the test's thread raises it
            self._failure = error

    def goes_on(self) -> None:
        """Return once pushes that are begun from now on have been acknowledged."""
        enough = self.acknowledged + 5
        await_that(lambda: self._failure is not None or self.acknowledged >= enough)
        if self._failure is not None:
            raise self._failure

    def end(self) -> int:
        """Stop; returns how many pushes were acknowledged."""
        self._ended.set()
        self._thread.join(120)
        if self._failure is not None:
            raise self._failure
        return self.acknowledged


def await_that(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 110
    while not holds():
        assert time.monotonic() < until, "it has not come to hold"
        time.sleep(0.02)


def whole_again(hosts: ReplicatedShards, changed: str, was: int) -> None:
    """Wait until another process has that part, and no copy is missing."""
    await_that(lambda: hosts.redundant and hosts.pids.get(changed, was) != was)
    hosts.check()


@pytest.fixture(scope="module")
def hosts() -> Iterator[ReplicatedShards]:
    """One shard with zeros installed, ready to lose a copy."""
    specs = ps.shard_specs(TABLE, schedule=Fixed(base_rate=1.0), lease_s=60.0)
    with replicated_shards(specs) as hosts, ps.Console(hosts.cluster) as console:
        console.install(TABLE.empty())
        yield hosts


@pytest.mark.timeout(400)
def test_each_process_in_turn(hosts: ReplicatedShards) -> None:
    """Primary, backup and coordinator are killed, a primary is stopped and goes on too late.

    Meanwhile two workers push. Each dead copy is followed by an empty process, which is brought up
    to date, and by which the next death is survived; the coordinator by one that knows as much.
    """
    workers = [Worker(hosts.cluster, name) for name in ("a", "b")]
    seen = set(hosts.pids.values())
    for victim, how in (
        (PRIMARY, signal.SIGKILL),
        (BACKUP, signal.SIGKILL),
        (COORDINATOR, signal.SIGKILL),
        (PRIMARY, signal.SIGSTOP),
    ):
        for worker in workers:
            worker.goes_on()
        pid = hosts.pids[victim]
        os.kill(pid, how)
        for worker in workers:
            worker.goes_on()
        whole_again(hosts, victim, pid)
        seen |= set(hosts.pids.values())
        if how is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
            await_that(lambda pid=pid: not psutil.pid_exists(pid))  # type: ignore[misc]
    assert len(seen) >= 7, "three processes, and one for each that was killed or stopped"
    acknowledged = sum(worker.end() for worker in workers)
    with ps.Console(hosts.cluster) as console:
        assert set(console.read()[:256]) == {-float(acknowledged)}
        assert [status.version for status in console.status()] == [acknowledged]


@pytest.mark.timeout(400)
def test_the_loss_of_both_copies_is_told(hosts: ReplicatedShards) -> None:
    """Whoever looks learns that the shard is gone, and how; no empty one takes its place."""
    pids = [hosts.pids[part] for part in (PRIMARY, BACKUP)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await_that(lambda: not set(pids) & set(hosts.pids.values()))
    with pytest.raises(GiveUp, match=r"^shard 0 has no copy left that holds its pushes: "):
        hosts.check()


def test_arguments_that_make_no_sense() -> None:
    """A wrong argument is named before anything starts."""
    specs = ps.shard_specs(TABLE)
    with pytest.raises(BadInput, match="silence_s: expected more than 0 s, got 0"):
        replicated_shards(specs, silence_s=0).__enter__()
    with pytest.raises(BadInput, match=r"^host 0\.0\.0\.0: expected one that this machine alone"):
        replicated_shards(specs, host="0.0.0.0").__enter__()
