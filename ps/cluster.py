"""The cluster description: everything that a worker or an SDK user needs to connect to a job.

It is a plain value that travels inside Spark's closures and in the run folder's `cluster.json`.
Where shards speak CURVE it holds the secrets that admit its owner (authorization.py), so its repr
hides them, and workers are given one without the operator's key.
"""

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from ps import path_checks
from ps.security.keys import address_of
from ps.session.events import JobEnded
from ps.snapshots import checked_json
from ps.snapshots.private_files import check_private, replace_private
from ps.tables import RowForm, TableForm
from ps.whole_files import write_private
from shards import argument_checks
from shards.errors import UNDECODABLE, BadInput, DownpourError
from shards.tables import Layout, ShardMap

_ADDRESSES = 3


class Access(msgspec.Struct, frozen=True):
    """The secret halves of the keys that admit clients: `token` for workers, `operator` for the
    operator.
    """

    token: str
    operator: str = ""

    def __repr__(self) -> str:
        return "Access(...)"


class EndedCluster(msgspec.Struct, frozen=True):
    """The content of a job's cluster file after the job has ended; `ended` is the job's name."""

    ended: str


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """One job: its tables, the key range of each shard, and where each shard listens.

    `bound` is the staleness bound in steps, None for none; `endpoints[shard]` is a ZeroMQ address,
    or one that pins a key (keys.py), for which `access` holds the client's keys. For replicated
    shards the endpoints are the first primaries'; the `coordinator` reports the present ones.
    `forms` and `row_forms` have, for dense and sparse tables of the SDK, what the layout lacks:
    structure, rate, compression.
    `strategy` names the strategy, if the job was started with one, and `workers` is the number of
    workers that it was started for; 0 without a strategy. `max_norms` has the limit of
    each table with a guard that sets one: the largest norm of a shard's section of a gradient.
    """

    job: str
    layout: Layout
    map: ShardMap
    endpoints: tuple[str, ...]
    bound: int | None
    coordinator: str | None = None
    access: Access | None = None
    forms: dict[str, TableForm] = {}
    row_forms: dict[str, RowForm] = {}
    strategy: str = ""
    workers: int = 0
    max_norms: dict[str, float] = {}

    def __post_init__(self) -> None:
        if len(self.endpoints) != self.map.shards:
            raise BadInput(
                f"cluster {self.name}",
                expected=f"{self.map.shards} endpoints, one per shard",
                got=len(self.endpoints),
            )

    def encode(self) -> bytes:
        """The description as JSON."""
        return msgspec.json.encode(self)

    @staticmethod
    def decode(content: bytes) -> "Cluster":
        """The inverse of `encode`; raises BadInput."""
        try:
            return checked_json.decode(content, Cluster)
        except UNDECODABLE as error:
            raise BadInput(f"cluster: {error}") from None

    @property
    def name(self) -> str:
        """The job's name, without its secret part."""
        return self.job.rpartition("-")[0] or self.job[:4]

    def where(self, shard: int) -> str:
        """The address of a shard, for messages to users."""
        return address_of(self.endpoints[shard]).plain

    def for_workers(self) -> "Cluster":
        """This cluster without the operator's key."""
        if self.access is None:
            return self
        return msgspec.structs.replace(self, access=Access(self.access.token))

    @property
    def token(self) -> str:
        """The secret that a client needs besides an address: `ps.connect(address, token=...)`.

        A secret: the job's id and, where shards speak CURVE, the join token.
        """
        return self.job if self.access is None else f"{self.job}:{self.access.token}"

    @property
    def address(self) -> str:
        """The addresses of a few shards, for `ps.connect`, which needs one that is alive."""
        return ",".join(self.endpoints[:_ADDRESSES])

    @property
    def description(self) -> bytes:
        """The shards' answer to `ps.connect`: all but the keys, which the client has."""
        return msgspec.structs.replace(self, access=None).encode()

    def save(self, path: str | Path) -> None:
        """Write the description as JSON that only this user can read; raises BadInput naming the
        file if it cannot be written.
        """
        file = path_checks.path("path", path)
        try:
            write_private(file, checked_json.encode(self))
        except OSError as error:
            raise BadInput(f"cluster file {file}: {error.strerror}") from None

    @staticmethod
    def load(path: str | Path) -> "Cluster":
        """Read a file that `save` wrote.

        Raises JobEnded if `mark_ended` has replaced its content, and BadInput, naming the file, if
        it cannot be read or if others may read its secrets.
        """
        file = path_checks.path("path", path)
        path_checks.refuse_pipe(file)
        content = b""
        try:
            content = file.read_bytes()
            cluster = Cluster.decode(content)
        except OSError as error:
            raise BadInput(f"cluster file {file}: {error.strerror}") from None
        except BadInput as error:
            if (ended := _read_ended(content)) is not None:
                raise JobEnded(f"cluster file {file}: job {ended} has ended") from None
            raise error.within(f"cluster file {file}") from None
        if cluster.access is not None:
            check_private(file, "cluster file")
        return cluster


def mark_ended(path: Path, cluster: Cluster) -> None:
    """Note in a job's cluster file that the job has ended, so that nobody waits for its shards.

    A file that is gone, cannot be written, or describes another job stays as it is.
    """
    with suppress(DownpourError, OSError):
        if Cluster.load(path).job == cluster.job:
            replace_private(path, checked_json.encode(EndedCluster(cluster.name)))


def check_running(path: Path) -> None:
    """Raise JobEnded if `mark_ended` has noted in this cluster file that the job has ended."""
    try:
        Cluster.load(path)
    except JobEnded:
        raise
    except DownpourError:
        pass  # a file that was moved or damaged says nothing about the job


def _read_ended(content: bytes) -> str | None:
    """The job's name in the content of a cluster file that `mark_ended` wrote; else None."""
    try:
        return checked_json.decode(content, EndedCluster, required=True).ended
    except (BadInput, *UNDECODABLE):
        return None


def cluster_of(value: object) -> Cluster:
    """The Cluster for `value`: itself, or the content of the file at this path.

    Raises BadInput, and JobEnded for the file of a job that has ended.
    """
    if isinstance(value, Cluster):
        return value
    if isinstance(value, str | os.PathLike):
        return Cluster.load(path_checks.path("cluster", value))
    expected = "a Cluster or the path of a cluster file"
    if isinstance(getattr(value, "cluster", None), Cluster):
        expected += " (pass .cluster of this object)"
    raise argument_checks.wrong("cluster", expected, value)
