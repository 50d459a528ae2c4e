"""Estimates how many requests to keep in flight, from how long they take. Pure.

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
"""

import math
from collections import deque

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
        self._own_s: float | None = None
        # For each request in flight: its time, the answers until then, and whether it was alone.
        self._flying: dict[int, tuple[float, int, bool]] = {}
        self._taken: deque[tuple[float, float]] = deque()  # time and duration, shortest first
        self._answered = 0
        self._answered_at = -math.inf
        self._rates: deque[float] = deque(maxlen=_RATES)

    def record_compute(self, own_s: float) -> None:
        """The caller was busy elsewhere for `own_s` seconds between two requests."""
        before = own_s if self._own_s is None else self._own_s
        self._own_s = before + _NEW * (own_s - before)

    def record_send(self, request: int, now: float) -> None:
        """Request number `request` has been sent."""
        self._flying[request] = now, self._answered, not self._flying

    def record_answer(
        self, request: int, now: float, *, heard: bool, waited_s: float = 0.0
    ) -> None:
        """A request was answered; `heard`: the caller was listening then; `waited_s` it spent at
        the gate.
        """
        sent_at, answered, alone = self._flying.pop(request, (now, self._answered, False))
        if alone and heard:
            took_s = max(0.0, now - sent_at - waited_s)
            # An older answer that took longer can never be the minimum again.
            while self._taken and self._taken[-1][1] >= took_s:
                self._taken.pop()
            self._taken.append((now, took_s))
            while self._taken[0][0] < now - _WINDOW_S:
                self._taken.popleft()
        self._answered += 1
        self._answered_at = now
        if now > sent_at:
            self._rates.append((self._answered - answered) / (now - sent_at))

    @property
    def early(self) -> int:
        """How many of the caller's steps early to send a request; from 1 to `most`."""
        if not self._taken or self._own_s is None:
            return 1
        quickest_s = _GAIN * self._taken[0][1]
        in_time = quickest_s / self._own_s if self._own_s > 0 else math.inf
        rate = max(self._rates, default=0.0)
        wanted = min(in_time, quickest_s * rate + 1, self.most)
        return max(1, math.ceil(wanted))

    @property
    def looks(self) -> bool:
        """Whether to send the next request alone, to measure the link again.

        Never while one in flight is enough: the measurement would then change nothing.
        """
        if not self._taken:
            return False
        return self._taken[-1][0] < self._answered_at - _WINDOW_S and self.early > 1
