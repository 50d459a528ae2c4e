"""Bounds the memory that answers take: however many clients ask for much and read nothing.

An answer that fits into the buffers of its connection is sent and forgotten. A longer one waits for
its client to read, so only some may be under way, and they are sent in pieces: the next piece is
written once the client has taken the last ones. The event stream is none of them: it keeps nothing
for its clients (stream.py). `STALLED_S` after a client has read nothing, the listener's socket ends
the connection (server.py).
"""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.service.problems import Problem
from deploy.service.tokens import Principal

CHUNK_BYTES = 64 << 10
"""The size of a piece; an answer of at most this size is not a long one."""
MOST, MOST_OF_ONE = 64, 16
"""The long answers under way at a time: of all senders, and of one."""
STALLED_S = 60.0


class LongAnswers:
    """ASGI middleware: sends long answers in pieces, and refuses those that are too many."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._under_way: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        principal: Principal = scope["state"]["principal"]
        name = f"{principal.name} {principal.token}"
        refusal: Problem | None = None
        counted = False

        async def send_pieces(message: Message) -> None:
            nonlocal counted, refusal
            if message["type"] == "http.response.start" and _is_long(message):
                if not self._begin(name):
                    refusal = _too_many()
                    raise refusal
                counted = True
            body = message.get("body", b"")
            if len(body) <= CHUNK_BYTES:
                await send(message)
                return
            more = message.get("more_body", False)
            for first in range(0, len(body), CHUNK_BYTES):
                piece, rest = body[first : first + CHUNK_BYTES], first + CHUNK_BYTES < len(body)
                await send({"type": message["type"], "body": piece, "more_body": rest or more})

        try:
            await self._app(scope, receive, send_pieces)
        except Exception:
            if refusal is None:
                raise
            await refusal.response()(scope, receive, send)
        finally:
            if counted:
                self._end(name)

    def _begin(self, name: str) -> bool:
        with self._lock:
            if self._under_way.total() >= MOST or self._under_way[name] >= MOST_OF_ONE:
                return False
            self._under_way[name] += 1
            return True

    def _end(self, name: str) -> None:
        with self._lock:
            self._under_way[name] -= 1
            self._under_way += Counter()  # drops those at zero


def pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The next `size` bytes of a file in pieces; the file is closed at the end."""
    with file:
        while size > 0 and (piece := file.read(min(size, CHUNK_BYTES))):
            size -= len(piece)
            yield piece


def open_at(path: Path, tail: int, after: int | None, most: int) -> tuple[BinaryIO, int, int]:
    """A file at its last `tail` bytes or at the byte `after`: the file, the place, bytes to read.

    Raises OSError.
    """
    file = path.open("rb")
    size = file.seek(0, 2)
    start = max(0, size - tail) if after is None else min(after, size)
    file.seek(start)
    return file, start, min(size - start, most)


def _is_long(start: Message) -> bool:
    headers = Headers(raw=start.get("headers", []))
    if headers.get("content-type", "").startswith("text/event-stream"):
        return False
    length = headers.get("content-length")
    return length is None or int(length) > CHUNK_BYTES


def _too_many() -> Problem:
    text = f"answer: expected at most {MOST_OF_ONE} long ones at a time, got one more"
    hint = "read the earlier answers first, or repeat the request later"
    return Problem(429, "busy", text, hint=hint, headers={"Retry-After": "5"})
