"""The choice of learning rates: a search on seeds and data apart from those that are reported."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from msgspec import structs

from deploy.experiments.trials import Trial, with_seed

TUNING_SEEDS = (100, 101, 102)
_POWERS = (-8, 12)  # of the rates that are tried, the second one excluded


class Tuned(NamedTuple):
    """Rates chosen on seeds of their own: that of the least error, and the largest with an error
    is within one standard error of it. `error` is the least one, in percent."""

    best: float
    greedy: float
    error: float


class RateSearch:
    """The search for one level's rate on the grid 1e-3 * 2^k.

    First every second k from 0, with one seed, until two rates in a row are far from the best; and
    below 0, as long as the lowest is the best. Then all three seeds for the best k, its two
    neighbours and each larger k up to two beyond the greedy one. So the rates around the choice
    have all seeds, and the others cost little.
    """

    def __init__(self) -> None:
        self.errors: dict[int, list[float]] = {}

    def next_trials(self) -> list[tuple[int, int]]:
        """The next powers and seeds to try; none at the end."""
        return self._coarse() or self._fine()

    def result(self) -> Tuned:
        best, greedy = self._best_and_greedy(self._whole())
        return Tuned(rate_of(best), rate_of(greedy), float(np.mean(self.errors[best])))

    def _coarse(self) -> list[tuple[int, int]]:
        seed = TUNING_SEEDS[0]
        rising = [power for power in range(0, _POWERS[1], 2) if power not in self.errors]
        if not _past({power: self.errors[power][:1] for power in sorted(self.errors)}) and rising:
            return [(rising[0], seed)]
        lowest = min(self.errors)
        if lowest - 2 >= _POWERS[0] and self._least() == lowest:
            return [(lowest - 2, seed)]
        return []

    def _fine(self) -> list[tuple[int, int]]:
        whole = self._whole()
        best, greedy = self._best_and_greedy(whole) if whole else (self._least(),) * 2
        around = range(max(best - 1, _POWERS[0]), min(greedy + 3, _POWERS[1]))
        return [
            (power, seed)
            for power in around
            for seed in TUNING_SEEDS[len(self.errors.get(power, ())) :]
        ]

    def _least(self) -> int:
        return min(self.errors, key=lambda power: self.errors[power][0])

    def _whole(self) -> dict[int, list[float]]:
        """The powers that all seeds have been tried with."""
        return {k: errors for k, errors in self.errors.items() if len(errors) == len(TUNING_SEEDS)}

    @staticmethod
    def _best_and_greedy(whole: dict[int, list[float]]) -> tuple[int, int]:
        best = min(whole, key=lambda power: float(np.mean(whole[power])))
        values = np.array(whole[best])
        if not np.isfinite(values).all():  # of failed trials only
            return best, best
        limit = values.mean() + values.std(ddof=1) / math.sqrt(len(values))
        return best, max(
            power for power, errors in whole.items() if float(np.mean(errors)) <= limit
        )


class Scored(Protocol):
    """A result, as far as the search reads it."""

    @property
    def error(self) -> float:
        """The error in percent at the end."""


def choose_rates(
    levels: Sequence[Trial], run: Callable[[Sequence[Trial]], Sequence[Scored]]
) -> tuple[list[Tuned], int]:
    """The rates of each level, by the mean error at the end, and the number of trials it took.

    The error is that of training data which these trials do not train with. `run` returns the
    results of trials, in their order.
    """
    searches, count = [RateSearch() for _ in levels], 0
    while requests := [
        (level, power, seed)
        for level, search in enumerate(searches)
        for power, seed in search.next_trials()
    ]:
        trials = [
            with_seed(structs.replace(levels[index], rate=rate_of(power), held_out=True), seed)
            for index, power, seed in requests
        ]
        for (index, power, _), score in zip(requests, run(trials), strict=True):
            searches[index].errors.setdefault(power, []).append(score.error)
        count += len(trials)
    return [search.result() for search in searches], count


def rate_of(power: int) -> float:
    return 1e-3 * 2.0**power


def _past(known: dict[int, list[float]]) -> bool:
    """Return whether the two largest rates so far are far worse than the best."""
    means = [float(np.mean(errors)) for errors in known.values()]
    return len(means) > 2 and min(means[-2:]) > max(2 * min(means), min(means) + 5)
