"""What a client holds open towards the shards of one cluster.

Links to where each shard is reached from here: by TCP, by a Unix socket where it is on this host,
and with shared memory beside that where both sides prove that they see the same (worker_side.py);
behind a modelled link if one is wanted (link_emulator.py), and over several TCP connections where
the round trip is long (striping.py).
"""

import math
import time

from ps.cluster import Cluster
from ps.security.enrolment import WorkerCredentials, join
from ps.security.keys import KeyPair, address_of
from ps.shared_memory.worker_side import WorkerSide
from ps.transport.addresses import check_reachable
from ps.transport.link_emulator import LinkEmulator
from ps.transport.link_model import LinkModel
from ps.transport.links import Links
from ps.transport.local_sockets import Transport, nearest
from ps.transport.striping import stripes_for
from shards.errors import BadInput
from shards.messages import Probe

_SOCKET_S = 1.0  # between a shard's port and its Unix socket
_LOOK_AGAIN_S = 0.05
_LOOKS = 2  # at the round trip; the first may have met a busy moment


class ShardConnections:
    """Open on return; `close` it."""

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
        """`gradients` are as many as may be in use at once, where memory is shared.

        Where shards speak CURVE, each is asked to let this life of `worker` in, and waited for
        `patience_s`.
        A shard whose Unix socket is asked for by name, and that is being started again, is waited
        for as long. Raises what `join` does, and BadInput when shared memory is asked for by name
        and there is no room, or when shards that move are to be put behind a modelled link.
        """
        if link is not None and cluster.coordinator is not None:
            raise BadInput("link: expected shards with one copy each, got replicated ones")
        if link is not None and transport is Transport.AUTO:
            transport = Transport.TCP  # or the link would be passed by
        self._cluster = cluster
        self._transport = transport
        self._slow = LinkEmulator(cluster.endpoints, link, worker) if link is not None else None
        reached_at = self._slow.endpoints if self._slow is not None else cluster.endpoints
        self.endpoints = [
            _nearest(cluster.job, shard, endpoint, transport, patience_s)
            for shard, endpoint in enumerate(reached_at)
        ]
        try:
            badge = self._badge(worker, incarnation)
            if badge is not None:
                self._own: KeyPair | None = badge.own
            else:
                self._own = join(cluster, worker, self.endpoints, patience_s, incarnation)
            self.sharing = self._share(gradients)
        except BaseException:
            self.close_slow()
            raise
        self.links = Links(self.endpoints, self.sharing, self._own, cluster, badge)

    def _badge(self, worker: str, incarnation: int) -> WorkerCredentials | None:
        """For shards that move: by which the links get in where they are led."""
        cluster = self._cluster
        if cluster.coordinator is None or not address_of(cluster.coordinator).key:
            return None
        return WorkerCredentials(cluster, worker, incarnation)

    def more_links(self) -> Links:
        """Further links to where those lead now, of the same worker; whoever asks closes them."""
        return Links(self.links.endpoints, own=self._own)

    def close(self) -> None:
        """Drop everything, without a word."""
        self.links.close()
        if self.sharing is not None:
            self.sharing.close()
        self.close_slow()

    def close_slow(self) -> None:
        """Drop the modelled links, whose threads would outlive an owner that was collected."""
        if self._slow is not None:
            self._slow.close()

    @property
    def transports(self) -> tuple[str, ...]:
        """What carries the arrays to and from each shard: shm, ipc or tcp."""
        return tuple(
            "shm"
            if self.sharing is not None and self.sharing.shares_with(shard)
            else address_of(address).plain.partition(":")[0]
            for shard, address in enumerate(self.endpoints)
        )

    def check_transport(self) -> None:
        """Raise BadInput when shared memory is asked for by name and a shard shares none."""
        if self._transport is Transport.SHM and set(self.transports) != {"shm"}:
            shard = next(at for at, kind in enumerate(self.transports) if kind != "shm")
            reason = self.sharing.reasons.get(shard, "no answer") if self.sharing else ""
            raise BadInput(f"transport shm: shard {shard} shares no memory: {reason}")

    def stripe(self, wanted: int | None, patience_s: float) -> None:
        """Spread what goes over TCP over several connections, `wanted` or as the link is found.

        For when nothing else is asked; waits up to `patience_s` for each.
        """
        for shard, endpoint in enumerate(self.endpoints):
            if endpoint.startswith(("tcp:", "curve:")):
                size = 4 * sum(map(len, self._cluster.map.ranges[shard]))
                stripes = wanted or self._stripes_for(shard, size, patience_s)
                self.links.stripe(shard, stripes, size)
        self.links.await_connections(patience_s)

    def _stripes_for(self, shard: int, size: int, patience_s: float) -> int:
        """As many as the quickest of a few round trips wants."""
        if stripes_for(math.inf, size) == 1:
            return 1
        probe = Probe(0, self._cluster.job, self._cluster.table.name, 0)
        trips = (self.links.round_trip_s(shard, probe, patience_s) for _ in range(_LOOKS))
        return stripes_for(min(trips), size)

    def _share(self, gradients: int) -> WorkerSide | None:
        """This worker's end of the memory that it shares; None where nobody is near, or no room."""
        near = any(at.startswith("ipc:") for at in self.endpoints)
        if not self._transport.shares or not near:
            return None
        try:
            return WorkerSide(self._cluster.job, self._cluster.table.size, gradients)
        except OSError as error:
            if self._transport is Transport.AUTO:
                return None
            raise BadInput(f"transport shm: no shared memory: {error.strerror}") from None


def _nearest(job: str, shard: int, endpoint: str, transport: Transport, patience_s: float) -> str:
    """Where to connect for a shard; waits for one that is being started again.

    Raises BadInput where `transport` insists on a Unix socket, and the shard has none: it listens,
    and no socket is there a moment later, or it does not listen within `patience_s`.
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
