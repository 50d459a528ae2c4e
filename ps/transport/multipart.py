"""Messages of several frames into a socket and out of it, at the least cost for small ones.

pyzmq's own `send_multipart` and `recv_multipart` look at every frame's type, do arithmetic on
enums, and ask the socket after each frame whether another follows, which the frame knows. For a
large message none of that matters; for a small one it costs as much as ZeroMQ does. An exception
that says "no more" costs as much again, so the socket is asked first.

Nothing is copied but what is so small that sharing it costs more than a copy: below 64 KB, which is
pyzmq's `copy_threshold`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from shards.wire_format import Buffer

MOST_FRAMES = 1024  # of a message; ours have eight headers, with an array for each of 32 key ranges
_DROPPED_A_TURN = 4096
_RCVMORE = int(zmq.RCVMORE)
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


def arrived(
    socket: "zmq.Socket[bytes]",
    most: int,
    most_frames: int = MOST_FRAMES,
    refused: Callable[[zmq.Frame], None] = lambda _: None,
) -> list[list[zmq.Frame]]:
    """Up to `most` messages that wait in a socket, as their frames; best if a poller says so.

    A message of more than `most_frames` is dropped: `refused` gets one of its frames, and the
    others are not kept. If there are very many, the next call continues with dropping them.
    """
    came: list[list[zmq.Frame]] = []
    if socket.getsockopt(_RCVMORE) and not _dropped(socket):
        return came
    for _ in range(most):
        try:
            frame = socket.recv(_LAST, copy=False)
        except zmq.Again:
            return came
        frames = [frame]
        while frame.more and len(frames) < most_frames:
            frame = socket.recv(_LAST, copy=False)
            frames.append(frame)
        if not frame.more:
            came.append(frames)
        else:
            frames.clear()
            refused(frame)
            if not _dropped(socket):
                return came
        if not zmq.zmq_poll([(socket, _READABLE)], 0):
            return came
    return came


def _dropped(socket: "zmq.Socket[bytes]") -> bool:
    """Whether the rest of a message is gone, after a few milliseconds at most."""
    return any(not socket.recv(_LAST, copy=False).more for _ in range(_DROPPED_A_TURN))


def views(frames: Iterable[zmq.Frame]) -> list[Buffer]:
    """The bytes of each, where they arrived; a view keeps its frame alive."""
    return list(map(_view, frames))
