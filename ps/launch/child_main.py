"""A server in a process of its own, from the child's side; processes.py has the parent's.

It is told what to be on standard input and tells on standard output where it listens, or why it
does not. It ends when its parent says so or is gone, however that came about: the kernel closes the
pipe of a parent that is killed.
"""

import os
import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

from ps.compatibility import build_id
from ps.launch.child_protocol import Failed, Listening, receive, send
from ps.transport.addresses import local_address
from ps.transport.server_thread import ServerThread
from shards.errors import BadInput, DownpourError

Order = TypeVar("Order")


def run_server(kind: type[Order], make: Callable[[Order, str], tuple[ServerThread, str]]) -> int:
    """Make what an order of `kind` wants, and serve; returns the exit status.

    `make` is also given this machine's address; it returns a server, not started yet, and where
    others reach it.
    """
    answers = os.dup(1)
    os.dup2(2, 1)  # What a library prints is no answer.
    order = receive(0, kind)
    if order is None:
        return 0
    try:
        server, endpoint = make(order, local_address())
        with server:
            send(answers, Listening(endpoint, build_id(), server.empty))
            threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
            server.wait()
    except Exception as error:  # noqa: BLE001  # whatever it is, the parent is told
        traceback.print_exc()
        ours = isinstance(error, DownpourError)
        text = str(error) if ours else f"{type(error).__name__}: {error}"
        send(answers, Failed(text, isinstance(error, BadInput)))
        return 1
    return 0


def _end_with_parent(server: ServerThread) -> None:
    os.read(0, 1)  # A byte, or the end of the pipe.
    server.end()
