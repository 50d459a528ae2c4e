"""Decides which keys the coordinator of replicated shards admits, and what each may send. Pure.

Theory. Apart from the operator's key and the invitation, which shards know too (authorization.py),
there are the copies' keys. A copy makes its key pair when it starts, and reports an endpoint with
the public half to the process that started it. So no secret is sent to a copy or by it, however it
was started. The operator then registers that key under the copy's boot number.

- The operator's key may ask for the primaries, and register copies.
- The invitation's key may ask for the primaries: a worker shows the job's token.
- A copy's key may send beats as that copy, with addresses that pin the same key. So no copy can
  speak for another, or lead clients or its peer to another process.
"""

from collections.abc import Mapping

from ps.security.authorization import Admission
from ps.security.keys import address_of
from ps.transport.coordinator_messages import AdmitCopies, Asked, Heartbeat, LocatePrimaries
from shards.errors import BadMessage


class CopyRegistry:
    """The keys that one coordinator admits, and the check of what they send."""

    def __init__(self, admission: Admission) -> None:
        self._operator = admission.operator
        self._invitation = admission.invitation.key
        self._copies: dict[int, str] = {}

    def admits(self, key: str) -> bool:
        """Whether to admit a connection that has proved to hold `key`."""
        return key in (self._operator, self._invitation) or key in self._copies.values()

    def enter(self, copies: Mapping[int, str]) -> None:
        """Register the keys of copies, by boot number."""
        self._copies |= copies

    def check(self, key: str, message: Asked) -> None:
        """Raise BadMessage unless the holder of `key` may send this message."""
        match message:
            case LocatePrimaries():
                good = key in (self._operator, self._invitation)
            case AdmitCopies():
                good = key == self._operator
            case Heartbeat():
                pinned = {address_of(message.endpoint).key, address_of(message.peer).key}
                good = bool(key) and self._copies.get(message.beat.boot) == key and pinned == {key}
        if not good:
            raise BadMessage(f"coordinator: {type(message).__name__.lower()} by a wrong key")
