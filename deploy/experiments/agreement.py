"""The distance between the records of two runs of one job: staleness, throughput and waits.

Neighbouring updates depend on each other, so there is no p-value: the distances are those of the
distributions, and a mean has an interval of whole blocks.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Records = NDArray[np.void]


class Agreement(NamedTuple):
    """A simulated run against a real one.

    `distance` is the Kolmogorov-Smirnov distance of the distributions of staleness, `wasserstein`
    the Wasserstein distance in updates. `throughput` is the relative difference of the steps a
    second, `wait_share` the difference of the shares of time at the gate, both simulated less real.
    """

    distance: float
    wasserstein: float
    throughput: float
    wait_share: float


def agreement(real: Records, simulated: Records) -> Agreement:
    """Compare records of dtype RECORD (shards/update_records.py)."""
    rates = [_steps_a_second(rows) for rows in (real, simulated)]
    return Agreement(
        distance(real, simulated),
        float(np.abs(np.subtract(*_distributions(real, simulated))).sum()),
        rates[1] / rates[0] - 1,
        _wait_share(simulated) - _wait_share(real),
    )


def distance(first: Records, second: Records) -> float:
    """The Kolmogorov-Smirnov distance: the largest difference of the distributions of staleness."""
    return float(np.abs(np.subtract(*_distributions(first, second))).max())


def _distributions(*runs: Records) -> list[NDArray[np.float64]]:
    """The share of updates with at most each staleness from 0."""
    length = 1 + int(max(rows["staleness"].max() for rows in runs))
    return [
        np.cumsum(np.bincount(rows["staleness"], minlength=length)) / len(rows) for rows in runs
    ]


def _steps_a_second(rows: Records) -> float:
    """The steps recorded after the first update, over the time since then."""
    return float(rows["steps"][1:].sum() / max(1e-9, _span_s(rows)))


def _wait_share(rows: Records) -> float:
    return float(rows["wait_s"].sum()) / (len(np.unique(rows["worker"])) * max(1e-9, _span_s(rows)))


def _span_s(rows: Records) -> float:
    return float(rows["time"].max() - rows["time"].min())
