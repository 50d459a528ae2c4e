"""Which weights a client has requested, and which of them have arrived: a table by clock.

Weights that are cancelled after the request still arrive, and are dropped then.
"""

from ps.session.events import Pulled


class PrefetchTable:
    """Pulls that are in flight, or have arrived and were not taken yet."""

    def __init__(self) -> None:
        self._asked: dict[int, int] = {}  # request number by clock
        self._came: dict[int, Pulled] = {}
        self._unwanted: set[int] = set()

    def __contains__(self, clock: int) -> bool:
        """Whether the weights for `clock` have been requested and not taken yet."""
        return clock in self._asked

    def record_request(self, clock: int, request: int) -> None:
        """The weights for `clock` have been requested under number `request`."""
        self._asked[clock] = request

    def record_pulled(self, pulled: Pulled) -> None:
        """A pull has arrived; it is kept unless it was cancelled."""
        if pulled.request in self._unwanted:
            self._unwanted.remove(pulled.request)
        else:
            self._came[pulled.request] = pulled

    def take(self, clock: int) -> Pulled | None:
        """Take the weights that were requested for `clock`; None if they have not arrived."""
        request = self._asked[clock]
        pulled = self._came.get(request)
        if pulled is not None:
            # This order: after Ctrl-C in between, `clock` can be requested again. The other order
            # would leave it requested for ever, with no answer to come.
            del self._asked[clock]
            del self._came[request]
        return pulled

    def drop_before(self, clock: int) -> None:
        """Cancel the weights for clocks before this one."""
        for past in tuple(self._asked):
            if past < clock:
                request = self._asked.pop(past)
                if self._came.pop(request, None) is None:
                    self._unwanted.add(request)

    def cancel_all(self) -> list[int]:
        """Cancel all requests; returns the clocks that they were for."""
        clocks = list(self._asked)
        self.drop_before(max(clocks, default=0) + 1)
        return clocks

    def restart(self) -> list[int]:
        """Forget all requests, because the shards have changed; returns the clocks to request
        again.
        """
        clocks = list(self._asked)
        self._asked.clear()
        self._came.clear()
        self._unwanted.clear()
        return clocks
