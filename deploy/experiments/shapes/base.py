"""The parts of every shape: a claim of the literature, checks with accept rules, and a verdict.

A set-up with its checks, accept rules and seeds is a *registration*, committed before its first
run. A shape has one or more, each with seeds of its own, so that no result decides the set-up it
comes from. Each check is judged by itself. The shape is reproduced if all checks of its source are;
it is not if one of them is not; otherwise an interval was too wide, or a part is missing, and it is
inconclusive. A *premise* is what the source assumes of its set-up. It is judged on the seeds that
choose rates; if it fails, the claim is not applicable there.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import structs

from deploy.experiments.runner import Folder
from deploy.experiments.statistics import Interval, TargetTimes
from deploy.experiments.trials import Trial, TrialResult, run_trials, with_seed
from deploy.experiments.tuning import TUNING_SEEDS, Tuned, choose_rates
from ps.whole_files import whole_file
from shards.errors import UNDECODABLE, BadInput, GiveUp

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
    NOT_APPLICABLE = "not applicable"


class Origin(StrEnum):
    """The origin of a check: the publication, or a theorem, an identity or an addition here.

    A premise is what the publication assumes.
    """

    SOURCE = "source"
    OWN = "own"
    PREMISE = "premise"


class Check(msgspec.Struct, frozen=True):
    """One claim: what was published or derived, what was measured, and the verdict by its rule.

    Only checks of the `source` decide the verdict on a shape, where its premises hold.
    """

    claim: str
    published: str
    measured: str
    verdict: ShapeVerdict
    origin: Origin = Origin.SOURCE


class ShapeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A shape after its runs. `tuned` counts the trials that chose rates, `cpu_s` all of them.

    `registration` is the number of its set-up, registered in `commit` at `committed_at`; the first
    of its trials began at `began_at`, in seconds since 1970.
    """

    number: int
    title: str
    source: str
    preset: Preset
    control: bool
    checks: list[Check]
    trials: list[TrialResult] = []
    tuned: int = 0
    cpu_s: float = 0.0
    registration: int = 1
    commit: str = ""
    committed_at: str = ""
    began_at: float = 0.0

    @property
    def name(self) -> str:
        """The number of the shape, with that of its registration from the second on."""
        return f"{self.number}.{self.registration}" if self.registration > 1 else str(self.number)

    @property
    def registered(self) -> str:
        """The commit of the set-up, and whether it precedes the results."""
        if not self.commit:
            return "no commit is recorded"
        before = datetime.fromisoformat(self.committed_at).timestamp() < self.began_at
        return f"{self.commit}, {'before' if before else 'after'} the first trial"

    @property
    def verdict(self) -> ShapeVerdict:
        premises = {check.verdict for check in self.checks if check.origin is Origin.PREMISE}
        if premises - {ShapeVerdict.REPRODUCED} and not self.control:
            return ShapeVerdict.NOT_APPLICABLE
        verdicts = {check.verdict for check in self.checks if check.origin is Origin.SOURCE}
        if ShapeVerdict.NOT_REPRODUCED in verdicts:
            return ShapeVerdict.NOT_REPRODUCED
        if verdicts == {ShapeVerdict.REPRODUCED}:
            return ShapeVerdict.REPRODUCED
        return ShapeVerdict.INCONCLUSIVE

    def lines(self) -> list[str]:
        """The checks as a table, and last the verdict next to what was published."""
        kind = " (control: the cause is removed)" if self.control else ""
        out = [f"shape {self.name}: {self.title}{kind}", f"  {self.source}"]
        suffixes = {Origin.SOURCE: "", Origin.OWN: " (own check)", Origin.PREMISE: " (premise)"}
        for check in self.checks:
            suffix = suffixes[check.origin]
            out.append(f"  {check.verdict:15} {check.claim}{suffix}")
            out.append(f"  {'':15} published: {check.published}; measured: {check.measured}")
        out.append(
            f"  {len(self.trials)} trials, {self.tuned} more to choose rates, {self.cpu_s:.0f} s"
        )
        reproduced = sum(check.verdict is ShapeVerdict.REPRODUCED for check in self.checks)
        claims = [check for check in self.checks if check.origin is Origin.SOURCE]
        first = (claims or self.checks)[0]
        out.append(
            f"shape {self.name}: {self.verdict}: {reproduced} of {len(self.checks)} checks;"
            f" published: {first.published}; measured: {first.measured}"
        )
        return out


class Bench:
    """Runs the trials of one shape, chooses rates for them, and counts what that costs.

    `measures` is whether a shape also does what it measures without trials. With `out` the result
    of each trial is kept in a file there as soon as it is known, and is read instead of computed
    when the same trial is asked for again, in this run or a later one.
    """

    measures = True
    seeds: range | None = None
    """The seeds of the registration, where it has named them."""

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
        self.began_at = time.time()
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
        self, trials: Iterable[Trial], seeds: int, *, first: int | None = None
    ) -> list[list[TrialResult]]:
        """The results of each trial with the seeds from `first`, a list for each trial.

        By default the first is that of the registration.
        """
        if first is None:
            first = self.seeds.start if self.seeds else 0
        levels, chosen = list(trials), range(first, first + seeds)
        assert self.seeds is None or set(chosen) <= set(self.seeds), "seeds that are registered"
        results = self._run([with_seed(trial, seed) for trial in levels for seed in chosen])
        self.results += results
        return [results[start : start + seeds] for start in range(0, len(results), seeds)]

    def probe(self, trials: Iterable[Trial]) -> list[list[TrialResult]]:
        """The results of each trial with the seeds and the data that rates are chosen on.

        A premise is judged by them.
        """
        levels = [structs.replace(trial, held_out=True) for trial in trials]
        seeds = len(TUNING_SEEDS)
        results = self._run([with_seed(trial, seed) for trial in levels for seed in TUNING_SEEDS])
        self.tuned += len(results)
        return [results[start : start + seeds] for start in range(0, len(results), seeds)]

    def ends_at(self, premises: Iterable[Check], control: bool) -> bool:
        """Return whether a premise fails, so that nothing more is run; controls have none."""
        failed = any(premise.verdict is not ShapeVerdict.REPRODUCED for premise in premises)
        return self.measures and not control and failed

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
        assert self._folder is not None
        kept_at = self._folder.result(trial.id).stat().st_mtime
        self.began_at = min(self.began_at, kept_at)
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


Judge = Callable[[Bench, bool], list[Check]]
"""Makes the checks; with True the cause is removed, and they must fail."""


class Registration(NamedTuple):
    """A set-up with its rules: `judge` runs and judges it with the reported `seeds`.

    `commit` and `committed_at` say where and when it was registered.
    """

    number: int
    judge: Judge
    seeds: range | None
    commit: str = ""
    committed_at: str = ""


class Shape(NamedTuple):
    """A claim of a source. `judge` is its first registration; there may be `later` ones."""

    number: int
    title: str
    source: str
    judge: Judge
    later: tuple[Registration, ...] = ()

    def registration(self, number: int | None = None) -> Registration:
        """A registration by its number, by default the newest; raises BadInput."""
        known = (Registration(1, self.judge, None), *self.later)
        if number is None:
            return known[-1]
        if not 1 <= number <= len(known):
            raise BadInput(
                f"shape {self.number}: registration", expected=f"1 to {len(known)}", got=number
            )
        return known[number - 1]


def play(
    shape: Shape,
    preset: Preset,
    *,
    control: bool,
    jobs: int,
    note: Callable[[str], None],
    out: Path | None = None,
    registration: int | None = None,
) -> ShapeOutcome:
    """Run a shape as registered, by default last; with `out`, continue there an earlier run."""
    registered = shape.registration(registration)
    bench = Bench(preset, jobs, note, out)
    bench.seeds = registered.seeds
    checks = registered.judge(bench, control)
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
        registration=registered.number,
        commit=registered.commit,
        committed_at=registered.committed_at,
        began_at=bench.began_at,
    )


def keep(outcome: ShapeOutcome, folder: Path) -> None:
    """Write an outcome where `load_outcomes` finds it, in MessagePack.

    JSON has no NaN, which is the loss of a run that diverged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind = "-control" if outcome.control else ""
    later = f".{outcome.registration}" if outcome.registration > 1 else ""
    path = folder / f"shape-{outcome.number:02}{later}-{outcome.preset}{kind}.msgpack"
    try:
        with whole_file(path, contended=True) as partial:
            partial.write_bytes(msgspec.msgpack.encode(outcome))
    except OSError as error:
        raise GiveUp(f"{path}: {error.strerror}") from None


def load_outcomes(folder: Path) -> list[ShapeOutcome]:
    """The outcomes in a folder, by number; raises BadInput for a file of another version."""
    outcomes = []
    for file in sorted(folder.glob("shape-*.msgpack")):
        try:
            outcomes.append(msgspec.msgpack.decode(file.read_bytes(), type=ShapeOutcome))
        except (OSError, *UNDECODABLE) as error:
            raise BadInput(
                file, expected="a shape's outcome of this version", got=str(error)
            ) from None
    return outcomes


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


def state_premise(claim: str, measured: str, holds: bool) -> Check:
    """A check of what the source assumes of its set-up."""
    return Check(claim, "assumed", measured, judge_rule(holds), Origin.PREMISE)


def judge_equal(tests: Iterable[tuple[bool, Interval]], margin: float) -> ShapeVerdict:
    """The verdict of a rule that all of these differences are within the margin.

    `tests` are those of `equivalent`. It is broken by one interval outside the margin.
    """
    known = list(tests)
    if all(same for same, _ in known):
        return ShapeVerdict.REPRODUCED
    outside = any(one.low >= margin or one.high <= -margin for _, one in known)
    return ShapeVerdict.NOT_REPRODUCED if outside else ShapeVerdict.INCONCLUSIVE


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
