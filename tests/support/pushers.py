"""Workers that push ones to single-copy shards, so that the weights count the applied pushes."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

import ps
from ps import Client, Cluster
from ps.launch import launcher
from shards.schedules import Fixed
from shards.spec import ShardSpec

TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (3000,)),))
PATIENCE_S = 180


def specs_of(shards: int) -> list[ShardSpec]:
    return ps.shard_specs(
        TABLE, shards=shards, bound=None, workers=3, schedule=Fixed(base_rate=1.0), lease_s=600
    )


def until(
    holds: Callable[[], bool], what: str, hosts: launcher.LaunchedShards | None = None
) -> None:
    """Wait until something holds; fail if that takes long, or a shard is given up."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_at, what
        if hosts is not None:
            hosts.check()
        time.sleep(0.01)


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

    until(reached, "the workers do not get on", hosts)


def losses(hosts: launcher.LaunchedShards) -> list[str]:
    """The reported losses, once there are any."""
    told: list[str] = []

    def come() -> bool:
        told.extend(hosts.lost_updates())
        return bool(told)

    until(come, "no loss is reported", hosts)
    return told
