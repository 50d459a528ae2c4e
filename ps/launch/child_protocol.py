"""What a child process and its parent say to each other, over the child's standard pipes.

One order goes down, one answer comes up, and a second answer if the child fails later. Each is
MessagePack, its length first.
"""

import os
from typing import TypeVar

import msgspec

from ps.durability import Durability
from ps.launch.launcher import ShardDevice
from ps.security.authorization import Admission
from ps.transport.local_sockets import Transport
from shards.spec import ShardSpec

T = TypeVar("T")

_LENGTH_BYTES = 8


class ShardLaunch(msgspec.Struct, frozen=True):
    """What the parent wants: a shard on a device, listening on the ZeroMQ address `bind`.

    `transport` is what it offers beside; `admission` who is let in, None for anybody. Where its
    `durability` asks for a log, that lies in `log_folder`, which its starter has made where it is
    `seen`. A shard that is to come back after its death without a log saves its state each
    `rollback_s`, in a folder of its own: `saves`, told as a path below that for temporary files,
    wherever it runs. Nothing in here is secret.
    """

    spec: ShardSpec
    bind: str
    transport: Transport
    device: ShardDevice
    admission: Admission | None = None
    durability: Durability = Durability.MEMORY
    log_folder: str | None = None
    seen: bool = False
    saves: str | None = None
    rollback_s: float = 0.0

    @property
    def restarts(self) -> bool:
        """Whether a shard whose process has died is followed by another, which goes on from it."""
        return self.durability.keeps_log or self.saves is not None


class CopyLaunch(msgspec.Struct, frozen=True):
    """What the parent wants: the copy with this boot number of a replicated shard.

    `admission` is who is let in, None for anybody. Nothing in here is secret: it makes its own key,
    whose public half is in the endpoint that it answers, for the parent to tell the coordinator.
    """

    spec: ShardSpec
    boot: int
    coordinator: str
    bind: str
    admission: Admission | None = None


class CoordinatorLaunch(msgspec.Struct, frozen=True):
    """What the parent wants: the coordinator of a job, whose record is the file at that path.

    `admission` is as a copy's; its own key lies in the record.
    """

    job: str
    shards: int
    record: str
    bind: str
    silence_s: float
    admission: Admission | None = None


class Listening(msgspec.Struct, frozen=True, tag=True):
    """It serves; others reach it at `endpoint`. `empty`: it is a shard without weights."""

    endpoint: str
    build: str
    empty: bool = False


class Failed(msgspec.Struct, frozen=True, tag=True):
    """It does not, or no longer; `mendable` when the user's input is what is wrong."""

    text: str
    mendable: bool


def send(descriptor: int, value: object) -> None:
    """Write a value to a pipe, its length first."""
    content = msgspec.msgpack.encode(value)
    with open(descriptor, "wb", closefd=False) as pipe:
        pipe.write(len(content).to_bytes(_LENGTH_BYTES) + content)


def receive(descriptor: int, kind: type[T]) -> T | None:
    """Read what `tell` wrote, and no byte more; None when the other end has closed the pipe."""
    length = _read(descriptor, _LENGTH_BYTES)
    content = _read(descriptor, int.from_bytes(length)) if length else b""
    return msgspec.msgpack.decode(content, type=kind) if content else None


def _read(descriptor: int, size: int) -> bytes:
    content = b""
    while len(content) < size and (part := os.read(descriptor, size - len(content))):
        content += part
    return content
