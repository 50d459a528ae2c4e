"""Those who come unasked: garbage, connections without end, questions whose answers are not read.

They bother every shard of a cluster until they are killed; of replicated ones the copies that serve
as they come. None speaks for a worker of the job, so whatever comes of it is the shards' doing.
Where CURVE is spoken they have stolen the join token: they come in, under names of their own.
"""

import random
import socket
import time
from contextlib import suppress
from typing import NoReturn

import msgspec
import numpy as np
import zmq

from ps import Cluster, Unreachable
from ps.security.enrolment import join
from ps.security.keys import KeyPair, address_of, expect
from ps.transport.primary_resolver import as_led
from shards import wire_format
from shards.messages import PROTOCOL, AskedPart, Hello, Join, Message, Part, Pull, Push, Welcome
from shards.messages import Kind as Payload
from shards.schema_digest import SCHEMA
from tests.chaos.schedule import Kind

_PATIENCE_S = 5.0
_STUCK = 4
_QUESTIONS = 64
_A_TURN_S = 0.005


def bother(kind: Kind, cluster: Cluster, seed: int) -> NoReturn:
    """Bother the shards in the way of `kind`; never returns."""
    dice = random.Random(seed)
    own = None if cluster.access is None else KeyPair.of(cluster.access.token)
    if cluster.coordinator is not None:
        cluster = as_led(cluster, own, _PATIENCE_S) or cluster
    match kind:
        case Kind.FUZZ:
            _talk_nonsense(cluster, dice)
        case Kind.SLOW_READERS:
            _never_read(cluster)
        case _:
            _connect_without_end(cluster)


def _talk_nonsense(cluster: Cluster, dice: random.Random) -> NoReturn:
    """ZeroMQ messages of random frames and spoilt headers; and bytes that are no ZeroMQ at all."""
    context = zmq.Context()
    context.setsockopt(zmq.LINGER, 0)
    key = _enrolled(cluster, "a stranger", 1)
    while True:
        for shard, endpoint in enumerate(cluster.endpoints):
            with context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.LINGER, 0)
                _connect(dealer, endpoint, key)
                for _ in range(20):
                    dealer.send_multipart(nonsense(cluster, shard, dice))
                dealer.poll(20)
            with suppress(OSError), _connection(endpoint) as raw:
                raw.sendall(dice.randbytes(dice.randint(1, 2000)))
            time.sleep(_A_TURN_S)


def nonsense(cluster: Cluster, shard: int, dice: random.Random) -> list[bytes]:
    """One message that no shard should accept, or that says nothing of any worker of the job."""
    match dice.randrange(4):
        case 0:
            return [dice.randbytes(dice.randint(0, 200)) for _ in range(dice.randint(1, 5))]
        case 1:
            foreign = msgspec.structs.replace(_push(cluster, shard), job="another")
            return _enclosed(foreign, dice.randbytes(dice.randint(0, 64)))
        case 2:
            first, *rest = _enclosed(_push(cluster, shard), dice.randbytes(64))
            spoilt = bytearray(first)
            for _ in range(dice.randint(1, 8)):
                spoilt[dice.randrange(len(spoilt))] = dice.randrange(256)
            return [bytes(spoilt), *rest]
        case _:
            whole = b"".join(_enclosed(_push(cluster, shard)))
            return [whole[: dice.randrange(len(whole))]]


def _push(cluster: Cluster, shard: int) -> Push:
    return Push(
        request=1,
        job=cluster.job,
        worker="a stranger",
        incarnation=1,
        boot=1,
        epoch=cluster.map.epoch,
        seq=1,
        clock=1,
        step=1,
        steps=1,
        samples=1,
        read_version=0,
        parts=[
            Part(one.table, Payload.F4, one.keys.start, one.keys.stop)
            for one in cluster.layout.sections(cluster.map.ranges[shard])
        ],
        loss=0.0,
        rtt_s=0.0,
        wait_s=0.0,
    )


def _enclosed(message: Message, *frames: bytes) -> list[bytes]:
    arrays = tuple(np.frombuffer(frame, np.uint8) for frame in frames)
    return [bytes(part) for part in wire_format.enclose([(message, arrays)])]


def _never_read(cluster: Cluster) -> NoReturn:
    """Workers of names that nobody counts on: they join, ask for weights, and never read them."""
    context = zmq.Context()
    stuck = [
        _join(context, cluster, shard, f"stuck {number}")
        for number in range(_STUCK)
        for shard in range(len(cluster.endpoints))
    ]
    request = 3
    while True:
        for dealer, pull in stuck:
            with suppress(zmq.Again):
                for _ in range(_QUESTIONS):
                    request += 1
                    asked = _enclosed(msgspec.structs.replace(pull, request=request))
                    dealer.send_multipart(asked, zmq.NOBLOCK)
        time.sleep(0.05)


def _join(
    context: "zmq.Context[zmq.Socket[bytes]]", cluster: Cluster, shard: int, name: str
) -> tuple["zmq.Socket[bytes]", Pull]:
    """A registered worker's socket, and a question that it may ask."""
    dealer = context.socket(zmq.DEALER)
    for option, value in ((zmq.RCVHWM, 1), (zmq.RCVBUF, 4096), (zmq.LINGER, 0)):
        dealer.setsockopt(option, value)
    life = time.time_ns() // 1000
    _connect(dealer, cluster.endpoints[shard], _enrolled(cluster, name, life, shard))
    hello = Hello(1, cluster.job, name, life, PROTOCOL, SCHEMA)
    dealer.send_multipart(_enclosed(hello))
    parts = dealer.recv_multipart()
    ((header, _),) = wire_format.disclose(parts[0], parts[1:])
    welcome = wire_format.decode_reply(header)
    assert isinstance(welcome, Welcome), f"expected to be welcomed, got {welcome}"
    dealer.send_multipart(_enclosed(Join(2, cluster.job, name, life, welcome.boot, 0)))
    asks = [AskedPart(one.table) for one in cluster.layout.sections(cluster.map.ranges[shard])]
    return dealer, Pull(3, cluster.job, name, life, welcome.boot, cluster.map.epoch, 0, asks)


def _enrolled(cluster: Cluster, name: str, life: int, shard: int | None = None) -> KeyPair | None:
    """A key that speaks for `name` at that shard, or all; None where none is wanted."""
    at = cluster.endpoints if shard is None else cluster.endpoints[shard : shard + 1]
    while True:
        with suppress(Unreachable):  # it is stopped, or is being started again
            return join(cluster, name, at, _PATIENCE_S, life)


def _connect(dealer: "zmq.Socket[bytes]", endpoint: str, own: KeyPair | None) -> None:
    plain, key = address_of(endpoint)
    if key and own is not None:
        expect(dealer, key, own)
    dealer.connect(plain)


def _connect_without_end(cluster: Cluster) -> NoReturn:
    """Hold as many connections to every shard as this process may."""
    held: list[socket.socket] = []
    while True:
        for endpoint in cluster.endpoints:
            with suppress(OSError):
                held.append(_connection(endpoint))
        time.sleep(_A_TURN_S)


def _connection(endpoint: str) -> socket.socket:
    host, port = address_of(endpoint).plain.removeprefix("tcp://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), 1.0)
