"""Evaluates the test nets of a solver on test data."""

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from shards.errors import BadInput
from worker.caffe.inference import evaluate, slices
from worker.caffe.layers.labelled import Labelled
from worker.caffe.layers.losses import ClassLoss
from worker.caffe.model import CaffeModel
from worker.caffe.net import Network
from worker.caffe.solver import Solver, TestNet
from worker.caffe.weights import lay_out
from worker.data.columns import ColumnKind
from worker.data.read_options import MAX_SKIPPED

Floats = NDArray[np.float32]
_MOST_CORES = 16  # each has buffers for a batch


Rows = Callable[[], Iterable[pa.RecordBatch]]
"""Each call yields the rows of test data from the start."""

KeepBatch = Callable[[pa.RecordBatch], bool]
"""Called before each batch of a test; the test ends once it returns false."""


class _Tested(NamedTuple):
    """A test net, the number of its batches in a test, and its data."""

    model: CaffeModel
    iterations: int
    number: int
    rows: Rows


class Evaluator:
    """Computes the outputs of test nets for given weights; serves one thread.

    Each test net has rows of its own. `trained` is the model that the weights belong to. A test
    leaves out up to `skip_images` images that cannot be decoded.
    """

    def __init__(
        self,
        tests: Sequence[tuple[TestNet, Rows]],
        trained: CaffeModel,
        skip_images: int = MAX_SKIPPED,
    ) -> None:
        self._nets = [
            _Tested(CaffeModel(test.net), test.iterations, test.number, rows)
            for test, rows in tests
        ]
        self._trained = trained
        self._skip_images = skip_images

    def check_names(self, names: Sequence[str], where: str) -> None:
        """Raise BadInput unless the images that the test nets read are among these columns."""
        for tested in self._nets:
            for column in tested.model.net.column_specs:
                if column.kind is ColumnKind.IMAGE:
                    column.find(names, where)

    @property
    def figures(self) -> list[str]:
        """The names of the outputs of a test."""
        return [
            name_of(output, tested.number)
            for tested in self._nets
            for output in tested.model.net.figures
        ]

    @property
    def max_rows(self) -> int:
        """The largest number of rows that a test during training reads."""
        return max(tested.model.net.batch_size * tested.iterations for tested in self._nets)

    def check(self, weights: Floats) -> None:
        """Raise BadInput unless the first row fits every test net."""
        for tested in self._nets:
            self._outputs(tested, weights, 1, lambda _: True)

    def sample(
        self, weights: Floats, stopped: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """The outputs over `test_iter` batches, or over all rows if there are fewer.

        The test stops early, with the batches so far, once `stopped` returns true.
        """
        return self._all(weights, lambda _: not stopped(), whole=False)

    def whole(
        self, weights: Floats, read: Callable[[int], None] = lambda _: None
    ) -> dict[str, float]:
        """The outputs over all rows; `read` is called with the rows read so far, of all nets.

        All cores compute, each on batches of its own.
        """
        rows = 0

        def count(batch: pa.RecordBatch) -> bool:
            nonlocal rows
            rows += batch.num_rows
            read(rows)
            return True

        with threadpool_limits(1):  # a product of one batch is too small for several cores
            return self._all(weights, count, whole=True)

    def _all(self, weights: Floats, keep_batch: KeepBatch, *, whole: bool) -> dict[str, float]:
        """Each net's outputs by name; the second net's names get the suffix #1, and so on."""
        figures: dict[str, float] = {}
        for tested in self._nets:
            most = None if whole else tested.model.net.batch_size * tested.iterations
            for name, value in self._outputs(tested, weights, most, keep_batch).items():
                figures[name_of(name, tested.number)] = value
        return figures

    def _outputs(
        self, tested: _Tested, weights: Floats, most: int | None, keep_batch: KeepBatch
    ) -> dict[str, float]:
        model = tested.model
        laid = lay_out(weights, self._trained.table, model.net)
        rows = tested.rows() if most is None else head(tested.rows(), most)
        batches = slices(rows, model.net.batch_size)
        cores = min(len(os.sched_getaffinity(0)), _MOST_CORES) if most is None else 1
        return evaluate(
            model,
            laid,
            takewhile(keep_batch, batches),
            model.net.batch_size,
            self._skip_images,
            [CaffeModel(model.net.description) for _ in range(cores - 1)],
        )


def name_of(output: str, net: int) -> str:
    """The name of an output of a solver's test net by the net's number, counted from 0."""
    return f"{output}#{net}" if net else output


def head(rows: Iterable[pa.RecordBatch], most: int) -> Iterable[pa.RecordBatch]:
    """The first `most` rows."""
    for batch in rows:
        yield batch.slice(0, most)
        most -= batch.num_rows
        if most <= 0:
            return


def needs_test_net(solver: Solver, label: str, data: object) -> None:
    """Raise BadInput for test data without a test net in the solver."""
    if not solver.active_tests:
        got = "one with a test_iter of 0" if solver.tests else "one without"
        raise BadInput(f"{label} {data}", expected="a solver with a test_iter", got=got)


def classes_of(net: Network) -> int | None:
    """The number of classes that the net's losses expect in the labels.

    None if it is unknown, or if the net reads several columns of labels.
    """
    if sum(column.kind is ColumnKind.LABEL for column in net.column_specs) > 1:
        return None
    layers = [node.layer for node in net.nodes]
    losses = [layer for layer in layers if layer.LOSS and isinstance(layer, Labelled | ClassLoss)]
    expected = [
        loss.classes
        for loss in losses
        if loss.spec.bottom[1] in net.inputs and not loss.spec.loss_param.HasField("ignore_label")
    ]
    return min(expected, default=None)
