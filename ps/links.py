"""Links: one DEALER socket to each shard, typed messages out, typed answers in.

The workers' client and the operator's console stand on this. `ZMQ_IMMEDIATE` keeps a message from
being queued for a shard that is down and then delivered to its next life.
"""

import contextlib
import math
import time
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import zmq
from numpy.typing import NDArray

from shards import codec
from shards.codec import Buffer
from shards.errors import BadInput
from shards.messages import Message, Reply

_HEARTBEAT_MS = 2000
_HEARTBEAT_TIMEOUT_MS = 10000


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


class Links:
    """Connections to `endpoints`; shard numbers are positions in it. Not for use by two threads."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets = [self._connect(endpoint) for endpoint in endpoints]
        self.endpoints = tuple(endpoints)
        drop_with(self, self._context, self._sockets)

    def _connect(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IMMEDIATE, 1),
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 2000),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS),
        ):
            socket.setsockopt(option, value)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise BadInput(
                f"shard endpoint: expected tcp://HOST:PORT or ipc://PATH, got {endpoint!r}"
                f" ({zmq.strerror(error.errno or 0)})"
            ) from None
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def await_connections(self, timeout_s: float) -> None:
        """Wait until every shard has been reached, or `timeout_s`: what is sent before is lost."""
        waiting = zmq.Poller()
        for socket in self._sockets:
            waiting.register(socket, zmq.POLLOUT)
        until = time.monotonic() + timeout_s
        while waiting.sockets and (left_s := until - time.monotonic()) > 0:
            for socket, _ in waiting.poll(math.ceil(left_s * 1000)):
                waiting.unregister(socket)

    def send(
        self, shard: int, message: Message, frames: Sequence[NDArray[np.float32] | bytes] = ()
    ) -> None:
        """Hand a message to the network; arrays are sent without a copy and must not change.

        While the shard cannot be reached nothing is sent: whoever keeps the message repeats it.
        """
        parts = [codec.encode(message), *codec.wrap(frames)]
        with contextlib.suppress(zmq.Again):
            self._sockets[shard].send_multipart(parts, zmq.NOBLOCK, copy=False)

    def receive(self, timeout_s: float) -> Iterator[tuple[int, Reply, list[Buffer]]]:
        """What has arrived within `timeout_s`, at least one message if any came: all that waits."""
        ready = {socket for socket, _ in self._poller.poll(math.ceil(max(0.0, timeout_s) * 1000))}
        for shard, socket in enumerate(self._sockets):
            if socket in ready:
                with contextlib.suppress(zmq.Again):
                    while True:
                        frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                        payload: list[Buffer] = [frame.buffer for frame in frames[1:]]
                        yield shard, codec.decode_reply(frames[0].buffer), payload

    def close(self, linger_s: float = 0.0) -> None:
        """Drop the connections, giving what is being sent up to `linger_s`."""
        self._context.destroy(linger=int(linger_s * 1000))
