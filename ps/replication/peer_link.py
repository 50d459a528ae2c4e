"""How copies of a shard reach each other: entries and states there, reports back.

Each binds a ROUTER, at which it only hears, and connects a DEALER to its peer's, by which it only
speaks. Payloads leave from where they lie and are used where they arrive.

Where copies have keys, a copy's is pinned in its address, and it shows the same one where it
connects. So whoever is told the addresses of the copies knows whom to let in: those, and the
coordinator, which watches the connection. A copy may come a moment before its peer has been told of
it, and waits (zap.py). What it says counts as its own alone.
"""

import contextlib
import hmac
from collections.abc import Iterator, Mapping, Sequence

import zmq

from ps.security.keys import KeyPair, address_of, expect, pinned, serve_with
from ps.security.zap import ZapAuthenticator
from ps.server.endpoint import router_options
from ps.server.sockets import most_arrays_bytes
from ps.transport import coordinator_messages
from ps.transport.connection_limits import Accepted
from ps.transport.coordinator_messages import PeerMessage
from ps.transport.malloc_tuning import HeapTrimmer
from ps.transport.send_tracker import SendTracker
from ps.transport.socket_options import NOTICE_THE_DEAD, drop_with
from shards import wire_format
from shards.errors import BadInput, BadMessage
from shards.replica import Post
from shards.replication_messages import Replicate, Sync, ToPeer
from shards.wire_format import Buffer

_AT_ONCE = 16  # messages, before the clock is looked at
_OTHERS = 2  # copies that send at a time: one takes over from another
_MOST_FRAMES = 64 << 10  # of a state: what many workers wait for is in it


class PeerLink:
    """One copy's ends towards the others. Not for use by two threads."""

    def __init__(
        self,
        job: str,
        boot: int,
        floats: int,
        bind: str,
        own: KeyPair | None = None,
        coordinator: str = "",
        workers: int = 1,
    ) -> None:
        """Bind at once, so that `endpoint` is known; raises BadInput when the address is none.

        With keys of its `own` it lets in only copies that it knows and the holder of the
        `coordinator`'s key.
        """
        self._job, self._boot, self._own = job, boot, own
        self._coordinator = coordinator
        self._keys: dict[int, str] = {}
        # Of its own, for a context has one porter, and clients' is another.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._porter = (
            ZapAuthenticator(self._context, self, patient=True) if own is not None else None
        )
        self.socket = self._context.socket(zmq.ROUTER)
        if own is not None:
            serve_with(self.socket, own)
        for option, value in router_options(floats):
            self.socket.setsockopt(option, value)
        self._accepted = Accepted(
            self.socket,
            # A copy's state comes with what its workers wait for.
            most_arrays_bytes(floats) * (workers + 1),
            peers=_OTHERS,
            most_frames=_MOST_FRAMES,
        )
        try:
            self.socket.bind(bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            reason = f"cannot listen on {bind!r}: {zmq.strerror(error.errno or 0)}"
            raise BadInput(f"a copy of a shard {reason}") from None
        drop_with(self, self._context, (*self.sockets, self._accepted.events))
        bound = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.endpoint = bound if own is None else pinned(bound, own.public)
        self._links: dict[int, zmq.Socket[bytes]] = {}
        self._leaving = SendTracker()
        self._surplus = HeapTrimmer()

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """What to wait at; when one can be read, call `arrivals`."""
        return (self.socket,) if self._porter is None else (self.socket, self._porter.socket)

    def admits(self, key: str) -> bool:
        """Whether it is the coordinator's or a copy's that we were told of."""
        return key == self._coordinator or key in self._keys.values()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def know(self, members: set[int], peers: Mapping[int, str]) -> None:
        """These are the copies, and where some of them listen; links to others are dropped."""
        told = {boot: address_of(at).key for boot, at in peers.items()}
        self._keys = {boot: key for boot, key in (self._keys | told).items() if boot in members}
        if self._porter is not None:
            self._porter.look_again()
        for boot in self._links.keys() - members:
            self._links.pop(boot).close(linger=0)
            self._leaving.forget(boot)
        for boot in peers.keys() - self._links.keys() - {self._boot}:
            link = self._context.socket(zmq.DEALER)
            # What waits here is held by the replica anyway, until it is reported.
            for option, value in ((zmq.SNDHWM, 0), (zmq.LINGER, 0), *NOTICE_THE_DEAD):
                link.setsockopt(option, value)
            link.setsockopt(zmq.RECONNECT_IVL, 50)
            plain, key = address_of(peers[boot])
            if self._own is not None:
                expect(link, key, self._own)
            link.connect(plain)
            self._links[boot] = link

    def send(self, post: Post) -> None:
        """Send it, unless an earlier copy of it has not left yet; nothing to a copy unknown.

        Of an epoch's states one is as good as another, and each holds on to weights and slots.
        """
        link, number = self._links.get(post.to), _number(post.message)
        if link is None or self._leaving.in_progress(post.to, number):
            return
        carried = PeerMessage(self._job, self._boot, post.to, post.message)
        parts = [wire_format.encode_state(carried), *wire_format.wrap(post.frames)]
        with contextlib.suppress(zmq.Again):
            self._leaving.send([(link, parts)], post.to, [number])

    def arrivals(self) -> Iterator[tuple[int, ToPeer, Sequence[Buffer]]]:
        """What has come so far, but no more than a few: from whom, what, and its frames."""
        if self._porter is not None:
            self._porter.answer()
        for sender, *frames in self._accepted.arrived(_AT_ONCE):
            self._surplus.received(sum(map(len, frames)))
            with contextlib.suppress(BadMessage):  # a stranger's
                buffers = [frame.buffer for frame in frames]
                carried = coordinator_messages.decode_peer_message(buffers)
                ours = hmac.compare_digest(carried.job.encode(), self._job.encode())
                if ours and carried.to == self._boot and self._is(carried.origin, frames):
                    self._accepted.vouch(sender)
                    yield carried.origin, carried.message, buffers[1:]

    @property
    def events(self) -> zmq.Socket[bytes]:
        """What to wait at as well; when it can be read, call `look`."""
        return self._accepted.events

    def look(self) -> float:
        """Reset connections whose unfinished messages cost too much.

        Returns in how many seconds to call it next, if nothing comes meanwhile.
        """
        return self._accepted.look()

    def _is(self, origin: int, frames: Sequence[zmq.Frame]) -> bool:
        """Whether who sent `frames` is that copy, as far as that can be proved here."""
        if self._own is None:
            return True
        return self._keys.get(origin) == str(frames[0].get("User-Id"))


def _number(message: ToPeer) -> int:
    """Tells large messages to one peer apart."""
    match message:
        case Replicate():
            return message.position
        case Sync():
            return -1 - message.epoch
        case _:
            return 0  # never large
