"""Chooses the rates of a sweep that asks for the best or the greedy one.

A level is a point without its rate, measured at its end. Its search (tuning.py) runs trials with
seeds of their own, which are kept below `tuning` in the sweep's folder, as the sweep's own trials
are: so a search that was killed continues. The rates, and what they cost, are in rates.json.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from deploy.experiments.runner import BadFolder, Folder, run_in_folder
from deploy.experiments.sweeps import RATES, ChosenRates, Rates, Sweep, read_rates, read_sweep
from deploy.experiments.trial_limits import TrialLimits
from deploy.experiments.trials import Trial
from deploy.experiments.tuning import choose_rates
from deploy.run.folder import write_whole
from shards.errors import BadInput, GiveUp

TUNING = "tuning"


class _Score(NamedTuple):
    """The score of a trial, for the search; one that failed is worse than any."""

    error: float


def tune_sweep(
    sweep: Sweep, path: Path, *, jobs: int = 1, note: Callable[[str], None] = print
) -> Sweep:
    """Choose the rates that a sweep asks for; returns it with them.

    Raises BadInput for a level of which no trial succeeds.
    """
    folder = Folder(path)
    folder.create(sweep)
    sweep = read_sweep(folder.sweep, consent=True)  # some rates may be there already
    if not sweep.levels:
        return sweep
    with folder.lock():
        rates: Rates = dict(read_rates(path / RATES))
        for key, (label, level) in sweep.levels.items():
            tried = _Tried(Folder(path / TUNING), sweep.limits, jobs)
            (tuned,), count = choose_rates([level], tried.run)
            if not math.isfinite(tuned.error):
                raise BadInput(label, expected="a rate to choose", got=tried.failure)
            rates[key] = ChosenRates(label, *tuned, count, round(tried.cpu_s, 3))
            note(f"{label}: rates: best {tuned.best:g}, greedy {tuned.greedy:g}, {count} trials")
            try:
                write_whole(path / RATES, msgspec.json.encode(rates))
            except GiveUp as error:
                raise BadFolder(f"{path / RATES}: expected to write rates, got: {error}") from None
    return read_sweep(folder.sweep, consent=True)


class _Tried:
    """Runs the trials of one search in a folder, and reads those that are there already.

    `cpu_s` is what all of them cost, whichever runner ran them, and `failure` why the last one that
    failed did.
    """

    def __init__(self, folder: Folder, limits: TrialLimits, jobs: int) -> None:
        folder.make()
        self.cpu_s, self.failure = 0.0, ""
        self._folder, self._limits, self._jobs = folder, limits, jobs

    def run(self, trials: Sequence[Trial]) -> list[_Score]:
        """The errors of trials, in their order."""
        folder = self._folder
        missing = [trial for trial in trials if folder.load(trial) is None]
        for trial, failure, cpu_s in run_in_folder(folder, self._limits, missing, self._jobs):
            folder.note_cost(trial, cpu_s)
            self.failure = failure or self.failure
        costs = folder.cost()
        self.cpu_s += sum(costs.get(trial.id, 0.0) for trial in trials)
        results = [folder.load(trial) for trial in trials]
        return [_Score(math.inf if result is None else result.error) for result in results]
