"""Messages of several frames into a socket and out of it, at the least cost for small ones.

pyzmq's own `send_multipart` and `recv_multipart` look at every frame's type, do arithmetic on
enums, and ask the socket after each frame whether another follows, which the frame knows. For a
large message none of that matters; for a small one it costs as much as ZeroMQ does. An exception
that says "no more" costs as much again, so the socket is asked first.

Nothing is copied but what is so small that sharing it costs more than a copy: below 64 KB, which is
pyzmq's `copy_threshold`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import zmq

from shards.codec import Buffer

_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)
_view: Any = memoryview  # pyzmq's types do not tell that a Frame is a buffer


def send(
    socket: "zmq.Socket[bytes]",
    frames: Sequence[Buffer],
    *,
    copy: bool = False,
    track: bool = False,
) -> zmq.MessageTracker | None:
    """Send one message without waiting; raises what a socket raises, and then nothing was sent.

    With `copy` the frames may change at once. The tracker of one that is tracked, and not copied,
    tells when its last frame has left.
    """
    for frame in frames[:-1]:
        socket.send(frame, _MORE, copy=copy, track=track)
    return socket.send(frames[-1], _LAST, copy=copy, track=track)


def arrived(socket: "zmq.Socket[bytes]", most: int) -> Iterator[list[zmq.Frame]]:
    """Up to `most` messages that wait in a socket, as their frames; best if a poller says so."""
    for _ in range(most):
        try:
            frame = socket.recv(_LAST, copy=False)
        except zmq.Again:
            return
        frames = [frame]
        while frame.more:
            frame = socket.recv(_LAST, copy=False)
            frames.append(frame)
        yield frames
        if not zmq.zmq_poll([(socket, _READABLE)], 0):
            return


def views(frames: Iterable[zmq.Frame]) -> list[Buffer]:
    """The bytes of each, where they arrived; a view keeps its frame alive."""
    return list(map(_view, frames))
