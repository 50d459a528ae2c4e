"""The number of a shape's trials and their cost, found without running it: `--dry-run`.

The shape's own code asks a `PlanningBench` for its trials. The bench counts them, and returns a
made-up result for each, so that this code continues to its end. Its errors fall and rise with the
rate as real ones usually do, so that the search for rates takes a usual number of trials. Nothing
else is done with these results. The cost is measured on short trials of each workload.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from deploy.experiments.shapes.base import Bench, Preset, Shape
from deploy.experiments.training_simulation import CurvePoint
from deploy.experiments.trials import Trial, TrialResult, run_trial

_USUAL_RATE = 0.016  # the middle of the rates that are chosen
_SHORT, _LONG = 50, 350  # gradients of the trials that are measured


class ShapePlan(NamedTuple):
    """The trials that a shape reports, about how many more choose rates, and their CPU seconds."""

    trials: int
    tuning: int
    cpu_s: float


def plan_of(
    shape: Shape, preset: Preset, *, control: bool, registration: int | None = None
) -> ShapePlan:
    """Count a shape's trials and estimate their cost."""
    registered = shape.registration(registration)
    bench = PlanningBench(preset)
    bench.seeds = registered.seeds
    registered.judge(bench, control)
    return ShapePlan(len(bench.results), bench.tuned, bench.cpu_s)


class PlanningBench(Bench):
    """A bench that counts trials and their cost, and leaves out checks that need no trials."""

    measures = False

    def __init__(self, preset: Preset) -> None:
        super().__init__(preset, note=lambda _: None)
        self._costs: dict[tuple[str, int, int], tuple[float, float]] = {}

    def _run(self, trials: Sequence[Trial]) -> list[TrialResult]:
        self.cpu_s += sum(map(self._cost_s, trials))
        return [_invent_result(trial) for trial in trials]

    def _cost_s(self, trial: Trial) -> float:
        """The CPU seconds of a trial: its gradients, and its measurements of the weights."""
        kind = trial.workload, trial.batch, trial.tested
        if kind not in self._costs:
            self._costs[kind] = _measure_costs(trial)
        gradient_s, point_s = self._costs[kind]
        curve = trial.gradients // trial.look_every if trial.look_every else 1
        return trial.gradients * gradient_s + curve * point_s


def _measure_costs(trial: Trial) -> tuple[float, float]:
    """The CPU seconds of one gradient, and of one measurement of the weights."""
    short = structs.replace(trial, gradients=_SHORT, look_every=0, until_error=-1.0)
    run_trial(short)  # loads the data and the loops
    short_s = run_trial(short).cpu_s
    long_s = run_trial(structs.replace(short, gradients=_LONG)).cpu_s
    gradient_s = max(0.0, long_s - short_s) / (_LONG - _SHORT)
    return gradient_s, max(0.0, short_s - _SHORT * gradient_s)


def _invent_result(trial: Trial) -> TrialResult:
    """A result that was not measured, with an error that is least at a usual rate."""
    error = 5.0 + abs(math.log2(trial.rate / _USUAL_RATE)) if trial.rate else 90.0
    point = CurvePoint(updates=1, gradients=1, seconds=1.0, loss=error / 10, error=error)
    return TrialResult(trial=trial, curve=[point], staleness=[1], wait_share=0.5)
