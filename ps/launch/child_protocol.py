"""The protocol between a parent process and its child, over the child's standard pipes.

The parent sends one order; the child sends one answer, and a second one if it fails later. Each is
MessagePack, preceded by its length.
"""

import os
import tempfile
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec

from ps.durability import Durability
from ps.launch.launch_plan import ShardDevice
from ps.security.authorization import Admission
from ps.transport.advertised_address import Advertised
from ps.transport.transports import Transport
from shards.spec import ShardSpec

T = TypeVar("T")

_LENGTH_BYTES = 8


class _OfShard(msgspec.Struct, frozen=True, tag=True):
    spec: ShardSpec

    @property
    def name(self) -> str:
        return f"shard {self.spec.shard}"


class ShardLaunch(_OfShard, frozen=True):
    """The order for a shard on a device that listens on the ZeroMQ address `bind`.

    `transport` is offered as well as TCP. `admission` says which keys are admitted; None admits
    anybody. If `durability` asks for a WAL, it is stored in `log_folder`; with `seen`, the parent
    has created that folder, so a machine that lacks it is refused. A shard without a WAL has a
    folder of its own, `saves`, a path relative to the folder for temporary files of the machine
    where it runs: for its key, and for the autosaves that it makes every `rollback_s` seconds,
    unless that is 0, if it is to be restarted. `advertised` decides the address that clients are
    given. An order holds no secret.
    """

    bind: str
    transport: Transport
    device: ShardDevice
    admission: Admission | None = None
    durability: Durability = Durability.MEMORY
    log_folder: str | None = None
    seen: bool = False
    saves: str | None = None
    rollback_s: float = 0.0
    advertised: Advertised = Advertised()

    @property
    def restarts(self) -> bool:
        """True if the shard can be restarted after a death, from its WAL or its last autosave."""
        return self.durability.keeps_log or self.rollback_s > 0

    @property
    def folder(self) -> Path | None:
        """The folder on this machine for what outlives the process, if the shard has one."""
        if self.log_folder is not None:
            return Path(self.log_folder)
        return None if self.saves is None else Path(tempfile.gettempdir()) / self.saves


class RefusalLaunch(msgspec.Struct, frozen=True, tag=True):
    """The order for a server that answers with `reason` in place of a shard that died for good."""

    shard: ShardLaunch
    reason: str

    @property
    def name(self) -> str:
        return self.shard.name


class CopyLaunch(_OfShard, frozen=True):
    """The order for a copy of a replicated shard, with the boot number `boot`.

    `admission` says which keys are admitted; None admits anybody. An order holds no secret: the
    copy makes its own key and answers with an endpoint that holds the public half, which the parent
    passes to the coordinator.
    """

    boot: int
    coordinator: str
    bind: str
    admission: Admission | None = None
    advertised: Advertised = Advertised()


class CoordinatorLaunch(msgspec.Struct, frozen=True, tag=True):
    """The order for the coordinator of a job, with the path of its `record` file.

    `admission` is as for a copy; the coordinator's own key is stored in the record.
    """

    name: ClassVar[str] = "coordinator"
    job: str
    shards: int
    record: str
    bind: str
    silence_s: float
    admission: Admission | None = None
    advertised: Advertised = Advertised()


Launch = ShardLaunch | RefusalLaunch | CopyLaunch | CoordinatorLaunch
"""An order; its `name` is the name of the process in errors."""


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The child serves, at `endpoint`. `empty`: it is a shard without weights."""

    endpoint: str
    build: str
    empty: bool = False


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The child failed before or while serving; `mendable` if the user's input is at fault.

    `retryable`: another child may succeed with the same order.
    """

    text: str
    mendable: bool
    retryable: bool = False


def send(descriptor: int, value: object) -> None:
    """Write the length of a value, then the value, to a pipe."""
    content = msgspec.msgpack.encode(value)
    with open(descriptor, "wb", closefd=False) as pipe:
        pipe.write(len(content).to_bytes(_LENGTH_BYTES) + content)


def receive(descriptor: int, kind: type[T]) -> T | None:
    """Read what `send` wrote, and no byte more; None if the other end has closed the pipe."""
    length = _read(descriptor, _LENGTH_BYTES)
    content = _read(descriptor, int.from_bytes(length)) if length else b""
    return msgspec.msgpack.decode(content, type=kind) if content else None


def _read(descriptor: int, size: int) -> bytes:
    content = b""
    while len(content) < size and (part := os.read(descriptor, size - len(content))):
        content += part
    return content
