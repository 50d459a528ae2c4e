"""Tracks large messages that are still leaving, so that they are not sent twice.

On a slow link a message of megabytes takes longer than the wait for an answer, and a second copy
queued behind the first only delays the answer. So before a message is sent again, the sender asks
here, and does not send while the first copy is leaving: until ZeroMQ has handed it to the system,
and for a fraction of that time afterwards, in which the system's own buffers empty. Messages are
identified by their peer and request number; small ones are not tracked.
"""

import time
import weakref
from collections.abc import Hashable, Iterable, Sequence

import zmq

from ps.transport import multipart
from shards.messages import Message
from shards.wire_format import Buffer, Frames

LARGE_BYTES = 1 << 20
_COPIED_BYTES = 1 << 16  # below this, sharing costs more than a copy
_BEYOND = 0.25  # the share of ZeroMQ's time that is added for the system's buffers


class _Sent:
    """One large message, in one part or several; each of `frames` dies when it has been sent."""

    def __init__(self, frames: Sequence[weakref.ref[memoryview]], now: float) -> None:
        self._frames = frames
        self._since = now
        self._gone_at: float | None = None

    def is_leaving(self, now: float) -> bool:
        if self._gone_at is None:
            for frame in self._frames:
                if frame() is not None:
                    return True
            self._gone_at = now
        return now < self._gone_at + _BEYOND * (self._gone_at - self._since)


class SendTracker:
    """The large messages of one owner of sockets that may still be leaving: `sent`, by peer and
    request.
    """

    def __init__(self) -> None:
        self.sent: dict[tuple[Hashable, int], _Sent] = {}

    def in_progress(self, peer: Hashable, request: int) -> bool:
        """Return whether a message of this request to this peer is still leaving."""
        sent = self.sent.get((peer, request))
        return sent is not None and sent.is_leaving(time.monotonic())

    def send(
        self,
        parts: Sequence[tuple[zmq.Socket[bytes], Sequence[Buffer]]],
        peer: Hashable,
        requests: Iterable[int],
    ) -> None:
        """Send the parts of a message, each by its socket, without waiting.

        Large frames are not copied, and must not change. `requests` are the numbers of the messages
        in it, which are read only if it is large. Raises what a socket raises.
        """
        total = 0
        for _, part in parts:
            for frame in part:
                total += memoryview(frame).nbytes
        if total < LARGE_BYTES:
            for socket, part in parts:
                multipart.send(socket, part, copy=total < _COPIED_BYTES)
            return
        frames: list[weakref.ref[memoryview]] = []
        for socket, part in parts:
            frames += multipart.send_watched(socket, part)
        now = time.monotonic()
        for key, earlier in list(self.sent.items()):
            if not earlier.is_leaving(now):
                del self.sent[key]
        sent = _Sent(frames, now)
        for request in requests:
            self.sent[peer, request] = sent

    def forget(self, peer: Hashable) -> None:
        """Drop the messages to this peer: its sockets were closed, so they will not arrive."""
        self.sent = {key: sent for key, sent in self.sent.items() if key[0] != peer}


def request_of(addressed: tuple[Message, Frames]) -> int:
    """The request number of a message that is given with its frames."""
    return addressed[0].request
