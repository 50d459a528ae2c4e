"""What a run came to: faults by kind, pushes acknowledged, lost and doubled, reads, and times.

Every kind has two times. *Again*: from a fault's healing (a kill: from when the process is
gone) to the touched worker's next acknowledgement. *Silent*: the longest that such a worker had no
acknowledgement, from the fault's beginning to then. For a kill of a shard or of a coordinator the
second acknowledgement counts, since the first may have been on its way.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.bench.report import Goal
from tests.chaos.faults import Met
from tests.chaos.oracle import Breach, Found
from tests.chaos.record import Verdict
from tests.chaos.schedule import KILLS, LINK_KINDS, Kind

_SHOWN = 20
_STALLS = (Kind.STOP_WORKER, Kind.STOP_SHARD, *LINK_KINDS)


class Outcome(NamedTuple):
    """A whole run; `found` is what its reads prove, None if it broke before there were any."""

    level: str
    seed: int
    seconds: float
    done: Mapping[Kind, int]
    met: Sequence[Met]
    verdicts: Sequence[Verdict]
    broken: str
    rss_mb_per_h: Mapping[str, float]
    found: Found | None = None
    bound: int | None = None
    rollback_s: float | None = None
    kills_wanted: int = 0
    joins: Sequence[int] = ()

    @property
    def kills(self) -> int:
        return sum(self.done.get(kind, 0) for kind in KILLS)

    @property
    def kept(self) -> bool:
        """Whether every promise was kept."""
        return (
            not self.broken
            and bool(self.verdicts)
            and all(v.kept for v in self.verdicts)
            and self.found is not None
            and not self.found.findings
        )


def spread(values: Iterable[float]) -> tuple[float, float, float]:
    """Median, 99th percentile and maximum."""
    found = np.fromiter(values, float)
    p50, p99 = np.percentile(found, [50, 99])
    return float(p50), float(p99), float(found.max())


def table(outcome: Outcome) -> str:
    """The run as text."""
    head = f"{'':28}{'faults':>7}{'again ms: p50':>15}{'p99':>8}{'max':>8}{'silent ms: max':>16}"
    lines = [head]
    for kind in Kind:
        met = [one for one in outcome.met if one.kind is kind]
        if not met:
            continue
        p50, p99, most = (1e3 * value for value in spread(one.again_s for one in met))
        silent = 1e3 * max(one.silent_s for one in met)
        count = outcome.done[kind]
        lines.append(f"{kind:28}{count:7d}{p50:15.0f}{p99:8.0f}{most:8.0f}{silent:16.0f}")
    lines += ["", "pushes, summed over shards"]
    lines.append(f"{'':8}{'acknowledged':>14}{'applied':>10}{'sent':>10}{'lost':>7}{'doubled':>9}")
    for worker in sorted({verdict.worker for verdict in outcome.verdicts}):
        lines.append(_row(worker, [v for v in outcome.verdicts if v.worker == worker]))
    lines.append(_row("all", outcome.verdicts))
    lines += [f"not kept: {verdict}" for verdict in outcome.verdicts if not verdict.kept]
    if outcome.found is not None:
        lines += ["", *_reads(outcome.found, outcome.bound, outcome.rollback_s)]
    if outcome.joins:
        counts = ", ".join(f"{n} in {k}" for k, n in sorted(Counter(outcome.joins).items()))
        lines += [f"exchanges until a life's first report was merged: {counts}"]
    killed = [f"{outcome.done[kind]} {kind}" for kind in KILLS if outcome.done.get(kind)]
    lines += [f"kills: {', '.join(killed) or 'none'}"]
    if outcome.met:
        again = max(one.again_s for one in outcome.met)
        lines += [f"longest time from a fault's end to the next acknowledgement: {again:.2f} s"]
    for name, slope in outcome.rss_mb_per_h.items():
        lines.append(f"{name}: {slope:+.1f} MB of memory an hour")
    if outcome.broken:
        lines.append(f"broken: {outcome.broken}")
    lines.append(
        f"level {outcome.level}, seed {outcome.seed}: {outcome.kills} kills,"
        f" {sum(outcome.done.values())} faults in {outcome.seconds:.0f} s:"
        f" {'every promise was kept' if outcome.kept else 'NOT KEPT'}"
    )
    return "\n".join(lines)


def _reads(found: Found, bound: int | None, rollback_s: float | None) -> Iterator[str]:
    wrong = {breach: found.count(breach) for breach in Breach}
    counts = ", ".join(f"{count} {breach}" for breach, count in wrong.items() if count)
    yield f"{found.reads} reads judged: {counts or 'nothing wrong'}"
    if bound is not None:
        times = f"{found.judged} times for one worker at one shard"
        yield f"  furthest behind: {found.behind} steps, bound {bound}, judged {times}"
    if rollback_s is not None:
        yield f"  oldest push that a death took back: {found.taken_back_s:.2f} s"
    yield from (f"  {finding}" for finding in found.findings[:_SHOWN])
    if len(found.findings) > _SHOWN:
        yield f"  and {len(found.findings) - _SHOWN} more"


def _row(name: str, verdicts: Sequence[Verdict]) -> str:
    sums = [
        sum(getattr(verdict, field) for verdict in verdicts)
        for field in ("acknowledged", "applied", "sent", "lost", "doubled")
    ]
    return "{:8}{:14d}{:10d}{:10d}{:7d}{:9d}".format(name, *sums)


def goals(outcome: Outcome) -> list[Goal]:
    """The goals that this run has figures for."""
    rows = [
        Goal("acknowledged pushes lost", sum(v.lost for v in outcome.verdicts), 0),
        Goal("pushes doubled", sum(v.doubled for v in outcome.verdicts), 0),
        Goal("real kills", outcome.kills, outcome.kills_wanted or 200, at_least=True),
    ]
    if outcome.joins:
        rows.append(Goal("exchanges until a joiner's report is merged", max(outcome.joins), 2))
    if outcome.found is not None:
        rows.append(Goal("reads with something wrong", len(outcome.found.findings), 0))
        if outcome.bound is not None:
            rows.append(Goal("furthest behind", outcome.found.behind, outcome.bound, "steps"))
        if outcome.rollback_s is not None:
            taken_s = outcome.found.taken_back_s
            rows.append(Goal("taken back by a death", taken_s, outcome.rollback_s, "s"))
    shards = [one.again_s for one in outcome.met if one.kind is Kind.KILL_SHARD]
    if shards and outcome.level != "replicated":
        rows.append(Goal("a shard begun again from its log", max(shards), 8, "s"))
    elif shards:
        p50, p99, _ = spread(shards)
        rows.append(Goal("kill -9 of a shard -> acknowledged again, p50", 1e3 * p50, 100, "ms"))
        rows.append(Goal("kill -9 of a shard -> acknowledged again, p99", 1e3 * p99, 500, "ms"))
    for kind in _STALLS:
        took = [one.again_s for one in outcome.met if one.kind is kind]
        if took:
            rows.append(Goal(f"{kind}, healed -> acknowledged again", max(took), 1, "s"))
    cuts = [one.again_s for one in outcome.met if one.kind in LINK_KINDS]
    if cuts:
        what = f"{len(cuts)} cuts, healed -> acknowledged again"
        p50, _, most = spread(cuts)
        rows += [Goal(f"{what}, p50", p50, 1, "s"), Goal(f"{what}, longest", most, 1, "s")]
    for name, slope in outcome.rss_mb_per_h.items():
        rows.append(Goal(f"{name}: memory", slope, 1, "MB/h"))
    return rows


def figures(outcome: Outcome) -> dict[str, Any]:
    """The run as JSON."""
    return {
        "level": outcome.level,
        "seed": outcome.seed,
        "seconds": outcome.seconds,
        "kept": outcome.kept,
        "broken": outcome.broken,
        "faults": {str(kind): number for kind, number in Counter(outcome.done).items()},
        "again_s": {
            str(kind): spread(one.again_s for one in outcome.met if one.kind is kind)
            for kind in {one.kind for one in outcome.met}
        },
        "verdicts": [
            one._asdict() | {"lost": one.lost, "doubled": one.doubled} for one in outcome.verdicts
        ],
        "joins": list(outcome.joins),
        "reads": None if outcome.found is None else _figures_of_reads(outcome.found),
        "rss_mb_per_h": dict(outcome.rss_mb_per_h),
    }


def _figures_of_reads(found: Found) -> dict[str, Any]:
    return {
        "reads": found.reads,
        "judged": found.judged,
        "behind": found.behind,
        "taken_back_s": found.taken_back_s,
        "wrong": {str(breach): found.count(breach) for breach in Breach},
        "findings": [str(finding) for finding in found.findings],
    }
