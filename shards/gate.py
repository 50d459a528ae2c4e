"""The gate: bounded staleness, and the requests that wait for it.

Theory (Ho et al. 2013, stale synchronous parallel). A worker may start a step at clock c once
every active worker has reached clock c - s. Bound 0 is bulk-synchronous, no bound is fully
asynchronous. The gate is checked at the pull. A worker that passes exactly at the bound then
completes one step, so the observed gap between clocks reaches s + 1, never more.

A request that may not pass yet is *parked*: it waits here as state, and whatever raises the slowest
clock (a push, a departure, an expired lease) asks the gate which requests to release. It releases
every request at or below the new limit, not only those exactly at it. Nothing polls.

Warm start uses the same mechanism: one replica trains alone for the first `warm_steps`, and the
Joins of the others are parked until then. So they start from trained weights, at the clock that the
first replica has reached.
"""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from shards.errors import BadMessage
from shards.messages import Join, Pull
from shards.wire_format import Buffer

MAX_PARKED = 256  # for each worker; a client on the longest link requests 64 pulls ahead
MAX_PARKED_BYTES = 128 << 20  # of the ids that a worker's parked pulls bring


class Waiting(msgspec.Struct, frozen=True):
    """A parked request, its sender's address, and the time `since` which it waits, in seconds.

    `frames` are copies of the request's: they outlive the message that they came in.
    """

    sender: bytes
    message: Pull | Join
    since: float
    frames: tuple[bytes, ...] = ()


class Gate:
    """The staleness bound, and the requests parked behind it, by (worker, request number)."""

    def __init__(self, bound: int | None) -> None:
        self.bound = bound
        self.parked: dict[tuple[str, int], Waiting] = {}

    def passes(self, clock: int, min_clock: int | None) -> bool:
        """Return whether a step at `clock` may start while the slowest worker is at `min_clock`."""
        # Without an active worker there is nobody to wait for.
        return self.bound is None or min_clock is None or clock - self.bound <= min_clock

    def park(
        self,
        sender: bytes,
        message: Pull | Join,
        now: float,
        frames: Sequence[Buffer] = (),
    ) -> bool:
        """Make a request wait; return False if it waits already: it has been sent again.

        The answer goes to the latest `sender`.

        Raises BadMessage for more than `MAX_PARKED` requests of one worker, or more than
        `MAX_PARKED_BYTES` of their frames.
        """
        key = (message.worker, message.request)
        known = self.parked.get(key)
        # Counted only where it can matter: the loop over all requests would run at every parked
        # pull.
        if known is None and len(self.parked) >= MAX_PARKED:
            count = sum(worker == message.worker for worker, _ in self.parked)
            if count >= MAX_PARKED:
                raise BadMessage(
                    f"worker {message.worker}: expected at most {MAX_PARKED} requests that wait,"
                    " got one more"
                )
        if known is None and frames:
            self._check_bytes(message.worker, frames)
        copies = known.frames if known else tuple(bytes(frame) for frame in frames)
        # The time of the first copy is kept, because the wait is measured from there.
        self.parked[key] = Waiting(sender, message, known.since if known else now, copies)
        return known is None

    def release(self, may_go: Callable[[Pull | Join], bool]) -> Iterator[Waiting]:
        """Remove and yield the requests that may pass, ordered by clock, then by arrival.

        It is a generator: `may_go` is evaluated for a request only after the caller has dealt with
        the one before, so that admitting one worker can keep the next one waiting.
        """
        # `sorted` makes a list, so the caller may park further requests meanwhile.
        for waiting in sorted(self.parked.values(), key=lambda w: (w.message.clock, w.since)):
            if may_go(waiting.message):
                del self.parked[waiting.message.worker, waiting.message.request]
                yield waiting

    def forget(self, *workers: str) -> None:
        """Drop the requests of these workers, which have left or have started a new incarnation."""
        gone = set(workers)
        # A list first, because the loop removes what it runs over.
        for key in [key for key in self.parked if key[0] in gone]:
            del self.parked[key]

    @property
    def waiting(self) -> list[Waiting]:
        """The parked requests, in the order of arrival."""
        return sorted(self.parked.values(), key=lambda waiting: waiting.since)

    def clear(self) -> None:
        """Drop all requests; their senders will repeat them."""
        self.parked.clear()

    def _check_bytes(self, worker: str, frames: Sequence[Buffer]) -> None:
        waiting = [entry.frames for (name, _), entry in self.parked.items() if name == worker]
        parked_bytes = sum(len(frame) for parked in waiting for frame in parked)
        parked_bytes += sum(memoryview(frame).nbytes for frame in frames)
        if parked_bytes > MAX_PARKED_BYTES:
            raise BadMessage(
                f"worker {worker}: expected at most {MAX_PARKED_BYTES} bytes of ids in requests"
                f" that wait, got {parked_bytes}"
            )

    def waits(self, worker: str) -> bool:
        return any(name == worker for name, _ in self.parked)
