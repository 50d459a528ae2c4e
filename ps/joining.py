"""How a process gets in where shards speak CURVE: its own key, enrolled by the job's join token.

A worker makes a key pair, and connects to each shard once as the holder of the token
(admission.py), to have the public half of its own key enrolled under its name. From then on it is
known by that key. Only then are its links opened.

    Enrol     this is my key, and my name
    Enrolled  come in
    Denied    no, because

These travel as single frames over connections on which nothing else is ever said.
"""

import contextlib
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
import zmq

from ps.admission import Register
from ps.cluster import Cluster
from ps.events import Unreachable
from ps.handshake import Watched
from ps.keys import KeyPair, address_of
from shards import codec
from shards.codec import Buffer
from shards.errors import BadInput, DownpourError, GiveUp
from shards.messages import Count, Name, Text

_REPEAT_S = 2.0


class _Word(msgspec.Struct, frozen=True, tag_field="j", forbid_unknown_fields=True):
    pass


class Enrol(_Word, frozen=True, tag="enrol"):
    worker: Name
    incarnation: Count
    key: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]


class Enrolled(_Word, frozen=True, tag="enrolled"):
    pass


class Denied(_Word, frozen=True, tag="denied"):
    reason: Text


_ASKED: msgspec.msgpack.Decoder[Enrol] = msgspec.msgpack.Decoder(Enrol)
_ANSWERS: msgspec.msgpack.Decoder[Enrolled | Denied] = msgspec.msgpack.Decoder(Enrolled | Denied)


def answer(register: Register, parts: Sequence[Buffer], now: float) -> tuple[bytes, bool]:
    """What to tell the holder of an invitation who sent `parts`; whether somebody is new by it."""
    try:
        asked = codec.decode(b"".join(map(bytes, parts[:1])), _ASKED)
        new = register.enrol(asked.worker, asked.incarnation, asked.key, now)
    except DownpourError as error:
        return codec.encode_state(Denied(str(error)[:256])), False
    return codec.encode_state(Enrolled()), new


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
    token = KeyPair.of(_token(cluster))
    own = KeyPair.new()
    with contextlib.ExitStack() as stack:
        waiting = {
            shard: stack.enter_context(Watched(endpoint, token)) for shard, endpoint in wanted
        }
        enrol = codec.encode_state(Enrol(worker, incarnation, own.public))
        until, repeat_at = time.monotonic() + patience_s, 0.0
        while waiting:
            now = time.monotonic()
            if now >= until:
                shard = min(waiting)
                raise Unreachable(
                    f"shard {shard} at {cluster.where(shard)} has not let in {worker} for"
                    f" {patience_s:g} s",
                    shard,
                )
            if now >= repeat_at:
                for link in waiting.values():
                    link.send(enrol)
                repeat_at = now + _REPEAT_S
            for shard in _answered(waiting, min(until, repeat_at)):
                waiting.pop(shard)
    return own


def _answered(waiting: dict[int, Watched], until: float) -> list[int]:
    """Who has let us in by then; raises GiveUp when one will not."""
    poller = zmq.Poller()
    for link in waiting.values():
        link.register(poller)
    poller.poll(max(1, int(1000 * (until - time.monotonic()))))
    done = []
    for shard, link in waiting.items():
        if link.fault():
            raise GiveUp(f"shard {shard} at {address_of(link.endpoint).plain}: {link.fault()}")
        for frames in link.received():
            match codec.decode(frames[0], _ANSWERS):
                case Enrolled():
                    done.append(shard)
                case Denied(reason):
                    raise GiveUp(f"shard {shard}: {reason}")
    return done


def operator_key(cluster: Cluster) -> KeyPair | None:
    """The key of the job's operator; None where no shard wants one.

    Raises BadInput where the cluster's description, being a worker's, does not hold it.
    """
    if not any(address_of(endpoint).key for endpoint in cluster.endpoints):
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
