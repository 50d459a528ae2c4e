"""Options for all of our sockets, and the clean-up of a context."""

import weakref
from collections.abc import Sequence

import zmq

# Dead links are detected by TCP itself. ZeroMQ's heartbeats queue behind the message being sent,
# so they would cut every link on which one message takes longer than their timeout.
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
    """Close a context when its owner is garbage-collected without having been closed.

    Collected sockets would make ZeroMQ's own clean-up of the context wait for ever, as happens when
    an error's traceback was the last reference to all of them. The context of a thread that still
    runs when the process exits is left alone.
    """
    weakref.finalize(owner, _drop, context, sockets).atexit = False


def _drop(context: "zmq.Context[zmq.Socket[bytes]]", _: Sequence[zmq.Socket[bytes]]) -> None:
    context.destroy(linger=0)
