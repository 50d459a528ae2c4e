"""The report of an experiment: one HTML page that needs nothing from outside."""

import hashlib
import math
import platform
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deploy.experiments import charts
from deploy.experiments.accept_rules import staleness_distance
from deploy.experiments.charts import Series
from deploy.experiments.combinations import shown_value
from deploy.experiments.imported_runs import ImportedRun, imported
from deploy.experiments.runner import Folder, judge_sweep
from deploy.experiments.shapes.base import ShapeOutcome, kept
from deploy.experiments.statistics import mean_interval
from deploy.experiments.sweeps import RATES, Point, Rates, Sweep, read_rates, read_sweep
from deploy.experiments.trials import TrialResult
from ps import __version__
from ps.build_id import build_id
from shards.errors import BadInput

_DRAWN = 12  # points with a drawn curve; all are in the tables

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#111}
table{border-collapse:collapse;margin:1em 0;width:100%}td,th{border:1px solid #cbd2d9;padding:.25em
.5em;text-align:left;vertical-align:top}th{background:#f0f3f6}figure{display:inline-block;margin:0
1em 1em 0;width:460px;max-width:100%}svg text{font-size:10px}figcaption span{margin-right:1em;
white-space:nowrap;font-size:12px}pre{background:#f6f8fa;padding:.8em;overflow:auto}
.verdict{font-weight:bold}@media print{body{margin:0}figure{break-inside:avoid}}
"""


_READING = (
    "<p>Means over seeds with 95 % intervals (bootstrap of 10,000). Shares are of all workers'"
    " time: in steps, and at the gate; the rest is the network's.</p>"
)


class Measured(NamedTuple):
    """A point of a sweep with its results, one a seed; None for those that are not there."""

    point: Point
    results: list[TrialResult | None]

    @property
    def found(self) -> list[TrialResult]:
        return [one for one in self.results if one is not None]


def write_report(path: Path, out: Path) -> int:
    """Write the report of a folder with a sweep, shapes and imported runs; returns its bytes.

    Raises BadInput for a folder with none of them.
    """
    folder = Folder(path)
    outcomes, real = kept(path), imported(path)
    parts = ["<h1>Staleness experiments</h1>"]
    if outcomes:
        parts += _shapes(outcomes)
    if folder.sweep.exists():
        parts += _sweep(folder, read_sweep(folder.sweep, consent=True))
    elif not outcomes and not real:
        raise BadInput(
            path,
            expected="the folder of a sweep, of shapes or of imported runs",
            got="another" if path.is_dir() else "no folder there",
        )
    if real:
        parts += _real(folder, real)
    parts.append(_provenance())
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>Staleness experiments</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>"
    )
    out.write_text(page)
    return len(page.encode())


# --- shapes ---------------------------------------------------------------------------------------


def _shapes(outcomes: Sequence[ShapeOutcome]) -> list[str]:
    rows = [
        (
            f"{one.number}{' (control)' if one.control else ''}",
            one.title,
            one.preset,
            check.claim,
            check.published,
            check.measured,
            check.verdict,
        )
        for one in outcomes
        for check in one.checks
    ]
    verdicts = [
        (
            f"{one.number}{' (control)' if one.control else ''}",
            one.title,
            one.source,
            one.verdict,
            f"{len(one.trials)} + {one.tuned}",
            f"{one.cpu_s:.0f}",
        )
        for one in outcomes
    ]
    parts = [
        "<h2>Verdicts</h2>",
        _table(("shape", "claim", "source", "verdict", "trials + tuning", "CPU s"), verdicts),
        "<h2>Checks</h2>",
        _table(("shape", "title", "preset", "rule", "published", "measured", "verdict"), rows),
    ]
    parts += [f"<h3>Shape {one.number}: trials</h3>{_trials(one.trials)}" for one in outcomes]
    return parts


# --- sweeps ---------------------------------------------------------------------------------------


def _sweep(folder: Folder, sweep: Sweep) -> list[str]:
    points = [
        Measured(point, [folder.load(trial) for trial in point.trials]) for point in sweep.points
    ]
    status = folder.status(sweep)
    keys = list(dict.fromkeys(key for point in sweep.points for key in point.values))
    digest = hashlib.sha256(sweep.text.encode()).hexdigest()[:16]
    parts = [
        f"<h2>Sweep {escape(sweep.name)}</h2><p>{escape(str(status))}.</p>",
        _READING,
        _table(
            (
                *(keys or ["setting"]),
                *("error %", "loss", "staleness, mean", "compute share", "wait share", "seconds"),
                "updates",
                "diverged",
            ),
            (_point_row(one, keys) for one in points),
        ),
    ]
    if rates := read_rates(folder.path / RATES):
        parts += ["<h3>Rates chosen on seeds of their own</h3>", _rates(rates)]
    if sweep.expect:
        rows = [(one.rule, one.measured, one.verdict) for one in judge_sweep(sweep, folder.path)]
        parts += ["<h3>Rules</h3>", _table(("rule", "measured", "verdict"), rows)]
    drawn = _spread([one for one in points if one.found])
    if drawn:
        left = len(points) - len(drawn)
        if left:
            parts.append(f"<p>Curves of {_DRAWN} points; {left} more are in tables.</p>")
        parts += [
            *(
                charts.lines([_curve(one, over) for one in drawn], over, "error %")
                for over in ("gradients", "seconds", "updates")
            ),
            charts.bars([_histogram(one) for one in drawn], "staleness", "share of updates"),
        ]
    results = [result for one in points for result in one.found]
    parts += [
        f"<h3>Trials</h3>{_trials(results)}{_failures(folder, sweep)}",
        f"<h3>The sweep (sha256 {digest})</h3><pre>{escape(sweep.text)}</pre>",
        f"<p>{sum(folder.cost().values()):.0f} CPU seconds.</p>",
    ]
    return parts


def _rates(rates: Rates) -> str:
    rows = [
        (one.level, f"{one.best:g}", f"{one.greedy:g}", f"{one.error:.2f}", one.trials, one.cpu_s)
        for one in rates.values()
    ]
    return _table(("point", "best", "greedy", "error % of best", "trials", "CPU s"), rows)


def _spread(points: Sequence[Measured]) -> list[Measured]:
    """At most as many points as a chart takes, from the first to the last."""
    places = np.linspace(0, len(points) - 1, min(len(points), _DRAWN)).round().astype(int)
    return [points[place] for place in places]


def _point_row(one: Measured, keys: Sequence[str]) -> list[str]:
    given = one.point.values
    values = [shown_value(given[key]) if key in given else "-" for key in keys] or ["all"]
    found = one.found
    if not found:
        return [*values, *["-"] * 8]

    def shown(figures: Iterable[float]) -> str:
        known = [figure for figure in figures if math.isfinite(figure)]
        return str(mean_interval(known)) if known else "not finite"

    return [
        *values,
        shown(result.error for result in found),
        shown(result.curve[-1].loss for result in found),
        shown(result.mean_staleness for result in found),
        shown(result.compute_share for result in found),
        shown(result.wait_share for result in found),
        shown(result.seconds for result in found),
        shown(float(result.updates) for result in found),
        f"{sum(result.diverged_at is not None for result in found)} of {len(found)}",
    ]


def _curve(one: Measured, over: str) -> Series:
    """The mean error of the seeds, at the measurements that all of them reached."""
    length = min(len(result.curve) for result in one.found)
    points = [
        (
            float(np.mean([getattr(result.curve[at], over) for result in one.found])),
            float(np.mean([result.curve[at].error for result in one.found])),
        )
        for at in range(length)
    ]
    return Series(one.point.label, points)


def _histogram(one: Measured) -> Series:
    return _shares(one.point.label, one.found)


def _failures(folder: Folder, sweep: Sweep) -> str:
    failed = [trial for trial in sweep.trials if folder.failure(trial.id).exists()]
    rows = [(trial.id, folder.failure(trial.id).read_text().strip()) for trial in failed]
    return f"<h3>Failed</h3>{_table(('trial', 'reason'), rows)}" if rows else ""


# --- real runs ------------------------------------------------------------------------------------


def _real(folder: Folder, runs: Sequence[ImportedRun]) -> list[str]:
    """Imported runs, and their staleness over that of the simulated trials of their points."""
    simulated = _simulated(folder)
    rows: list[list[str]] = []
    drawn: list[str] = []
    for label in dict.fromkeys(one.label for one in runs):
        here = [one for one in runs if one.label == label]
        others = simulated.get(label, [])
        rows += [_real_row(run, others) for run in here]
        series = [_shares(f"real, {label}", [run.result for run in here])]
        if others:
            series.append(_shares(f"simulated, {label}", others))
        drawn.append(charts.bars(series, "staleness", "share of updates"))
    heading = (
        *("run", "point", "seed", "strategy", "workers", "error %", "staleness, mean"),
        *("KS to simulated", "wait share", "seconds", "updates"),
    )
    return ["<h2>Real runs</h2>", _table(heading, rows), *drawn[:_DRAWN]]


def _simulated(folder: Folder) -> dict[str, list[TrialResult]]:
    """The simulated trials of a folder, by the label of their point."""
    if not folder.sweep.exists():
        return {}
    points = read_sweep(folder.sweep, consent=True).points
    return {
        point.label: [found for trial in point.trials if (found := folder.load(trial))]
        for point in points
    }


def _real_row(run: ImportedRun, others: Sequence[TrialResult]) -> list[str]:
    result = run.result
    trial, error = result.trial, f"{result.error:.2f}"
    return [
        run.name,
        run.label,
        str(trial.seed),
        trial.strategy,
        str(trial.cluster.workers),
        error if math.isfinite(result.error) else "not tested",
        f"{result.mean_staleness:.2f}",
        f"{staleness_distance([result], others):.3f}" if others else "-",
        f"{result.wait_share:.3f}",
        f"{result.seconds:.4g}",
        str(result.updates),
    ]


# --- parts of all --------------------------------------------------------------------------------


def _shares(name: str, results: Sequence[TrialResult]) -> Series:
    """The share of updates of each staleness, over all of these trials."""
    total = np.zeros(max((len(result.staleness) for result in results), default=0))
    for result in results:
        total[: len(result.staleness)] += result.staleness
    shares = total / max(1.0, total.sum())
    return Series(name, [(float(at), float(share)) for at, share in enumerate(shares)])


def _trials(results: Iterable[TrialResult]) -> str:
    rows = [
        (
            one.trial.id,
            one.trial.seed,
            one.trial.strategy,
            f"{one.trial.rate:g}",
            one.trial.cluster.workers,
            f"{one.error:.2f}",
            f"{one.mean_staleness:.2f}",
            one.updates,
            f"{one.seconds:.5g}",
            "" if one.diverged_at is None else f"at update {one.diverged_at}",
        )
        for one in results
    ]
    heading = ("trial", "seed", "strategy", "rate", "workers", "error %", "staleness", "updates")
    return _table((*heading, "seconds", "diverged"), rows)


def _table(heading: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{escape(str(cell))}</th>" for cell in heading)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _provenance() -> str:
    return (
        f"<p>downpour {__version__} build {build_id()}, Python {platform.python_version()}, NumPy"
        f" {np.__version__}, {platform.machine()}. All times but CPU seconds are of the virtual"
        " clock.</p>"
    )
