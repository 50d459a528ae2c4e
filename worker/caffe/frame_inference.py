"""`worker.test` and `worker.features`: a Caffe net with its weights over a Spark DataFrame.

This process reads the net and the weights, and checks them, the blobs and the DataFrame's columns
before any task starts. The tasks are those of `mapInArrow`, one a partition. A Python process of
Spark runs many of them, one at a time; it builds the net once and keeps it with its weights.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.structs import replace
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ps import path_checks
from shards import argument_checks
from shards.errors import BadInput
from worker import spark
from worker.caffe import inference
from worker.caffe.inference import ID, LABEL, check_blobs, check_row_blobs, column_sums
from worker.caffe.model import CaffeModel
from worker.caffe.net import Description
from worker.caffe.net_data import read_options_of, with_files
from worker.caffe.phases import Phase
from worker.caffe.python_nets import Net
from worker.caffe.solver import Solver, read_solver
from worker.caffe.text import read_text
from worker.caffe.weights import read_weights
from worker.data.columns import DATA
from worker.data.read_options import MAX_SKIPPED
from worker.job.runner import check_frame
from worker.spark.dataframe_checks import check_columns, shapes_of
from worker.training.device_selection import DeviceRequest, lend_weights, parse_device

Floats = NDArray[np.float32]

_WHERE = "the DataFrame"
_ROW_ID = "id"
_SUMS = pa.schema([("blob", pa.string()), ("rows", pa.int64()), ("sums", pa.list_(pa.float64()))])


class ForwardPass(msgspec.Struct, frozen=True):
    """The work of every task: these blobs of a net with these weights, a flat float32 arena.

    `key` identifies the net and the weights among those that a process has loaded. `weights` is
    called in a task.
    """

    key: str
    net: Description
    weights: Callable[[], Floats]
    blobs: tuple[str, ...]
    batch_size: int
    device: DeviceRequest
    skip_images: int = MAX_SKIPPED


_loaded: dict[str, tuple[CaffeModel, Floats]] = {}
"""The net and the weights of the latest pass in this process."""


def test(
    df: spark.DataFrame,
    *,
    weights: str | Path,
    solver: str | Path | Solver | None = None,  # noqa: PT028  # a function called test, no test
    net: str | Path | Net | None = None,  # noqa: PT028  # a function called test, no test
    blobs: Sequence[str] | None = None,  # noqa: PT028  # a function called test, no test
    device: str = "auto",  # noqa: PT028  # a function called test, no test
    skip_images: int = MAX_SKIPPED,  # noqa: PT028  # a function called test, no test
) -> dict[str, list[float]]:
    """The mean of each column of a net's `blobs` over all rows of a DataFrame; blocks until done.

    For example {"accuracy": [0.99], "loss": [0.03]}. `solver` gives its first test net, or `net` a
    net in its test phase; each is a prototxt file, or what `worker.caffe.python_nets` makes.
    `blobs` are by default the net's outputs. A blob of one row is flattened, and has a mean for
    each of its columns. One of the whole batch, such as a loss or the accuracies by class, is
    averaged over the batches, of the size that the net states, with equal weight for every row.

    The columns of `df` are those of `worker.train`; `label` may be missing if no blob needs it.
    `weights` is a .caffemodel, .h5 or .safetensors file with every layer that the blobs depend on.
    `device` is cpu, gpu, gpu:N, or auto (a GPU where one answers). Each task leaves out up to
    `skip_images` images that cannot be decoded.

    Raises BadInput for an error that the caller can fix, before any task starts where it can be
    known; GiveUp when a task fails for good.
    """
    check_frame("test: df", df)
    skip_images = argument_checks.whole("test: skip_images", skip_images, 0)
    fitted = _fit_net(df, _choose_net(solver, net))
    names = None if blobs is None else _names("test: blobs", blobs)
    return column_means(
        df, fitted, weights=weights, blobs=names, device=device, skip_images=skip_images
    )


def column_means(
    df: spark.DataFrame,
    net: Description,
    *,
    weights: str | Path,
    blobs: Sequence[str] | None = None,
    device: str = "auto",
    skip_images: int = MAX_SKIPPED,
) -> dict[str, list[float]]:
    """`test` with a net that has the shapes of the rows."""
    model = CaffeModel(net)
    names = model.net.outputs if blobs is None else blobs
    check_blobs(model, names)
    forward = _forward("test", df, model, names, weights, model.net.batch_size, device, skip_images)
    tag = f"downpour-test-{secrets.token_hex(4)}"
    records = spark.run_tasks(df, partial(_sums, forward=forward), _SUMS, tag, job="test")
    totals: dict[str, NDArray[np.float64]] = {}
    for blob, _, sums in records:
        totals[blob] = totals.get(blob, np.zeros(len(sums))) + np.array(sums)
    rows = sum(count for blob, count, _ in records if blob == names[0])
    if not rows:  # there are some, but no image of them can be decoded
        raise BadInput(_WHERE, expected="rows to test on", got="none")
    return {name: [float(value) / rows for value in totals[name]] for name in names}


def features(
    df: spark.DataFrame,
    *,
    net: str | Path | Net,
    weights: str | Path,
    blobs: Sequence[str],
    label: str | None = None,
    batch_size: int = 100,
    device: str = "auto",
    skip_images: int = MAX_SKIPPED,
) -> spark.DataFrame:
    """A DataFrame with the `blobs` of a net for each row of `df`, computed when it is read.

    Its columns are `SampleID`, an array<float> for each blob, flattened, and `label`. `SampleID` is
    the column `id` of `df`, or a number that Spark gives each row (monotonically_increasing_id).
    `label` is the column that the argument names, by default `label`; without it there is none.

    `net` is a prototxt file, or a net of `worker.caffe.python_nets`; its test phase runs, on
    `batch_size` rows at a time. The other columns of `df` are those of `worker.train`. `weights` is
    a .caffemodel, .h5 or .safetensors file with every layer that the blobs depend on. `device` is
    cpu, gpu, gpu:N, or auto (a GPU where one answers). Each task leaves out up to `skip_images`
    images that cannot be decoded.

    Reads the first row of `df`. Raises BadInput for a net, weights, blobs or columns that do not
    fit; an error in a later row fails the Spark job that reads the result.
    """
    check_frame("features: df", df)
    batch_size = argument_checks.whole("features: batch_size", batch_size, 1)
    skip_images = argument_checks.whole("features: skip_images", skip_images, 0)
    read = _net("features: net", net)
    if label is not None:
        df = _rename_label(df, label)
    fitted, names = _fit_net(df, read), _names("features: blobs", blobs)
    return feature_rows(
        df,
        fitted,
        weights=weights,
        blobs=names,
        batch_size=batch_size,
        device=device,
        skip_images=skip_images,
    )


def feature_rows(
    df: spark.DataFrame,
    net: Description,
    *,
    weights: str | Path,
    blobs: Sequence[str],
    batch_size: int,
    device: str = "auto",
    skip_images: int = MAX_SKIPPED,
) -> spark.DataFrame:
    """`features` with a net that has the shapes of the rows."""
    model, names = CaffeModel(net), blobs
    check_row_blobs(model, names)
    reserved = [name for name in names if name in (ID, LABEL)]
    if reserved:
        raise BadInput(
            "features: blobs", expected=f"names other than {ID} and {LABEL}", got=reserved[0]
        )
    if _ROW_ID not in df.columns:
        df = df.selectExpr("*", f"monotonically_increasing_id() AS {_ROW_ID}")
    forward = _forward("features", df, model, names, weights, batch_size, device, skip_images)
    kinds = spark.column_types(df, {_ROW_ID, LABEL})
    columns = [(ID, kinds[_ROW_ID]), *((name, pa.list_(pa.float32())) for name in names)]
    if LABEL in kinds:
        columns.append((LABEL, kinds[LABEL]))
    task = partial(_features, forward=forward)
    return spark.map_tasks(df, task, pa.schema(columns), job="features")


def _choose_net(solver: str | Path | Solver | None, net: str | Path | Net | None) -> Description:
    """The net to test: the first of the solver's test nets, or the net's test phase."""
    if (solver is None) == (net is None):
        got = "neither" if net is None else "both"
        raise BadInput("test", expected="a solver or a net", got=got)
    if net is not None:
        return _net("test: net", net)
    read = (
        solver
        if isinstance(solver, Solver)
        else read_solver(path_checks.path("test: solver", solver))
    )
    if not read.tests:
        raise BadInput(
            read.file, expected="a test_iter, which says that it has a test net", got="none"
        )
    return read.tests[0].net


def _net(label: str, net: str | Path | Net) -> Description:
    if isinstance(net, Net):
        return with_files(net.description(Phase.TEST))
    path = path_checks.path(label, net)
    return with_files(Description(read_text(path), Phase.TEST, file=str(path)))


def _names(label: str, blobs: Sequence[str]) -> tuple[str, ...]:
    """The names of blobs, each once; raises BadInput for none."""
    names = argument_checks.items(label, blobs, "a list of names")
    if not names:
        raise BadInput(label, expected="names of blobs", got="none")
    return tuple(dict.fromkeys(argument_checks.name(label, name) for name in names))


def _rename_label(df: spark.DataFrame, label: str) -> spark.DataFrame:
    """`df` with the column `label` under that name."""
    if label not in df.columns:
        raise BadInput(_WHERE, expected=f"a column {label}", got=", ".join(df.columns))
    return df if label == LABEL else df.drop(LABEL).withColumnRenamed(label, LABEL)


def _fit_net(df: spark.DataFrame, net: Description) -> Description:
    """The net for the rows of `df`; raises BadInput for no rows, and for no column of images."""
    data_options = read_options_of(net)
    if not data_options.tops:
        check_columns(df, (DATA,))
    shape, others = shapes_of(df, data_options)
    return replace(net, data_shape=shape, row_shapes=others)


def _forward(
    label: str,
    df: spark.DataFrame,
    model: CaffeModel,
    blobs: Sequence[str],
    weights: str | Path,
    batch_size: int,
    device: str,
    skip_images: int,
) -> ForwardPass:
    """Describe the tasks' work, with the weights read; raises BadInput for a missing column."""
    device_request = parse_device(device)
    needed = model.net.columns_for(blobs)
    columns = model.net.column_specs
    check_columns(
        df, [column for column in columns if column.name in needed or column.among(df.columns)]
    )
    path = path_checks.path(f"{label}: weights", weights)
    arena, _ = read_weights(path, model.net, model.initial(0), model.net.tensors_for(blobs))
    key, shared = secrets.token_hex(8), spark.share(df, arena)
    return ForwardPass(
        key, model.net.description, shared, tuple(blobs), batch_size, device_request, skip_images
    )


def _load(forward: ForwardPass) -> tuple[CaffeModel, Floats]:
    """The net and the weights, as this process has them since its first task of this pass."""
    if forward.key not in _loaded:
        _loaded.clear()
        _loaded[forward.key] = CaffeModel(forward.net), forward.weights()
    return _loaded[forward.key]


def _sums(
    rows: Iterator[pa.RecordBatch],
    part: int,
    _: int,
    gpus: Sequence[str],
    *,
    forward: ForwardPass,
) -> Iterator[pa.RecordBatch]:
    """The sums of the columns of each blob over one partition; nothing without rows."""
    model, arena = _load(forward)
    with (
        threadpool_limits(1),
        lend_weights(arena, forward.device, partition=part, assigned=gpus) as device_weights,
    ):
        seen, sums = column_sums(
            model, device_weights, rows, forward.blobs, forward.batch_size, forward.skip_images
        )
    if seen:
        records = [{"blob": name, "rows": seen, "sums": total} for name, total in sums.items()]
        yield pa.RecordBatch.from_pylist(records, schema=_SUMS)


def _features(
    rows: Iterator[pa.RecordBatch],
    part: int,
    _: int,
    gpus: Sequence[str],
    *,
    forward: ForwardPass,
) -> Iterator[pa.RecordBatch]:
    """The features of one partition, in order."""
    model, arena = _load(forward)
    with (
        threadpool_limits(1),
        lend_weights(arena, forward.device, partition=part, assigned=gpus) as device_weights,
    ):
        yield from inference.features(
            model, device_weights, rows, forward.blobs, forward.batch_size, forward.skip_images
        )
