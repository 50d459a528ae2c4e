"""Connects the copies of a shard: carries entries and states to the backup, and reports back.

Each copy binds a ROUTER, on which it only receives, and connects a DEALER to its peer's ROUTER, on
which it only sends. Payloads are not copied at either end.

With keys, a copy's address pins its key, and the copy connects to its peers with the same key. So a
copy that knows its peers' addresses knows which keys to admit: theirs, and that of the coordinator,
which watches the connection. A copy may connect a moment before its peer has received its address;
the handshake then waits (zap.py). A copy can only send messages in its own name.
"""

import contextlib
import hmac
from collections.abc import Iterator, Mapping, Sequence

import zmq

from ps.security.keys import KeyPair, address_of, expect, pin_key, serve_with
from ps.security.zap import ZapAuthenticator
from ps.server.frontend import router_options
from ps.server.sockets import max_arrays_bytes
from ps.socket_context import SocketContext
from ps.transport import coordinator_messages
from ps.transport.addresses import bind_socket
from ps.transport.coordinator_messages import PeerMessage
from ps.transport.malloc_tuning import HeapTrimmer
from ps.transport.send_tracker import SendTracker
from ps.transport.socket_options import NOTICE_THE_DEAD, drop_with
from ps.transport.unfinished_messages import Accepted
from shards import wire_format
from shards.errors import BadInput, BadMessage
from shards.replica import Post
from shards.replication_messages import Replicate, Sync, ToPeer
from shards.wire_format import Buffer

_AT_ONCE = 16  # messages handled before the loop checks the clock
_OTHERS = 2  # copies that may send at a time, while one replaces another
_MAX_FRAMES = 64 << 10  # in a state: it includes the answers that many workers wait for


class PeerLink:
    """One copy's sockets to the other copies. Not for use by two threads."""

    def __init__(
        self,
        job: str,
        boot: int,
        floats: int,
        bind: str,
        keys: KeyPair | None = None,
        coordinator: str = "",
        workers: int = 1,
    ) -> None:
        """Bind at once, so that `endpoint` is known; raises BadInput for an invalid address.

        With `keys` of its own it admits only known copies and the holder of the
        `coordinator`'s key.
        """
        self._job, self._boot, self._key_pair = job, boot, keys
        self._coordinator = coordinator
        self._keys: dict[int, str] = {}
        # A context of its own: a context has one ZAP handler, and clients need a different one.
        self._context: zmq.Context[zmq.Socket[bytes]] = SocketContext()
        self._authenticator = (
            ZapAuthenticator(self._context, self, patient=True) if keys is not None else None
        )
        self.socket = self._context.socket(zmq.ROUTER)
        if keys is not None:
            serve_with(self.socket, keys)
        for option, value in router_options(floats):
            self.socket.setsockopt(option, value)
        self._accepted = Accepted(
            self.socket,
            # A copy's state includes the answers that its workers wait for.
            max_arrays_bytes(floats) * (workers + 1),
            peers=_OTHERS,
            max_frames=_MAX_FRAMES,
        )
        try:
            bound = bind_socket(self.socket, bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            reason = f"cannot listen on {bind!r}: {zmq.strerror(error.errno or 0)}"
            raise BadInput(f"a copy of a shard {reason}") from None
        drop_with(self, self._context, (*self.sockets, self._accepted.events))
        self.endpoint = bound if keys is None else pin_key(bound, keys.public)
        self._links: dict[int, zmq.Socket[bytes]] = {}
        self._leaving = SendTracker()
        self._surplus = HeapTrimmer()

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """The sockets to poll; when one can be read, call `arrivals`."""
        return (
            (self.socket,)
            if self._authenticator is None
            else (self.socket, self._authenticator.socket)
        )

    def admits(self, key: str) -> bool:
        """Return whether `key` is that of the coordinator or of a known copy."""
        return key == self._coordinator or key in self._keys.values()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def set_members(self, members: set[int], peers: Mapping[int, str]) -> None:
        """Set the copies, and the addresses of some of them; drop the links to all others."""
        keys = self._keys | {boot: address_of(at).key for boot, at in peers.items()}
        self._keys = {boot: key for boot, key in keys.items() if boot in members}
        if self._authenticator is not None:
            self._authenticator.look_again()
        for boot in self._links.keys() - members:
            self._links.pop(boot).close(linger=0)
            self._leaving.forget(boot)
        for boot in peers.keys() - self._links.keys() - {self._boot}:
            link = self._context.socket(zmq.DEALER)
            # No limit: the replica holds what waits here anyway, until it is acknowledged.
            for option, value in ((zmq.SNDHWM, 0), (zmq.LINGER, 0), *NOTICE_THE_DEAD):
                link.setsockopt(option, value)
            link.setsockopt(zmq.RECONNECT_IVL, 50)
            plain, key = address_of(peers[boot])
            if self._key_pair is not None:
                expect(link, key, self._key_pair)
            link.connect(plain)
            self._links[boot] = link

    def send(self, post: Post) -> None:
        """Send `post`, unless its receiver is unknown or the same message is still being sent."""
        link, number = self._links.get(post.to), _number(post.message)
        if link is None or self._leaving.in_progress(post.to, number):
            return
        carried = PeerMessage(self._job, self._boot, post.to, post.message)
        parts = [wire_format.encode_state(carried), *wire_format.wrap(post.frames)]
        with contextlib.suppress(zmq.Again):
            self._leaving.send([(link, parts)], post.to, [number])

    def arrivals(self) -> Iterator[tuple[int, ToPeer, Sequence[Buffer]]]:
        """Up to `_AT_ONCE` messages that have come: sender's boot number, message, its frames."""
        if self._authenticator is not None:
            self._authenticator.answer()
        for sender, *frames in self._accepted.take_messages(_AT_ONCE):
            self._surplus.count_message(sum(map(len, frames)))
            with contextlib.suppress(BadMessage):  # not from a copy of this shard
                buffers = [frame.buffer for frame in frames]
                carried = coordinator_messages.decode_peer_message(buffers)
                is_of_job = hmac.compare_digest(carried.job.encode(), self._job.encode())
                if is_of_job and carried.to == self._boot and self._is(carried.origin, frames):
                    self._accepted.trust(sender)
                    yield carried.origin, carried.message, buffers[1:]

    @property
    def events(self) -> zmq.Socket[bytes]:
        """A further socket to poll; when it can be read, call `look`."""
        return self._accepted.events

    def check_connections(self) -> float:
        """Reset connections with unfinished messages that cost too much.

        Returns in how many seconds to call it next, if nothing comes meanwhile.
        """
        return self._accepted.check_connections()

    def _is(self, origin: int, frames: Sequence[zmq.Frame]) -> bool:
        """Return whether `frames` come from the copy `origin`; always true without keys."""
        if self._key_pair is None:
            return True
        return self._keys.get(origin) == str(frames[0].get("User-Id"))


def _number(message: ToPeer) -> int:
    """A number that distinguishes the large messages to one peer."""
    match message:
        case Replicate():
            return message.position
        case Sync():
            return -1 - (message.epoch << 32 | message.piece.number)
        case _:
            return 0  # never large
