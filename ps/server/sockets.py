"""The sockets of a shard, and which connections they admit.

If other hosts can connect, TCP uses CURVE: the key registry decides which keys to admit and what
each may send (authorization.py). The Unix socket is accessible to its user only and stays plain, so
it has a ROUTER of its own. In this file, the first byte of a peer's address is the number of the
ROUTER that leads to it.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence

import zmq

from ps.security import enrolment
from ps.security.authorization import Admission, KeyRegistry
from ps.security.enrolment import EnrolmentStore
from ps.security.keys import KeyPair, pin_key, serve_with
from ps.security.zap import ZapAuthenticator
from ps.transport import multipart
from ps.transport.addresses import bind_socket, is_private
from ps.transport.transports import Transport, UnixSocketFolder
from ps.transport.unfinished_messages import Accepted
from shards.errors import BadInput
from shards.messages import Probe, Request
from shards.spec import ShardSpec
from shards.wire_format import Buffer

Options = Sequence[tuple[int, int]]
_TOGETHER = 8  # most arrays of a shard's size in one message: several pushes, or all slots


def max_arrays_bytes(shard_floats: int) -> int:
    """The most bytes that the arrays of one message to a shard may take.

    `shard_floats` are those of the largest frame.
    """
    return _TOGETHER * 4 * shard_floats


class CannotListen(BadInput):
    """An address at which a shard cannot listen, perhaps because it is taken for a moment."""

    retryable = True


class ShardSockets:
    """The sockets of one shard. Not for use by two threads."""

    def __init__(
        self,
        spec: ShardSpec,
        context: "zmq.Context[zmq.Socket[bytes]]",
        bind: str,
        transport: Transport,
        options: Options,
        admission: Admission | None,
        plaintext: bool,
        keys: KeyPair | None,
        store: EnrolmentStore | None,
    ) -> None:
        """Bind at once, so that `endpoint` is known; `options` apply to each socket.

        With `admission` TCP uses CURVE, and `endpoint` pins the key of `keys`, or of a pair that is
        made here. Workers that join are written into `store`, if there is one, from which a
        restarted shard admits them again. Without `admission`, an address that other hosts can
        reach needs `plaintext`. Raises BadInput, and closes the context, if it has neither, if the
        address is taken, or if `store` cannot be read.
        """
        self._context, self._options = context, options
        self._arrays_bytes = max_arrays_bytes(spec.frame_floats)
        self._workers = spec.workers
        self._accepted: list[Accepted] = []
        self._store = store
        self._registry = self._make_registry(admission) if admission else None
        self._authenticator = ZapAuthenticator(context, self._registry) if self._registry else None
        self._routers = [self._router()]
        keys = (keys or KeyPair.new()) if admission else None
        if keys is not None:
            serve_with(self._routers[0], keys)
        try:
            self.endpoint = self._bind(bind)
            if admission is None and not plaintext and not is_private(self.endpoint):
                raise BadInput(
                    f"shard {spec.shard} on {bind}: other hosts can reach it",
                    expected="keys to admit, or `plaintext`",
                    got="neither",
                )
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            reason = f"cannot listen on {bind!r}: {zmq.strerror(error.errno or 0)}"
            raise CannotListen(f"shard {spec.shard} {reason}") from None
        except BadInput:
            context.destroy(linger=0)
            raise
        self._unix_socket = self._open_unix_socket(spec, transport)
        if keys is not None:
            self.endpoint = pin_key(self.endpoint, keys.public)

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """The sockets to poll; when one can be read, call `take_messages`."""
        authenticators = (self._authenticator.socket,) if self._authenticator is not None else ()
        return (*self._routers, *authenticators)

    @property
    def all_sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """All sockets, including those that are not polled; `drop_with` needs them."""
        return (*self.sockets, *self.events)

    @property
    def events(self) -> tuple[zmq.Socket[bytes], ...]:
        """Further sockets to poll; when one can be read, call `look`."""
        return tuple(accepted.events for accepted in self._accepted)

    def take_messages(self, most: int) -> Iterator[tuple[bytes, str, list[Buffer]]]:
        """Up to `most` messages from each socket: address, key, frames.

        The key is empty for peers that need none. Requests to join are answered here.
        """
        if self._authenticator is not None:
            self._authenticator.answer()
        for number in range(len(self._routers)):
            guarded = self._registry is not None and number == 0
            accepted = self._accepted[number]
            for sender, *frames in accepted.take_messages(most):
                self._last = accepted, sender
                address = bytes([number]) + sender.bytes
                # libzmq attaches the key that the ZAP handler has admitted to every frame.
                key = str(frames[0].get("User-Id")) if guarded else ""
                parts = multipart.views(frames)
                if self._registry is None or not self._joins(address, key, parts):
                    yield address, key, parts

    def trust(self) -> None:
        """Note that the sender of the message yielded last knows the job."""
        accepted, sender = self._last
        accepted.trust(sender)

    def check_connections(self) -> float:
        """Reset connections with unfinished messages that cost too much.

        Call it when nothing has come for POLL_S, and when one of `events` can be read. Returns the
        seconds until the next call, if nothing comes meanwhile.
        """
        return min([accepted.check_connections() for accepted in self._accepted])

    def check(self, key: str, message: Request | Probe) -> None:
        """Raise the error to report to the holder of `key` if it may not send this message."""
        if self._registry is not None and key:
            self._registry.check(key, message, time.monotonic())

    def note_operator(self) -> None:
        """Note that the operator is alive, as another connection has shown."""
        if self._registry is not None:
            self._registry.note_operator(time.monotonic())

    def to(self, address: bytes) -> tuple[zmq.Socket[bytes], bytes]:
        """The socket that leads to an address, and the peer's identity on it."""
        return self._routers[address[0]], address[1:]

    def close(self) -> None:
        """Release what is not released with the sockets."""
        if self._unix_socket is not None:
            self._unix_socket.close()

    def _make_registry(self, admission: Admission) -> KeyRegistry:
        try:
            former = self._store.read(admission) if self._store is not None else None
        except BadInput:
            self._context.destroy(linger=0)
            raise
        return KeyRegistry(admission, time.monotonic(), former)

    def _router(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        for option, value in self._options:
            socket.setsockopt(option, value)
        self._accepted.append(Accepted(socket, self._arrays_bytes, peers=self._workers + 1))
        return socket

    def _bind(self, bind: str) -> str:
        return bind_socket(self._routers[0], bind)

    def _open_unix_socket(self, spec: ShardSpec, transport: Transport) -> UnixSocketFolder | None:
        """A Unix socket in addition to TCP; None if not wanted or not available."""
        if transport is Transport.TCP or not self.endpoint.startswith("tcp://"):
            return None
        try:
            folder = UnixSocketFolder(spec.job, spec.shard, self.endpoint)
        except OSError:
            return None
        if self._registry is not None:
            self._routers.append(self._router())
        self._routers[-1].bind(folder.address)
        return folder

    def _joins(self, address: bytes, key: str, parts: Sequence[Buffer]) -> bool:
        """Answer a request to join from the holder of the job's token; False if it is none."""
        if self._registry is None or not self._registry.is_invitation(key):
            return False
        reply, new = enrolment.answer(self._registry, parts, time.monotonic())
        if new and self._store is not None:
            self._store.write(self._registry.enrolments)  # before the worker relies on it
        socket, name = self.to(address)
        with contextlib.suppress(zmq.ZMQError):  # the peer is gone, or does not read
            socket.send_multipart([name, reply], zmq.NOBLOCK)
        return True
