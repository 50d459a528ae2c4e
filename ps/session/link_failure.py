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
_RETRANSMITS = 2  # unacknowledged transmissions in a row that begin the doubt
_DIAL_S = 0.25  # between dials, at first
_RARER = 0.05  # this share of the outage so far is added between dials,
_RAREST_S = 1.0  # up to this interval
_GRACE_S = 0.25  # for a connection without failing transmissions, once a dial is through
_TRIPS = 2  # round trips, at least, between dials and of grace
# How long a new connection is not judged: this time and number of round trips, up to the maximum.
_SETTLE_S, _SETTLE_TRIPS, _SETTLE_MAX_S = 0.5, 8, 4.0


class TcpInfo(NamedTuple):
    """A connection as its system reports it.

    `retransmits` counts retransmissions, or probes, in a row that were not acknowledged;
    `bytes_acked` are those that the peer has acknowledged; `rtt_s` is the round trip in seconds.
    """

    retransmits: int
    bytes_received: int
    bytes_acked: int
    rtt_s: float


class LinkAction(Enum):
    """The caller's next action on a connection, as `decide` says."""

    NOTHING = auto()
    DIAL = auto()
    RENEW = auto()


class LinkFailureDetector:
    """Judges whether the connections to one shard still work; call `decide` regularly."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._received = self._acked = 0
        self._rtt_s = 0.0
        self._dial_at = self._still_since = 0.0
        self._through_s: float | None = None
        self._looked_at = self._settled_at = -math.inf

    @property
    def in_doubt(self) -> bool:
        """True if there is doubt; without it no dial is needed."""
        return self._since is not None

    def decide(self, info: TcpInfo | None, through_s: float | None, now: float) -> LinkAction:
        """Decide about the connection, which the system reports as `info`; None without one.

        `through_s` is the round trip in seconds of a dial that has got through since the last call.
        After RENEW, close the connection and open another.
        """
        # What was seen before an absence is out of date: a doubt would begin again.
        if now - self._looked_at > AWAY_S:
            self._since = None
        self._looked_at = now
        if self._since is None:
            if now < self._settled_at or not _doubtful(info):
                return LinkAction.NOTHING
            self._begin(info, now)
            return self._dial(now)
        # Bytes that arrive prove that the link works, however long it was silent.
        if info is not None and not info.retransmits and info.bytes_received > self._received:
            self._since = None
            return LinkAction.NOTHING
        if through_s is not None and self._through_s is None:
            self._through_s, self._still_since = through_s, now
        if self._through_s is None:
            return self._dial(now)
        return (
            self._renew(now)
            if self._is_hopeless(info, self._through_s, now)
            else LinkAction.NOTHING
        )

    def _begin(self, info: TcpInfo | None, now: float) -> None:
        self._since = self._dial_at = now
        self._through_s = None
        if info is not None:
            self._received, self._acked, self._rtt_s = (
                info.bytes_received,
                info.bytes_acked,
                info.rtt_s,
            )
        else:
            self._received = self._acked = 0

    def _dial(self, now: float) -> LinkAction:
        assert self._since is not None, "in doubt"
        if now < self._dial_at:
            return LinkAction.NOTHING
        rarer_s = min(_DIAL_S + _RARER * (now - self._since), _RAREST_S)
        self._dial_at = now + max(rarer_s, _TRIPS * self._rtt_s)
        return LinkAction.DIAL

    def _is_hopeless(self, info: TcpInfo | None, through_s: float, now: float) -> bool:
        if info is None or info.retransmits:
            return True
        if info.bytes_acked > self._acked:
            self._acked, self._still_since = info.bytes_acked, now
        return now - self._still_since > max(_GRACE_S, _TRIPS * through_s, _TRIPS * self._rtt_s)

    def _renew(self, now: float) -> LinkAction:
        assert self._through_s is not None, "the link is whole"
        settle_s = min(_SETTLE_S + _SETTLE_TRIPS * self._through_s, _SETTLE_MAX_S)
        self._since, self._settled_at = None, now + settle_s
        return LinkAction.RENEW


def _doubtful(info: TcpInfo | None) -> bool:
    return info is None or info.retransmits >= _RETRANSMITS
