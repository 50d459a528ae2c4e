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
from deploy.experiments.combinations import show_value
from deploy.experiments.imported_runs import ImportedRun, load_imported
from deploy.experiments.runner import Folder, judge_sweep
from deploy.experiments.shapes.base import ShapeOutcome, load_outcomes
from deploy.experiments.statistics import mean_interval
from deploy.experiments.sweeps import RATES, Point, Rates, Sweep, read_rates, read_sweep
from deploy.experiments.trial_table import list_stragglers
from deploy.experiments.trials import Trial, TrialResult
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
    def present(self) -> list[TrialResult]:
        return [result for result in self.results if result is not None]


def write_report(path: Path, out: Path) -> int:
    """Write the report of a folder with a sweep, shapes and imported runs; returns its bytes.

    Raises BadInput for a folder with none of them.
    """
    folder = Folder(path)
    outcomes, real = load_outcomes(path), load_imported(path)
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
            f"{outcome.name}{' (control)' if outcome.control else ''}",
            outcome.title,
            outcome.preset,
            check.claim,
            check.origin,
            check.published,
            check.measured,
            check.verdict,
        )
        for outcome in outcomes
        for check in outcome.checks
    ]
    verdicts = [
        (
            f"{outcome.name}{' (control)' if outcome.control else ''}",
            outcome.title,
            outcome.source,
            outcome.registered,
            outcome.verdict,
            f"{len(outcome.trials)} + {outcome.tuned}",
            f"{outcome.cpu_s:.0f}",
        )
        for outcome in outcomes
    ]
    parts = [
        "<h2>Verdicts</h2>",
        _table(
            ("shape", "claim", "source", "registered", "verdict", "trials + tuning", "CPU s"),
            verdicts,
        ),
        "<h2>Checks</h2>",
        _table(
            ("shape", "title", "preset", "rule", "origin", "published", "measured", "verdict"), rows
        ),
    ]
    parts += [
        f"<h3>Shape {outcome.name}: trials</h3>{_trials(outcome.trials)}" for outcome in outcomes
    ]
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
            (_point_row(point, keys) for point in points),
        ),
    ]
    if rates := read_rates(folder.path / RATES):
        parts += ["<h3>Rates chosen on seeds of their own</h3>", _rates(rates)]
    if sweep.expect:
        rows = [
            (judgement.rule, judgement.measured, judgement.verdict)
            for judgement in judge_sweep(sweep, folder.path)
        ]
        parts += ["<h3>Rules</h3>", _table(("rule", "measured", "verdict"), rows)]
    drawn = _spread([point for point in points if point.present])
    if drawn:
        undrawn = len(points) - len(drawn)
        if undrawn:
            parts.append(f"<p>Curves of {_DRAWN} points; {undrawn} more are in tables.</p>")
        parts += [
            *(
                charts.lines([_curve(point, over) for point in drawn], over, "error %")
                for over in ("gradients", "seconds", "updates")
            ),
            charts.bars([_histogram(point) for point in drawn], "staleness", "share of updates"),
        ]
    results = [result for point in points for result in point.present]
    parts += [
        f"<h3>Trials</h3>{_trials(results)}{_failures(folder, sweep)}",
        f"<h3>The sweep (sha256 {digest})</h3><pre>{escape(sweep.text)}</pre>",
        f"<p>{sum(folder.cost().values()):.0f} CPU seconds.</p>",
    ]
    return parts


def _rates(rates: Rates) -> str:
    rows = [
        (
            tuned.level,
            f"{tuned.best:g}",
            f"{tuned.greedy:g}",
            f"{tuned.error:.2f}",
            tuned.trials,
            tuned.cpu_s,
        )
        for tuned in rates.values()
    ]
    return _table(("point", "best", "greedy", "error % of best", "trials", "CPU s"), rows)


def _spread(points: Sequence[Measured]) -> list[Measured]:
    """At most as many points as a chart takes, from the first to the last."""
    indices = np.linspace(0, len(points) - 1, min(len(points), _DRAWN)).round().astype(int)
    return [points[index] for index in indices]


def _point_row(measured: Measured, keys: Sequence[str]) -> list[str]:
    values_of_point = measured.point.values
    values = [
        show_value(values_of_point[key]) if key in values_of_point else "-" for key in keys
    ] or ["all"]
    results = measured.present
    if not results:
        return [*values, *["-"] * 8]

    def show_mean(figures: Iterable[float]) -> str:
        known = [figure for figure in figures if math.isfinite(figure)]
        return str(mean_interval(known)) if known else "not finite"

    return [
        *values,
        show_mean(result.error for result in results),
        show_mean(result.curve[-1].loss for result in results),
        show_mean(result.mean_staleness for result in results),
        show_mean(result.compute_share for result in results),
        show_mean(result.wait_share for result in results),
        show_mean(result.seconds for result in results),
        show_mean(float(result.updates) for result in results),
        f"{sum(result.diverged_at is not None for result in results)} of {len(results)}",
    ]


def _curve(measured: Measured, over: str) -> Series:
    """The mean error of the seeds, at the measurements that all of them reached."""
    length = min(len(result.curve) for result in measured.present)
    points = [
        (
            float(np.mean([getattr(result.curve[at], over) for result in measured.present])),
            float(np.mean([result.curve[at].error for result in measured.present])),
        )
        for at in range(length)
    ]
    return Series(measured.point.label, points)


def _histogram(measured: Measured) -> Series:
    return _shares(measured.point.label, measured.present)


def _failures(folder: Folder, sweep: Sweep) -> str:
    failed = [trial for trial in sweep.trials if folder.failure(trial.id).exists()]
    rows = [(trial.id, folder.failure(trial.id).read_text().strip()) for trial in failed]
    return f"<h3>Failed</h3>{_table(('trial', 'reason'), rows)}" if rows else ""


# --- real runs ------------------------------------------------------------------------------------


def _real(folder: Folder, runs: Sequence[ImportedRun]) -> list[str]:
    """Imported runs, and their staleness over that of the simulated trials of their points."""
    simulated = _load_simulated(folder)
    rows: list[list[str]] = []
    drawn: list[str] = []
    for label in dict.fromkeys(run.label for run in runs):
        runs_of_point = [run for run in runs if run.label == label]
        others = simulated.get(label, [])
        rows += [_real_row(run, others) for run in runs_of_point]
        series = [_shares(f"real, {label}", [run.result for run in runs_of_point])]
        if others:
            series.append(_shares(f"simulated, {label}", others))
        drawn.append(charts.bars(series, "staleness", "share of updates"))
    heading = (
        *("run", "point", "seed", "strategy", "workers", "error %", "staleness, mean"),
        *("KS to simulated", "wait share", "seconds", "updates"),
    )
    return ["<h2>Real runs</h2>", _table(heading, rows), *drawn[:_DRAWN]]


def _load_simulated(folder: Folder) -> dict[str, list[TrialResult]]:
    """The simulated trials of a folder, by the label of their point."""
    if not folder.sweep.exists():
        return {}
    points = read_sweep(folder.sweep, consent=True).points
    return {
        point.label: [result for trial in point.trials if (result := folder.load(trial))]
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
            result.trial.id,
            result.trial.seed,
            result.trial.strategy,
            f"{result.trial.rate:g}",
            result.trial.cluster.workers,
            _describe_setting(result.trial),
            f"{result.error:.2f}",
            f"{result.mean_staleness:.2f}",
            result.updates,
            f"{result.seconds:.5g}",
            "" if result.diverged_at is None else f"at update {result.diverged_at}",
        )
        for result in results
    ]
    heading = ("trial", "seed", "strategy", "rate", "workers", "setting", "error %", "staleness")
    return _table((*heading, "updates", "seconds", "diverged"), rows)


def _describe_setting(trial: Trial) -> str:
    """The other settings of a trial in which it differs from its neighbours."""
    cluster, times = trial.cluster, trial.cluster.times
    texts = [f"{trial.workload}, batch {trial.batch}", trial.rule, f"steps {times}"]
    if trial.staleness is not None:
        texts.append(f"bound {trial.staleness}")
    if cluster.link:
        texts.append(f"link {cluster.link}")
    if cluster.delays:
        texts.append(f"delays 0 to {cluster.delays}")
    if cluster.stragglers:
        texts.append(f"slow {list_stragglers(cluster)}")
    texts.append(f"tested on {trial.tested}{' held out' if trial.held_out else ''}")
    if trial.until_error >= 0:
        texts.append(f"until {trial.until_error:g} %")
    usual = Trial()
    others = ("schedule", "decay", "fragments", "on_stale")
    texts += [
        f"{name} {value}"
        for name in others
        if (value := getattr(trial, name)) != getattr(usual, name)
    ]
    return "; ".join(texts)


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
