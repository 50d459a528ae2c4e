"""What every socket of ours is told, and how a context is let go."""

import weakref
from collections.abc import Sequence

import zmq

# How a dead link is noticed: by TCP's own means. ZeroMQ's heartbeats wait behind the message that
# is on its way, and would cut every link on which one takes longer than they are patient.
NOTICE_THE_DEAD = (
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 5),
    (zmq.TCP_KEEPALIVE_INTVL, 2),
    (zmq.TCP_KEEPALIVE_CNT, 3),
    (zmq.TCP_MAXRT, 15_000),
)


def drop_with(
    owner: object, context: "zmq.Context[zmq.Socket[bytes]]", sockets: Sequence[zmq.Socket[bytes]]
) -> None:
    """Close a context when its owner is collected without having been closed.

    ZeroMQ would wait for ever for sockets that were collected together with it, as they are when an
    error's traceback held them all. Those of a thread that still runs at exit are left to the exit.
    """
    weakref.finalize(owner, _drop, context, sockets).atexit = False


def _drop(context: "zmq.Context[zmq.Socket[bytes]]", _: Sequence[zmq.Socket[bytes]]) -> None:
    context.destroy(linger=0)
