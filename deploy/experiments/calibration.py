"""Fits the cluster of a simulation to the records of a real run, and states how well it fits.

A record has three spans. `wall_age_s` runs from when the shard sent weights to when it applied the
gradient: down the link, the steps, up the link. `rtt_s` runs from sending a push to seeing its
answer: up the link, the application, back. So, with pushes and pulls of one size,

    step time = (wall_age_s - rtt_s) / steps

and one end of a worker's round trips is its link. Bytes differ between pushes only if they are
compressed; then the slope of the round trip in the bytes is the bandwidth. Otherwise latency and
bandwidth cannot be told apart, and the fit has a round trip only, which holds for tables of this
size. The application time is at most the least span between two records of a shard; the simulator
takes it as none, so it is only printed.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deploy.experiments.cluster import Law, StepTimes
from deploy.experiments.run_records import read_record
from shards.errors import BadInput

Numbers = NDArray[np.float64]

_COLUMNS = ("time", "worker", "shard", "steps", "wall_age_s", "wait_s", "rtt_s", "bytes", "dropped")
_FEWEST = 10  # records of a worker
_APART = 1.25  # times the median, or a part of it, from which a worker has a factor of its own
_QUICK = 0.2e-3  # round trips below this are those of one machine: no link


class ClusterFit(NamedTuple):
    """A fitted cluster. Times are in seconds; `distance` is the Kolmogorov distance of the step
    times from the fitted distribution, `throughput` the ratio of predicted to recorded steps."""

    workers: int
    shards: int
    mean_s: float
    cv: float
    stragglers: dict[str, float]
    links: dict[str, str]
    apply_s: float
    distance: float
    throughput: float
    records: int

    @property
    def link(self) -> str:
        """The link that most workers have, as a text."""
        texts = [*self.links.values()]
        return max(texts, key=texts.count)

    @property
    def section(self) -> str:
        """The `[cluster]` section of a sweep."""
        link = self.link
        others = {name: text for name, text in self.links.items() if text != link}
        lines = [
            "[cluster]",
            f"workers = {self.workers}",
            f"shards = {self.shards}",
            f"times = {{ mean_s = {self.mean_s:.4g}, cv = {self.cv:.3g} }}",
            f'link = "{link}"',
        ]
        if others:
            others_text = ", ".join(f'{name} = "{text}"' for name, text in others.items())
            lines.append(f"links = {{ {others_text} }}")
        if self.stragglers:
            slow = ", ".join(f"{name} = {factor:.2f}" for name, factor in self.stragglers.items())
            lines.append(f"stragglers = {{ {slow} }}")
        return "\n".join(lines)

    @property
    def quality(self) -> str:
        """The quality of the fit, in one line."""
        return (
            f"{self.records} records of {self.workers} workers; step times differ from the fitted"
            f" distribution by {self.distance:.3f} (Kolmogorov), steps a second are"
            f" {self.throughput:.2f} times those recorded, an application takes at most"
            f" {self.apply_s * 1e3:.3g} ms"
        )


def fit_run(path: Path) -> ClusterFit:
    """Fit the records of a run folder, of its updates.parquet, or of an imported run's file.

    Workers are numbered in the order of their names. Raises BadInput for records that do not
    suffice.
    """
    table = read_record(path, _COLUMNS).to_pydict()
    names = np.array(table.pop("worker"))
    return fit_rows(str(path), names, {k: np.array(v, np.float64) for k, v in table.items()})


def fit_rows(origin: str, names: NDArray[Any], rows: dict[str, Numbers]) -> ClusterFit:
    """Fit records in columns: the workers' names, and the other columns of updates.parquet.

    `origin` is where they are from, for errors. Raises BadInput for records that do not suffice.
    """
    whole = (rows["dropped"] == 0) & np.isfinite(rows["wall_age_s"]) & np.isfinite(rows["rtt_s"])
    first = rows["shard"] == 0
    workers = sorted(set(names[first].tolist()))
    per_worker = [whole & first & (names == name) for name in workers]
    fewest = min((int(rows_of_worker.sum()) for rows_of_worker in per_worker), default=0)
    if fewest < _FEWEST:
        raise BadInput(
            origin,
            expected=f"{_FEWEST} records of each worker with wall_age_s and rtt_s",
            got=fewest,
        )
    steps = [
        np.maximum(rows["wall_age_s"][selected] - rows["rtt_s"][selected], 1e-9)
        / np.maximum(rows["steps"][selected], 1)
        for selected in per_worker
    ]
    medians = [float(np.median(times)) for times in steps]
    usual = float(np.median(medians))
    factors = {
        f"worker-{number}": median / usual
        for number, median in enumerate(medians)
        if not usual / _APART <= median <= _APART * usual
    }
    scaled = np.concatenate(
        [times / factors.get(f"worker-{number}", 1.0) for number, times in enumerate(steps)]
    )
    mean, cv = float(scaled.mean()), float(scaled.std() / scaled.mean())
    links = {
        f"worker-{number}": _link(rows["rtt_s"][selected], rows["bytes"][selected])
        for number, selected in enumerate(per_worker)
    }
    spans = np.diff(rows["time"][first])
    return ClusterFit(
        workers=len(workers),
        shards=int(rows["shard"].max()) + 1,
        mean_s=mean,
        cv=cv,
        stragglers=factors,
        links=links,
        apply_s=float(spans[spans > 0].min(initial=math.inf)),
        distance=_distance(scaled, StepTimes(mean_s=mean, law=Law.LOGNORMAL, cv=cv)),
        throughput=_throughput(rows, per_worker, mean, factors),
        records=int(first.sum()),
    )


def _link(rtt_s: Numbers, sizes: Numbers) -> str:
    """The link that a worker's round trips show, as a text; empty for one machine."""
    if len(np.unique(sizes)) > 1:
        slope, start = np.polyfit(sizes, rtt_s, 1)
        if slope > 0 and start > 0:
            return f"rtt={start * 1e3:.3g}ms,rate={8 / slope / 1e6:.3g}Mbit"
    usual = float(np.median(rtt_s))
    return f"rtt={usual * 1e3:.3g}ms" if usual > _QUICK else ""


def _distance(step_times: Numbers, times: StepTimes) -> float:
    """The Kolmogorov distance of step times from a distribution, by a large sample of it."""
    draws = times.draws(0, 0)
    drawn = np.sort([next(draws) for _ in range(10_000)])
    ordered = np.sort(step_times)
    expected = np.searchsorted(drawn, ordered) / len(drawn)
    return float(np.abs(expected - (np.arange(len(ordered)) + 0.5) / len(ordered)).max())


def _throughput(
    rows: dict[str, Numbers],
    per_worker: Sequence[NDArray[np.bool_]],
    mean: float,
    factors: dict[str, float],
) -> float:
    """Steps a second as the fit predicts them for what was recorded, over those recorded: a push
    takes its steps, a round trip and its wait."""
    predicted = recorded = 0.0
    for number, selected in enumerate(per_worker):
        counts, time = rows["steps"][selected], rows["time"][selected]
        each_s = mean * factors.get(f"worker-{number}", 1.0)
        spent = (
            each_s * counts
            + np.median(rows["rtt_s"][selected])
            + np.nan_to_num(rows["wait_s"][selected])
        )
        predicted += float(counts.sum() / spent.sum())
        recorded += float(counts[1:].sum() / max(1e-9, time[-1] - time[0]))
    return predicted / recorded
