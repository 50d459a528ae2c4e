"""The sockets by which a shard is reached, and whom they let in.

Where others than this host can connect, TCP speaks CURVE, and whoever comes that way is let in and
heard as the register of keys says (authorization.py). The Unix socket beside it is its user's alone
and stays plain, so it has a ROUTER of its own. An address in here begins with which socket it is
of.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence

import zmq

from ps.security import enrolment
from ps.security.authorization import Admission, KeyRegistry
from ps.security.enrolment_store import EnrolmentStore
from ps.security.keys import KeyPair, pinned, serve_with
from ps.security.zap import ZapAuthenticator
from ps.transport import multipart
from ps.transport.addresses import is_private
from ps.transport.connection_limits import Accepted
from ps.transport.local_sockets import Transport, UnixSocketFolder
from shards.errors import BadInput
from shards.messages import Probe, Request
from shards.spec import ShardSpec
from shards.wire_format import Buffer

Options = Sequence[tuple[int, int]]
_TOGETHER = 8  # times a shard's weights, in one message: as many pushes, or all its slots


def most_arrays_bytes(shard_floats: int) -> int:
    """What the arrays of one message to a shard may take."""
    return _TOGETHER * 4 * shard_floats


class ShardSockets:
    """One shard's. Not for use by two threads."""

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
        book: EnrolmentStore | None,
    ) -> None:
        """Bind at once, so that `endpoint` is known; `options` are of each socket.

        With `admission` TCP speaks CURVE, and `endpoint` pins the key of `keys`, or of a pair that
        is made here; whoever joins is written into `book`, if there is one, and let in again where
        another entrance goes on from that. Without it, an address that others can reach is refused
        unless `plaintext` says that they may. Raises BadInput for that, when the address is taken,
        and when the book cannot be read; the context is closed then.
        """
        self._context, self._options = context, options
        self._arrays_bytes = most_arrays_bytes(sum(map(len, spec.map.ranges[spec.shard])))
        self._workers = spec.workers
        self._accepted: list[Accepted] = []
        self._book = book
        self._register = self._registered(admission) if admission else None
        self._porter = ZapAuthenticator(context, self._register) if self._register else None
        self._routers = [self._router()]
        keys = (keys or KeyPair.new()) if admission else None
        if keys is not None:
            serve_with(self._routers[0], keys)
        try:
            self.endpoint = self._bound(bind)
            if admission is None and not plaintext and not is_private(self.endpoint):
                raise BadInput(
                    f"shard {spec.shard} on {bind}: expected keys to admit there, or plaintext"
                    " asked for; got neither"
                )
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            reason = f"cannot listen on {bind!r}: {zmq.strerror(error.errno or 0)}"
            raise BadInput(f"shard {spec.shard} {reason}") from None
        except BadInput:
            context.destroy(linger=0)
            raise
        self._door = self._open_door(spec, transport)
        if keys is not None:
            self.endpoint = pinned(self.endpoint, keys.public)

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """What to wait at; when one can be read, call `received`."""
        porters = (self._porter.socket,) if self._porter is not None else ()
        return (*self._routers, *porters)

    @property
    def owned(self) -> tuple[zmq.Socket[bytes], ...]:
        """Every socket, those that are not waited at included: what `drop_with` must hold."""
        return (*self.sockets, *self.events)

    @property
    def events(self) -> tuple[zmq.Socket[bytes], ...]:
        """What to wait at as well; when one can be read, call `look`."""
        return tuple(accepted.events for accepted in self._accepted)

    def received(self, most: int) -> Iterator[tuple[bytes, str, list[Buffer]]]:
        """What has come so far, up to `most` a socket: address, key, frames.

        The key is empty for who needs none. Who is at the door only to join is answered here.
        """
        if self._porter is not None:
            self._porter.answer()
        for number in range(len(self._routers)):
            guarded = self._register is not None and number == 0
            accepted = self._accepted[number]
            for sender, *came in accepted.arrived(most):
                self._last = accepted, sender
                address = bytes([number]) + sender.bytes
                # libzmq writes it beside every frame, once it has asked the porter.
                key = str(came[0].get("User-Id")) if guarded else ""
                parts = multipart.views(came)
                if self._register is None or not self._joins(address, key, parts):
                    yield address, key, parts

    def vouch(self) -> None:
        """The sender of what was yielded last knows the job."""
        accepted, sender = self._last
        accepted.vouch(sender)

    def look(self) -> float:
        """Reset connections whose unfinished messages cost too much.

        Call it when nothing has come for LOOK_S, and when one of `events` can be read. Returns in
        how many seconds to call it next, if nothing comes meanwhile.
        """
        return min([accepted.look() for accepted in self._accepted])

    def check(self, key: str, message: Request | Probe) -> None:
        """Raise the error that whoever came with `key` is to be told for saying this, if any."""
        if self._register is not None and key:
            self._register.check(key, message, time.monotonic())

    def hear_operator(self) -> None:
        """Whoever speaks for the operator was heard, elsewhere."""
        if self._register is not None:
            self._register.hear_operator(time.monotonic())

    def to(self, address: bytes) -> tuple[zmq.Socket[bytes], bytes]:
        """The socket that leads to an address, and what to call it there."""
        return self._routers[address[0]], address[1:]

    def close(self) -> None:
        """Give back what the sockets do not hold."""
        if self._door is not None:
            self._door.close()

    def _registered(self, admission: Admission) -> KeyRegistry:
        try:
            former = self._book.read(admission) if self._book is not None else None
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

    def _bound(self, bind: str) -> str:
        self._routers[0].bind(bind)
        return str(self._routers[0].getsockopt_string(zmq.LAST_ENDPOINT))

    def _open_door(self, spec: ShardSpec, transport: Transport) -> UnixSocketFolder | None:
        """A Unix socket beside the TCP port; None where it is not wanted or cannot be had."""
        if transport is Transport.TCP or not self.endpoint.startswith("tcp://"):
            return None
        try:
            door = UnixSocketFolder(spec.job, spec.shard, self.endpoint)
        except OSError:
            return None
        if self._register is not None:
            self._routers.append(self._router())
        self._routers[-1].bind(door.address)
        return door

    def _joins(self, address: bytes, key: str, parts: Sequence[Buffer]) -> bool:
        """Whether this comes from the holder of the job's token, who is then answered."""
        if self._register is None or not self._register.invited(key):
            return False
        said, new = enrolment.answer(self._register, parts, time.monotonic())
        if new and self._book is not None:
            self._book.write(self._register.enrolments)  # before anybody counts on it
        socket, name = self.to(address)
        with contextlib.suppress(zmq.ZMQError):  # gone, or it does not read
            socket.send_multipart([name, said], zmq.NOBLOCK)
        return True
