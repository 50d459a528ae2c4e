"""`downpour test` and `downpour features`: inference in this process, or as tasks of a Spark."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace
from threadpoolctl import threadpool_limits

from deploy.run.settings import FeatureFormat
from ps import path_checks
from shards.errors import BadInput, GiveUp
from worker import spark
from worker.caffe.evaluator import name_of
from worker.caffe.frame_inference import column_means, feature_rows
from worker.caffe.inference import check_row_blobs, evaluate, features
from worker.caffe.model import CaffeModel
from worker.caffe.net import Description
from worker.caffe.net_data import data_of, with_files
from worker.caffe.net_sources import open_net_data
from worker.caffe.phases import Phase
from worker.caffe.solver import read_solver
from worker.caffe.text import read_text
from worker.caffe.weights import read_weights
from worker.data.read_options import MAX_SKIPPED
from worker.data.source import Source
from worker.data.sources import ImageSource, Split, part_to_test, row_shapes
from worker.training.device_selection import DeviceRequest, lend_weights, parse_device


class OnSpark(NamedTuple):
    """The URL of a Spark, and the number of tasks that read the data there."""

    url: str
    tasks: int


def run_test(
    solver: Path,
    weights: Path,
    data: Path | None,
    device: str = "auto",
    on: OnSpark | None = None,
    skip_images: int = MAX_SKIPPED,
) -> dict[str, float]:
    """The outputs of the test nets (loss, accuracy ...) over the test part of `data`, or all of it.

    Without `data` each net reads what it names. The names of a second net's outputs end in #1.
    `device` is a device as in `worker.training.device_selection`. It is computed in this process,
    or `on` a Spark. A reader leaves out up to `skip_images` images that cannot be decoded.
    """
    request = parse_device(device)
    read = read_solver(solver)
    if not read.tests:
        raise BadInput(
            solver, expected="a test_iter, which says that it has a test net", got="none"
        )
    figures: dict[str, float] = {}
    for number, test in enumerate(read.tests):
        outputs = _test_net(
            test.net, weights, _resolve_for_tasks(data, on), request, device, on, skip_images
        )
        figures |= {name_of(name, number): value for name, value in outputs.items()}
    return figures


def _test_net(
    tested: Description,
    weights: Path,
    data: Path | None,
    request: DeviceRequest,
    device: str,
    on: OnSpark | None,
    skip_images: int,
) -> dict[str, float]:
    """The outputs of one net."""
    source, net = fit_net(tested, data, None, skip_images)
    model = CaffeModel(net)
    if on is not None:
        with _frame(source, on) as df:
            means = column_means(
                df,
                net,
                weights=weights,
                blobs=model.net.figures,
                device=device,
                skip_images=skip_images,
            )
        return {name: columns[0] for name, columns in means.items()}
    needed = model.net.tensors_for(model.net.outputs)
    arena, _ = read_weights(weights, model.net, model.initial(0), needed)
    with threadpool_limits(1), lend_weights(arena, request) as device_weights:
        batch_size = model.net.batch_size
        return evaluate(model, device_weights, source.batches(), batch_size, skip_images)


def run_features(
    net: Path,
    weights: Path,
    data: Path | None,
    blobs: list[str],
    output: str,
    split: str | None,
    batch_size: int,
    device: str = "auto",
    form: FeatureFormat = FeatureFormat.PARQUET,
    on: OnSpark | None = None,
    skip_images: int = MAX_SKIPPED,
) -> tuple[str, int]:
    """Write `blobs` of every row into a new folder; returns what was written and its row count.

    `split` None selects the data's test part, or all rows if it has none. `device` is a device as
    in `worker.training.device_selection`. In this process the folder gets one file. `on` a Spark
    each task writes a file, and `output` may be a URI. A reader leaves out up to `skip_images`
    images that cannot be decoded.
    """
    request = parse_device(device)
    if not blobs:
        raise BadInput("--blobs", expected="names of blobs", got="none")
    if batch_size < 1:
        raise BadInput("--batch-size", expected="at least 1", got=batch_size)
    folder = _new_folder(output, on)
    read = with_files(Description(read_text(net), Phase.TEST, file=str(net)))
    source, shaped = fit_net(read, _resolve_for_tasks(data, on), split, skip_images)
    model = CaffeModel(shaped)
    check_row_blobs(model, blobs)
    if on is not None:
        with _frame(source, on) as df:
            frame = feature_rows(
                df,
                shaped,
                weights=weights,
                blobs=blobs,
                batch_size=batch_size,
                device=device,
                skip_images=skip_images,
            )
            where = output if folder is None else str(folder)
            return output, spark.write_frame(frame, where, form)
    assert folder is not None
    needed = model.net.tensors_for(blobs)
    arena, _ = read_weights(weights, model.net, model.initial(0), needed)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise BadInput(f"--output {output}: {error.strerror}") from None
    path = folder / f"features.{form}"
    try:
        with threadpool_limits(1), lend_weights(arena, request) as device_weights:
            computed = features(
                model, device_weights, source.batches(), blobs, batch_size, skip_images
            )
            rows = _WRITERS[form](path, computed)
        if not rows:
            raise BadInput("features", expected="rows", got="none")
    except BaseException as error:
        shutil.rmtree(folder)
        if isinstance(error, OSError):  # an error of pyarrow does not name the file
            raise GiveUp(f"--output {output}: {error}") from None
        raise
    return str(Path(output) / path.name), rows


def fit_net(
    net: Description, data: Path | None, split: str | None, skip_images: int = MAX_SKIPPED
) -> tuple[ImageSource, Description]:
    """One part of `data`, read in the row format of `net`, and the net for that row shape.

    Without `data` it is a part of the sources that the net names.
    """
    named = data_of(net).absolute()
    location = named.source if data is None else data
    if location is None:
        raise BadInput(
            "--data", expected=f"data, as no data layer of {net.file} names a source", got="none"
        )
    source = open_net_data(named, data, _split(split, location), skip_images=skip_images)
    return source, replace(net, data_shape=source.shape, row_shapes=row_shapes(source))


def _new_folder(output: str, on: OnSpark | None) -> Path | None:
    """The local folder to make; None for a URI, which Spark writes to."""
    if "://" in output:
        if on is None:
            raise BadInput(f"--output {output}", expected="a folder, as there is no --spark")
        return None
    folder = path_checks.path("--output", output).absolute()
    if folder.exists():
        raise BadInput(f"--output {output}", expected="a folder to create", got="one that exists")
    return folder


def _resolve_for_tasks(data: Path | None, on: OnSpark | None) -> Path | None:
    """The place of the data as tasks see it, which run in folders of their own."""
    return data if on is None or data is None else data.absolute()


@contextmanager
def _frame(source: ImageSource, on: OnSpark) -> Iterator[spark.DataFrame]:
    """The rows of a source on a Spark; files that tasks can read in parts are not read here."""
    with spark.start_session(on.url, on.tasks, app="downpour", env={}) as session:
        if isinstance(source, Source):
            yield spark.source_rows(session, source, on.tasks)
        else:
            yield session.createDataFrame(pa.Table.from_batches(source.batches()))


def _write_parquet(path: Path, batches: Iterator[pa.RecordBatch]) -> int:
    rows = 0
    writer: pq.ParquetWriter | None = None
    for batch in batches:
        writer = writer or pq.ParquetWriter(path, batch.schema)
        writer.write_batch(batch)
        rows += batch.num_rows
    if writer is not None:
        writer.close()
    return rows


def _write_json(path: Path, batches: Iterator[pa.RecordBatch]) -> int:
    """Write an object a line, as Spark does."""
    rows = 0
    with path.open("wb") as file:
        for batch in batches:
            file.write(msgspec.json.Encoder().encode_lines(batch.to_pylist()))
            rows += batch.num_rows
    return rows


_WRITERS = {FeatureFormat.PARQUET: _write_parquet, FeatureFormat.JSON: _write_json}


def _split(name: str | None, data: Path) -> Split:
    match name:
        case "train" | "test":
            return name
        case None:
            return part_to_test(data)
        case _:
            raise BadInput("--split", expected="train or test", got=name)
