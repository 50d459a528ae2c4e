"""The figures of update records: their sums, and the means that follow from these.

The progress display, `summary.json`, the readings of a job of the service, callbacks and the loss
line of a solver all compute them here, so that they agree.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.void]
RecordColumns = Rows | Mapping[str, NDArray[Any]]

LARGEST_STALENESS = 64

TALLIED = ("staleness", "clock_gap", "samples", "loss")
"""The columns of records of which a tally is made."""


class UpdateTally(msgspec.Struct, frozen=True):
    """Sums over update records, in constant memory for a run of any length.

    All of them, `rows` and `samples` included, count each update once for every shard. `loss_sum`
    is over the `losses` that are finite; `not_finite` losses are counted apart.
    """

    rows: int = 0
    samples: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    max_clock_gap: int = 0
    losses: int = 0
    loss_sum: float = 0.0
    not_finite: int = 0

    @classmethod
    def of(cls, records: Iterable[RecordColumns]) -> "UpdateTally":
        """The tally of records, or of their columns `TALLIED` as arrays of equal length."""
        total = cls()
        for rows in records:
            staleness, losses = rows["staleness"], finite_losses(rows)
            if len(staleness):
                total += cls(
                    rows=len(staleness),
                    samples=int(rows["samples"].sum()),
                    staleness_sum=int(staleness.sum()),
                    staleness_max=int(staleness.max()),
                    max_clock_gap=int(rows["clock_gap"].max()),
                    losses=len(losses),
                    loss_sum=float(losses.sum()),
                    not_finite=len(staleness) - len(losses),
                )
        return total

    def __add__(self, other: "UpdateTally") -> "UpdateTally":
        return UpdateTally(
            rows=self.rows + other.rows,
            samples=self.samples + other.samples,
            staleness_sum=self.staleness_sum + other.staleness_sum,
            staleness_max=max(self.staleness_max, other.staleness_max),
            max_clock_gap=max(self.max_clock_gap, other.max_clock_gap),
            losses=self.losses + other.losses,
            loss_sum=self.loss_sum + other.loss_sum,
            not_finite=self.not_finite + other.not_finite,
        )

    @property
    def staleness_mean(self) -> float | None:
        """The mean staleness; None before the first update."""
        return self.staleness_sum / self.rows if self.rows else None

    @property
    def largest_staleness(self) -> int | None:
        """The largest staleness; None before the first update."""
        return self.staleness_max if self.rows else None

    @property
    def loss_mean(self) -> float | None:
        """The mean of the finite losses; None without any."""
        return self.loss_sum / self.losses if self.losses else None


class StalenessCounts:
    """The updates of a run by their staleness, in constant memory.

    `counts[n]` are those with staleness n; the last one counts all from `LARGEST_STALENESS` on.
    """

    def __init__(self) -> None:
        self.counts: NDArray[np.int64] = np.zeros(LARGEST_STALENESS + 1, np.int64)

    def add(self, rows: RecordColumns) -> None:
        """Count these updates."""
        values = np.clip(rows["staleness"], 0, LARGEST_STALENESS)
        self.counts += np.bincount(values, minlength=LARGEST_STALENESS + 1)

    def quantile(self, share: float) -> float | None:
        """The staleness that `share` of the updates do not exceed; None before the first update."""
        total = int(self.counts.sum())
        if not total:
            return None
        return float(np.searchsorted(np.cumsum(self.counts), share * total))


class RecentLoss:
    """The mean loss of the last `updates` updates, as shard 0 records them."""

    def __init__(self, updates: int) -> None:
        self._losses: deque[float] = deque(maxlen=updates)

    def add(self, records: Sequence[Rows]) -> None:
        """Add the records of updates since the last call, one array for each shard."""
        if records:
            self._losses.extend(finite_losses(records[0]).tolist())

    @property
    def mean(self) -> float | None:
        """The mean loss; None before the first update."""
        return math.fsum(self._losses) / len(self._losses) if self._losses else None


def finite_losses(rows: RecordColumns) -> NDArray[np.float64]:
    """The losses of these updates without NaN, which a push without a loss has, and infinity."""
    losses: NDArray[np.float64] = rows["loss"]
    return losses[np.isfinite(losses)]
