"""How many requests to keep in flight, from how long they take: a pure estimator.

Theory (BBR, Cardwell et al. 2017, in requests instead of bytes). A request that finds the link
empty is answered after q seconds; the link answers at most m requests a second; the caller computes
for c seconds between two. To be there in time, a request must be sent q / c of the caller's steps
early. Where the link is slower than the caller, m * q fill it, and more would only queue.

So q is the least of the last answers, and m the most that was seen in a while: as many as were
answered from when a request was sent until it was, over that time. What was seen may have been too
few in flight: one more than m * q is allowed, and if the link answers faster for it, m rises within
the time of an answer. An answer counts for q only if its request was alone in flight, for else it
may have queued behind others, and if somebody was listening when it came, for else it may have lain
there while its caller computed. When the last that counted is old, one is sent alone again.
"""

import math
from collections import deque

_GAIN = 1.25  # of q, so that an ordinary delay does not make the caller wait
_WINDOW_S = 10.0
_RATES = 32  # of how many the best counts
_NEW = 0.25  # the share of the newest in the caller's own time


class WindowEstimator:
    """One kind of request; `most` is what memory or the staleness bound allows in flight."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._own_s: float | None = None
        # When each was sent, how many were answered by then, and whether it was alone.
        self._flying: dict[int, tuple[float, int, bool]] = {}
        self._taken: deque[tuple[float, float]] = deque()  # when and how long, the least first
        self._answered = 0
        self._answered_at = -math.inf
        self._rates: deque[float] = deque(maxlen=_RATES)

    def record_compute(self, own_s: float) -> None:
        """The caller was busy with other things for `own_s` between two requests."""
        before = own_s if self._own_s is None else self._own_s
        self._own_s = before + _NEW * (own_s - before)

    def record_send(self, request: int, now: float) -> None:
        """A request has been sent."""
        self._flying[request] = now, self._answered, not self._flying

    def record_answer(
        self, request: int, now: float, *, heard: bool, waited_s: float = 0.0
    ) -> None:
        """It was answered; `heard`: somebody listened when it came. `waited_s` was at the gate."""
        sent_at, answered, alone = self._flying.pop(request, (now, self._answered, False))
        if alone and heard:
            took_s = max(0.0, now - sent_at - waited_s)
            # What took longer and is older will never be the least again.
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
        """How many of the caller's steps early to send one; at least 1, at most `most`."""
        if not self._taken or self._own_s is None:
            return 1
        quickest_s = _GAIN * self._taken[0][1]
        in_time = quickest_s / self._own_s if self._own_s > 0 else math.inf
        rate = max(self._rates, default=0.0)
        wanted = min(in_time, quickest_s * rate + 1, self.most)
        return max(1, math.ceil(wanted))

    @property
    def looks(self) -> bool:
        """Whether the next one is to be sent alone, to see what the link is like by now.

        Never while one in flight is enough: then there is nothing to find out.
        """
        if not self._taken:
            return False
        return self._taken[-1][0] < self._answered_at - _WINDOW_S and self.early > 1
