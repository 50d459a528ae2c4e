"""Decides when to replace a connection: it distinguishes cut links from slow ones. Pure.

Theory. After a link was cut and restored, its old connections carry nothing for a while: TCP
doubles its wait after each failed retransmission, so a connection that was stuck for six seconds
may stay stuck for six more. A new connection works within a round trip or two. But a link may also
be slow, and replacing a connection that works loses everything in flight. So silence alone proves
nothing. The decision rests on what the operating system reports about the connection, and on trial
connections, called dials:

- *doubt* begins when the system has sent twice in a row without an acknowledgement: while a peer
  lives, however slow, stopped or full, its system acknowledges. It also begins when there is no
  connection.
- *dials* are then opened, one every quarter of a second (less often in a long outage, and at least
  two round trips apart). Each is a bare TCP connection that sends nothing. While the link is cut
  none gets through, and none does harm.
- once a dial is *through*, the link works. A connection with failing retransmissions is
  replaced. One that was acknowledged meanwhile is given a little time: the peer's own
  retransmissions may be backed off in the same way. If nothing arrives, and the peer acknowledges
  nothing new either, all connections are replaced, once.
- any arrival ends the doubt. An absence of the caller, for example to compute, ends it as well:
  observations from before the absence are out of date.

Messages in flight on a replaced connection are lost or arrive late, as any message may, and the
session repeats them (session.py). A new connection is not judged until it had time for its
handshakes; then it is treated like any other.
"""

import math
from enum import Enum, auto
from typing import NamedTuple

AWAY_S = 1.0  # a caller that has not looked for longer was away
_IN_VAIN = 2  # unacknowledged transmissions in a row that begin the doubt
_DIAL_S = 0.25  # between dials, at first
_RARER = 0.05  # this share of the outage so far is added between dials,
_RAREST_S = 1.0  # up to this interval
_GRACE_S = 0.25  # for a connection without failing transmissions, once a dial is through
_TRIPS = 2  # round trips, at least, between dials and of grace
# How long a new connection is not judged: this time and number of round trips, up to the maximum.
_SETTLE_S, _SETTLE_TRIPS, _SETTLE_MOST_S = 0.5, 8, 4.0


class TcpInfo(NamedTuple):
    """A connection as its system reports it.

    `in_vain` counts retransmissions, or probes, in a row that were not acknowledged; `heard` and
    `taken` are the bytes received and the bytes that the peer has acknowledged so far; `rtt_s` is
    the round trip in seconds.
    """

    in_vain: int
    heard: int
    taken: int
    rtt_s: float


class LinkAction(Enum):
    """What the caller has to do with a connection after a `look`."""

    NOTHING = auto()
    DIAL = auto()
    RENEW = auto()


class LinkFailureDetector:
    """Judges whether the connections to one shard still work; call `look` regularly."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._heard = self._taken = 0
        self._rtt_s = 0.0
        self._dial_at = self._still_since = 0.0
        self._through_s: float | None = None
        self._looked_at = self._settled_at = -math.inf

    @property
    def lasts(self) -> bool:
        """Whether there is doubt; without it no dial is needed."""
        return self._since is not None

    def look(self, line: TcpInfo | None, through_s: float | None, now: float) -> LinkAction:
        """What to do with the connection, which the system reports as `line`; None without one.

        `through_s` is the round trip in seconds of a dial that has got through since the last call.
        After RENEW, close the connection and open another.
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
