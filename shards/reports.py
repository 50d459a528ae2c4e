"""The reports on fragments that wait for their merge (Decoupled DiLoCo, arXiv 2604.21428).

A fragment is a table of its own. Learners report at their own times how far they have moved it, and
a shard merges the reports on it as `Quorum` (aggregation.py) says. A report is in the ledger and in
the shard's state as soon as it arrives, though not yet in a version, so it is acknowledged at once,
and a death of shard or learner loses none. The arrays are the slots of the table's part
(dense_part.py); the rest is here.

A late report is dropped, and its worker sits out the round: nobody waits for it, or two workers
could wait for each other for ever, each with a report that is open at one shard or on one fragment
and was late at another. Where all have to report, it also gets the fragment with all the others, or
it would be late again at each round. With a quorum it waits only for the grace, once there is one:
before that, the open round may need its next report.

Time decides only when the grace after a quorum ends, and only the driver's tick looks at it: a tick
that merges is logged and replicated with the tables that it merges. Everything else follows from
the messages, so replays and copies merge at the same points.
"""

from collections.abc import Collection, Iterable
from math import isfinite

import msgspec

from shards.aggregation import Quorum
from shards.errors import BadInput
from shards.messages import AskedPart, Count, Name, Push

MAX_WEIGHT = 1e15
"""The largest weight of a report: its product with float32 values of any use is finite."""


class Reports(msgspec.Struct):
    """The open reports on one table: of which `workers`, the sum of their weights, and by tensor
    the sum of weighted norms. `changed` is the shard's version that the last merge made; the
    workers that are `sitting` out were late since then.
    """

    changed: Count = 0
    workers: list[Name] = []
    sitting: list[Name] = []
    weight: float = 0.0
    norms: dict[Name, float] = {}

    def copy(self) -> "Reports":
        """A copy, which does not change with these."""
        workers, sitting = list(self.workers), list(self.sitting)
        return Reports(self.changed, workers, sitting, self.weight, dict(self.norms))


class ReportTracker:
    """The open reports of one shard, by table."""

    def __init__(self, quorum: Quorum, tables: Iterable[str]) -> None:
        self.by_table = {table: Reports() for table in tables}
        self._quorum = quorum
        self._ends: dict[str, float] = {}  # when the first of a table's reporters needs the merge
        # When the first report of a round came: of the open one, and of the one merged last.
        self._opened: dict[str, float] = {}
        self._opened_before: dict[str, float] = {}

    def check(self, message: Push) -> None:
        """Raise BadInput unless a push is a report on one table, or on none at this shard."""
        subject = f"push {message.seq} of worker {message.worker}"
        if len(message.parts) > 1:
            raise BadInput(subject, expected="a report on one table", got=len(message.parts))
        if not message.parts:
            return
        (part,) = message.parts
        if part.table not in self.by_table:
            expected = f"a dense table of this shard: {', '.join(self.by_table)}"
            raise BadInput(subject, expected=expected, got=part.table)
        for field in ("tokens", "window"):
            if getattr(message, field) < 1:
                raise BadInput(f"{subject}: {field}", expected="at least 1", got=0)
        if weigh(message) > MAX_WEIGHT:
            expected = f"tokens^2 / window of at most {MAX_WEIGHT:g}"
            raise BadInput(subject, expected=expected, got=f"{weigh(message):g}")

    def is_late(self, message: Push) -> bool:
        """Return whether a report is from weights that a merge has replaced, or a second one."""
        (part,) = message.parts
        reports = self.by_table[part.table]
        return message.read_version < reports.changed or message.worker in reports.workers

    def sit_out(self, message: Push) -> None:
        """Note that a report was late: its worker is not waited for in this round."""
        (part,) = message.parts
        reports = self.by_table[part.table]
        if message.worker not in (*reports.workers, *reports.sitting):
            reports.sitting.append(message.worker)

    def record(self, message: Push, now: float) -> None:
        """Count a report that is not late; its gradient is collected elsewhere."""
        (part,) = message.parts
        reports = self.by_table[part.table]
        reports.workers.append(message.worker)
        self._opened.setdefault(part.table, now)
        if message.worker in reports.sitting:
            reports.sitting.remove(message.worker)
        reports.weight += weigh(message)
        # The exchange is not subtracted: a worker measures it only when it looks for answers, after
        # its steps, and takes further steps if the answer comes too late.
        spare_s = self._quorum.overlap * message.compute_s / max(1, message.steps)
        # These times are for the records and not checked: one that is no time leaves no grace.
        spare_s = spare_s if isfinite(spare_s) and spare_s > 0 else 0.0
        ends = now + self._quorum.grace * spare_s
        self._ends[part.table] = min(ends, self._ends.get(part.table, ends))

    def close(self, table: str, version: int) -> Reports:
        """The reports on a table, which are merged into `version`; the next one opens a round.

        If all workers sit the round out, there are none, and no version is made.
        """
        merged = self.by_table[table]
        self.by_table[table] = Reports(version if merged.workers else merged.changed)
        self._ends.pop(table, None)
        if table in self._opened:
            self._opened_before[table] = self._opened.pop(table)
        return merged

    def measure_delay(self, message: Push, now: float) -> float:
        """The seconds since the first of the reports that were merged without a late one.

        They say how much earlier its worker has to report; no state depends on them. 0 if they are
        not known, or if it is the worker's second report in the open round.
        """
        (part,) = message.parts
        if message.worker in self.by_table[part.table].workers:
            return 0.0
        return max(0.0, now - self._opened_before.get(part.table, now))

    def awaits(self, worker: str, asks: Iterable[AskedPart]) -> bool:
        """Return whether a worker asks for a table that will be merged without its next report."""
        return any(self._holds(worker, ask.table) for ask in asks if ask.table in self.by_table)

    def _holds(self, worker: str, table: str) -> bool:
        reports = self.by_table[table]
        if worker not in reports.sitting:
            return worker in reports.workers
        # A round without a quorum may need this worker's next report: the others may be dead, or
        # wait in the same way for the merge of another fragment.
        return self._quorum.size is None or len(reports.workers) >= self._quorum.size

    @property
    def tables(self) -> list[str]:
        """The tables with open rounds."""
        return [
            table
            for table, reports in self.by_table.items()
            if reports.workers or (reports.sitting and self._quorum.size is None)
        ]

    def complete(self, active: Collection[str]) -> list[str]:
        """The tables on which every active worker has reported, in time or late."""
        return [table for table in self.tables if not self._missing(table, active)]

    def quorate(self) -> list[str]:
        """The tables with enough reports, whether or not their grace has ended."""
        size = self._quorum.size
        if size is None:
            return []
        return [table for table in self.tables if len(self.by_table[table].workers) >= size]

    def next_end(self, active: Collection[str]) -> float | None:
        """When the first grace after a quorum ends, by the shard's clock; None without one.

        It is long ago where the reports came with a state or from another copy, of another clock.
        """
        return min(self._find_ends(active).values(), default=None)

    def find_ended(self, active: Collection[str], now: float) -> list[str]:
        """The tables that wait for nobody any more."""
        return [table for table, end in self._find_ends(active).items() if end <= now]

    def _find_ends(self, active: Collection[str]) -> dict[str, float]:
        # A complete one waits for nobody: a quiesce has kept it open.
        complete = dict.fromkeys(self.complete(active), 0.0)
        return {table: self._ends.get(table, 0.0) for table in self.quorate()} | complete

    def forget_times(self) -> None:
        """End every grace: its end is a time of another clock."""
        for times in (self._ends, self._opened, self._opened_before):
            times.clear()

    def _missing(self, table: str, active: Collection[str]) -> bool:
        reports = self.by_table[table]
        return not set(active).issubset((*reports.workers, *reports.sitting))


def weigh(message: Push) -> float:
    """The weight of a report: tokens^2 / window, its quantity times its tokens a step."""
    return message.tokens * message.tokens / message.window
