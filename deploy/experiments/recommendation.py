"""A strategy and a staleness bound for a cluster, by a sweep of candidates on it.

The cluster is fitted to a real run (calibration.py) or measured. Each candidate has the rate that
is best for it, chosen on seeds and rows of their own. Candidates are ranked by the median time to
an error, in virtual seconds. One is advised if it is within a tenth of the fastest in 95 % of the
bootstrap draws of the seeds. While none is, those that may be run again with as many new seeds, up
to a limit; then nothing is advised, because the runs do not separate the fastest ones.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from deploy.experiments.runner import Folder, run_sweep
from deploy.experiments.shapes.base import times_to
from deploy.experiments.statistics import TargetTimes, near_best
from deploy.experiments.sweep_tuning import tune_sweep
from deploy.experiments.sweeps import Sweep, read_sweep
from deploy.experiments.target_times import SURE, usual_target
from deploy.experiments.trials import TrialResult
from shards import argument_checks
from shards.errors import BadInput, GiveUp

FIRST_SEED = 1000  # apart from those that choose rates
_LOOKS = 80
_CANDIDATES: tuple[tuple[str, int | None], ...] = (
    ("bsp", None),
    ("ssp", 1),
    ("ssp", 4),
    ("ssp", 16),
    ("asp", None),
    ("easgd:tau=5", None),
    ("easgd:tau=20", None),
)


class AdviceSettings(Struct, frozen=True, kw_only=True):
    """The problem that candidates are compared on, for how long, and to which error in percent.

    Without a `target` it is 1.2 times the least median error at the end of a candidate. Each
    candidate has `seeds` trials at first, and in the end up to `most_seeds`.
    """

    workload: str = "mlp"
    batch: int = 16
    gradients: int = 4000
    seeds: int = 8
    most_seeds: int = 64
    target: float | None = None

    def __post_init__(self) -> None:
        argument_checks.whole("seeds", self.seeds, 6, 1000)  # fewer have no interval
        argument_checks.whole("most_seeds", self.most_seeds, self.seeds)
        argument_checks.whole("gradients", self.gradients, _LOOKS)
        if self.target is not None:
            argument_checks.number("target", self.target, least=0, expected="0 or more")


class Candidate(NamedTuple):
    """A strategy with its bound and its rate, and its times to the target, one a seed."""

    strategy: str
    bound: int | None
    rate: float
    staleness: float
    times: TargetTimes

    @property
    def name(self) -> str:
        return self.strategy if self.bound is None else f"{self.strategy}, bound {self.bound}"

    @property
    def flags(self) -> str:
        """The options of `downpour train`."""
        bound = "" if self.bound is None else f" --staleness {self.bound}"
        return f"--strategy {self.strategy}{bound}"


class Ranked(NamedTuple):
    """A candidate with the bootstrap probability that it is within a tenth of the fastest."""

    candidate: Candidate
    near: float


class Recommendation(NamedTuple):
    """The candidates, the fastest first, and the error in percent that they were timed to."""

    target: float
    ranked: list[Ranked]

    @property
    def choice(self) -> Candidate | None:
        """The fastest of those that are surely near; None if none is."""
        sure = [entry.candidate for entry in self.ranked if entry.near >= SURE]
        return sure[0] if sure else None

    @property
    def is_open(self) -> bool:
        """True if more seeds may separate candidates that reach the target."""
        reached = any(math.isfinite(entry.candidate.times.median) for entry in self.ranked)
        return reached and self.choice is None

    def lines(self) -> list[str]:
        """The ranking as a table, and last the advice or why there is none."""
        heading = f"{'seconds to ' + format(self.target, '.3g') + ' % error':28}"
        out = [f"{'strategy':24}{'rate':>8}{'staleness':>11}  {heading}within a tenth"]
        for candidate, near in self.ranked:
            out.append(
                f"{candidate.name:24}{candidate.rate:8.3g}{candidate.staleness:11.2f}"
                f"  {candidate.times.show_interval():28}{near:.2f}"
            )
        return [*out, self._advise()]

    def _advise(self) -> str:
        best = self.choice
        if best is not None:
            others = [entry.candidate.name for entry in self.ranked if entry.near >= SURE][1:]
            equal = f"; as near: {', '.join(others)}" if others else ""
            return f"advised: {best.flags}{equal}"
        if not self.is_open:
            return "nothing is advised: no candidate reaches the target in half of its runs"
        names = [entry.candidate.name for entry in self.ranked if entry.near > 1 - SURE]
        return (
            f"nothing is advised: these runs do not separate {', '.join(names)}; raise --most-seeds"
        )


def rank_candidates(candidates: Sequence[Candidate], target: float) -> Recommendation:
    """Rank candidates with the same seeds by their median times; a miss is infinite."""
    near = near_best([candidate.times.values for candidate in candidates])
    ranked = [Ranked(*pair) for pair in zip(candidates, near, strict=True)]
    ranked.sort(key=lambda entry: (entry.candidate.times.median, -entry.near))
    return Recommendation(target, ranked)


def write_sweep(section: str, settings: AdviceSettings, lists: Sequence[str], seeds: range) -> str:
    """A sweep of candidates as TOML: `lists` has the lines of each, `section` is the cluster's."""
    return "\n".join(
        [
            'name = "advice"',
            f"seeds = [{seeds[0]}, {seeds[-1]}]",
            f'workload = "{settings.workload}"',
            f"batch = {settings.batch}",
            f"gradients = {settings.gradients}",
            f"look_every = {settings.gradients // _LOOKS}",
            "tested = 2000",
            "",
            section,
            "",
            *(f"[[list]]\n{lines}" for lines in lists),
            "",
        ]
    )


def recommend(
    section: str,
    settings: AdviceSettings,
    out: Path,
    *,
    jobs: int = 1,
    note: Callable[[str], None] = print,
) -> Recommendation:
    """Run the sweeps of the candidates in a folder, or what is left of them there, and rank them.

    `section` is the `[cluster]` section of a sweep. The rates are those of the first sweep.
    """

    def run(folder: Path, lists: Sequence[str], seeds: range) -> list[list[TrialResult]]:
        text = write_sweep(section, settings, lists, seeds)
        return _run_candidates(text, folder, jobs, note)

    seeds = range(FIRST_SEED, FIRST_SEED + settings.seeds)
    levels = run(out, [_describe(*entry) for entry in _CANDIDATES], seeds)
    target = usual_target(levels) if settings.target is None else settings.target
    ranking, slower = rank_results(levels, target), list[Ranked]()
    while ranking.is_open and 2 * len(seeds) <= settings.most_seeds:
        slower = [entry for entry in ranking.ranked if entry.near <= 1 - SURE] + slower
        near = dict(ranking.ranked)
        levels = [results for results in levels if near[_time(results, target)] > 1 - SURE]
        trials = [results[0].trial for results in levels]
        lists = [_describe(trial.strategy, trial.staleness, trial.rate) for trial in trials]
        new_seeds = range(seeds.stop, seeds.stop + len(seeds))
        more = run(out / f"seeds-{new_seeds.start}", lists, new_seeds)
        levels = [[*former, *later] for former, later in zip(levels, more, strict=True)]
        seeds = range(FIRST_SEED, new_seeds.stop)
        ranking = rank_results(levels, target)
    return Recommendation(target, [*ranking.ranked, *slower])


def _describe(strategy: str, bound: int | None, rate: float | str = '"best"') -> str:
    """The lines of a candidate in a sweep; without a rate, the best one for it is to be chosen."""
    lines = [f'strategy = "{strategy}"', f"rate = {rate}"]
    return "\n".join(lines if bound is None else [*lines, f"staleness = {bound}"])


def _run_candidates(
    text: str, out: Path, jobs: int, note: Callable[[str], None]
) -> list[list[TrialResult]]:
    """Run a sweep in a folder; returns the results of each candidate, in the order of seeds."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "advice.toml"
    file.write_text(text)
    sweep = tune_sweep(read_sweep(file), out, jobs=jobs, note=note)
    status = run_sweep(sweep, out, jobs=jobs, note=note)
    if status.failed:
        raise GiveUp(f"{out}: {status}; the reasons are in {out / 'failed'}")
    return _load_results(sweep, out)


def rank_results(
    levels: Sequence[Sequence[TrialResult]], target: float | None = None
) -> Recommendation:
    """Rank the results of candidates, a list of seeds for each."""
    if target is None:
        target = usual_target(levels)
    return rank_candidates([_time(results, target) for results in levels], target)


def _time(results: Sequence[TrialResult], target: float) -> Candidate:
    """The candidate that all these trials are of, with its times to the target."""
    trial = results[0].trial
    bound = None if trial.strategy == "bsp" else trial.staleness  # that of bsp is always 0
    staleness = float(np.mean([result.mean_staleness for result in results]))
    return Candidate(trial.strategy, bound, trial.rate, staleness, times_to(results, target))


def _load_results(sweep: Sweep, out: Path) -> list[list[TrialResult]]:
    folder = Folder(out)
    return [
        [result for trial in point.trials if (result := folder.load(trial)) is not None]
        for point in sweep.points
    ]


def describe_cluster(workers: int | None, step_s: float | None, link: str) -> str:
    """The section of a sweep for workers with even steps on equal links; raises BadInput."""
    if workers is None or step_s is None:
        raise BadInput("exp advise", expected="a RUN, or --workers and --step-s", got="neither")
    times = f"times = {{ mean_s = {step_s:g}, cv = 0.1 }}"
    return f'[cluster]\nworkers = {workers}\n{times}\nlink = "{link}"'
