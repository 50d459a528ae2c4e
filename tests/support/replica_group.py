"""One shard's coordinator and copies over real sockets, all in this process."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

import ps
from ps.client import Client
from ps.cluster import Access
from ps.job_spec import make_cluster, shard_specs
from ps.replication.coordinator_server import CoordinatorServer
from ps.replication.replica_server import ReplicaServer
from ps.security.authorization import Admission
from shards.errors import BadInput
from shards.schedules import Fixed
from shards.spec import ShardSpec
from tests.support.eventually import eventually

TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (512,)),))
ANYWHERE = "tcp://127.0.0.1:*"
ONE = np.ones(512, np.float32)


class Group:
    """One shard's coordinator and copies; with keys where strangers must be kept out."""

    def __init__(
        self,
        folder: Path,
        keys: tuple[Access, Admission] | None = None,
        specs: Sequence[ShardSpec] | None = None,
    ) -> None:
        self.access = None if keys is None else keys[0]
        self.admission = None if keys is None else keys[1]
        self.specs = specs or shard_specs(TABLE, schedule=Fixed(base_rate=1.0), lease_s=60.0)
        self._record = folder / "record"
        self.coordinator = self.coordinate(ANYWHERE)
        self.copies: list[ReplicaServer] = []

    def coordinate(self, bind: str) -> CoordinatorServer:
        job = self.specs[0].job

        def started() -> CoordinatorServer | None:
            try:
                # A slow machine must not look dead: only broken connections count as deaths.
                return CoordinatorServer(
                    job, 1, self._record, bind=bind, silence_s=30.0, admission=self.admission
                ).start()
            except BadInput as error:
                # ZeroMQ's thread closes a former one's socket when it gets its turn.
                if "Address already in use" not in str(error):
                    raise
                return None

        server = eventually(started, because=f"{bind} is free")
        assert server is not None
        return server

    def join(self) -> ReplicaServer:
        boot = len(self.copies) + 1
        at = self.coordinator.endpoint
        copy = ReplicaServer(self.specs[0], boot, at, ANYWHERE, self.admission).start()
        self.copies.append(copy)
        return copy

    @property
    def cluster(self) -> ps.Cluster:
        cluster = make_cluster(self.specs, ["tcp://127.0.0.1:1"], self.access)  # where nobody is
        return msgspec.structs.replace(cluster, coordinator=self.coordinator.endpoint)

    def holders(self) -> tuple[int, ...]:
        """The copies that may be promoted, by boot number; the primary is one of them."""
        return self.coordinator._coordinator.groups[0].promotable

    def await_holders(self, *boots: int) -> None:
        eventually(
            lambda: self.holders() == boots,
            because=lambda: f"copies {boots} may be promoted, got {self.holders()}",
        )

    def stop(self) -> None:
        for copy in self.copies:
            copy.stop()
        self.coordinator.stop()


def push(client: Client, times: int) -> None:
    for _ in range(times):
        client.push(ONE)
    client.flush()
