"""One shard in a process of its own: `python -m ps.shard_process`, which ps/process_host.py starts.

It is told its shard on standard input and tells on standard output where it listens, or why it does
not. It ends when its parent says so or is gone, however that came about: the kernel closes the pipe
of a parent that is killed.
"""

import os
import sys
import threading
import traceback

from ps.build import build_id
from ps.hosting import serve, told_as
from ps.pipe import Failed, Listening, Order, hear, tell
from ps.reach import own_address
from ps.server import Server
from shards.errors import BadInput, DownpourError


def main() -> int:
    """Serve as told; returns the exit status."""
    answers = os.dup(1)
    os.dup2(2, 1)  # What a library prints is no answer.
    order = hear(0, Order)
    if order is None:
        return 0
    try:
        with serve(
            order.spec, order.bind, order.transport, order.device, order.admission
        ) as server:
            tell(answers, Listening(told_as(server.endpoint, own_address()), build_id()))
            threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
            server.wait()
    except Exception as error:  # noqa: BLE001  # whatever it is, the parent is told
        traceback.print_exc()
        ours = isinstance(error, DownpourError)
        text = str(error) if ours else f"{type(error).__name__}: {error}"
        tell(answers, Failed(text, isinstance(error, BadInput)))
        return 1
    return 0


def _end_with_parent(server: Server) -> None:
    os.read(0, 1)  # A byte, or the end of the pipe.
    server.end()


if __name__ == "__main__":
    sys.exit(main())
