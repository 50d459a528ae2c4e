"""A problem that is trained on from the weights of an earlier trial."""

from collections.abc import Callable, Iterator

from deploy.experiments.problem import Batch, Measurement, Workload
from shards.tables import DenseTable
from worker.strategies.base import Floats


class ContinuedProblem:
    """A workload that starts from trained weights; `begin` returns those of a seed."""

    def __init__(self, workload: Workload, begin: Callable[[int], Floats]) -> None:
        self._workload, self._begin = workload, begin

    @property
    def table(self) -> DenseTable:
        return self._workload.table

    @property
    def worst_error(self) -> float:
        return self._workload.worst_error

    def start(self, seed: int) -> Floats:
        return self._begin(seed).copy()

    def batches(self, seed: int, worker: int) -> Iterator[Batch]:
        return self._workload.batches(seed, worker)

    def gradient(self, weights: Floats, batch: Batch, out: Floats) -> float:
        return self._workload.gradient(weights, batch, out)

    def measure(self, weights: Floats) -> Measurement:
        return self._workload.measure(weights)
