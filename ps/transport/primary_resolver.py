"""Finds the primary of each replicated shard, by asking the coordinator.

It asks regularly, which also subscribes it to changes as they happen. While the coordinator does
not answer, the last known primaries are used.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence

import msgspec
import zmq

from ps.cluster import Cluster
from ps.security.handshake_diagnostics import fault_at
from ps.security.keys import KeyPair, address_of, expect
from ps.socket_context import SocketContext
from ps.transport import coordinator_messages
from ps.transport.coordinator_messages import AdmitCopies, EndJob, LocatePrimaries, PrimaryInfo
from ps.transport.socket_options import NOTICE_THE_DEAD
from shards.errors import BadInput, BadMessage, GiveUp

ASK_S = 0.5
_TOGETHER = 32  # keys in one message: they fit into a header's bytes


class PrimaryResolver:
    """One connection to the coordinator of a cluster. Not for use by two threads."""

    def __init__(
        self,
        cluster: Cluster,
        context: "zmq.Context[zmq.Socket[bytes]]",
        keys: KeyPair | None = None,
    ) -> None:
        """Connect to the coordinator; raises BadInput for an invalid address.

        `keys` are those with which this process authenticates to a coordinator that pins a key
        in its address: the operator's, or the token's.
        """
        assert cluster.coordinator is not None, "only replicated shards have primaries to resolve"
        self._job, self._key_pair, self._coordinator = cluster.job, keys, cluster.coordinator
        self._question = msgspec.msgpack.encode(LocatePrimaries(cluster.job))
        self._asked_at = -ASK_S
        self._ended = ""
        self.primaries: dict[int, PrimaryInfo] = {}
        self.socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IMMEDIATE, 1),
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 500),
            *NOTICE_THE_DEAD,
        ):
            self.socket.setsockopt(option, value)
        plain, key = address_of(cluster.coordinator)
        if key and keys is not None:
            expect(self.socket, key, keys)
        try:
            self.socket.connect(plain)
        except zmq.ZMQError as error:
            text = zmq.strerror(error.errno or 0)
            raise BadInput(
                "coordinator", expected="tcp://HOST:PORT", got=f"{cluster.coordinator!r} ({text})"
            ) from None

    def check_running(self) -> None:
        """Raise GiveUp with the reason if the coordinator has said that the job has ended."""
        if self._ended:
            raise GiveUp(self._ended)

    def end_job(self, reason: str) -> None:
        """Have the coordinator answer all clients that the job has ended.

        `reason` has up to LONGEST_TEXT characters. Repeat it, because the coordinator may be
        restarted.
        """
        with contextlib.suppress(zmq.Again):
            self.socket.send(msgspec.msgpack.encode(EndJob(self._job, reason)), zmq.NOBLOCK)

    def check(self) -> None:
        """Raise GiveUp where the handshake itself fails, because waiting does not help."""
        if fault := fault_at(self._coordinator, self._key_pair):
            raise GiveUp(f"coordinator at {address_of(self._coordinator).plain}: {fault}")

    def admit(self, copies: Mapping[int, str]) -> None:
        """Send the coordinator these copies' keys; repeat it, because the coordinator may not be up
        yet.
        """
        known = sorted(copies.items())
        for start in range(0, len(known), _TOGETHER):
            admission = AdmitCopies(self._job, dict(known[start : start + _TOGETHER]))
            with contextlib.suppress(zmq.Again):
                self.socket.send(msgspec.msgpack.encode(admission), zmq.NOBLOCK)

    def ask(self, *, again: bool = False) -> None:
        """Ask where the primaries are; without `again`, at most every ASK_S seconds."""
        now = time.monotonic()
        if again or now - self._asked_at >= ASK_S:
            self._asked_at = now
            with contextlib.suppress(zmq.Again):
                self.socket.send(self._question, zmq.NOBLOCK)

    def listen(self, timeout_s: float = 0.0) -> bool:
        """Read the coordinator's answers for up to `timeout_s` seconds; whether any came.

        An entry never replaces one of a newer epoch.
        """
        heard = False
        while self.socket.poll(0 if heard else int(timeout_s * 1000)):
            with contextlib.suppress(BadMessage):
                answer = coordinator_messages.decode_primaries(self.socket.recv())
                self._ended = answer.ended
                for info in answer.primaries:
                    known = self.primaries.get(info.shard)
                    if known is None or info.epoch >= known.epoch:
                        self.primaries[info.shard] = info
                heard = True
        return heard

    def poll(self, timeout_s: float) -> bool:
        """Ask, and wait up to `timeout_s` seconds for the answer; whether one came."""
        self.socket.poll(int(timeout_s * 1000), zmq.POLLOUT)
        self.ask(again=True)
        return self.listen(timeout_s)

    def replace_endpoints(self, endpoints: Sequence[str]) -> list[str]:
        """`endpoints`, replaced by the primaries' addresses as far as they are known."""
        present = list(endpoints)
        for shard, info in self.primaries.items():
            present[shard] = info.endpoint
        return present


def as_led(cluster: Cluster, keys: KeyPair | None, timeout_s: float) -> Cluster | None:
    """This cluster with the endpoints of the primaries that serve now.

    None when the coordinator does not answer within `timeout_s`; raises GiveUp where it rejects
    this process or fails its own authentication, or reports that the job has ended.
    """
    with SocketContext() as context:
        resolver = PrimaryResolver(cluster, context, keys)
        with resolver.socket:
            if not resolver.poll(timeout_s):
                resolver.check()
                return None
            resolver.check_running()
            return msgspec.structs.replace(
                cluster, endpoints=tuple(resolver.replace_endpoints(cluster.endpoints))
            )
