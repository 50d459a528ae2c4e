"""The gate: bounded staleness, and the waiting room before it.

Theory (Ho et al. 2013, stale synchronous parallel). A worker may start a step at clock c once
every registered worker has reached clock c - s. Bound 0 is bulk-synchronous, no bound is fully
asynchronous. The gate stands before the pull: a worker that was let through at the very bound then
completes one step, so the observed gap between clocks reaches s + 1, never more.

A request that may not pass yet is *parked*: it waits here as state, and whatever raises the slowest
clock (a push, a departure, an expired lease) asks the gate whom to let go. Everyone at or below the
new limit goes, not only those exactly at it. Nothing polls.

Warm start is the same waiting room: until one replica has brought the weights through the first
`warm_steps`, the others' Join is parked, so that they start from trained weights, and at the clock
that replica has reached.
"""

from collections.abc import Callable, Iterator

import msgspec

from shards.errors import BadMessage
from shards.messages import Join, Pull

MOST_PARKED = 256  # of one worker's; a client on the longest link asks for 64 weights ahead


class Waiting(msgspec.Struct, frozen=True):
    """A parked request and where its answer goes."""

    sender: bytes
    message: Pull | Join
    since: float


class Gate:
    """Requests parked by worker and request number, in `parked`."""

    def __init__(self, bound: int | None) -> None:
        self.bound = bound
        self.parked: dict[tuple[str, int], Waiting] = {}

    def passes(self, clock: int, min_clock: int | None) -> bool:
        """Whether a step at `clock` may start while the slowest worker is at `min_clock`."""
        return self.bound is None or min_clock is None or clock - self.bound <= min_clock

    def park(self, sender: bytes, message: Pull | Join, now: float) -> bool:
        """Make a request wait; False if it already does (its answer then goes to `sender`).

        Raises BadMessage for more of one worker's than any has a use for.
        """
        key = (message.worker, message.request)
        known = self.parked.get(key)
        if known is None and len(self.parked) >= MOST_PARKED:
            own = sum(worker == message.worker for worker, _ in self.parked)
            if own >= MOST_PARKED:
                raise BadMessage(
                    f"worker {message.worker}: expected at most {MOST_PARKED} requests that wait,"
                    " got one more"
                )
        self.parked[key] = Waiting(sender, message, known.since if known else now)
        return known is None

    def release(self, may_go: Callable[[Pull | Join], bool]) -> Iterator[Waiting]:
        """Let go whoever may, in the order of their clocks, then of their arrival.

        Each is asked for only after the one before it was dealt with, so that admitting one worker
        can keep the next one waiting.
        """
        for waiting in sorted(self.parked.values(), key=lambda w: (w.message.clock, w.since)):
            if may_go(waiting.message):
                del self.parked[waiting.message.worker, waiting.message.request]
                yield waiting

    def forget(self, *workers: str) -> None:
        """Drop what an earlier life, or workers that left, still wait for."""
        gone = set(workers)
        for key in [key for key in self.parked if key[0] in gone]:
            del self.parked[key]

    @property
    def waiting(self) -> list[Waiting]:
        """Everyone who is parked, in the order of arrival."""
        return sorted(self.parked.values(), key=lambda waiting: waiting.since)

    def clear(self) -> None:
        """Drop everyone: they will ask again."""
        self.parked.clear()

    def waits(self, worker: str) -> bool:
        return any(name == worker for name, _ in self.parked)
