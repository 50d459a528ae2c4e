"""Which weights a client has requested, and which of them have arrived, by clock and tables.

Weights that are cancelled after the request still arrive, and are dropped then.
"""

from ps.session.events import Pulled

Wanted = tuple[int, tuple[str, ...]]
"""The clock of a step, and the tables whose weights it reads."""


class PrefetchTable:
    """Pulls that are in flight, or have arrived and were not taken yet."""

    def __init__(self) -> None:
        self._asked: dict[Wanted, int] = {}  # request numbers
        self._came: dict[int, Pulled] = {}
        self._unwanted: set[int] = set()

    def __contains__(self, wanted: Wanted) -> bool:
        """Whether these weights have been requested and not taken yet."""
        return wanted in self._asked

    def record_request(self, wanted: Wanted, request: int) -> None:
        """These weights have been requested under number `request`."""
        self._asked[wanted] = request

    def record_pulled(self, pulled: Pulled) -> None:
        """A pull has arrived; it is kept unless it was cancelled."""
        if pulled.request in self._unwanted:
            self._unwanted.remove(pulled.request)
        else:
            self._came[pulled.request] = pulled

    def take(self, wanted: Wanted) -> Pulled | None:
        """Take weights that were requested; None if they have not arrived."""
        request = self._asked[wanted]
        pulled = self._came.get(request)
        if pulled is not None:
            # This order: after Ctrl-C in between, they can be requested again. The other order
            # would leave it requested for ever, with no answer to come.
            del self._asked[wanted]
            del self._came[request]
        return pulled

    def drop_before(self, clock: int) -> None:
        """Cancel the weights for clocks before this one."""
        for past in tuple(self._asked):
            if past[0] < clock:
                request = self._asked.pop(past)
                if self._came.pop(request, None) is None:
                    self._unwanted.add(request)

    def cancel_all(self) -> list[Wanted]:
        """Cancel all requests; returns what they were for."""
        wanted = list(self._asked)
        self.drop_before(max([clock for clock, _ in wanted], default=0) + 1)
        return wanted

    def restart(self) -> list[Wanted]:
        """Forget all requests, because the shards have changed; returns what to request again."""
        wanted = list(self._asked)
        self._asked.clear()
        self._came.clear()
        self._unwanted.clear()
        return wanted
