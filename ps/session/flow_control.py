"""How many requests a client keeps in flight: a pace for pulls and one for pushes
(window_estimator.py).

A pace is to know how long the caller is busy between two requests of its kind, and whether anybody
listened when an answer came. Both follow from when the caller comes and goes, which is noted here.
Where the caller has said how many pushes may be in flight, there are as many.
"""

import msgspec

from ps.session.window_estimator import WindowEstimator
from shards.errors import BadInput
from shards.messages import Pull, Push

LEAST = 2  # requests of a kind in flight, where nobody says how many
_MOST = 64
_MEMORY_BYTES = 1 << 30

Kind = type[Pull | Push]


class Times(msgspec.Struct):
    """Where a client's time went, in seconds, since it connected."""

    waited_s: float = 0.0
    network_s: float = 0.0
    serialise_s: float = 0.0


class FlowControl:
    """One client's `pulls` and `pushes`, which hear by themselves what is sent and answered.

    `listens`: the caller waits for answers. All times are the driver's, in seconds.
    """

    def __init__(self, in_flight: int | None, now: float) -> None:
        """`in_flight` pushes may be unacknowledged; None, and it is found out.

        Raises BadInput where that is none.
        """
        if in_flight is not None and in_flight < 1:
            raise BadInput(f"in_flight: expected at least 1, got {in_flight}")
        self.in_flight = in_flight
        self.listens = False
        self._left_at = now
        self._own_s = 0.0  # the caller's; and how much of it the paces have been told
        self._told_s: dict[Kind, float] = {Pull: 0.0, Push: 0.0}
        self.pulls, self.pushes = WindowEstimator(LEAST), WindowEstimator(LEAST)

    def begin(self, floats: int, *, shared: bool) -> None:
        """Find out anew what the way to shards is like, to which `floats` go at a time.

        In `shared` memory they go at once, so as few as can be are on their way.
        """
        most = LEAST if shared else most_in_flight(floats)
        self.pulls, self.pushes = WindowEstimator(most), WindowEstimator(most - 1)

    def enter(self, kind: Kind | None, now: float) -> float:
        """The caller is back, for a request of this kind; returns how long it was away.

        None where the request is not one that it makes at each of its steps.
        """
        away_s = now - self._left_at
        self._own_s += away_s
        if kind is None:
            return away_s
        pace = self.pulls if kind is Pull else self.pushes
        pace.record_compute(self._own_s - self._told_s[kind])
        self._told_s[kind] = self._own_s
        return away_s

    def leave(self, now: float) -> None:
        """The caller goes: nobody listens."""
        self.listens = False
        self._left_at = now

    @property
    def ahead(self) -> int:
        """How many of the caller's steps early to ask for weights."""
        return 1 if self.pulls.looks else self.pulls.early

    @property
    def room(self) -> int:
        """How many pushes may be unacknowledged when a further one is sent."""
        if self.in_flight is not None:
            return self.in_flight - 1
        return 0 if self.pushes.looks else self.pushes.early


def most_in_flight(floats: int) -> int:
    """How many pushes, or pulls, of so many floats memory allows on their way."""
    return max(LEAST, min(_MOST, _MEMORY_BYTES // (4 * max(1, floats))))
