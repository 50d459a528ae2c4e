"""`worker.Caffe`: a solver and its net as a kind of model of `worker.train`."""

from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ps import path_checks
from ps.logs import logger
from shards import argument_checks
from shards.errors import BadInput
from shards.plurals import format_count
from shards.tables import DenseTable
from worker import spark
from worker.caffe.evaluator import Evaluator, classes_of, needs_test_net
from worker.caffe.job import caffe_job, model_of
from worker.caffe.model import CaffeModel
from worker.caffe.net_data import data_of, read_options_of
from worker.caffe.solver import Solver, read_solver
from worker.caffe.weight_files import write_weights
from worker.caffe.weights import starting_weights
from worker.data.source import Source
from worker.job.model_kind import Fitted, TrainArguments
from worker.spark.dataframe_checks import check_columns, shapes_of
from worker.training.evaluation import EvaluationPlan

_LOG = logger("worker", worker="driver")
Floats = NDArray[np.float32]


class Caffe(msgspec.Struct, frozen=True):
    """A Caffe solver and its net, for `worker.train`.

    `solver` is a prototxt, or a `Solver` with a net of your own (`worker.caffe.python_nets`).
    `weights` starts from a .caffemodel, .h5 or .safetensors file (fine-tuning); which layers
    matched is logged. `test_data` is a DataFrame with the columns of the training data, or the path
    of such files. The weights are tested on it every `test_interval` iterations of the solver and
    at the end; of a DataFrame this process reads the first `test_iter` batches.

    The training data needs a column `label` (whole numbers) and one named `image` or `data` (binary
    uint8 pixels, or a list of numbers). Bytes are a square image and a list is a vector, unless
    columns channels, height, width or the net give a shape; a net with convolutions takes a list as
    a square image. With a Spark session in place of a DataFrame, the tasks read the source that the
    net's data layer names, each its own part; every machine must have it at the same path.

    Raises BadInput for a file that is no solver.
    """

    solver: Solver | str | Path
    weights: str | Path | None = None
    test_data: "spark.DataFrame | str | Path | None" = None

    def __post_init__(self) -> None:
        if not isinstance(self.solver, Solver):
            read = read_solver(path_checks.path("Caffe: solver", self.solver))
            msgspec.structs.force_setattr(self, "solver", read)
        if self.weights is not None:
            path = path_checks.path("Caffe: weights", self.weights)
            msgspec.structs.force_setattr(self, "weights", path)

    def __repr__(self) -> str:
        start = "" if self.weights is None else f", weights={str(self.weights)!r}"
        tests = "" if self.test_data is None else ", test_data=..."
        return f"worker.Caffe({str(self._read.file)!r}{start}{tests})"

    def table(self) -> DenseTable:
        """The net's tensors: "conv1/0" the weights of a layer, "conv1/1" its bias, and so on."""
        return CaffeModel(self._read.train).table

    @property
    def _read(self) -> Solver:
        assert isinstance(self.solver, Solver), "read when this was made"
        return self.solver

    def fit_to(self, df: "spark.DataFrame | spark.SparkSession", options: TrainArguments) -> Fitted:
        """See `worker.train`."""
        source = None
        self._read.steps(options.max_iter)  # an error before any row is looked at
        if isinstance(df, spark.SparkSession):
            source = _open_source(self._read, options)
            solver = self._read.with_data_shape(source.shape, source.row_shapes)
            assert options.workers is not None, "checked with the source"
            df = spark.number_partitions(df, options.workers)
        else:
            solver = fit_solver(self._read, df)
        for notice in solver.notices:
            _LOG.warning(notice)
        job = caffe_job(solver, options, workers=options.count_workers(df), logs_apart=True)
        model = model_of(job)
        start = self._start(model, solver, options.resume, job.plan.seed)
        evaluator = _evaluator(solver, model, self.test_data, start, options.skip_images)
        return Fitted(
            model=msgspec.structs.replace(self, solver=solver),
            df=df,
            job=job,
            source=source,
            start=start,
            evaluation=_plan(solver, evaluator),
            test=None if evaluator is None else evaluator.sample,
        )

    def save(self, path: Path, weights: Floats) -> None:
        """Write the weights as .caffemodel, .h5 or .safetensors, by the path's suffix."""
        write_weights(path, CaffeModel(self._read.train).net, weights)

    def _start(
        self, model: CaffeModel, solver: Solver, resume: str | Path | None, seed: int
    ) -> Floats | None:
        """The weights of the given file, else of the solver's files; None if there are none.

        A resumed job does not read the solver's files. A report says what each file was used for.
        """
        solver_files = () if resume is not None else tuple(solver.weights)
        files = solver_files if self.weights is None else (self.weights,)
        weights, reports = starting_weights(model, files, seed)
        for report in reports:
            _LOG.info(str(report))
        return weights


def _open_source(solver: Solver, options: TrainArguments) -> Source:
    """The source that the net names, which tasks can read themselves; raises BadInput."""
    from worker.caffe.net_sources import open_net_data

    source = open_net_data(
        data_of(solver.train), seed=options.seed, skip_images=options.skip_images
    )
    if not isinstance(source, Source):
        raise BadInput(
            "train: df",
            expected=(
                "a DataFrame for IDX files and Parquet files of raw images (spark.read.parquet)"
            ),
            got="a Spark session",
        )
    if options.workers is None or options.workers > source.rows:
        raise BadInput(
            "train: workers",
            expected=(
                f"the number of workers, at most {source.rows}, as the source "
                f"has {format_count(source.rows, 'row')}"
            ),
            got=options.workers,
        )
    return source


def fit_solver(solver: Solver, df: "spark.DataFrame") -> Solver:
    """The solver for the rows of `df`; a net with columns by name reads no images by default."""
    data_options = read_options_of(solver.train)
    if not data_options.tops:
        check_columns(df)
    return solver.with_data_shape(*shapes_of(df, data_options))


def _evaluator(
    solver: Solver,
    model: CaffeModel,
    data: "spark.DataFrame | str | Path | None",
    start: NDArray[np.float32] | None,
    skip_images: int,
) -> Evaluator | None:
    """The solver's test nets on `data`, tested on one row first; None without data."""
    if data is None:
        if solver.test_interval and solver.active_tests:
            _LOG.warning("%s: test_interval has no effect: no test_data was given", solver.file)
        return None
    if not isinstance(data, spark.DataFrame | str | Path):
        raise argument_checks.wrong("Caffe: test_data", "a Spark DataFrame or a path", data)
    if not isinstance(data, spark.DataFrame):
        data = path_checks.path("Caffe: test_data", data)
    named = data if isinstance(data, Path) else "the DataFrame"
    needs_test_net(solver, "Caffe: test_data", named)
    batches: list[pa.RecordBatch] = []
    if isinstance(data, Path):
        # Loaded on first use: PyArrow's readers are needed for files only.
        from worker.caffe.net_sources import open_net_data
        from worker.data.sources import part_to_test, row_shapes

        part, classes = part_to_test(data), classes_of(model.net)
        sources = [
            open_net_data(data_of(test.net), data, part, classes, skip_images=skip_images)
            for test in solver.active_tests
        ]
        tests = [
            (test.with_data_shape(source.shape, row_shapes(source)), source.batches)
            for test, source in zip(solver.active_tests, sources, strict=True)
        ]
        evaluator = Evaluator(tests, model, skip_images)
    else:
        evaluator = Evaluator(
            [(test, lambda: batches) for test in solver.active_tests], model, skip_images
        )
        evaluator.check_names(data.columns, "Caffe: test_data")
        batches += spark.first_rows(data, evaluator.max_rows)
    try:
        evaluator.check(start if start is not None else model.initial(1))
    except BadInput as error:
        raise error.within(f"Caffe: test_data {named}") from None
    return evaluator


def _plan(solver: Solver, evaluator: Evaluator | None) -> EvaluationPlan | None:
    """The tests during training, as the solver wants them."""
    if evaluator is None or not solver.test_interval:
        return None
    return EvaluationPlan(evaluator.sample, solver.test_interval, solver.test_initialization)
