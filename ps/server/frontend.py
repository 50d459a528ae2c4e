"""A shard's endpoint for clients: everything between the sockets and the shard.

It decodes bytes into messages and encodes answers as bytes; the shard decides what to answer, and
the caller owns the shard. Payloads are wrapped and sent without a copy. A peer that has gone or
reads too slowly loses answers, and will ask for them again.
"""

import time
from collections.abc import Iterable, Sequence
from secrets import token_bytes

import zmq

from ps.security.authorization import Admission
from ps.security.enrolment import EnrolmentStore
from ps.security.keys import KeyPair
from ps.server.sockets import ShardSockets
from ps.shared_memory.shard_side import ShardSide
from ps.transport.malloc_tuning import HeapTrimmer, tune_malloc
from ps.transport.send_tracker import SendTracker, request_of
from ps.transport.socket_options import NOTICE_THE_DEAD
from ps.transport.striping import MARK, TOKEN_BYTES, Cutter, Gatherer
from ps.transport.transports import Transport
from shards import wire_format
from shards.buffer_pool import Allocator
from shards.errors import BadMessage, DownpourError
from shards.messages import Message, Probe
from shards.shard import Shard
from shards.spec import ShardSpec
from shards.transition_io import Arrival, Outgoing
from shards.wire_format import Buffer, Frames

HANDSHAKE_MS = 2000  # after which a peer that has not completed its handshake is disconnected
_QUEUE = 16  # most messages queued to one peer, or from it
_MIN_QUEUE = 4  # messages, however large
_QUEUE_BYTES = 128 << 20
_WEIGHTS = 8  # times the size of the shard's weights: the parts that are held for one sender
_SPARE_BYTES = 16 << 20  # besides


class ShardFrontend:
    """The clients' side of one shard. Not for use by two threads."""

    def __init__(
        self,
        spec: ShardSpec,
        context: "zmq.Context[zmq.Socket[bytes]]",
        bind: str,
        transport: Transport,
        otherwise: Allocator,
        admission: Admission | None = None,
        *,
        plaintext: bool = False,
        keys: KeyPair | None = None,
        store: EnrolmentStore | None = None,
    ) -> None:
        """Bind at once, so that `endpoint` is known; raises BadInput as `ShardSockets` does, which
        takes `admission`, `plaintext`, `keys` and `store`.

        Workers on this host are offered `transport` as well as TCP (transports.py). Weights to
        be sent must be allocated from `sharing.buffers`, which falls back to `otherwise` if no
        memory is shared.
        """
        tune_malloc()
        floats = spec.frame_floats
        self.sharing = ShardSide(
            spec.job,
            enabled=transport.shares,
            rows=bool(spec.layout.sparse),
            otherwise=otherwise,
        )
        self._cutter = Cutter(token_bytes(TOKEN_BYTES))
        self._gatherer = Gatherer(_SPARE_BYTES + _WEIGHTS * 4 * floats, guarded=True)
        try:
            self._sockets = ShardSockets(
                spec,
                context,
                bind,
                transport,
                router_options(floats),
                admission,
                plaintext,
                keys,
                store,
            )
        except BaseException:
            self.sharing.close()
            raise
        self.endpoint = self._sockets.endpoint
        self._surplus = HeapTrimmer()
        self._leaving = SendTracker()

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """The sockets to poll; when one can be read, call `arrivals`."""
        return self._sockets.sockets

    @property
    def all_sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """All sockets, including those that are not polled; `drop_with` needs them."""
        return self._sockets.all_sockets

    def arrivals(self, shard: Shard) -> list[Arrival]:
        """The messages that have come so far, but only a few, so that the loop can tick in time.

        Malformed messages are refused in the name of `shard`; probes of the link are answered here.
        """
        arrivals: list[Arrival] = []
        seen: set[tuple[bytes, int]] = set()
        for sender, key, came in self._sockets.take_messages(_QUEUE):
            self._surplus.count_message(sum(map(len, came)))
            try:
                self._read(shard, sender, key, came, arrivals, seen)
            except DownpourError as error:
                self.send([shard.refuse(sender, 0, error)])
        return arrivals

    def send(self, outgoing: Sequence[Outgoing]) -> None:
        """Send answers, those for one client together."""
        sharing = self.sharing
        to_each: dict[bytes, list[tuple[Message, Frames]]] = {}
        for answer in outgoing:
            to_each.setdefault(answer.to, []).append((answer.message, answer.frames))
        for to, messages in to_each.items():
            stripes = self._gatherer.addresses(to) if to.startswith(MARK) else [to]
            if not stripes:
                continue
            for start in range(0, len(messages), wire_format.MAX_TOGETHER):
                together = messages[start : start + wire_format.MAX_TOGETHER]
                if to in sharing.offers or to in sharing.addresses:
                    parts, loan = sharing.seal(to, together)
                else:
                    parts, loan = wire_format.enclose(together), None
                # Gone (EHOSTUNREACH) or stuck (EAGAIN): a live peer will ask again.
                cut = [parts] if len(stripes) == 1 else self._cutter.cut(parts, len(stripes))
                stripe_parts = []
                for address, part in zip(stripes, cut, strict=True):
                    socket, name = self._sockets.to(address)
                    stripe_parts.append((socket, [name, *part]))
                try:
                    self._hand_over(stripe_parts, to, map(request_of, together))
                except zmq.ZMQError:
                    sharing.withdraw(to, loan)

    def note_operator(self) -> None:
        """Note that the operator is alive, so that workers may still join."""
        self._sockets.note_operator()

    @property
    def events(self) -> tuple[zmq.Socket[bytes], ...]:
        """Further sockets to poll; when one can be read, call `look`."""
        return self._sockets.events

    def check_connections(self) -> float:
        """Reset connections with unfinished messages that cost too much.

        Returns the longest time, in seconds, until the next call.
        """
        return self._sockets.check_connections()

    def tick(self) -> None:
        """Release what dead peers have left; call it periodically."""
        self.sharing.tick()
        self._gatherer.tick()

    def close(self) -> None:
        """Release what is not released with the sockets."""
        self.sharing.close()
        self._sockets.close()

    def _hand_over(
        self,
        outgoing: Sequence[tuple[zmq.Socket[bytes], Sequence[Buffer]]],
        to: bytes,
        requests: Iterable[int],
    ) -> None:
        """Send the parts of an envelope; raises what the socket raises."""
        try:
            self._leaving.send(outgoing, to, requests)
        except zmq.Again:
            # ZeroMQ checks only now and then whether its own thread has made room; reading the
            # events of a socket makes it check at once.
            for socket, _ in outgoing:
                socket.getsockopt(zmq.EVENTS)
            self._leaving.send(outgoing, to, requests)

    def _read(
        self,
        shard: Shard,
        address: bytes,
        key: str,
        came: list[Buffer],
        arrivals: list[Arrival],
        seen: set[tuple[bytes, int]],
    ) -> None:
        """Append to `arrivals` the messages from `address`, except those already in `seen`.

        Raises BadMessage at a malformed one. A message that the holder of `key` may not send is
        refused.
        """
        sender, parts = address, came
        plain = len(came) > 0 and len(came[0]) > 1 and came[0][1] <= wire_format.MARKED
        if not plain or self.sharing.offers:
            whole = self._gatherer.take(address, came)
            opened = whole and self.sharing.open(*whole)
            if whole is None or opened is None:
                return
            sender, parts = whole[0], list(opened)
        if not parts:
            raise BadMessage("expected a header, got an empty message")
        leaving, vouched = self._leaving.sent, False
        for header, payload in wire_format.disclose(parts[0], parts[1:]):
            message = wire_format.decode_client_message(header)
            if not vouched and message.job == shard.spec.job:
                vouched = True
                self._sockets.trust()
                if sender != address:
                    self._gatherer.trust(sender)
            if key:
                try:
                    self._sockets.check(key, message)
                except DownpourError as error:
                    self.send([shard.refuse(sender, message.request, error)])
                    continue
            if isinstance(message, Probe):
                clocks = {"unix_s": time.time(), "cpu_s": time.process_time()}
                self.send([shard.answer_probe(sender, message, payload, **clocks)])
            elif (sender, message.request) not in leaving or not self._leaving.in_progress(
                sender, message.request
            ):
                # If the answer is still being sent, the request is a repetition and is ignored.
                # Several copies of one request may arrive together: one answer is enough.
                asked = address, message.request
                if message.request == 0 or asked not in seen:
                    seen.add(asked)
                    arrivals.append(Arrival(sender, message, payload))


def router_options(shard_floats: int) -> tuple[tuple[int, int], ...]:
    """Socket options that limit what a peer can cost, and detect dead links."""
    largest_frame = 4 * shard_floats + wire_format.MAX_HEADER_BYTES
    queue = min(_QUEUE, max(_MIN_QUEUE, _QUEUE_BYTES // largest_frame))
    return (
        (zmq.ROUTER_MANDATORY, 1),  # raise for a peer that is gone, instead of dropping silently
        (zmq.MAXMSGSIZE, max(4 * largest_frame, wire_format.MAX_STATE_BYTES)),
        (zmq.SNDHWM, queue),
        (zmq.RCVHWM, queue),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
        *NOTICE_THE_DEAD,
        (zmq.LINGER, 1000),
    )
