"""The orders to a running job, and their answers.

    the service -> orders.jsonl -> its runner -----------------+
    downpour set, reshard, snapshots take -> the run folder ---+-> RunControl -> the job's own loop
    SIGUSR1 ---------------------------------------------------+

An order waits in one queue. The thread that watches the job (worker/job/running_job.py) takes it
from there, one after another, in the order in which they came. Each has one answer: that of the
loop, or, when the run ends first, that it was not carried out.

A new kind of order is a struct here, in `Order`, and its case in the loop.
"""

import signal
import time
from collections import deque
from collections.abc import Callable
from threading import main_thread
from typing import Any

import msgspec

from ps.closing_context import ClosingContext
from ps.process_owner import Opener
from ps.session.admin_plans import SettingsChange
from shards import argument_checks
from shards.errors import BadInput, DownpourError, GiveUp
from shards.live_settings import LIVE, check_factor
from shards.plurals import format_count

_SECOND_SIGNAL_S = 1.0  # Python joins two signals that come before it has handled the first


class SnapshotOrder(msgspec.Struct, frozen=True, tag="snapshot"):
    """Take a snapshot; the answer has its number."""

    def __str__(self) -> str:
        return "a snapshot"


class ReshardOrder(msgspec.Struct, frozen=True, tag="reshard"):
    """Change the number of shards."""

    shards: int

    def __str__(self) -> str:
        return format_count(self.shards, "shard")


class SettingsOrder(msgspec.Struct, frozen=True, tag="set"):
    """Change options of the job, by name, while it trains."""

    changes: dict[str, Any]

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.changes.items())

    def check(self) -> SettingsChange:
        """The change, with valid values; raises BadInput for other options or values."""
        for name in self.changes or ("none",):
            if name not in LIVE:
                expected = f"{' or '.join(LIVE)}, which may change while a job trains"
                raise BadInput("set", expected=expected, got=name[:80])
        sets_bound, bound = "staleness" in self.changes, self.changes.get("staleness")
        factor = self.changes.get("rate_factor")
        return SettingsChange(
            sets_bound,
            argument_checks.staleness_bound("staleness", bound) if sets_bound else None,
            check_factor("rate_factor", factor) if "rate_factor" in self.changes else None,
        )


Order = SnapshotOrder | ReshardOrder | SettingsOrder
ORDERS: dict[str, type[Order]] = {
    str(kind.__struct_config__.tag): kind for kind in (SnapshotOrder, ReshardOrder, SettingsOrder)
}
"""The kinds of orders, by name."""

Answer = Callable[[DownpourError | None, str], object]
"""Called with the error that prevented an order, or with None and the result in words."""


def name_of(order: Order) -> str:
    """The name of an order's kind."""
    return str(order.__struct_config__.tag)


class PendingOrder:
    """An order with the function that receives its answer; only the first answer counts."""

    def __init__(self, order: Order, answer: Answer = lambda *_: None) -> None:
        self.order = order
        self._answer: Answer | None = answer

    @property
    def is_open(self) -> bool:
        """True until the order is answered."""
        return self._answer is not None

    def answer(self, error: DownpourError | None, text: str = "") -> None:
        """Report success in words, or the error that prevented it."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer(error, text)


class RunControl(ClosingContext):
    """The orders to one run. Any thread may `submit` one; the run's own thread calls the rest.

    It has no lock, so that a signal handler may submit an order: it would wait for ever for a lock
    that the thread holds which it interrupts. `append` and `popleft` of a deque are atomic.
    """

    def __init__(self) -> None:
        self._queue: deque[PendingOrder] = deque()
        self._taken: list[PendingOrder] = []
        self._inbox: Callable[[], PendingOrder | None] = lambda: None
        self._closed = self._stopping = False
        self._opener = Opener()

    def submit(self, order: Order, answer: Answer = lambda *_: None) -> None:
        """Queue an order; `answer` is called once, as a rule in the thread of the run."""
        self._queue.append(PendingOrder(order, answer))
        if self._closed:  # looked up after `append`: `close` has either seen the order or set this
            self._refuse_queued()

    def read_inbox(self, inbox: Callable[[], PendingOrder | None]) -> None:
        """Take orders from `inbox`, too; it returns the next one, or None."""
        self._inbox = inbox

    def take(self) -> PendingOrder | None:
        """The next order, which is to be carried out and answered; None if there is none."""
        try:
            pending = self._queue.popleft()
        except IndexError:
            next_order = self._inbox()
            if next_order is None:
                return None
            pending = next_order
        # A run that trains for weeks may take thousands: only those without an answer are needed.
        self._taken = [earlier for earlier in self._taken if earlier.is_open]
        self._taken.append(pending)
        return pending

    def stop(self, *, now: bool = False) -> None:
        """Interrupt the run's process as a SIGTERM does: it ends with a snapshot; `now` without.

        Several calls interrupt once, for a second interrupt would lose the snapshot.
        """
        first, self._stopping = not self._stopping, True
        if first:
            _interrupt()
        if now:
            if first:
                time.sleep(_SECOND_SIGNAL_S)
            _interrupt()

    def close(self) -> None:
        """The run is over: answer what is left, and every later order, that it was not done.

        A process that a callback has forked off answers nothing: the run continues.
        """
        if not self._opener.is_this_process:
            return
        self._closed = True
        self._refuse_queued()
        for pending in self._taken:
            _refuse(pending)
        self._taken.clear()

    def _refuse_queued(self) -> None:
        while True:
            try:
                _refuse(self._queue.popleft())
            except IndexError:
                return


def _refuse(pending: PendingOrder) -> None:
    order = pending.order
    pending.answer(GiveUp(f"{name_of(order)}: the run ended before it had {order}"))


def _interrupt() -> None:
    # Addressed to the main thread: it may be in a system call, from which only a signal of its own
    # wakes it.
    signal.pthread_kill(main_thread().ident or 0, signal.SIGTERM)
