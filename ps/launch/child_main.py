"""The child's side of a server in a process of its own; processes.py has the parent's side.

The child reads its order from standard input, and writes to standard output where it listens, or
why it does not. It ends when its parent asks it to or is gone, however the parent ended: the kernel
closes the pipe of a parent that is killed.
"""

import os
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from ps.compatibility import build_id
from ps.launch.child_protocol import (
    CoordinatorLaunch,
    CopyLaunch,
    Failed,
    Listening,
    ShardLaunch,
    receive,
    send,
)
from ps.logs import send_to_parent
from ps.transport.addresses import local_address
from ps.transport.server_thread import ServerThread
from shards.errors import BadInput, DownpourError

Order = TypeVar("Order")


def run_server(kind: type[Order], make: Callable[[Order, str], tuple[ServerThread, str]]) -> int:
    """Read an order of `kind`, make its server with `make`, and serve; returns the exit status.

    `make` takes the order and this machine's address. It returns a server that is not started yet,
    and the endpoint by which others reach it.
    """
    answers = os.dup(1)
    os.dup2(2, 1)  # Otherwise what a library prints would be read as an answer.
    order = receive(0, kind)
    if order is None:
        return 0
    send_to_parent(**whose(order))
    try:
        server, endpoint = make(order, local_address())
        with server:
            send(answers, Listening(endpoint, build_id(), server.empty))
            threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
            server.wait()
    except Exception as error:  # noqa: BLE001  # whatever it is, the parent learns it
        traceback.print_exc()
        ours = isinstance(error, DownpourError)
        text = str(error) if ours else f"{type(error).__name__}: {error}"
        send(answers, Failed(text, isinstance(error, BadInput)))
        return 1
    return 0


def whose(order: object) -> dict[str, Any]:
    """The job of an order, and its shard: the fields of what its process logs."""
    match order:
        case ShardLaunch(spec=spec) | CopyLaunch(spec=spec):
            return {"job": spec.job, "shard": spec.shard}
        case CoordinatorLaunch(job=job):
            return {"job": job}
    raise AssertionError(f"an order for no server of ours: {type(order).__name__}")


def _end_with_parent(server: ServerThread) -> None:
    os.read(0, 1)  # returns with a byte, or at the end of the pipe
    server.end()
