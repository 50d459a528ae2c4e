"""Sends and receives messages of several frames, at the least cost for small ones.

pyzmq's own `send_multipart` and `recv_multipart` check every frame's type, do arithmetic on enums,
and ask the socket after each frame whether another follows, although the frame has that flag. For a
large message none of that matters; for a small one it costs as much as ZeroMQ does. An exception
that says "no more" costs as much again, so the socket is polled first. pyzmq's `send`, too, is a
layer above the function that does the work, which is called here directly.

Frames are copied only where sharing them would cost more than a copy: below 64 KB, which is pyzmq's
`copy_threshold`.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from shards.wire_format import Buffer

MAX_FRAMES = 1024  # per message; ours have up to 8 headers, with arrays of 32 key ranges each
_DROPPED_A_TURN = 4096
_RCVMORE = int(zmq.RCVMORE)
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)
_send: Any = zmq.backend.Socket.send
_view: Any = memoryview  # pyzmq's types do not declare that a Frame is a buffer


def send(socket: "zmq.Socket[bytes]", frames: Sequence[Buffer], *, copy: bool = False) -> None:
    """Send one message without waiting; raises what the socket raises, and then nothing was sent.

    With `copy` the caller may change the frames as soon as this returns.
    """
    for frame in frames[:-1]:
        _send(socket, frame, _MORE, copy)
    _send(socket, frames[-1], _LAST, copy)


def send_watched(
    socket: "zmq.Socket[bytes]", frames: Sequence[Buffer]
) -> list[weakref.ref[memoryview]]:
    """Send as `send` does, without a copy; each reference dies when ZeroMQ has sent its frame.

    pyzmq keeps each buffer alive until ZeroMQ has sent it, so a view that is made for this message
    alone is freed at that moment. That needs none of the locks of pyzmq's own `MessageTracker`.
    """
    watched = []
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        view = memoryview(frame)
        _send(socket, view, _LAST if number == last else _MORE, False)
        watched.append(weakref.ref(view))
    return watched


class Inbox:
    """The incoming messages of one socket."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        max_frames: int = MAX_FRAMES,
        refused: Callable[[zmq.Frame], None] = lambda _: None,
    ) -> None:
        """A message of more than `max_frames` is dropped, and `refused` gets one of its frames."""
        self._socket, self._max_frames, self._refused = socket, max_frames, refused
        self._receive: Any = socket.recv
        # Whether the next frame begins a message; False after Ctrl-C in the middle of one.
        self._whole = True

    def take_messages(self, most: int) -> list[list[zmq.Frame]]:
        """Up to `most` waiting messages, as their frames; call it when a poller reports some.

        The frames of a dropped message are not kept. If it has very many, the next call continues
        to drop them.
        """
        came: list[list[zmq.Frame]] = []
        if not self._whole and not self._drop_rest():
            return came
        while True:
            self._whole = False
            try:
                frame = self._receive(_LAST, False)
            except zmq.Again:
                self._whole = True
                return came
            frames = [frame]
            while frame.more and len(frames) < self._max_frames:
                frame = self._receive(_LAST, False)
                frames.append(frame)
            if not frame.more:
                self._whole = True
                came.append(frames)
            else:
                frames.clear()
                self._refused(frame)
                if not self._drop_rest():
                    return came
            if len(came) == most or not zmq.zmq_poll([(self._socket, _READABLE)], 0):
                return came

    def _drop_rest(self) -> bool:
        """Drop the rest of a message, for a few milliseconds at most; returns whether all of it is
        gone.
        """
        self._whole = not self._socket.getsockopt(_RCVMORE) or any(
            not self._socket.recv(_LAST, copy=False).more for _ in range(_DROPPED_A_TURN)
        )
        return self._whole


def views(frames: Iterable[zmq.Frame]) -> list[Buffer]:
    """The bytes of each frame without a copy; a view keeps its frame alive."""
    return list(map(_view, frames))
