"""Sends and receives messages of several frames, at the least cost for small ones.

pyzmq's own `send_multipart` and `recv_multipart` check every frame's type, do arithmetic on enums,
and ask the socket after each frame whether another follows, which the frame knows. For a large
message none of that matters; for a small one it costs as much as ZeroMQ does. An exception that
says "no more" costs as much again, so the socket is asked first.

Frames are copied only where sharing them would cost more than a copy: below 64 KB, which is pyzmq's
`copy_threshold`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from shards.wire_format import Buffer

MOST_FRAMES = 1024  # per message; ours have up to 8 headers, with arrays of 32 key ranges each
_DROPPED_A_TURN = 4096
_RCVMORE = int(zmq.RCVMORE)
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)
_view: Any = memoryview  # pyzmq's types do not declare that a Frame is a buffer


def send(
    socket: "zmq.Socket[bytes]",
    frames: Sequence[Buffer],
    *,
    copy: bool = False,
    track: bool = False,
) -> zmq.MessageTracker | None:
    """Send one message without waiting; raises what the socket raises, and then nothing was sent.

    With `copy` the frames may change at once. With `track`, and without `copy`, the returned
    tracker reports when the last frame has left.
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
    """Up to `most` waiting messages, as their frames; call it when a poller reports some.

    A message of more than `most_frames` is dropped: `refused` gets one of its frames, and the
    others are not kept. If there are very many, the next call continues to drop them.
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
    """Drop the rest of a message, for a few milliseconds at most; whether it is gone."""
    return any(not socket.recv(_LAST, copy=False).more for _ in range(_DROPPED_A_TURN))


def views(frames: Iterable[zmq.Frame]) -> list[Buffer]:
    """The bytes of each frame without a copy; a view keeps its frame alive."""
    return list(map(_view, frames))
