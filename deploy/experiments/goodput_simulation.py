"""Goodput under failures: the share of a job's chips and time that ends up in useful steps.

The model of Decoupled DiLoCo (arXiv 2604.21428), in events and without steps. A job runs on some
learners of equal size. Each fails at random, at a constant rate while it runs, and computes again
`restart_s` later. What a failure costs the others depends on how they train:

- *synchronous*: all learners stop until it is back, and all repeat the work since the last
  checkpoint. A checkpoint takes `save_s`, at the intervals that Young's formula says.
- *elastic*: all stop for `pause_s` to continue without it, and again when it returns.
- *decoupled*: nobody else stops. The learner itself repeats at most the window that it has not
  reported, of `window_s` on average.

No time passes between a failure and its detection other than in these numbers, and learners fail
independently of each other.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]


class Failures(NamedTuple):
    """The failures of one learner: the seconds between two of them, and what each costs."""

    learners: int
    between_s: float
    restart_s: float = 300.0
    pause_s: float = 30.0
    save_s: float = 30.0
    window_s: float = 10.0


class Goodput(NamedTuple):
    """The share of all learners' time in useful steps, by the way to train."""

    synchronous: float
    elastic: float
    decoupled: float


def simulate_goodput(model: Failures, failures: int, seed: int) -> Goodput:
    """Simulate about this number of failures of the whole job."""
    dice = np.random.default_rng(seed)
    return Goodput(
        _synchronous(model, failures, dice),
        *_independent(model, failures, dice),
    )


def _synchronous(model: Failures, failures: int, dice: np.random.Generator) -> float:
    """One time between two failures of anyone after another, with what it leaves behind."""
    between_s = model.between_s / model.learners
    interval_s = math.sqrt(2 * model.save_s * between_s)
    ran_s = dice.exponential(between_s, failures)
    saved_s = ran_s  # checkpoints that cost nothing are taken all the time
    if model.save_s:
        saved_s = np.floor(ran_s / (interval_s + model.save_s)) * interval_s
    return float(saved_s.sum() / (ran_s + model.restart_s).sum())


def _independent(model: Failures, failures: int, dice: np.random.Generator) -> tuple[float, float]:
    """The goodput of elastic and of decoupled training, from the same failures.

    Each learner runs and restarts in turn. While all stop for a pause nobody fails, so an elastic
    job sees these events on a clock without its pauses, which are added at the end.
    """
    cycles = max(2, math.ceil(failures / model.learners))
    ran_s = dice.exponential(model.between_s, (model.learners, cycles))
    ends_s = np.cumsum(ran_s + model.restart_s, axis=1)
    horizon_s = float(ends_s[:, -1].min())  # until then every learner has been simulated
    fails_s = ends_s - model.restart_s
    up_s = _overlap(fails_s - ran_s, fails_s, horizon_s)
    lost_s = model.window_s * (fails_s < horizon_s).sum()
    total_s = model.learners * horizon_s
    events = int((fails_s < horizon_s).sum() + (ends_s < horizon_s).sum())
    elastic = up_s / (total_s + model.learners * model.pause_s * events)
    return elastic, max(0.0, up_s - lost_s) / total_s


def _overlap(begins: Seconds, ends: Seconds, horizon_s: float) -> float:
    """The sum of the times from `begins` to `ends` that come before the horizon."""
    return float(np.clip(np.minimum(ends, horizon_s) - begins, 0, None).sum())


def expect_decoupled(model: Failures) -> float:
    """The decoupled goodput in the long run: the time that a learner runs, less its windows."""
    return (model.between_s - model.window_s) / (model.between_s + model.restart_s)


def restart_for(goodput: float, between_s: float) -> float:
    """The restart time with which decoupled learners without windows have this goodput."""
    return between_s * (1 / goodput - 1)
