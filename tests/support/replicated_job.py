"""Workers that push ones to replicated shards until stopped, while a test kills processes.

With plain SGD at rate 1 a weight is minus the number of applied pushes, which proves that each push
was applied exactly once.
"""

import threading
from collections.abc import Sequence

import numpy as np

import ps
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.replica_supervisor import ReplicatedShards
from shards.schedules import Fixed
from shards.spec import ShardSpec
from tests.support.eventually import eventually

TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (512,)),))
PRIMARY, BACKUP, COORDINATOR = "shard 0 primary", "shard 0 backup", "coordinator"
PATIENCE_S = 110.0
SILENCE_S = 5.0  # a busy machine stands still for longer than the usual half a second
LONG_SILENCE_S = 10.0  # where a test would fail if a process that is only slow counted as dead


class Worker:
    """Pushes ones until stopped, in a thread."""

    def __init__(self, cluster: ps.Cluster, name: str) -> None:
        self.acknowledged = 0
        self._cluster, self._name = cluster, name
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with Client(self._cluster, worker=self._name, patience_s=120) as client:
                client.pull()
                while not self._ended.wait(0.002):
                    client.push(np.ones(self._cluster.layout.size, np.float32))
                    client.flush()
                    self.acknowledged = client.seq
        except BaseException as error:  # noqa: BLE001  # the test's thread raises it
            self._failure = error

    def await_progress(self) -> None:
        """Return once pushes that start from now on have been acknowledged."""
        enough = self.acknowledged + 5
        eventually(
            lambda: self._failure is not None or self.acknowledged >= enough,
            because=f"worker {self._name} has pushed",
            within_s=PATIENCE_S,
        )
        if self._failure is not None:
            raise self._failure

    def end(self) -> int:
        """Stop; returns how many pushes were acknowledged."""
        self._ended.set()
        self._thread.join(120)
        if self._failure is not None:
            raise self._failure
        return self.acknowledged


def whole_again(hosts: ReplicatedShards, changed: str, was: int) -> None:
    """Wait until another process has that role, and no copy is missing."""
    eventually(
        lambda: hosts.redundant and hosts.pids.get(changed, was) != was,
        because=f"another process is {changed}",
        within_s=PATIENCE_S,
    )
    hosts.check()


def specs_of() -> list[ShardSpec]:
    return shard_specs(TABLE, schedule=Fixed(base_rate=1.0), lease_s=60.0)


def check_applied_once(cluster: ps.Cluster, workers: Sequence[Worker]) -> None:
    """Stop the workers, and compare their acknowledged pushes with the shards' weights."""
    acknowledged = sum(worker.end() for worker in workers)
    with ps.AdminClient(cluster) as console:
        assert set(console.read()[: TABLE.size]) == {-float(acknowledged)}
        assert {status.version for status in console.status()} == {acknowledged}
