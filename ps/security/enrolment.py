"""How a process gets in where shards speak CURVE: its own key, enrolled by the job's join token.

A worker makes a key pair, and connects to each shard once as the holder of the token
(authorization.py), to have the public half of its own key enrolled under its name. From then on it
is known by that key. Only then are its links opened.

    Enrol     this is my key, and my name
    Enrolled  come in
    Later     not now, because; ask again
    Denied    no, because

These travel as single frames over connections on which nothing else is ever said.
"""

import contextlib
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
import zmq

from ps.cluster import Cluster
from ps.security.authorization import KeyRegistry
from ps.security.handshake_diagnostics import HandshakeProbe
from ps.security.keys import KeyPair, address_of
from ps.session.events import Unreachable
from shards import wire_format
from shards.errors import BadInput, DownpourError, GiveUp, Retry
from shards.messages import Count, Name, Text
from shards.wire_format import Buffer

_REPEAT_S = 2.0


class _Word(msgspec.Struct, frozen=True, tag_field="j", forbid_unknown_fields=True):
    pass


class Enrol(_Word, frozen=True, tag="enrol"):
    worker: Name
    incarnation: Count
    key: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]


class Enrolled(_Word, frozen=True, tag="enrolled"):
    pass


class Later(_Word, frozen=True, tag="later"):
    reason: Text


class Denied(_Word, frozen=True, tag="denied"):
    reason: Text


_ASKED: msgspec.msgpack.Decoder[Enrol] = msgspec.msgpack.Decoder(Enrol)
_ANSWERS: msgspec.msgpack.Decoder[Enrolled | Later | Denied] = msgspec.msgpack.Decoder(
    Enrolled | Later | Denied
)


def answer(register: KeyRegistry, parts: Sequence[Buffer], now: float) -> tuple[bytes, bool]:
    """What to tell the holder of an invitation who sent `parts`; whether somebody is new by it."""
    try:
        asked = wire_format.decode(b"".join(map(bytes, parts[:1])), _ASKED)
        new = register.enrol(asked.worker, asked.incarnation, asked.key, now)
    except Retry as error:
        return wire_format.encode_state(Later(str(error)[:256])), False
    except DownpourError as error:
        return wire_format.encode_state(Denied(str(error)[:256])), False
    return wire_format.encode_state(Enrolled()), new


class WorkerCredentials:
    """What a life of a worker shows: the job's token where it joins, then a key of its own."""

    def __init__(self, cluster: Cluster, worker: str, incarnation: int) -> None:
        """Raises BadInput where the cluster's description has no token."""
        self.token = KeyPair.of(_token(cluster))
        self.own = KeyPair.new()
        self.worker = worker
        self.enrol = wire_format.encode_state(Enrol(worker, incarnation, self.own.public))


class EnrolmentRequest:
    """One shard process, at `endpoint`, that is asked to let a worker in; wakes `poller`."""

    def __init__(
        self, shard: int, endpoint: str, badge: WorkerCredentials, poller: zmq.Poller
    ) -> None:
        self.shard, self.endpoint = shard, endpoint
        self._badge, self._poller = badge, poller
        self._link = HandshakeProbe(endpoint, badge.token)
        self._link.register(poller)
        self._repeat_at = 0.0
        self.delayed = ""  # why it has not yet, in words, where it has said so

    def ask(self, now: float) -> float:
        """Ask, and again after a while; returns when that is."""
        if now >= self._repeat_at:
            self._link.send(self._badge.enrol)
            self._repeat_at = now + _REPEAT_S
        return self._repeat_at

    def let_in(self) -> bool:
        """Whether it has; raises GiveUp when it will not."""
        self._link.fault()  # what is noticed of its handshake wakes the poller until it is taken
        for frames in self._link.received():
            match wire_format.decode(frames[0], _ANSWERS):
                case Enrolled():
                    return True
                case Later(reason):
                    self.delayed = f": {reason}"
                case Denied(reason):
                    raise GiveUp(f"shard {self.shard}: {reason}")
        return False

    def check(self) -> None:
        """Raise GiveUp where the handshake goes wrong, for which waiting is of no use."""
        if fault := self._link.fault():
            raise GiveUp(f"shard {self.shard} at {address_of(self.endpoint).plain}: {fault}")

    def close(self) -> None:
        self._link.unregister(self._poller)
        self._link.close()


def join(
    cluster: Cluster,
    worker: str,
    endpoints: Sequence[str],
    patience_s: float,
    incarnation: int = 0,
) -> KeyPair | None:
    """The key that speaks for `worker` at `endpoints`, the cluster's or local ones that lead there.

    None where none of them wants one. Raises BadInput where the cluster's description has no token,
    GiveUp with the reason where a shard will not have it, Unreachable where one does not answer.
    """
    wanted = [(shard, at) for shard, at in enumerate(endpoints) if address_of(at).key]
    if not wanted:
        return None
    badge, poller = WorkerCredentials(cluster, worker, incarnation), zmq.Poller()
    until = time.monotonic() + patience_s
    with contextlib.ExitStack() as stack:
        waiting = [EnrolmentRequest(shard, endpoint, badge, poller) for shard, endpoint in wanted]
        for one in waiting:
            stack.callback(one.close)
        while waiting:
            now = time.monotonic()
            if now >= until:
                shard = waiting[0].shard
                raise Unreachable(
                    f"shard {shard} at {cluster.where(shard)} has not let in {worker} for"
                    f" {patience_s:g} s{waiting[0].delayed}",
                    shard,
                )
            repeat_at = min([one.ask(now) for one in waiting])
            poller.poll(max(1, int(1000 * (min(until, repeat_at) - now))))
            for one in waiting:
                one.check()
            waiting = [one for one in waiting if not one.let_in()]
    return badge.own


def operator_key(cluster: Cluster) -> KeyPair | None:
    """The key of the job's operator; None where neither shards nor coordinator want one.

    Raises BadInput where the cluster's description, being a worker's, does not hold it.
    """
    if not any(address_of(at).key for at in (*cluster.endpoints, cluster.coordinator or "")):
        return None
    if cluster.access is None or not cluster.access.operator:
        raise BadInput(
            f"cluster {cluster.name}: expected the operator's key, which its driver and the run"
            " folder's cluster.json have; got a worker's description"
        )
    return KeyPair.of(cluster.access.operator)


def _token(cluster: Cluster) -> str:
    if cluster.access is None or not cluster.access.token:
        raise BadInput(f"cluster {cluster.name}: expected a join token in it, got none")
    return cluster.access.token
