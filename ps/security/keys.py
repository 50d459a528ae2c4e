"""Keys on the wire: who a process is, and an endpoint that pins the key of whoever listens there.

A server that others than this host can reach speaks CURVE (CurveZMQ, rfc.zeromq.org/spec/26), whose
handshake proves to each side that the other holds the secret half of a key. Every process makes its
own pair and keeps the secret half to itself; the public halves are told. A server's is part of its
endpoint,

    curve://KEY@HOST:PORT

so that whoever knows where a shard is knows whom to expect there, and none can be reached in plain
text by oversight. Keys are written as 64 hexadecimal digits.
"""

import re
from typing import NamedTuple

import msgspec
import zmq
from zmq.utils import z85

from shards.errors import BadInput

_PINNED = re.compile(r"curve://([0-9a-f]{64})@(.+)")
ZAP_DOMAIN = b"downpour"


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair; shows its public half alone."""

    public: str
    secret: str

    @staticmethod
    def new() -> "KeyPair":
        """A pair that nobody else has, of the system's randomness."""
        return KeyPair(*map(_digits, zmq.curve_keypair()))

    @staticmethod
    def of(secret: str) -> "KeyPair":
        """The pair whose secret half this is; raises BadInput for what is none."""
        return KeyPair(_digits(zmq.curve_public(z85.encode(key_bytes(secret)))), secret)

    def __repr__(self) -> str:
        return f"KeyPair({self.public})"


class Address(NamedTuple):
    """An endpoint taken apart: what a socket connects to, and the key expected there, or none."""

    plain: str
    key: str


def pinned(endpoint: str, key: str) -> str:
    """The endpoint of a server at `endpoint`, tcp://HOST:PORT, that proves to hold `key`."""
    return f"curve://{key}@{endpoint.removeprefix('tcp://')}"


def address_of(endpoint: str) -> Address:
    """Where an endpoint leads, and the key that is pinned to it."""
    found = _PINNED.fullmatch(endpoint)
    return Address(f"tcp://{found[2]}", found[1]) if found else Address(endpoint, "")


def serve_with(socket: "zmq.Socket[bytes]", keys: KeyPair) -> None:
    """Have a socket that is not bound yet speak CURVE alone; its context must answer ZAP."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, key_bytes(keys.secret))
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)


def expect(socket: "zmq.Socket[bytes]", key: str, own: KeyPair) -> None:
    """Have a socket that is not connected yet talk only to who holds `key`, showing `own`."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, key_bytes(key))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key_bytes(own.public))
    socket.setsockopt(zmq.CURVE_SECRETKEY, key_bytes(own.secret))


def key_bytes(digits: str) -> bytes:
    """A key's 32 bytes; raises BadInput for what is none, which it does not repeat."""
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise BadInput(f"key: expected 64 hexadecimal digits, got {len(digits)} characters")
    return key


def _digits(key: bytes) -> str:
    return z85.decode(key).hex()
