"""The transports between a worker and a shard: TCP, a Unix socket, or shared memory.

A server opens a Unix socket in addition to its TCP port, in a folder that only its user can enter.
The folder's path follows from the job's id, which is a secret, the shard and the port, so a
cluster's description need not contain it: a worker on the same host finds the folder, on another
host it does not. Headers then go through that socket; where both sides prove that they share
memory, arrays stay in it.

`auto` uses the best transport available; the others are required by name.
"""

import os
import stat
from enum import StrEnum
from pathlib import Path

from ps.security.keys import address_of
from ps.shared_memory import shm_files
from shards import argument_checks
from shards.errors import BadInput

_SOCKET = "socket"


class Transport(StrEnum):
    """The transport of a job: `auto` is shared memory, else a Unix socket, else TCP."""

    AUTO = "auto"
    TCP = "tcp"
    IPC = "ipc"
    SHM = "shm"

    @property
    def shares(self) -> bool:
        """True if memory is shared where it can be."""
        return self in (Transport.AUTO, Transport.SHM)


def transport_named(name: str) -> Transport:
    """The transport of that name; raises BadInput."""
    return argument_checks.choice("transport", name, Transport)


class UnixSocketFolder:
    """A server's folder for its Unix socket, removed with the server."""

    def __init__(self, job: str, shard: int, endpoint: str) -> None:
        """The folder for the TCP `endpoint`; raises OSError where it cannot be created."""
        shm_files.sweep()
        self._claim = shm_files.Claim(_folder(job, shard, endpoint), folder=True)
        self.address = f"ipc://{self._claim.path / _SOCKET}"

    def close(self) -> None:
        self._claim.release()


def nearest(job: str, shard: int, endpoint: str, transport: Transport) -> str:
    """Where to connect for the shard at `endpoint`: its Unix socket, if that exists and is wanted.

    Raises BadInput when `transport` requires one and there is none.
    """
    if transport is Transport.TCP or not address_of(endpoint).plain.startswith("tcp://"):
        return endpoint
    folder = _folder(job, shard, endpoint)
    if _is_ours(folder):
        return f"ipc://{folder / _SOCKET}"
    if transport is Transport.AUTO:
        return endpoint
    raise BadInput(
        f"transport {transport}: shard {shard} at {endpoint}",
        expected="its Unix socket on this host and of this user, found none",
    )


def _folder(job: str, shard: int, endpoint: str) -> Path:
    return shm_files.unix_socket_path(job, shard, endpoint.rpartition(":")[2])


def _is_ours(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    private = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o700
    return private and status.st_uid == os.geteuid() and (folder / _SOCKET).exists()
