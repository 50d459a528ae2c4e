"""CURVE keys: they identify processes, and an endpoint pins the key of its server.

A server that other hosts can reach uses CURVE (CurveZMQ, rfc.zeromq.org/spec/26): the handshake
proves to each side that the other holds the secret half of a key. Every process makes its own pair,
keeps the secret half, and publishes the public half. A server's public half is in its endpoint,

    curve://KEY@HOST:PORT

so a client that knows where a shard is also knows which key to expect there, and cannot reach it in
plain text by accident. Keys are written as 64 hexadecimal digits.

Workers know a shard by the key in its endpoint, so a restartable shard stores its pair next to its
WAL or autosaves. The first process makes the pair on the machine where it runs, and the secret half
never leaves that machine. The file is readable by its user only. It holds both halves, so that a
damaged file is not mistaken for another key.
"""

import re
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq
from zmq.utils import z85

from ps.path_checks import refuse_pipe
from ps.snapshots.private_files import check_private, replace_private
from shards.errors import BadInput

_PINNED = re.compile(r"curve://([0-9a-f]{64})@(.+)")
ZAP_DOMAIN = b"downpour"
_NAME, _WHAT = "key", "shard's key"


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair; its `repr` shows the public half only."""

    public: str
    secret: str

    @staticmethod
    def new() -> "KeyPair":
        """A new random pair."""
        return KeyPair(*map(_digits, zmq.curve_keypair()))

    @staticmethod
    def of(secret: str) -> "KeyPair":
        """The pair with this secret half; raises BadInput if it is not a key."""
        return KeyPair(_digits(zmq.curve_public(z85.encode(key_bytes(secret)))), secret)

    def __repr__(self) -> str:
        return f"KeyPair({self.public})"


class Address(NamedTuple):
    """An endpoint's parts: the address a socket connects to, and the pinned key or ''."""

    plain: str
    key: str


def pin_key(endpoint: str, key: str) -> str:
    """The endpoint tcp://HOST:PORT with the server's public `key` pinned to it."""
    return f"curve://{key}@{endpoint.removeprefix('tcp://')}"


def address_of(endpoint: str) -> Address:
    """Split an endpoint into its address and the key pinned to it, empty if there is none."""
    match = _PINNED.fullmatch(endpoint)
    return Address(f"tcp://{match[2]}", match[1]) if match else Address(endpoint, "")


def serve_with(socket: "zmq.Socket[bytes]", keys: KeyPair) -> None:
    """Make a socket that is not bound yet accept only CURVE; its context must answer ZAP."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, key_bytes(keys.secret))
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)


def expect(socket: "zmq.Socket[bytes]", key: str, keys: KeyPair) -> None:
    """Make a socket that is not connected yet show `keys`, and accept only a server with `key`."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, key_bytes(key))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key_bytes(keys.public))
    socket.setsockopt(zmq.CURVE_SECRETKEY, key_bytes(keys.secret))


def key_bytes(digits: str) -> bytes:
    """The 32 bytes of a key; raises BadInput, which does not quote `digits`, if it is not one."""
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise BadInput("key", expected="64 hexadecimal digits", got=f"{len(digits)} characters")
    return key


def _digits(key: bytes) -> str:
    return z85.decode(key).hex()


def load_or_create_keys(folder: Path) -> KeyPair:
    """The key pair in a shard's `folder`, created if missing; the caller holds the folder's lock.

    Raises BadInput naming the file if others may read it, or if it holds no key.
    """
    path = folder / _NAME
    refuse_pipe(path)
    try:
        if path.exists():
            check_private(path, _WHAT)
            return _read_keys(path)
        keys = KeyPair.new()
        replace_private(path, f"{keys.secret} {keys.public}".encode())
    except OSError as error:
        raise BadInput(f"{_WHAT}: {path}: {error.strerror}") from None
    return keys


def _read_keys(path: Path) -> KeyPair:
    secret, _, public = path.read_text(errors="replace").partition(" ")
    try:
        keys = KeyPair.of(secret)
        if keys.public != public:
            raise BadInput("key", expected="two halves of one pair", got="others: it is damaged")
        return keys
    except BadInput as error:
        raise BadInput(f"{_WHAT}: {path}: {str(error).removeprefix('key: ')}") from None
