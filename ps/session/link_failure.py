"""When a connection is given up for a new one: cut links, told from slow ones. Pure.

Theory. A link that was cut and is whole again carries nothing over the connections from before for
as long as TCP's patience has grown meanwhile: each time that it has sent in vain it waits twice as
long, so what stood still for six seconds may stand still for six more. A new connection is through
in a round trip or two. But a link may also be slow, and giving up a connection that moves costs all
that is on its way. So nothing is concluded from silence. What counts is what the system says of the
connection itself, and what a dial on the side finds out:

- *doubt* begins when the system has sent twice in a row and nobody acknowledged either: while a
  peer lives, however slow, stopped or full, its system acknowledges. Or when there is none.
- *dials* go out then, one every quarter of a second (ever less often in a long outage, and no
  sooner than two round trips), each a bare TCP connection that says nothing. While the link is cut
  none gets through, and none hurts.
- once one *is through*, the link is whole. A connection that still sends in vain is given up. One
  that was acknowledged meanwhile is given a little time: the other side may be waiting just as
  patiently with what it has to say. If nothing comes, and what we say does not move either, all
  are given up, once.
- whatever arrives ends the doubt. So does an absence of whoever looks, who may be computing: what
  was found out before it says nothing of now.

What a connection that is given up had on its way is lost, or arrives late: as any message may be,
and its session repeats it (session.py). A new one is left in peace until it had time for its
greetings; then it is a connection like any other.
"""

import math
from enum import Enum, auto
from typing import NamedTuple

AWAY_S = 1.0
_IN_VAIN = 2
_DIAL_S = 0.25
_RARER = 0.05  # of the outage so far is added between dials,
_RAREST_S = 1.0  # up to this
_GRACE_S = 0.25
_TRIPS = 2  # so many round trips at least, between dials and of grace
_SETTLE_S, _SETTLE_TRIPS, _SETTLE_MOST_S = 0.5, 8, 4.0


class TcpInfo(NamedTuple):
    """A connection as its system sees it.

    `in_vain` are retransmissions, or probes, in a row that were not acknowledged, `heard` and
    `taken` the bytes that came and that the peer has acknowledged so far.
    """

    in_vain: int
    heard: int
    taken: int
    rtt_s: float


class LinkAction(Enum):
    """What is to be done now."""

    NOTHING = auto()
    DIAL = auto()
    RENEW = auto()


class LinkFailureDetector:
    """Whether the connections to one shard are of any use still. Look at it every so often."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._heard = self._taken = 0
        self._rtt_s = 0.0
        self._dial_at = self._still_since = 0.0
        self._through_s: float | None = None
        self._looked_at = self._settled_at = -math.inf

    @property
    def lasts(self) -> bool:
        """Whether it is not settled yet: else no dial is wanted."""
        return self._since is not None

    def look(self, line: TcpInfo | None, through_s: float | None, now: float) -> LinkAction:
        """What to do; `line` is None where no connection is.

        `through_s` is the round trip of a dial that has got through since the last look. When told
        to renew, close the connection and begin another.
        """
        if now - self._looked_at > AWAY_S:
            self._since = None
        self._looked_at = now
        if self._since is None:
            if now < self._settled_at or not _doubtful(line):
                return LinkAction.NOTHING
            self._begin(line, now)
            return self._dial(now)
        if line is not None and not line.in_vain and line.heard > self._heard:
            self._since = None
            return LinkAction.NOTHING
        if through_s is not None and self._through_s is None:
            self._through_s, self._still_since = through_s, now
        if self._through_s is None:
            return self._dial(now)
        return (
            self._renew(now) if self._given_up(line, self._through_s, now) else LinkAction.NOTHING
        )

    def _begin(self, line: TcpInfo | None, now: float) -> None:
        self._since = self._dial_at = now
        self._through_s = None
        if line is not None:
            self._heard, self._taken, self._rtt_s = line.heard, line.taken, line.rtt_s
        else:
            self._heard = self._taken = 0

    def _dial(self, now: float) -> LinkAction:
        assert self._since is not None, "in doubt"
        if now < self._dial_at:
            return LinkAction.NOTHING
        rarer_s = min(_DIAL_S + _RARER * (now - self._since), _RAREST_S)
        self._dial_at = now + max(rarer_s, _TRIPS * self._rtt_s)
        return LinkAction.DIAL

    def _given_up(self, line: TcpInfo | None, through_s: float, now: float) -> bool:
        if line is None or line.in_vain:
            return True
        if line.taken > self._taken:
            self._taken, self._still_since = line.taken, now
        return now - self._still_since > max(_GRACE_S, _TRIPS * through_s, _TRIPS * self._rtt_s)

    def _renew(self, now: float) -> LinkAction:
        assert self._through_s is not None, "the link is whole"
        settle_s = min(_SETTLE_S + _SETTLE_TRIPS * self._through_s, _SETTLE_MOST_S)
        self._since, self._settled_at = None, now + settle_s
        return LinkAction.RENEW


def _doubtful(line: TcpInfo | None) -> bool:
    return line is None or line.in_vain >= _IN_VAIN
