"""Workers that push ones to single-copy shards, so that the weights count the applied pushes."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

import ps
from ps import Cluster
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch import launcher
from shards.schedules import Fixed
from shards.spec import ShardSpec
from tests.support.eventually import eventually

TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (3000,)),))
PATIENCE_S = 180


def specs_of(shards: int) -> list[ShardSpec]:
    return shard_specs(
        TABLE, shards=shards, bound=None, workers=3, schedule=Fixed(base_rate=1.0), lease_s=600
    )


class Pusher(threading.Thread):
    """A worker that pushes ones until it has reached the number that it was given."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.cluster = cluster
        self.acknowledged = self.lost = 0
        self.ending = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with Client(
                self.cluster, worker=self.name, retry_s=0.2, patience_s=PATIENCE_S
            ) as client:
                one = np.ones(TABLE.size, np.float32)
                while not self.ending.is_set():
                    client.pull()
                    client.push(one)
                    client.flush()
                    self.acknowledged += 1
                self.lost = client.lost
        except BaseException as error:  # noqa: BLE001  # the test raises it
            self.failure = error


@contextmanager
def pushing(cluster: Cluster, workers: int = 3) -> Iterator[list[Pusher]]:
    """Workers that push; on leaving they finish the current push."""
    pushers = [Pusher(cluster, f"w{number}") for number in range(workers)]
    for one in pushers:
        one.start()
    try:
        yield pushers
    finally:
        for one in pushers:
            one.ending.set()
    for one in pushers:
        one.join(PATIENCE_S)
        assert not one.is_alive()
        assert one.failure is None, one.failure


def more(pushers: Sequence[Pusher], hosts: launcher.LaunchedShards | None = None) -> None:
    """Wait until each worker has had some more pushes acknowledged."""
    wanted = [one.acknowledged + 5 for one in pushers]

    def reached() -> bool:
        for one in pushers:
            assert one.failure is None, one.failure
        return all(one.acknowledged >= n for one, n in zip(pushers, wanted, strict=True))

    eventually(
        reached,
        because="each worker pushes",
        within_s=PATIENCE_S,
        check=None if hosts is None else hosts.check,
    )


def losses(hosts: launcher.LaunchedShards) -> list[str]:
    """The reported losses, once there are any."""
    return eventually(
        hosts.lost_updates, because="a loss is reported", within_s=PATIENCE_S, check=hosts.check
    )
