"""Decides how many pulls and pushes a client keeps in flight, with window_estimator.py.

An estimator needs to know how long the caller is busy between two requests of its kind, and whether
the caller was listening when an answer came. Both follow from the times at which the caller enters
and leaves the client, which are recorded here. If the caller sets the number of pushes in flight,
that number is used.
"""

import msgspec

from ps.session.window_estimator import WindowEstimator
from shards.errors import BadInput
from shards.messages import Pull, Push

LEAST = 2  # requests of a kind in flight, where the number is not configured
_MOST = 64
_MEMORY_BYTES = 1 << 30

Kind = type[Pull | Push]


class Times(msgspec.Struct):
    """How a client has spent its time since it connected, in seconds."""

    waited_s: float = 0.0
    network_s: float = 0.0
    serialise_s: float = 0.0


class FlowControl:
    """The estimators of one client, `pulls` and `pushes`, which record what is sent and answered.

    `listens`: the caller waits for answers. All times are the driver's, in seconds.
    """

    def __init__(self, in_flight: int | None, now: float) -> None:
        """`in_flight` pushes may be unacknowledged; None estimates the number.

        Raises BadInput unless `in_flight` is at least 1.
        """
        if in_flight is not None and in_flight < 1:
            raise BadInput(f"in_flight: expected at least 1, got {in_flight}")
        self.in_flight = in_flight
        self.listens = False
        self._left_at = now
        self._own_s = 0.0  # the caller's total; `_recorded_s` is the part given to each estimator
        self._recorded_s: dict[Kind, float] = {Pull: 0.0, Push: 0.0}
        self.pulls, self.pushes = WindowEstimator(LEAST), WindowEstimator(LEAST)

    def begin(self, floats: int, *, shared: bool) -> None:
        """Start estimating again for new shards, to which `floats` values go at a time.

        `shared` memory transfers them at once, so the least possible number is kept in flight.
        """
        most = LEAST if shared else most_in_flight(floats)
        self.pulls, self.pushes = WindowEstimator(most), WindowEstimator(most - 1)

    def enter(self, kind: Kind | None, now: float) -> float:
        """The caller enters for a request of this kind; returns how long it was away, in seconds.

        `kind` is None for a request that the caller does not make at each of its steps.
        """
        away_s = now - self._left_at
        self._own_s += away_s
        if kind is None:
            return away_s
        pace = self.pulls if kind is Pull else self.pushes
        pace.record_compute(self._own_s - self._recorded_s[kind])
        self._recorded_s[kind] = self._own_s
        return away_s

    def leave(self, now: float) -> None:
        """The caller leaves: it does not listen any more."""
        self.listens = False
        self._left_at = now

    @property
    def ahead(self) -> int:
        """How many of the caller's steps early to request weights."""
        return 1 if self.pulls.looks else self.pulls.early

    @property
    def room(self) -> int:
        """How many pushes may be unacknowledged when another one is sent."""
        if self.in_flight is not None:
            return self.in_flight - 1
        return 0 if self.pushes.looks else self.pushes.early


def most_in_flight(floats: int) -> int:
    """How many pushes, or pulls, of `floats` values memory allows in flight."""
    return max(LEAST, min(_MOST, _MEMORY_BYTES // (4 * max(1, floats))))
