"""The context of all our sockets: it names the remedy where this process may open no more files."""

import resource
from contextlib import suppress
from errno import EMFILE, ENFILE
from pathlib import Path
from typing import Any

import zmq

from shards.errors import GiveUp

_SPARE_DESCRIPTORS = 10  # for a context's threads, a monitor, and connections made later


class SocketContext(zmq.Context[zmq.Socket[bytes]]):
    """A context that makes no socket where descriptors run short: ZeroMQ ends the process then."""

    def socket(self, *arguments: Any, **options: Any) -> zmq.Socket[bytes]:
        """A new socket; raises GiveUp with the remedy where too many files are open."""
        check_descriptors()
        try:
            return super().socket(*arguments, **options)
        except zmq.ZMQError as error:
            if error.errno not in (EMFILE, ENFILE):
                raise
            raise _too_many_files() from None


def check_descriptors() -> None:
    """Raise GiveUp unless this process may open a few more files; checked on Linux only."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(FileNotFoundError):
        try:
            open_files = sum(1 for _ in Path("/proc/self/fd").iterdir())
        except OSError as error:
            if error.errno not in (EMFILE, ENFILE):
                raise
            raise _too_many_files() from None
        if most != resource.RLIM_INFINITY and open_files + _SPARE_DESCRIPTORS > most:
            raise _too_many_files()


def _too_many_files() -> GiveUp:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return GiveUp(
        f"too many open files: this process may open {most}, and sockets need more: raise the"
        " limit before it starts, as with `ulimit -n 4096`"
    )
