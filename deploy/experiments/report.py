"""The report of an experiment: one HTML page that needs nothing from outside.

Its pictures can be written as SVG files as well.
"""

import hashlib
import math
import platform
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deploy.experiments import charts
from deploy.experiments.accept_rules import (
    ExpectationVerdict,
    Judgement,
    PointResults,
    staleness_distance,
)
from deploy.experiments.charts import Chart, Series
from deploy.experiments.combinations import show_value
from deploy.experiments.imported_runs import ImportedRun, load_imported
from deploy.experiments.runner import Folder, judge_sweep
from deploy.experiments.shapes.base import ShapeOutcome, load_outcomes
from deploy.experiments.statistics import mean_interval, median_interval
from deploy.experiments.sweeps import RATES, Point, Rates, Sweep, read_rates, read_sweep
from deploy.experiments.target_times import FEWEST, PointRanking, rank_points
from deploy.experiments.trial_table import describe_setting
from deploy.experiments.trials import TrialResult
from ps import __version__
from ps.build_id import build_id
from shards import argument_checks
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
_TIMES = (
    "<p>Medians over seeds with 95 % intervals; a run that misses the target is infinite. The last"
    " column is the share of 10,000 bootstrap draws of the seeds in which the median is within a"
    " tenth of the least.</p>"
)


class Picture(NamedTuple):
    """A chart of the page; `name` is that of its file."""

    name: str
    chart: Chart


Part = str | Picture


class Measured(NamedTuple):
    """A point of a sweep with its results, one a seed; None for those that are not there."""

    point: Point
    results: list[TrialResult | None]

    @property
    def present(self) -> list[TrialResult]:
        return [result for result in self.results if result is not None]

    @property
    def whole(self) -> bool:
        """True if there are trials, and all of them are done."""
        return bool(self.results) and None not in self.results


def write_report(
    path: Path, out: Path, *, figures: Path | None = None, target: float | None = None
) -> int:
    """Write the report of a folder with a sweep, shapes and imported runs; returns its bytes.

    The pictures are also written to the folder `figures`, as SVG files. A sweep's points are timed
    to an error of `target` percent (target_times.py has the usual one). Raises BadInput for a
    folder without experiments.
    """
    if target is not None:
        argument_checks.number("target", target, least=0, expected="0 or more")
    folder = Folder(path)
    outcomes, real = load_outcomes(path), load_imported(path)
    parts: list[Part] = ["<h1>Staleness experiments</h1>"]
    if outcomes:
        parts += _shapes(outcomes)
    if folder.sweep.exists():
        parts += _sweep(folder, read_sweep(folder.sweep, consent=True), target)
    elif not outcomes and not real:
        raise BadInput(
            path,
            expected="the folder of a sweep, of shapes or of imported runs",
            got="another" if path.is_dir() else "no folder there",
        )
    if real:
        parts += _real(folder, real)
    parts.append(_provenance())
    body = "".join(part.chart.html if isinstance(part, Picture) else part for part in parts)
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>Staleness experiments</title><style>{_STYLE}</style></head>"
        f"<body>{body}</body></html>"
    )
    out.write_text(page)
    if figures is not None:
        _write_pictures([part for part in parts if isinstance(part, Picture)], figures)
    return len(page.encode())


def _write_pictures(pictures: Sequence[Picture], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in pictures:
            (folder / f"{picture.name}.svg").write_text(picture.chart.file)
    except OSError as error:
        raise BadInput(f"{folder}: expected to write pictures, got: {error.strerror}") from None


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


def _sweep(folder: Folder, sweep: Sweep, target: float | None) -> list[Part]:
    points = [
        Measured(point, [folder.load(trial) for trial in point.trials]) for point in sweep.points
    ]
    status = folder.status(sweep)
    keys = list(dict.fromkeys(key for point in sweep.points for key in point.values))
    digest = hashlib.sha256(sweep.text.encode()).hexdigest()[:16]
    rankings = rank_points(
        [PointResults(p.point.values, p.present) for p in points if p.whole], target
    )
    judged = judge_sweep(sweep, folder.path)
    parts: list[Part] = [
        f"<h2>Sweep {escape(sweep.name)}</h2><p>{escape(str(status))}.</p>",
        *(f'<p class="verdict">{escape(text)}</p>' for text in _verdicts(rankings, judged)),
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
    if rankings:
        parts += ["<h3>Ranking</h3>", _TIMES, *map(_ranking, rankings)]
    if judged:
        rows = [(judgement.rule, judgement.measured, judgement.verdict) for judgement in judged]
        parts += ["<h3>Rules</h3>", _table(("rule", "measured", "verdict"), rows)]
    drawn = _spread([point for point in points if point.present])
    if drawn:
        undrawn = len(points) - len(drawn)
        if undrawn:
            parts.append(f"<p>Curves of {_DRAWN} points; {undrawn} more are in tables.</p>")
        shares = charts.bars([_histogram(p) for p in drawn], "staleness", "share of updates")
        parts += [
            f"<p>{_describe_bands(drawn)}</p>",
            *(
                Picture(
                    f"sweep-{over}",
                    charts.lines([draw_curve(point, over) for point in drawn], over, "error %"),
                )
                for over in ("gradients", "seconds", "updates")
            ),
            Picture("sweep-staleness", shares),
        ]
    results = [result for point in points for result in point.present]
    parts += [
        f"<h3>Trials</h3>{_trials(results)}{_failures(folder, sweep)}",
        f"<h3>The sweep (sha256 {digest})</h3><pre>{escape(sweep.text)}</pre>",
        f"<p>{sum(folder.cost().values()):.0f} CPU seconds.</p>",
    ]
    return parts


def _verdicts(rankings: Sequence[PointRanking], judged: Sequence[Judgement]) -> list[str]:
    """The best points, and the count of the rules that held, in a sentence each."""
    sentences = [ranking.verdict for ranking in rankings[:_DRAWN]]
    if judged:
        counts = (
            f"{sum(judgement.verdict is verdict for judgement in judged)} {verdict}"
            for verdict in ExpectationVerdict
        )
        sentences.append(f"Of {len(judged)} rules: {', '.join(counts)}.")
    return sentences


def _ranking(ranking: PointRanking) -> str:
    """The table of a ranking."""
    times = ranking.target is not None
    heading = (
        ranking.condition or "point",
        ranking.figure,
        *(["updates"] if times else []),
        "within a tenth",
    )
    rows = [
        (
            point.label,
            point.figures.show_interval(),
            *([point.updates.show_interval()] if point.updates else []),
            f"{point.near:.2f}",
        )
        for point in ranking.points
    ]
    return _table(heading, rows)


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


def draw_curve(measured: Measured, over: str) -> Series:
    """The median error of the seeds and its 95 % interval, or their range where they are few.

    It ends where the first of the runs ends. One that diverged keeps the error of a guess.
    """
    runs = [
        np.array([(getattr(look, over), look.error) for look in result.curve], np.float64).T
        for result in measured.present
    ]
    ends = [
        at[-1]
        for (at, _), result in zip(runs, measured.present, strict=True)
        if result.diverged_at is None
    ]
    last = min(ends) if ends else max(at[-1] for at, _ in runs)
    grid = np.unique(np.concatenate([at[at <= last] for at, _ in runs]))
    grid = grid[
        np.linspace(0, len(grid) - 1, min(len(grid), charts.MAX_POINTS)).round().astype(int)
    ]
    errors = np.sort([np.interp(grid, at, error) for at, error in runs], axis=0)
    if len(runs) < FEWEST:
        middle, lows, highs = errors[len(runs) // 2], errors[0], errors[-1]
    else:
        middle, lows, highs = np.transpose([median_interval(column) for column in errors.T])
    points = list(zip(grid.tolist(), middle.tolist(), strict=True))
    band = list(zip(lows.tolist(), highs.tolist(), strict=True)) if len(runs) > 1 else []
    return Series(measured.point.label, points, band)


def _describe_bands(drawn: Sequence[Measured]) -> str:
    seeds = [len(point.present) for point in drawn]
    if max(seeds) == 1:
        return "Lines are of one seed."
    if min(seeds) >= FEWEST:
        return "Lines are medians over seeds, bands their 95 % intervals."
    return (
        f"Lines are medians over seeds, bands the range of the seeds, for fewer than {FEWEST} have"
        " no 95 % interval."
    )


def _histogram(measured: Measured) -> Series:
    return _shares(measured.point.label, measured.present)


def _failures(folder: Folder, sweep: Sweep) -> str:
    failed = [trial for trial in sweep.trials if folder.failure(trial.id).exists()]
    rows = [(trial.id, folder.failure(trial.id).read_text().strip()) for trial in failed]
    return f"<h3>Failed</h3>{_table(('trial', 'reason'), rows)}" if rows else ""


# --- real runs ------------------------------------------------------------------------------------


def _real(folder: Folder, runs: Sequence[ImportedRun]) -> list[Part]:
    """Imported runs, and their staleness over that of the simulated trials of their points."""
    simulated = _load_simulated(folder)
    rows: list[list[str]] = []
    drawn: list[Part] = []
    for label in dict.fromkeys(run.label for run in runs):
        runs_of_point = [run for run in runs if run.label == label]
        others = simulated.get(label, [])
        rows += [_real_row(run, others) for run in runs_of_point]
        series = [_shares(f"real, {label}", [run.result for run in runs_of_point])]
        if others:
            series.append(_shares(f"simulated, {label}", others))
        shares = charts.bars(series, "staleness", "share of updates")
        drawn.append(Picture(f"real-{len(drawn) + 1}-staleness", shares))
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
            describe_setting(result.trial),
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
