"""The server loop: carries bytes between a ROUTER socket and a shard, and decides nothing.

It runs in a thread of its own (a Ray actor's, or any process's), so that whoever hosts it stays
responsive. Payloads are wrapped and sent without a copy; a peer that has gone or reads too slowly
loses answers, which it will ask for again.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from secrets import token_bytes

import zmq

from cupy_kernels.places import HOST, Place
from ps.leaving import Leaving
from ps.links import NOTICE_THE_DEAD, drop_with
from ps.memory import Surplus, keep_large_blocks
from ps.shard_side import ShardSide
from ps.stripes import TOKEN_BYTES, Cutter, Gatherer
from ps.transport import Door, Transport
from shards import codec
from shards.codec import Frames
from shards.errors import BadInput, BadMessage, DownpourError
from shards.messages import Message, Probe
from shards.shard import Arrival, Outgoing, Shard
from shards.spec import ShardSpec
from shards.versions import staging

_HANDSHAKE_MS = 2000
_QUEUE = 16  # messages that wait for one peer, or from it, at most
_LEAST_QUEUE = 4  # of any size
_QUEUE_BYTES = 128 << 20


class Server:
    """One shard behind one bound socket.

    Use it as a context manager, or call `start` and `stop`. A failure inside the loop ends it and
    is raised again by `stop` and by `check`.
    """

    def __init__(
        self,
        spec: ShardSpec,
        boot: int,
        bind: str = "tcp://127.0.0.1:*",
        transport: Transport = Transport.AUTO,
        place: Place = HOST,
    ) -> None:
        """Bind at once, so that `endpoint` is known; raises BadInput when the address is taken.

        `transport` is what workers on this host are offered beside TCP (transport.py); `place` is
        where weights and slots live.
        """
        keep_large_blocks()
        self._sharing = ShardSide(spec.job, wanted=transport.shares, otherwise=staging(place))
        self.shard = Shard(spec, boot, self._sharing.buffers, place)
        self._cutter = Cutter(token_bytes(TOKEN_BYTES))
        self._gatherer = Gatherer(max(_QUEUE_BYTES, 4 * _LEAST_QUEUE * self.shard.size))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in _options(self.shard.size):
            self._socket.setsockopt(option, value)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._sharing.close()
            reason = f"cannot listen on {bind!r}: {zmq.strerror(error.errno or 0)}"
            raise BadInput(f"shard {spec.shard} {reason}") from None
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._door = self._open_door(transport)
        self._wake_out = self._context.socket(zmq.PAIR)
        self._wake_in = self._context.socket(zmq.PAIR)
        self._wake_in.bind("inproc://wake")
        self._wake_out.connect("inproc://wake")
        drop_with(self, self._context, (self._socket, self._wake_out, self._wake_in))
        self._failure: BaseException | None = None
        self._surplus = Surplus()
        self._leaving = Leaving()
        # Compiling takes seconds, in which the first push would be taken for lost.
        spec.rule.prepare(place)
        self._thread = threading.Thread(target=self._run, name=f"shard-{spec.shard}", daemon=True)

    def start(self) -> "Server":
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the loop, give answers under way a moment to leave, and free the port."""
        if self._thread.is_alive():
            self.end()
            self.wait()
        self._context.destroy(linger=1000)
        self._let_go()
        self.check()

    def end(self) -> None:
        """Ask the loop to end, without waiting for it."""
        self._wake_out.send(b"")

    def wait(self) -> None:
        """Return when the loop has ended, because it was asked to or because it failed."""
        self._thread.join()

    def check(self) -> None:
        """Raise what ended the loop, if anything did."""
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _open_door(self, transport: Transport) -> Door | None:
        """A Unix socket beside the TCP port; None where it is not wanted or cannot be had."""
        if transport is Transport.TCP or not self.endpoint.startswith("tcp://"):
            return None
        try:
            door = Door(self.shard.spec.job, self.shard.spec.shard, self.endpoint)
        except OSError:
            return None
        self._socket.bind(door.address)
        return door

    def _let_go(self) -> None:
        self._sharing.close()
        if self._door is not None:
            self._door.close()

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
                self._take_turn()
            if time.monotonic() >= tick_at:
                self._send(self.shard.tick(time.monotonic()))
                self._sharing.tick()
                self._gatherer.tick()
                tick_at = time.monotonic() + period

    def _arrived(self) -> Iterator[list[zmq.Frame]]:
        """What has come so far, but no more than a few, so that leases are looked at in time."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_QUEUE):
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                self._surplus.received(sum(map(len, frames)))
                yield frames

    def _take_turn(self) -> None:
        """Hand the shard what has come, and send what it answers."""
        arrivals: list[Arrival] = []
        seen: set[tuple[bytes, int]] = set()
        for frames in self._arrived():
            sender = frames[0].bytes
            try:
                for one in self._read(sender, frames[1:]):
                    # Copies of a request that were held up together want one answer.
                    asked = sender, one.message.request
                    if one.message.request == 0 or asked not in seen:
                        seen.add(asked)
                        arrivals.append(one)
            except DownpourError as error:
                self._send([self.shard.refuse(sender, 0, error)])
        self._send(self.shard.handle_together(arrivals, time.monotonic()))

    def _read(self, sender: bytes, frames: Sequence[zmq.Frame]) -> Iterator[Arrival]:
        """The messages in what `sender` sent; raises BadMessage at one that is none."""
        whole = self._gatherer.take(sender, [frame.buffer for frame in frames])
        if whole is None:
            return
        sender, parts = whole[0], self._sharing.open(*whole)
        if parts is None:
            return
        if not parts:
            raise BadMessage("expected a header, got an empty message")
        for header, own in codec.disclose(parts[0], parts[1:]):
            message = codec.decode_asked(header)
            if isinstance(message, Probe):
                told = {"unix_s": time.time(), "cpu_s": time.process_time()}
                self._send([self.shard.probed(sender, message, own, **told)])
            elif not self._leaving.still(sender, message.request):
                # Else it is asked again while its answer is on the way.
                yield Arrival(sender, message, own)

    def _send(self, outgoing: Sequence[Outgoing]) -> None:
        to_each: dict[bytes, list[tuple[Message, Frames]]] = {}
        for answer in outgoing:
            to_each.setdefault(answer.to, []).append((answer.message, answer.frames))
        for to, messages in to_each.items():
            for start in range(0, len(messages), codec.MAX_TOGETHER):
                together = messages[start : start + codec.MAX_TOGETHER]
                parts, loan = self._sharing.seal(to, together)
                # Gone (EHOSTUNREACH) or stuck (EAGAIN): a live peer asks again, a dead one not.
                stripes = self._gatherer.addresses(to)
                cut = self._cutter.cut(parts, len(stripes))
                try:
                    requests = [message.request for message, _ in together]
                    each = [
                        (self._socket, [a, *part]) for a, part in zip(stripes, cut, strict=True)
                    ]
                    self._leaving.send(each, to, requests)
                except zmq.ZMQError:
                    self._sharing.withdraw(to, loan)


def _options(shard_floats: int) -> tuple[tuple[int, int], ...]:
    """Limits on what a peer can cost; and dead links are noticed."""
    largest_frame = 4 * shard_floats + codec.MAX_HEADER_BYTES
    queue = min(_QUEUE, max(_LEAST_QUEUE, _QUEUE_BYTES // largest_frame))
    return (
        (zmq.ROUTER_MANDATORY, 1),
        (zmq.MAXMSGSIZE, max(4 * largest_frame, codec.MAX_STATE_BYTES)),
        (zmq.SNDHWM, queue),
        (zmq.RCVHWM, queue),
        (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
        *NOTICE_THE_DEAD,
        (zmq.LINGER, 1000),
    )
