"""Hostile connections to a live shard: raw TCP and ZMTP handshakes that go wrong in every way.

None is a client's: no hostile connection uses ZeroMQ. Each says something of these, some hold the
connection open after it, some close at once, some reset it. Meanwhile a good client goes on.
"""

import contextlib
import io
import random
import socket
import struct
from collections.abc import Callable

from ps.security.keys import address_of

# ZMTP 3.1 (rfc.zeromq.org/spec/37): signature, version, mechanism, as-server, filler.
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_HELD = 64  # connections that stay open at a time
_SEND_S = 60.0


def greeting(mechanism: bytes, major: int = 3, minor: int = 1) -> bytes:
    """The 64 bytes that a ZMTP peer begins with."""
    head = _SIGNATURE + bytes([major, minor]) + mechanism.ljust(20, b"\0")
    return head + bytes(32)


def command(name: bytes, body: bytes, flags: int = 4) -> bytes:
    """A ZMTP command frame, or with other `flags` something like one."""
    content = bytes([len(name)]) + name + body
    if len(content) > 255:
        return bytes([flags | 2]) + struct.pack(">Q", len(content)) + content
    return bytes([flags, len(content)]) + content


def _ready(dice: random.Random) -> bytes:
    """The metadata of a READY, true or not."""
    socket_type = dice.choice((b"DEALER", b"ROUTER", b"PUB", b"\xff" * 200, b""))
    length = dice.choice((len(socket_type), 2**32 - 1, 0))
    return b"\x0bSocket-Type" + struct.pack(">I", length) + socket_type


_WORDS: tuple[Callable[[random.Random], bytes], ...] = (
    lambda _: b"",
    lambda dice: dice.randbytes(dice.randrange(1, 300)),
    lambda _: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    lambda dice: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + dice.randbytes(300),
    lambda dice: greeting(b"NULL")[: dice.randrange(64)],
    lambda dice: greeting(dice.choice((b"PLAIN", b"GSSAPI", b"X" * 20, b""))),
    lambda dice: greeting(b"NULL", major=dice.choice((0, 1, 2, 9)), minor=dice.randrange(256)),
    lambda dice: greeting(b"NULL") + command(b"READY", _ready(dice)),
    lambda dice: (
        greeting(b"NULL")
        + command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x06DEALER")
        + dice.randbytes(dice.randrange(200))
    ),
    lambda dice: (
        greeting(b"NULL")
        + command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x06DEALER")
        + bytes([2])
        + struct.pack(">Q", dice.choice((2**63, 2**64 - 1, 2**40)))
    ),
    lambda dice: greeting(b"NULL") + command(dice.randbytes(dice.randrange(20)), b"", flags=255),
    lambda dice: greeting(b"CURVE") + command(b"HELLO", b"\x01\x00" + dice.randbytes(192)),
    lambda dice: greeting(b"CURVE") + command(b"HELLO", dice.randbytes(dice.randrange(300))),
    lambda dice: greeting(b"CURVE") + command(b"INITIATE", dice.randbytes(dice.randrange(600))),
    lambda dice: greeting(b"CURVE") + command(b"READY", _ready(dice)),
    lambda _: greeting(b"CURVE") + command(b"HELLO", b"\x01\x00" + bytes(192)) * 20,
)


def spoken_to(endpoint: str) -> socket.socket:
    """A connection that has shaken hands in plain text, as a DEALER without a name."""
    host, _, port = address_of(endpoint).plain.removeprefix("tcp://").rpartition(":")
    connection = socket.create_connection((host, int(port)), _SEND_S)
    about = b"\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
    connection.sendall(greeting(b"NULL") + command(b"READY", about))
    with connection.makefile("rb", buffering=0) as said:  # before its word none of ours counts
        _exactly(said, 64)
        _, length = _exactly(said, 2)
        _exactly(said, length)
    return connection


def _exactly(said: io.RawIOBase, size: int) -> bytes:
    read = b""
    while len(read) < size:
        piece = said.read(size - len(read))
        assert piece, "it closed the connection within the handshake"
        read += piece
    return read


class Crowd:
    """Strangers at one endpoint; close it to let go of those who hold on."""

    def __init__(self, endpoint: str, seed: int) -> None:
        host, _, port = address_of(endpoint).plain.removeprefix("tcp://").rpartition(":")
        self._where = host, int(port)
        self._dice = random.Random(seed)
        self._held: list[socket.socket] = []
        self.came = 0

    def come(self, connections: int) -> None:
        """So many more connections, one after another."""
        for _ in range(connections):
            self._one()

    def close(self) -> None:
        while self._held:
            self._held.pop().close()

    def _one(self) -> None:
        dice = self._dice
        stranger = socket.create_connection(self._where, _SEND_S)
        self.came += 1
        with contextlib.suppress(OSError):  # thrown out in the middle of a word
            stranger.sendall(dice.choice(_WORDS)(dice))
        match dice.randrange(4):
            case 0:
                self._held.append(stranger)
                if len(self._held) > _HELD:
                    self._held.pop(dice.randrange(_HELD)).close()
            case 1:  # a reset
                reset = struct.pack("ii", 1, 0)
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                stranger.close()
            case _:
                stranger.close()
