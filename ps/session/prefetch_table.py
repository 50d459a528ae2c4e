"""Which weights a client has asked for, and which of them have come: a table by clock.

Weights that were asked for and are wanted no more still come: they are let go of then.
"""

from ps.session.events import Pulled


class PrefetchTable:
    """Pulls that are on their way, or have come and were not taken yet."""

    def __init__(self) -> None:
        self._asked: dict[int, int] = {}  # by clock the request
        self._came: dict[int, Pulled] = {}
        self._unwanted: set[int] = set()

    def __contains__(self, clock: int) -> bool:
        """Whether the weights for a step at `clock` have been asked for, and not taken yet."""
        return clock in self._asked

    def record_request(self, clock: int, request: int) -> None:
        """They have been asked for."""
        self._asked[clock] = request

    def record_pulled(self, pulled: Pulled) -> None:
        """They are here."""
        if pulled.request in self._unwanted:
            self._unwanted.remove(pulled.request)
        else:
            self._came[pulled.request] = pulled

    def take(self, clock: int) -> Pulled | None:
        """Those that were asked for at `clock`, if they have come."""
        request = self._asked[clock]
        pulled = self._came.get(request)
        if pulled is not None:
            del self._asked[clock]  # first: else Ctrl-C might leave them asked for, and never come
            del self._came[request]
        return pulled

    def drop_before(self, clock: int) -> None:
        """Weights of steps before this one are wanted no more."""
        for past in tuple(self._asked):
            if past < clock:
                request = self._asked.pop(past)
                if self._came.pop(request, None) is None:
                    self._unwanted.add(request)

    def cancel_all(self) -> list[int]:
        """None of them is wanted any more; the clocks that they were asked for at."""
        clocks = list(self._asked)
        self.drop_before(max(clocks, default=0) + 1)
        return clocks

    def restart(self) -> list[int]:
        """Other shards are asked from now on; the clocks to ask them at."""
        clocks = list(self._asked)
        self._asked.clear()
        self._came.clear()
        self._unwanted.clear()
        return clocks
