"""How copies of a shard reach each other: entries and states there, reports back.

Each binds a ROUTER, at which it only hears, and connects a DEALER to its peer's, by which it only
speaks. Payloads leave from where they lie and are used where they arrive.
"""

import contextlib
import hmac
from collections.abc import Iterator, Mapping, Sequence

import zmq

from ps import group_wire
from ps.group_wire import Carried
from ps.leaving import Leaving
from ps.memory import Surplus
from ps.reception import router_options
from ps.sockets import NOTICE_THE_DEAD
from shards import codec
from shards.codec import Buffer
from shards.errors import BadInput, BadMessage
from shards.group import Replicate, Sync, ToPeer
from shards.replica import Post

_AT_ONCE = 16  # messages, before the clock is looked at


class Peers:
    """One copy's ends towards the others. Not for use by two threads."""

    def __init__(
        self,
        job: str,
        boot: int,
        floats: int,
        context: "zmq.Context[zmq.Socket[bytes]]",
        bind: str,
    ) -> None:
        """Bind at once, so that `endpoint` is known; raises BadInput when the address is none."""
        self._job, self._boot, self._context = job, boot, context
        self.socket = context.socket(zmq.ROUTER)
        for option, value in router_options(floats):
            self.socket.setsockopt(option, value)
        try:
            self.socket.bind(bind)
        except zmq.ZMQError as error:
            reason = f"cannot listen on {bind!r}: {zmq.strerror(error.errno or 0)}"
            raise BadInput(f"a copy of a shard {reason}") from None
        self.endpoint: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._links: dict[int, zmq.Socket[bytes]] = {}
        self._leaving = Leaving()
        self._surplus = Surplus()

    def know(self, members: set[int], peers: Mapping[int, str]) -> None:
        """These are the copies, and where some of them listen; links to others are dropped."""
        for boot in self._links.keys() - members:
            self._links.pop(boot).close(linger=0)
            self._leaving.forget(boot)
        for boot in peers.keys() - self._links.keys() - {self._boot}:
            link = self._context.socket(zmq.DEALER)
            # What waits here is held by the replica anyway, until it is reported.
            for option, value in ((zmq.SNDHWM, 0), (zmq.LINGER, 0), *NOTICE_THE_DEAD):
                link.setsockopt(option, value)
            link.connect(peers[boot])
            self._links[boot] = link

    def send(self, post: Post) -> None:
        """Send it, unless an earlier copy of it has not left yet; nothing to a copy unknown."""
        link, number = self._links.get(post.to), _number(post.message)
        if link is None or self._leaving.still(post.to, number):
            return
        carried = Carried(self._job, self._boot, post.to, post.message)
        parts = [codec.encode_state(carried), *codec.wrap(post.frames)]
        with contextlib.suppress(zmq.Again):
            self._leaving.send([(link, parts)], post.to, [number])

    def arrivals(self) -> Iterator[tuple[int, ToPeer, Sequence[Buffer]]]:
        """What has come so far, but no more than a few: from whom, what, and its frames."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_AT_ONCE):
                _, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                self._surplus.received(sum(map(len, frames)))
                with contextlib.suppress(BadMessage):  # a stranger's
                    buffers = [frame.buffer for frame in frames]
                    carried = group_wire.decode_carried(buffers)
                    ours = hmac.compare_digest(carried.job.encode(), self._job.encode())
                    if ours and carried.to == self._boot:
                        yield carried.origin, carried.message, buffers[1:]


def _number(message: ToPeer) -> int:
    """Tells large messages to one peer apart."""
    match message:
        case Replicate():
            return message.position
        case Sync():
            return -1 - message.position
        case _:
            return 0  # never large
