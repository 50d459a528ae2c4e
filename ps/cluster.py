"""A cluster, described: everything that a worker or an SDK user needs to find a job's shards.

It is a plain value that travels inside Spark's closures and in the run folder's `cluster.json`.
"""

from pathlib import Path

import msgspec

from ps.build import build_id
from shards.errors import BadInput
from shards.tables import DenseTable, ShardMap


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """One job: its table, who owns which keys, and where each shard listens.

    `bound` is the staleness bound in steps, None for none; `endpoints[shard]` is a ZeroMQ address.
    """

    job: str
    table: DenseTable
    map: ShardMap
    endpoints: tuple[str, ...]
    bound: int | None
    build: str = msgspec.field(default_factory=build_id)

    def __post_init__(self) -> None:
        if len(self.endpoints) != self.map.shards:
            raise BadInput(
                f"cluster {self.job}: expected {self.map.shards} endpoints, one a shard,"
                f" got {len(self.endpoints)}"
            )

    def encode(self) -> bytes:
        """It as JSON."""
        return msgspec.json.encode(self)

    @staticmethod
    def decode(content: bytes) -> "Cluster":
        """What `encode` gave; raises BadInput."""
        try:
            return msgspec.json.decode(content, type=Cluster)
        except msgspec.DecodeError as error:
            raise BadInput(f"cluster: {error}") from None

    def save(self, path: Path) -> None:
        """Write it as JSON that only this user can read."""
        path.touch(mode=0o600)
        path.chmod(0o600)  # it may have been there
        path.write_bytes(msgspec.json.format(self.encode()))

    @staticmethod
    def load(path: Path) -> "Cluster":
        """Read such a file; raises BadInput naming it."""
        try:
            return Cluster.decode(path.read_bytes())
        except OSError as error:
            raise BadInput(f"cluster file {path}: {error.strerror}") from None
        except BadInput as error:
            raise BadInput(f"cluster file {path}: {error}") from None
