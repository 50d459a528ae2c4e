"""A client's open connections to the shards of one cluster.

Each shard is reached the best way available: by TCP; by a Unix socket where it is on this host,
with shared memory in addition where both sides prove that they see the same memory
(worker_side.py); behind a modelled link if configured (link_emulator.py); and over several TCP
connections where the round trip is long (striping.py).
"""

import math
import time

from ps.cluster import Cluster
from ps.security.enrolment import WorkerCredentials, join, token_of
from ps.security.keys import KeyPair, address_of
from ps.shared_memory.worker_side import WorkerSide
from ps.transport.addresses import check_reachable
from ps.transport.link_emulator import LinkEmulator
from ps.transport.link_model import LinkModel
from ps.transport.shard_sockets import Links
from ps.transport.striping import stripes_for
from ps.transport.transports import Transport, nearest
from shards.errors import BadInput
from shards.messages import Probe

_SOCKET_S = 1.0  # between a shard's port and its Unix socket
_LOOK_AGAIN_S = 0.05
_LOOKS = 2  # measurements of the round trip: the shard may have been busy during the first


class ShardConnections:
    """The connections, open on return; `close` them."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        worker: str,
        incarnation: int,
        transport: Transport,
        link: LinkModel | None,
        gradients: int,
        patience_s: float,
    ) -> None:
        """`gradients` is the most gradient arrays in shared memory that may be in use at once.

        With shards that require CURVE keys, the worker enrols with each, waiting up to
        `patience_s`. If `transport` requires a Unix socket and the shard is restarting, the wait is
        as long. Raises what `join` does, and BadInput when `transport` requires shared memory and
        there is no room, or when replicated shards are to be put behind a modelled link.
        """
        if link is not None and cluster.coordinator is not None:
            raise BadInput("link", expected="shards with one copy each", got="replicated ones")
        if link is not None and transport is Transport.AUTO:
            transport = Transport.TCP  # a Unix socket would bypass the modelled link
        self._cluster = cluster
        self._transport = transport
        self._slow = LinkEmulator(cluster.endpoints, link, worker) if link is not None else None
        reached_at = self._slow.endpoints if self._slow is not None else cluster.endpoints
        self.endpoints = [
            _nearest(cluster.job, shard, endpoint, transport, patience_s)
            for shard, endpoint in enumerate(reached_at)
        ]
        try:
            credentials = self._credentials(worker, incarnation)
            if credentials is not None:
                self._key_pair: KeyPair | None = credentials.own
            else:
                self._key_pair = join(cluster, worker, self.endpoints, patience_s, incarnation)
            self.sharing = self._share(gradients)
        except BaseException:
            self.close_slow()
            raise
        self.links = Links(self.endpoints, self.sharing, self._key_pair, cluster, credentials)

    def _credentials(self, worker: str, incarnation: int) -> WorkerCredentials | None:
        """The credentials with which links enrol at replicated shards; None where none are
        required.
        """
        cluster = self._cluster
        if cluster.coordinator is None or not address_of(cluster.coordinator).key:
            return None
        return WorkerCredentials(token_of(cluster), worker, incarnation)

    def more_links(self) -> Links:
        """Further links of the same worker, to the same places; the caller closes them."""
        return Links(self.links.endpoints, keys=self._key_pair)

    def close(self) -> None:
        """Drop all connections, without leaving the job."""
        self.links.close()
        if self.sharing is not None:
            self.sharing.close()
        self.close_slow()

    def close_slow(self) -> None:
        """Close the modelled links: their threads would outlive a garbage-collected owner."""
        if self._slow is not None:
            self._slow.close()

    @property
    def transports(self) -> tuple[str, ...]:
        """The transport of the arrays to and from each shard: shm, ipc or tcp."""
        return tuple(
            "shm"
            if self.sharing is not None and self.sharing.shares_with(shard)
            else address_of(address).plain.partition(":")[0]
            for shard, address in enumerate(self.endpoints)
        )

    def check_transport(self) -> None:
        """Raise BadInput when shared memory is required and a shard shares none."""
        if self._transport is Transport.SHM and set(self.transports) != {"shm"}:
            shard = next(at for at, kind in enumerate(self.transports) if kind != "shm")
            reason = self.sharing.reasons.get(shard, "no answer") if self.sharing else ""
            raise BadInput(f"transport shm: shard {shard} shares no memory: {reason}")

    def stripe(self, stripes: int | None, patience_s: float) -> None:
        """Spread TCP traffic over several connections: `stripes`, or as many as the measured link
        needs.

        Call it only while nothing else is outstanding; waits up to `patience_s` for each shard.
        """
        striped: list[int] = []
        for shard, endpoint in enumerate(self.endpoints):
            if endpoint.startswith(("tcp:", "curve:")):
                size = 4 * len(self._cluster.map.ranges[shard])
                count = stripes or self._stripes_for(shard, size, patience_s)
                self.links.stripe(shard, count, size)
                striped += [shard] * (count > 1)
        self.links.await_connections(patience_s)
        # A shard takes large parts only from senders that have named the job.
        for shard in striped:
            self.links.round_trip_s(shard, Probe(0, self._cluster.job, 0), patience_s)

    def _stripes_for(self, shard: int, size: int, patience_s: float) -> int:
        """The number of connections for the quickest of a few round trips."""
        if stripes_for(math.inf, size) == 1:
            return 1
        probe = Probe(0, self._cluster.job, 0)
        trips = (self.links.round_trip_s(shard, probe, patience_s) for _ in range(_LOOKS))
        return stripes_for(min(trips), size)

    def _share(self, gradients: int) -> WorkerSide | None:
        """This worker's end of the shared memory; None where no shard is local, or there is no
        room.
        """
        near = any(at.startswith("ipc:") for at in self.endpoints)
        layout = self._cluster.layout
        if not self._transport.shares or not near:
            return None
        try:
            return WorkerSide(self._cluster.job, layout.size, gradients, rows=bool(layout.sparse))
        except OSError as error:
            if self._transport is Transport.AUTO:
                return None
            raise BadInput(f"transport shm: no shared memory: {error.strerror}") from None


def _nearest(job: str, shard: int, endpoint: str, transport: Transport, patience_s: float) -> str:
    """Where to connect for a shard; waits for one that is restarting.

    Raises BadInput if `transport` requires a Unix socket and the shard has none: a second after its
    port listens there is still no socket, or the port does not listen within `patience_s`.
    """
    until = time.monotonic() + patience_s
    while True:
        try:
            return nearest(job, shard, endpoint, transport)
        except BadInput:
            if time.monotonic() >= until:
                raise
        if _listens(endpoint):  # its port is bound before the socket is
            until = min(until, time.monotonic() + _SOCKET_S)
        time.sleep(_LOOK_AGAIN_S)


def _listens(endpoint: str) -> bool:
    host, _, port = address_of(endpoint).plain.rpartition("/")[2].rpartition(":")
    try:
        check_reachable("shard", [(host, int(port))], timeout_s=_SOCKET_S)
    except (BadInput, ValueError):
        return False
    return True
