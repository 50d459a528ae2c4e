"""Who may speak to the coordinator of replicated shards, and what they may say. Pure.

Theory. Besides the operator's key and the invitation that a shard's register knows
(authorization.py), there are the copies' keys. A copy makes its pair when it starts, and its public
half is in the endpoint that it tells whoever started it: nothing secret is told to a copy or by it,
however it was started. The operator, who started it, enters that key into the roll under the copy's
boot number.

- The operator's key may ask where the primaries are, and enter copies.
- The invitation's may ask where the primaries are: a worker shows the job's token.
- A copy's may report, as that copy, and only addresses that pin its very key; so none can speak for
  another, nor lead its clients or its peer to anyone else.
"""

from collections.abc import Mapping

from ps.security.authorization import Admission
from ps.security.keys import address_of
from ps.transport.coordinator_messages import AdmitCopies, Asked, Heartbeat, LocatePrimaries
from shards.errors import BadMessage


class CopyRegistry:
    """The keys that one coordinator lets in, and its judgement of what they say."""

    def __init__(self, admission: Admission) -> None:
        self._operator = admission.operator
        self._invitation = admission.invitation.key
        self._copies: dict[int, str] = {}

    def admits(self, key: str) -> bool:
        """Whether a connection that proved to hold `key` may stay."""
        return key in (self._operator, self._invitation) or key in self._copies.values()

    def enter(self, copies: Mapping[int, str]) -> None:
        """From now on these are copies, by boot number, with these keys."""
        self._copies |= copies

    def check(self, key: str, message: Asked) -> None:
        """Raise BadMessage unless the holder of `key` may say this."""
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
