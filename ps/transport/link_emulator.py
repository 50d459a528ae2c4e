"""Carries real bytes over a modelled link: local endpoints that lead to the shards, but slowly.

A thread in the client's process accepts connections and forwards each to its shard, holding every
chunk back until `link_model.py` says that it comes out. The traffic is the same ZeroMQ over the
same TCP, so any user of an endpoint can be put behind a link without noticing. All connections
through one `LinkEmulator` share one line each way, like the connections of a worker on its own
access link.
"""

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from errno import EAGAIN, EINPROGRESS
from itertools import count

from ps.security.keys import address_of, pin_key
from ps.transport.link_model import Lane, LinkModel, LinkStream
from shards.errors import BadInput

_CONNECTING = 0, EINPROGRESS, EAGAIN
_IN, _OUT = select.POLLIN, select.POLLOUT
_GONE = select.POLLERR | select.POLLHUP | select.POLLNVAL


class LinkEmulator:
    """Forwards `endpoints` (tcp://, curve:// or ipc://) in a thread until `close`.

    `name` is added to the model's seed, so that each worker's link has its own random events.
    """

    def __init__(self, endpoints: Sequence[str], model: LinkModel, name: str = "") -> None:
        self._model = model
        self._seed = f"{model.seed}/{name}"
        since = time.monotonic()
        self._lanes = Lane(model, self._seed, since), Lane(model, self._seed, since)
        self._numbers = count()
        whole = [address_of(endpoint) for endpoint in endpoints]
        self._addresses = [_address(address.plain) for address in whole]
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in endpoints]
        local = [f"tcp://127.0.0.1:{listener.getsockname()[1]}" for listener in self._listeners]
        # The emulator forwards encrypted bytes unread, so clients still expect the shard's own key.
        self.endpoints = tuple(
            pin_key(near, far.key) if far.key else near
            for near, far in zip(local, whole, strict=True)
        )
        for listener in self._listeners:
            listener.setblocking(False)
        self._woken, self._waker = socket.socketpair()
        self._pipes: list[_Pipe] = []
        self._thread = threading.Thread(target=self._run, name="slow-link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cut every connection; data in flight is lost."""
        self._waker.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            for pipe in self._pipes:
                pipe.cut()
            for listener in (*self._listeners, self._woken):
                listener.close()

    def _turn(self) -> bool:
        """Wait for the next byte or due time, and forward what is due; False at the end."""
        now = time.monotonic()
        events, wake_at = self._interests(now)
        ready = _poll(events, wake_at)
        if self._woken.fileno() in ready:
            return False
        for listener, address in zip(self._listeners, self._addresses, strict=True):
            if listener.fileno() in ready:
                self._pipes += self._accept(listener, address)
        now = time.monotonic()
        self._take_in(ready, now)
        for pipe in self._pipes:
            if not pipe.cut_off:
                pipe.deliver(now)
        self._pipes = [pipe for pipe in self._pipes if not pipe.cut_off]
        return True

    def _take_in(self, ready: dict[int, int], now: float) -> None:
        """Fill the lines with one chunk of each connection in turn, as TCP connections share one.

        The connection that was served last is last in the next turn. Otherwise the first would send
        all of its bytes before the last sends its first chunk, and messages that are cut among
        connections (striping.py) would only be complete with the last connection's part.
        """
        waiting = deque(self._pipes)
        while waiting:
            pipe = waiting.popleft()
            if not pipe.cut_off and pipe.take(ready, now):
                waiting.append(pipe)
                self._pipes.remove(pipe)
                self._pipes.append(pipe)

    def _interests(self, now: float) -> tuple[dict[int, int], float | None]:
        """The sockets to wait for, with their events, and the time of the next wake-up."""
        events = {listener.fileno(): _IN for listener in (*self._listeners, self._woken)}
        times: list[float] = []
        for pipe in self._pipes:
            for number, event in pipe.interests(now):
                events[number] = events.get(number, 0) | event
            times += pipe.times(now)
        return events, min(times, default=None)

    def _accept(self, listener: socket.socket, address: "_Address") -> "list[_Pipe]":
        """Both directions of a new connection; none when the shard cannot be reached."""
        family, target = address
        near, _ = listener.accept()
        far = socket.socket(family)
        for end in (near, far):
            end.setblocking(False)
            if end.family == socket.AF_INET:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if far.connect_ex(target) not in _CONNECTING:
            near.close()
            far.close()
            return []
        number = next(self._numbers)
        up, down = (
            LinkStream(lane, f"{self._seed}/{number}/{way}")
            for way, lane in zip(("up", "down"), self._lanes, strict=True)
        )
        return [_Pipe(near, far, up, self._model), _Pipe(far, near, down, self._model)]


_Address = tuple[socket.AddressFamily, tuple[str, int] | str]


def _address(endpoint: str) -> _Address:
    kind, _, rest = endpoint.partition("://")
    if kind == "ipc" and rest:
        return socket.AF_UNIX, f"\0{rest[1:]}" if rest.startswith("@") else rest
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or not host or not port.isdecimal():
        raise BadInput(
            "shard endpoint", expected="tcp://HOST:PORT or ipc://PATH", got=f"{endpoint!r}"
        )
    return socket.AF_INET, (host, int(port))


def _poll(events: dict[int, int], wake_at: float | None) -> dict[int, int]:
    """Poll until `wake_at`, more precisely than poll's own milliseconds."""
    poller = select.poll()
    for number, event in events.items():
        poller.register(number, event)
    if wake_at is None:
        return dict(poller.poll())
    left_s = max(0.0, wake_at - time.monotonic())
    ready = dict(poller.poll(int(left_s * 1000)))
    if not ready and (left_s := wake_at - time.monotonic()) > 0:
        time.sleep(min(left_s, 0.001))
        ready = dict(poller.poll(0))
    return ready


class _Pipe:
    """One direction of a connection: the bytes read, and when each chunk is due."""

    def __init__(
        self, source: socket.socket, target: socket.socket, stream: LinkStream, model: LinkModel
    ) -> None:
        self._source, self._target = source, target
        self._stream = stream
        self._chunk, self._window = model.chunk, model.window
        self._due: deque[tuple[float, memoryview]] = deque()
        self._waiting_bytes = 0
        self._ended = False
        self._more = False  # more bytes are known to wait in the source
        self._queued = False  # bytes have waited for the line since it last had no room

    @property
    def cut_off(self) -> bool:
        """True if this direction or the other has closed the connection."""
        return self._source.fileno() < 0

    def interests(self, now: float) -> Iterator[tuple[int, int]]:
        if self._wants_more and self._stream.may_enter(self._chunk, now):
            yield self._source.fileno(), _IN
        if self._due and self._due[0][0] <= now:
            yield self._target.fileno(), _OUT

    def times(self, now: float) -> Iterator[float]:
        """When to check again even if no socket is ready."""
        if self._wants_more and not self._stream.may_enter(self._chunk, now):
            yield self._stream.enter_at(self._chunk, now)
        if self._due and self._due[0][0] > now:
            yield self._due[0][0]

    @property
    def _wants_more(self) -> bool:
        # The peer may read more slowly than the link delivers.
        return not self._ended and self._waiting_bytes < self._window

    def take(self, ready: dict[int, int], now: float) -> bool:
        """Read one chunk, if one has arrived and may enter the line; returns whether it did."""
        if self._ended or not ready.get(self._source.fileno(), 0) & (_IN | _GONE):
            return False
        if not self._wants_more or not self._stream.may_enter(self._chunk, now):
            self._queued = self._more and self._stream.must_queue(self._chunk, now)
            return False
        try:
            read = self._source.recv(self._chunk)
        except BlockingIOError:
            self._more = self._queued = False
            return False
        except OSError:
            self.cut()
            return False
        if not read:
            self._ended = True
            return False
        due = self._stream.enter(len(read), now, waited=self._queued)
        self._due.append((due, memoryview(read)))
        self._waiting_bytes += len(read)
        self._more = len(read) == self._chunk
        self._queued = self._queued and self._more
        return True

    def deliver(self, now: float) -> None:
        """Forward the chunks that are due; the end of the stream is forwarded in its turn."""
        try:
            while self._due and self._due[0][0] <= now:
                if not self._write():
                    break
            if self._ended and not self._due:
                self.cut()
        except OSError:
            self.cut()

    def _write(self) -> bool:
        """Send the first chunk that is due, or as much of it as the socket takes; False if it is
        full.
        """
        due, chunk = self._due[0]
        try:
            sent = self._target.send(chunk)
        except BlockingIOError:
            return False
        self._waiting_bytes -= sent
        if sent < len(chunk):
            self._due[0] = due, chunk[sent:]
            return False
        self._due.popleft()
        return True

    def cut(self) -> None:
        """Close both ends: the opposite direction is of no use without this one."""
        self._source.close()
        self._target.close()
