"""Decides how many pulls and pushes a client keeps in flight, and knows which were requested. Pure.

Theory (BBR, Cardwell et al. 2017, in requests instead of bytes). A request that finds the link
empty is answered after q seconds; the link answers at most m requests a second; the caller computes
for c seconds between two. To be answered in time, a request must be sent q / c of the caller's
steps early. Where the link is slower than the caller, m * q requests fill it, and more would only
queue.

So q is the least of the recent answer times, and m the highest recent rate: the number of answers
between a request and its answer, divided by that time. Too few requests may have been in flight to
see the full rate: one more than m * q is allowed, and if the link then answers faster, m rises
within one answer time. An answer counts for q only if its request was alone in flight, because it
may otherwise have queued behind others, and if the caller was listening when it came, because it
may otherwise have waited for the caller. When the last answer that counted is old, one request is
sent alone again.

An estimator needs to know how long the caller is busy between two requests of its kind, and whether
the caller was listening when an answer came. Both follow from the times at which the caller enters
and leaves the client, which are recorded here. If the caller sets the number of pushes in flight,
that number is used.
"""

import math
from collections import deque
from typing import NamedTuple

import msgspec

from ps.session.events import Pulled
from ps.session.row_requests import Gather
from shards.errors import BadInput
from shards.messages import Pull, Push

MIN_IN_FLIGHT = 2  # requests of a kind in flight, where the number is not configured
_MAX_IN_FLIGHT = 64
_MEMORY_BYTES = 1 << 30

Kind = type[Pull | Push]
_GAIN = 1.25  # of q, so that an ordinary delay does not make the caller wait
_WINDOW_S = 10.0
_RATES = 32  # the number of recent rates of which the best counts
_NEW = 0.25  # the weight of the newest value in the average of the caller's own time


class WindowEstimator:
    """The estimator for one kind of request; `most` is the limit set by memory or the staleness
    bound.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._compute_s: float | None = None
        # For each request in flight: its time, the answers until then, and whether it was alone.
        self._flying: dict[int, tuple[float, int, bool]] = {}
        self._durations: deque[tuple[float, float]] = deque()  # time and duration, shortest first
        self._answered = 0
        self._answered_at = -math.inf
        self._rates: deque[float] = deque(maxlen=_RATES)

    def record_compute(self, own_s: float) -> None:
        """The caller was busy elsewhere for `own_s` seconds between two requests."""
        before = own_s if self._compute_s is None else self._compute_s
        self._compute_s = before + _NEW * (own_s - before)

    def record_send(self, request: int, now: float) -> None:
        """Request number `request` has been sent."""
        self._flying[request] = now, self._answered, not self._flying

    def record_answer(
        self, request: int, now: float, *, listening: bool, waited_s: float = 0.0
    ) -> None:
        """A request was answered; `waited_s` is how long it was parked at the staleness gate.

        `listening`: whether the caller was listening when the answer arrived.
        """
        # A request that was sent before a restart of the estimates is unknown, and measures
        # nothing.
        sent_at, answered, alone = self._flying.pop(request, (now, self._answered, False))
        if alone and listening:
            took_s = max(0.0, now - sent_at - waited_s)
            # An older answer that took longer can never be the minimum again.
            while self._durations and self._durations[-1][1] >= took_s:
                self._durations.pop()
            self._durations.append((now, took_s))
            while self._durations[0][0] < now - _WINDOW_S:
                self._durations.popleft()
        self._answered += 1
        self._answered_at = now
        # Two events at one time measure no rate.
        if now > sent_at:
            self._rates.append((self._answered - answered) / (now - sent_at))

    @property
    def early(self) -> int:
        """By how many of the caller's steps to send a request early; from 1 to `most`."""
        if not self._durations or self._compute_s is None:
            return 1
        quickest_s = _GAIN * self._durations[0][1]
        in_time = quickest_s / self._compute_s if self._compute_s > 0 else math.inf
        rate = max(self._rates, default=0.0)
        steps = min(in_time, quickest_s * rate + 1, self.most)
        return max(1, math.ceil(steps))

    @property
    def should_probe(self) -> bool:
        """True if to send the next request alone, to measure the link again.

        False while one in flight is enough, because the measurement would change nothing.
        """
        if not self._durations:
            return False
        return self._durations[-1][0] < self._answered_at - _WINDOW_S and self.early > 1


class PushTimes(msgspec.Struct, frozen=True):
    """The times that a worker reports with a push, in seconds (update_records.py)."""

    rtt_s: float = 0.0
    wait_s: float = 0.0
    compute_s: float = 0.0
    data_s: float = 0.0
    network_s: float = 0.0


class Times(msgspec.Struct):
    """A client's use of its time since it connected, in seconds.

    The client's caller adds to `compute_s` and `data_s`, or leaves them at 0.
    """

    waited_s: float = 0.0
    network_s: float = 0.0
    serialise_s: float = 0.0
    compute_s: float = 0.0
    data_s: float = 0.0

    def since(self, before: "Times", rtt_s: float, wait_s: float) -> PushTimes:
        """The times from `before` on, to be reported with a push."""
        return PushTimes(
            rtt_s,
            wait_s,
            self.compute_s - before.compute_s,
            self.data_s - before.data_s,
            self.network_s - before.network_s,
        )


class FlowControl:
    """The estimators of one client, `pulls` and `pushes`, which record what is sent and answered.

    `listens`: the caller waits for answers. All times are the driver's, in seconds.
    """

    def __init__(self, in_flight: int | None, now: float) -> None:
        """`in_flight` is how many pushes may be unacknowledged; None estimates the number.

        Raises BadInput unless `in_flight` is at least 1.
        """
        if in_flight is not None and in_flight < 1:
            raise BadInput("in_flight", expected="at least 1", got=in_flight)
        self.in_flight = in_flight
        self.listens = False
        self._left_at = now
        self._compute_s = (
            0.0  # the caller's total; `_recorded_s` is the part given to each estimator
        )
        self._recorded_s: dict[Kind, float] = {Pull: 0.0, Push: 0.0}
        self.pulls, self.pushes = WindowEstimator(MIN_IN_FLIGHT), WindowEstimator(MIN_IN_FLIGHT)

    def begin(self, floats: int, *, shared: bool) -> None:
        """Restart the estimates for new shards; each message to them carries `floats` values.

        `shared` memory transfers them at once, so the least possible number is kept in flight.
        """
        most = MIN_IN_FLIGHT if shared else max_in_flight(floats)
        self.pulls, self.pushes = WindowEstimator(most), WindowEstimator(most - 1)

    def enter(self, kind: Kind | None, now: float) -> float:
        """The caller enters for a request of this kind; returns how long it was away, in seconds.

        `kind` is None for a request that the caller does not make at each of its steps.
        """
        away_s = now - self._left_at
        self._compute_s += away_s
        if kind is None:
            return away_s
        pace = self.pulls if kind is Pull else self.pushes
        pace.record_compute(self._compute_s - self._recorded_s[kind])
        self._recorded_s[kind] = self._compute_s
        return away_s

    def leave(self, now: float) -> None:
        """The caller leaves: it does not listen any more."""
        self.listens = False
        self._left_at = now

    @property
    def ahead(self) -> int:
        """By how many of the caller's steps to request weights early."""
        return 1 if self.pulls.should_probe else self.pulls.early

    @property
    def room(self) -> int:
        """The number of pushes that may be unacknowledged when another one is sent."""
        if self.in_flight is not None:
            return self.in_flight - 1
        return 0 if self.pushes.should_probe else self.pushes.early


def max_in_flight(floats: int) -> int:
    """The number of pushes, or pulls, of `floats` values that memory allows in flight."""
    return max(MIN_IN_FLIGHT, min(_MAX_IN_FLIGHT, _MEMORY_BYTES // (4 * max(1, floats))))


class PullKey(NamedTuple):
    """The clock of a step, the dense tables of which it reads the weights, and the rows."""

    clock: int
    tables: tuple[str, ...]
    gather: Gather | None = None


class PrefetchTable:
    """Pulls that are in flight, or have arrived and were not taken yet."""

    def __init__(self) -> None:
        self._requested: dict[PullKey, int] = {}  # request numbers
        self._arrived: dict[int, Pulled] = {}
        self._cancelled: set[int] = set()

    def __contains__(self, key: PullKey) -> bool:
        """Return whether these weights have been requested and not taken yet."""
        return key in self._requested

    def holds_next(self, key: PullKey) -> bool:
        """Return whether these weights, the next ones, were requested; cancels those before."""
        if len(self._requested) > (key in self._requested):
            self.drop_before(key.clock)
        return key in self._requested

    def record_request(self, key: PullKey, request: int) -> None:
        """These weights have been requested under number `request`."""
        self._requested[key] = request

    def record_pulled(self, pulled: Pulled) -> None:
        """A pull has arrived; it is kept unless it was cancelled."""
        if pulled.request in self._cancelled:
            self._cancelled.remove(pulled.request)
        else:
            self._arrived[pulled.request] = pulled

    def has(self, key: PullKey) -> bool:
        """Return whether these weights were requested and have arrived."""
        return self._requested.get(key) in self._arrived

    def take(self, key: PullKey) -> Pulled | None:
        """Take weights that were requested; None if they have not arrived."""
        request = self._requested[key]
        pulled = self._arrived.get(request)
        if pulled is not None:
            # This order: after Ctrl-C in between, they can be requested again. The other order
            # would leave it requested for ever, with no answer to come.
            del self._requested[key]
            del self._arrived[request]
        return pulled

    def drop_before(self, clock: int) -> None:
        """Cancel the weights for clocks before this one."""
        for past in tuple(self._requested):
            if past.clock < clock:
                request = self._requested.pop(past)
                if self._arrived.pop(request, None) is None:
                    self._cancelled.add(request)

    def cancel_all(self) -> list[PullKey]:
        """Cancel all requests; returns what they were for."""
        keys = list(self._requested)
        self.drop_before(max([key.clock for key in keys], default=0) + 1)
        return keys

    def restart(self) -> list[PullKey]:
        """Forget all requests, because the shards have changed; returns what to request again."""
        keys = list(self._requested)
        self._requested.clear()
        self._arrived.clear()
        self._cancelled.clear()
        return keys
