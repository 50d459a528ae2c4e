"""The parts of every shape: a claim of the literature, checks with accept rules, and a verdict.

A shape's checks and their accept rules are those of the design, written before the first run. Each
check is judged by itself. The shape is reproduced if all of its checks are; it is not if one of
them is not; otherwise an interval was too wide, or a part is missing, and it is inconclusive.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import structs

from deploy.experiments.runner import Folder
from deploy.experiments.statistics import Interval, TargetTimes
from deploy.experiments.trials import Trial, TrialResult, run_trials, with_seed
from deploy.experiments.tuning import Tuned, choose_rates
from ps.whole_files import whole_file
from shards.errors import GiveUp

_TRIALS = "shape-trials"  # a folder of results, as a sweep has one
_NOTE_EVERY_S = 30.0
Value = TypeVar("Value")


class Preset(StrEnum):
    """The size of a shape's runs: ci takes a minute or two of one core, small ten times that."""

    CI = "ci"
    SMALL = "small"


class ShapeVerdict(StrEnum):
    """The verdict on a check or a shape."""

    REPRODUCED = "reproduced"
    NOT_REPRODUCED = "not reproduced"
    INCONCLUSIVE = "inconclusive"
    MISSING = "missing"


class Origin(StrEnum):
    """The origin of a check: the publication, or a theorem, an identity or an addition here."""

    SOURCE = "source"
    OWN = "own"


class Check(msgspec.Struct, frozen=True):
    """One claim: what was published or derived, what was measured, and the verdict by its rule.

    Only checks of the `source` decide the verdict on a shape.
    """

    claim: str
    published: str
    measured: str
    verdict: ShapeVerdict
    origin: Origin = Origin.SOURCE


class ShapeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A shape after its runs. `tuned` counts the trials that chose rates, `cpu_s` all of them."""

    number: int
    title: str
    source: str
    preset: Preset
    control: bool
    checks: list[Check]
    trials: list[TrialResult] = []
    tuned: int = 0
    cpu_s: float = 0.0

    @property
    def verdict(self) -> ShapeVerdict:
        verdicts = {check.verdict for check in self.checks if check.origin is Origin.SOURCE}
        if ShapeVerdict.NOT_REPRODUCED in verdicts:
            return ShapeVerdict.NOT_REPRODUCED
        if verdicts == {ShapeVerdict.REPRODUCED}:
            return ShapeVerdict.REPRODUCED
        return ShapeVerdict.INCONCLUSIVE

    def lines(self) -> list[str]:
        """The checks as a table, and last the verdict next to what was published."""
        kind = " (control: the cause is removed)" if self.control else ""
        out = [f"shape {self.number}: {self.title}{kind}", f"  {self.source}"]
        for check in self.checks:
            suffix = " (own check)" if check.origin is Origin.OWN else ""
            out.append(f"  {check.verdict:15} {check.claim}{suffix}")
            out.append(f"  {'':15} published: {check.published}; measured: {check.measured}")
        out.append(
            f"  {len(self.trials)} trials, {self.tuned} more to choose rates, {self.cpu_s:.0f} s"
        )
        reproduced = sum(check.verdict is ShapeVerdict.REPRODUCED for check in self.checks)
        out.append(
            f"shape {self.number}: {self.verdict}: {reproduced} of {len(self.checks)} checks;"
            f" published: {self.checks[0].published}; measured: {self.checks[0].measured}"
        )
        return out


class Bench:
    """Runs the trials of one shape, chooses rates for them, and counts what that costs.

    `measures` is whether a shape also does what it measures without trials. With `out` the result
    of each trial is kept in a file there as soon as it is known, and is read instead of computed
    when the same trial is asked for again, in this run or a later one.
    """

    measures = True

    def __init__(
        self,
        preset: Preset,
        jobs: int = 1,
        note: Callable[[str], None] = print,
        out: Path | None = None,
    ) -> None:
        self.preset = preset
        self.results: list[TrialResult] = []
        self.tuned = 0
        self.cpu_s = 0.0
        self._jobs, self._note = jobs, note
        self._folder: Folder | None = None
        self._earlier_cpu_s: dict[str, float] = {}  # of trials, by id
        if out is not None:
            self._folder = Folder(out / _TRIALS)
            self._folder.make()
            self._earlier_cpu_s = self._folder.cost()
        self._done = self._read = 0
        self._noted_at = time.monotonic()

    def pick(self, ci: Value, small: Value) -> Value:
        """The value for the preset at hand."""
        return ci if self.preset is Preset.CI else small

    def run(
        self, trials: Iterable[Trial], seeds: int, *, first: int = 0
    ) -> list[list[TrialResult]]:
        """The results of each trial with the seeds from `first`, a list for each trial."""
        levels, chosen = list(trials), range(first, first + seeds)
        results = self._run([with_seed(trial, seed) for trial in levels for seed in chosen])
        self.results += results
        return [results[start : start + seeds] for start in range(0, len(results), seeds)]

    def tune(self, levels: Sequence[Trial]) -> list[Tuned]:
        """Choose the rate of each level on the grid 1e-3 * 2^k, by the mean error at the end.

        The seeds 100 to 102 are apart from those that are reported, and the errors are of data that
        is held out of training. See `RateSearch` for the rates that are tried.
        """
        chosen, trials = choose_rates(levels, self._run)
        self.tuned += trials
        for level, rates in zip(levels, chosen, strict=True):
            text = f"{level.strategy}, {level.rule}, {level.cluster.workers} workers"
            self._note(f"  rates of {text}: best {rates.best:g}, greedy {rates.greedy:g}")
        return chosen

    def _run(self, trials: Sequence[Trial]) -> list[TrialResult]:
        earlier = [self._earlier(trial) for trial in trials]
        missing = [trial for trial, known in zip(trials, earlier, strict=True) if known is None]
        new = run_trials(missing, self._jobs)
        results = []
        for known in earlier:
            result = self._keep(next(new)) if known is None else known
            results.append(result)
            self.cpu_s += result.cpu_s
            self._done += 1
            self._read += known is not None
            self._tell()
        return results

    def _earlier(self, trial: Trial) -> TrialResult | None:
        """The kept result of a trial, with what it cost; None if there is none."""
        result = self._folder.load(trial) if self._folder is not None else None
        if result is None:
            return None
        return structs.replace(result, cpu_s=self._earlier_cpu_s.pop(trial.id, 0.0))

    def _keep(self, result: TrialResult) -> TrialResult:
        if self._folder is not None:
            self._folder.save(result)
            self._folder.note_cost(result.trial.id, result.cpu_s)
        return result

    def _tell(self) -> None:
        """Say from time to time how far it is."""
        now = time.monotonic()
        if now - self._noted_at >= _NOTE_EVERY_S:
            self._noted_at = now
            before = f", {self._read} of them before" if self._read else ""
            self._note(f"  {self._done} trials done{before}")


class Shape(NamedTuple):
    """A shape: `judge` makes its checks; with `control` the cause is removed, and it must fail."""

    number: int
    title: str
    source: str
    judge: Callable[[Bench, bool], list[Check]]


def play(
    shape: Shape,
    preset: Preset,
    *,
    control: bool,
    jobs: int,
    note: Callable[[str], None],
    out: Path | None = None,
) -> ShapeOutcome:
    """Run a shape; with `out`, continue there what an earlier run has begun."""
    bench = Bench(preset, jobs, note, out)
    checks = shape.judge(bench, control)
    return ShapeOutcome(
        number=shape.number,
        title=shape.title,
        source=shape.source,
        preset=preset,
        control=control,
        checks=checks,
        trials=bench.results,
        tuned=bench.tuned,
        cpu_s=bench.cpu_s,
    )


def keep(outcome: ShapeOutcome, folder: Path) -> None:
    """Write an outcome where `load_outcomes` finds it, in MessagePack.

    JSON has no NaN, which is the loss of a run that diverged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind = "-control" if outcome.control else ""
    path = folder / f"shape-{outcome.number:02}-{outcome.preset}{kind}.msgpack"
    try:
        with whole_file(path, contended=True) as partial:
            partial.write_bytes(msgspec.msgpack.encode(outcome))
    except OSError as error:
        raise GiveUp(f"{path}: {error.strerror}") from None


def load_outcomes(folder: Path) -> list[ShapeOutcome]:
    """The outcomes in a folder, by number."""
    files = sorted(folder.glob("shape-*.msgpack"))
    return [msgspec.msgpack.decode(file.read_bytes(), type=ShapeOutcome) for file in files]


def judge_rule(holds: bool) -> ShapeVerdict:
    """The verdict of a rule that a figure keeps or breaks."""
    return ShapeVerdict.REPRODUCED if holds else ShapeVerdict.NOT_REPRODUCED


def positive(interval: Interval) -> ShapeVerdict:
    """The verdict of the rule "more than 0": by the interval, not by the mean."""
    if interval.low > 0:
        return ShapeVerdict.REPRODUCED
    return ShapeVerdict.NOT_REPRODUCED if interval.high <= 0 else ShapeVerdict.INCONCLUSIVE


def at_most(interval: Interval, limit: float) -> ShapeVerdict:
    """The verdict of the rule "at most": inconclusive if the interval holds the limit."""
    if interval.high <= limit:
        return ShapeVerdict.REPRODUCED
    return ShapeVerdict.NOT_REPRODUCED if interval.low > limit else ShapeVerdict.INCONCLUSIVE


def judge_probability(share: float) -> ShapeVerdict:
    """The verdict of a rule about the best level, by its bootstrap probability."""
    if share >= 0.95:
        return ShapeVerdict.REPRODUCED
    return ShapeVerdict.NOT_REPRODUCED if share <= 0.05 else ShapeVerdict.INCONCLUSIVE


def errors(results: Iterable[TrialResult]) -> list[float]:
    return [result.error for result in results]


def times_to(results: Iterable[TrialResult], error: float, *, updates: bool = False) -> TargetTimes:
    """The virtual seconds, or the updates, to an error in percent."""
    curve = [result.first_below(error) for result in results]
    return TargetTimes(
        tuple(
            math.inf if point is None else float(point.updates if updates else point.seconds)
            for point in curve
        )
    )


def list_figures(names: Iterable[object], values: Iterable[float], form: str = ".3g") -> str:
    """Levels and their figures in one line: 0: 1.5, 4: 2."""
    return ", ".join(f"{name}: {value:{form}}" for name, value in zip(names, values, strict=True))
