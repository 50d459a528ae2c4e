"""The server loop: carries bytes between a ROUTER socket and a shard, and decides nothing.

It runs in a thread of its own (a Ray actor's, or any process's), so that whoever hosts it stays
responsive. Payloads are wrapped and sent without a copy; a peer that has gone or reads too slowly
loses answers, which it will ask for again.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import zmq

from ps.links import drop_with
from shards import codec
from shards.errors import BadInput, BadMessage, DownpourError
from shards.shard import Outgoing, Shard
from shards.spec import ShardSpec

_HANDSHAKE_MS = 2000
_HEARTBEAT_MS = 2000
_HEARTBEAT_TIMEOUT_MS = 10000
_QUEUE = 16


class Server:
    """One shard behind one bound socket.

    Use it as a context manager, or call `start` and `stop`. A failure inside the loop ends it and
    is raised again by `stop` and by `check`.
    """

    def __init__(self, spec: ShardSpec, boot: int, bind: str = "tcp://127.0.0.1:*") -> None:
        """Bind at once, so that `endpoint` is known; raises BadInput when the address is taken."""
        self.shard = Shard(spec, boot)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in _options(self.shard.size):
            self._socket.setsockopt(option, value)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            reason = f"cannot listen on {bind!r}: {zmq.strerror(error.errno or 0)}"
            raise BadInput(f"shard {spec.shard} {reason}") from None
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake_out = self._context.socket(zmq.PAIR)
        self._wake_in = self._context.socket(zmq.PAIR)
        self._wake_in.bind("inproc://wake")
        self._wake_out.connect("inproc://wake")
        drop_with(self, self._context, (self._socket, self._wake_out, self._wake_in))
        self._failure: BaseException | None = None
        # Compiling takes seconds, in which the first push would be taken for lost.
        spec.rule.prepare()
        self._thread = threading.Thread(target=self._run, name=f"shard-{spec.shard}", daemon=True)

    def start(self) -> "Server":
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the loop, give answers under way a moment to leave, and free the port."""
        if self._thread.is_alive():
            self._wake_out.send(b"")
            self._thread.join()
        self._context.destroy(linger=1000)
        self.check()

    def check(self) -> None:
        """Raise what ended the loop, if anything did."""
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # noqa: BLE001  # whatever it is, `check` raises it
            self._failure = error

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        period = self.shard.spec.lease_s / 4
        tick_at = time.monotonic() + period
        while True:
            timeout_ms = int(max(0.0, tick_at - time.monotonic()) * 1000) + 1
            ready = dict(poller.poll(timeout_ms))
            if self._wake_in in ready:
                return
            if self._socket in ready:
                for frames in self._arrived():
                    self._send(self._answer(frames))
            if time.monotonic() >= tick_at:
                self._send(self.shard.tick(time.monotonic()))
                tick_at = time.monotonic() + period

    def _arrived(self) -> Iterator[list[zmq.Frame]]:
        """What has come so far, but no more than a few, so that leases are looked at in time."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_QUEUE):
                yield self._socket.recv_multipart(zmq.NOBLOCK, copy=False)

    def _answer(self, frames: Sequence[zmq.Frame]) -> list[Outgoing]:
        sender = frames[0].bytes
        try:
            if len(frames) < 2:
                raise BadMessage("expected a header, got an empty message")
            message = codec.decode_request(frames[1].buffer)
        except DownpourError as error:
            return [self.shard.refuse(sender, 0, error)]
        payload = [frame.buffer for frame in frames[2:]]
        return self.shard.handle(sender, message, payload, time.monotonic())

    def _send(self, outgoing: Sequence[Outgoing]) -> None:
        for answer in outgoing:
            parts = [answer.to, codec.encode(answer.message), *codec.wrap(answer.frames)]
            # Gone (EHOSTUNREACH) or stuck (EAGAIN): a live peer asks again, a dead one need not.
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)


def _options(shard_floats: int) -> tuple[tuple[int, int], ...]:
    """Limits on what a peer can cost; and dead links are noticed."""
    largest_frame = 4 * shard_floats + codec.MAX_HEADER_BYTES
    return (
        (zmq.ROUTER_MANDATORY, 1),
        (zmq.MAXMSGSIZE, max(4 * largest_frame, codec.MAX_STATE_BYTES)),
        (zmq.SNDHWM, _QUEUE),
        (zmq.RCVHWM, _QUEUE),
        (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
        (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS),
        (zmq.LINGER, 1000),
    )
