"""Trials: single runs of an experiment, described by one value and run in processes of their own.

A trial is the whole description: the same trial gives the same result, wherever it runs, up to the
rounding of sums in a BLAS that adds several matrices in another order than one. Its id is the hash
of that description, of the data and of the build.
"""

import hashlib
import multiprocessing
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import msgspec
import numpy as np
from msgspec import structs
from threadpoolctl import threadpool_limits

from deploy.experiments.cached_ssp import CachedSSP
from deploy.experiments.cluster import ClusterModel
from deploy.experiments.continued import ContinuedProblem
from deploy.experiments.fragment_cut import FragmentCut
from deploy.experiments.jobs import SimulatedJob
from deploy.experiments.logistic import Proximal
from deploy.experiments.lossy_diloco import LossyDiLoCo
from deploy.experiments.problem import BatchedWorkload, Workload
from deploy.experiments.rate_schedules import FIXED
from deploy.experiments.trace_training import NeedsMessages, TraceTraining, is_traced, keeps_step
from deploy.experiments.training_simulation import Course, CurvePoint, TrainingSimulation
from deploy.experiments.workloads import data_digest, workload_of
from ps.build_id import build_id
from shards import argument_checks
from shards.aggregation import stale_limit_of
from shards.errors import BadInput, DownpourError
from shards.rules import RULES, Rule, rule_of
from worker.strategies import STRATEGIES, Strategy, strategy_of, strategy_with_options
from worker.strategies.base import Floats

_EXPERIMENTAL: dict[str, type[LossyDiLoCo | CachedSSP]] = {
    str(kind.__struct_config__.tag): kind for kind in (LossyDiLoCo, CachedSSP)
}
STRATEGY_KINDS: dict[str, type[msgspec.Struct]] = {**STRATEGIES, **_EXPERIMENTAL}
"""The strategies of experiments by name."""

RULE_KINDS: dict[str, Any] = {**RULES, "proximal": Proximal}
"""The rules of experiments by name."""


class Trial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run: what is trained, by which strategy on which cluster, and for how long.

    `strategy` is a text as in `downpour train --strategy`; `rule` is the shards' rule in the same
    form, such as momentum:momentum=0.9. `staleness` is the bound in steps, None for none, and
    `on_stale` is wait, scale:N or drop:N, as for `downpour
    train`. The run ends after `gradients` of all workers together, or
    earlier at an error of `until_error` percent; the weights are measured every `look_every`
    gradients (0: at the end), on `tested` rows of the test data. With `held_out` rows of
    the training data take their place, which no gradient then sees, to choose rates by. A strategy
    that exchanges tables by themselves has the weights in `fragments` tables.

    `decay` is the L2 weight decay. The rate follows `schedule` in shares of the run
    (rate_schedules.py). With `start` the weights are those at the end of that trial, which runs
    with a seed of its own for each seed of this one.
    """

    workload: str = "mlp"
    batch: int = 4
    tested: int = 10_000
    held_out: bool = False
    fragments: int = 1
    strategy: str = "asp"
    rule: str = "sgd"
    rate: float = 0.01
    decay: float = 0.0
    schedule: str = FIXED
    staleness: int | None = None
    on_stale: str = "wait"
    gradients: int = 10_000
    look_every: int = 0
    until_error: float = -1.0
    seed: int = 0
    cluster: ClusterModel = ClusterModel()
    start: "Trial | None" = None

    def job(self) -> SimulatedJob:
        """The job to simulate; raises BadInput for a setting that a part of it does not know."""
        return SimulatedJob(
            strategy=self._build_strategy().for_workers(self.cluster.workers),
            cluster=self.cluster,
            rate=self.rate,
            seed=self.seed,
            rule=rule_named(self.rule),
            bound=self.staleness,
            stale=stale_limit_of("on_stale", self.on_stale),
            fragments=self.fragments,
            decay=self.decay,
            schedule=self.schedule,
            gradients=self.gradients,
        )

    def _build_strategy(self) -> Strategy:
        strategy = trial_strategy(self.strategy)
        if isinstance(strategy, LossyDiLoCo):
            return structs.replace(strategy, seed=self.seed)
        if isinstance(strategy, CachedSSP):
            strategy.check_simulated(self.cluster, self.rule)
        return strategy

    def problem(self) -> Workload:
        """The problem that is trained; raises BadInput."""
        problem = workload_of(self.workload, self.batch, self.tested, held_out=self.held_out)
        if self.start is None:
            return problem
        start = structs.replace(self.start, held_out=self.held_out)
        return ContinuedProblem(problem, lambda seed: _trained_weights(with_seed(start, seed)))

    def check(self) -> None:
        """Raise BadInput for a setting that cannot be run, before anything is."""
        argument_checks.whole("gradients", self.gradients, 1)
        argument_checks.whole("batch", self.batch, 1, 60_000)
        argument_checks.whole("tested", self.tested, 1, 10_000)
        argument_checks.whole("fragments", self.fragments, 1)
        argument_checks.whole("look_every", self.look_every, 0)
        argument_checks.whole("seed", self.seed, 0, 2**31)
        argument_checks.number("rate", self.rate, least=0, expected="0 or more")
        argument_checks.number("decay", self.decay, least=0, expected="0 or more")
        if self.start is not None:
            self._check_start(self.start)
        self.job().specs(FragmentCut(self.problem().table, self.fragments).layout)

    def _check_start(self, start: "Trial") -> None:
        try:
            start.check()
        except BadInput as error:
            raise error.within("start") from None
        if start.problem().table != self.problem().table:
            raise BadInput("start", expected=f"a trial of {self.workload}", got=start.workload)

    @property
    def id(self) -> str:
        """The hash of all settings, the data, the build and the simulator, in 16 hexadecimal
        digits."""
        settings = msgspec.json.encode(self, order="deterministic")
        parts = (data_digest(self.workload), build_id(), simulator_id())
        written = settings + "".join(parts).encode()
        return hashlib.sha256(written).hexdigest()[:16]


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a trial. `curve` are its measurements, the last one at its end.

    `staleness` counts the updates of each staleness from 0. `seconds` are of the virtual clock;
    `compute_share` and `wait_share` are the workers' shares of them in steps and at the gate, and
    the rest is the network's. `cpu_s` is what the run cost. `diverged_at` is
    the update at which weights or a gradient were no longer finite. `failed` is why there is no
    result.
    """

    trial: Trial
    curve: list[CurvePoint] = msgspec.field(default_factory=list, name="looks")
    staleness: list[int] = []
    updates: int = 0
    gradients: int = 0
    dropped: int = 0
    clock_gap: int = 0
    seconds: float = 0.0
    compute_share: float = 0.0
    wait_share: float = 0.0
    cpu_s: float = 0.0
    diverged_at: int | None = None
    failed: str = ""

    @property
    def error(self) -> float:
        """The error in percent at the end."""
        return self.curve[-1].error

    @property
    def mean_staleness(self) -> float:
        counts = np.array(self.staleness)
        return float(counts @ np.arange(len(counts)) / max(1, counts.sum()))

    def first_below(self, error: float) -> CurvePoint | None:
        """The first measurement with at most this error in percent; None if there is none."""
        return next((point for point in self.curve if point.error <= error), None)

    def error_at(self, seconds: float) -> float:
        """The error at the last measurement up to this virtual time."""
        return [point for point in self.curve if point.seconds <= seconds][-1].error


_SOURCES = (
    "cached_ssp", "character_model", "cluster", "continued", "fragment_cut", "images", "jobs",
    "lenet", "logistic", "lossy_diloco", "own_problems", "problem", "rate_schedules",
    "timing_simulation", "torch_problem", "trace_training", "training_simulation", "trials",
    "workloads",
)  # fmt: skip


@cache
def simulator_id() -> str:
    """Sixteen hexadecimal digits over the source of all that a trial's result depends on here."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((files("deploy.experiments") / f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]


def run_trial(trial: Trial) -> TrialResult:
    """Run one trial, with one BLAS thread."""
    (result,) = run_together([trial])
    return result


def run_together(trials: Sequence[Trial]) -> list[TrialResult]:
    """Run trials of one group of `group_trials`, with one BLAS thread; each has its share of the
    CPU time."""
    began = time.process_time()
    jobs, first = [trial.job() for trial in trials], trials[0]
    with threadpool_limits(1):
        courses = _train_together(jobs, first)
    cpu_s = (time.process_time() - began) / len(trials)
    return [_describe(trial, course, cpu_s) for trial, course in zip(trials, courses, strict=True)]


def _train_together(jobs: list[SimulatedJob], first: Trial) -> list[Course]:
    """The course of each job: along a trace where that is enough, or else message by message."""
    workload, gradients = first.problem(), first.gradients
    looks: dict[str, Any] = {"look_every": first.look_every, "until_error": first.until_error}
    if all(map(is_traced, jobs)):
        try:
            return TraceTraining(jobs, workload).run(gradients, **looks)
        except NeedsMessages:
            pass
    return [TrainingSimulation(job, workload).run(gradients, **looks) for job in jobs]


def _describe(trial: Trial, course: Course, cpu_s: float) -> TrialResult:
    rows = course.records
    applied = rows["staleness"][rows["dropped"] == 0]
    spent = trial.cluster.workers * course.seconds
    return TrialResult(
        trial=trial,
        curve=course.curve,
        staleness=np.bincount(applied).tolist() if len(applied) else [],
        updates=course.final.updates,
        gradients=course.gradients,
        dropped=int(rows["dropped"].sum()),
        clock_gap=int(rows["clock_gap"].max()) if len(rows) else 0,
        seconds=course.seconds,
        compute_share=course.compute_s / spent if spent else 0.0,
        wait_share=float(rows["wait_s"].sum()) / spent if spent else 0.0,
        cpu_s=cpu_s,
        diverged_at=course.diverged_at,
    )


_TOGETHER = 12
"""The most runs of a group: more no longer share calls, and need more memory."""
_TOGETHER_BYTES = 1 << 28  # of the weights that all their workers hold, if no two are the same


def group_trials(trials: Sequence[Trial], most: int = _TOGETHER) -> list[list[int]]:
    """The numbers of the trials that `run_together` trains, in groups of at most `most`.

    Trials of a group differ in seed, rate, rule and the times of their cluster.
    """
    groups: list[list[int]] = []
    by_key: dict[bytes, list[int]] = {}
    for number, trial in enumerate(trials):
        job, problem = trial.job(), trial.problem()
        if not (isinstance(problem, BatchedWorkload) and keeps_step(job)):
            groups.append([number])
            continue
        half = structs.replace(job.half, rule=None, scale=1.0)
        alike = structs.replace(
            trial,
            strategy=repr(half),
            rule="sgd",
            rate=1.0,
            seed=0,
            staleness=job.real_bound,
            cluster=ClusterModel(workers=trial.cluster.workers),
        )
        key = msgspec.json.encode(alike)
        held = 4 * problem.table.size * (trial.cluster.workers + 4)
        fits = max(1, min(most, _TOGETHER_BYTES // held))
        if len(by_key.get(key, range(fits))) >= fits:
            by_key[key] = []
            groups.append(by_key[key])
        by_key[key].append(number)
    return groups


def with_seed(trial: Trial, seed: int) -> Trial:
    return structs.replace(trial, seed=seed)


_START_SEEDS = 1_000_000
"""Added to the seed of a trial for the trial that it starts from, which so has other batches."""


def _trained_weights(trial: Trial) -> Floats:
    """The weights at the end of the trial that another one starts from."""
    return _train(msgspec.json.encode(with_seed(trial, trial.seed + _START_SEEDS)))


@lru_cache(maxsize=32)
def _train(settings: bytes) -> Floats:
    trial = msgspec.json.decode(settings, type=Trial)
    with threadpool_limits(1):
        simulation = TrainingSimulation(trial.job(), trial.problem())
        simulation.advance(trial.gradients)
    return simulation.weights()


def run_trials(trials: Sequence[Trial], jobs: int = 1) -> Iterator[TrialResult]:
    """The results in the order of the trials, computed in this number of processes.

    Trials that can be are trained together.
    """
    groups = group_trials(trials, min(_TOGETHER, -(-len(trials) // max(1, jobs))))
    together = [[trials[number] for number in group] for group in groups]
    if jobs <= 1 or len(groups) <= 1:
        yield from _in_order(groups, map(run_together, together))
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(groups))) as pool:
        yield from _in_order(groups, pool.imap(_run_apart, together))


def _run_apart(trials: Sequence[Trial]) -> list[TrialResult]:
    """`run_together` in a process of its own: an error may hold what no process can send."""
    try:
        return run_together(trials)
    except DownpourError:
        raise
    except Exception as error:  # noqa: BLE001  # of any kind
        raise RuntimeError("".join(traceback.format_exception(error))) from None


def _in_order(
    groups: Sequence[Sequence[int]], results: Iterator[list[TrialResult]]
) -> Iterator[TrialResult]:
    """The results of groups in the order of the trials, each as early as it is known."""
    known: dict[int, TrialResult] = {}
    following = 0
    for group, found in zip(groups, results, strict=True):
        known |= zip(group, found, strict=True)
        while following in known:
            yield known.pop(following)
            following += 1


def trial_strategy(text: str) -> Strategy:
    """The strategy in a text such as diloco:h=50; raises BadInput."""
    name, _, options = text.partition(":")
    if name in _EXPERIMENTAL:
        return strategy_with_options("strategy", _EXPERIMENTAL[name], options)
    return strategy_of("strategy", text)


def rule_named(text: str) -> Rule:
    """The update rule in a text: adam, or momentum:momentum=0.9. Raises BadInput."""
    name, _, options = argument_checks.text("rule", text, "a rule").partition(":")
    kinds = RULE_KINDS
    if name not in kinds:
        return rule_of("rule", text)
    values: dict[str, Any] = {}
    for option in options.split(",") if options else ():
        field, _, value = option.partition("=")
        if field not in kinds[name].__struct_fields__:
            known = ", ".join(kinds[name].__struct_fields__) or "none"
            raise BadInput(f"rule {name}: unknown option {field!r}; its options are {known}")
        values[field] = value
    try:
        rule: Rule = msgspec.convert(values, kinds[name], strict=False)
        return rule
    except msgspec.ValidationError as error:
        raise BadInput(f"rule {name}: {error}") from None
