"""`downpour test` and `downpour features`: inference on local data, without Ray or Spark."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
from msgspec.structs import replace
from threadpoolctl import threadpool_limits

from cupy_kernels.types import AnyArray
from shards.errors import BadInput, GiveUp
from worker.caffe.model import CaffeModel
from worker.caffe.net import Description
from worker.caffe.net_data import data_of, with_files
from worker.caffe.phases import Phase
from worker.caffe.solver import read_solver
from worker.caffe.text import read_text
from worker.caffe.weights import read_weights
from worker.device_selection import lent, parse_device
from worker.inference import check_blobs, evaluate, features
from worker.sources import ImageSource, Split, open_net_data, part_to_test, row_shapes

_BATCH_ROWS = 100


def run_test(solver: Path, weights: Path, data: Path, device: str = "auto") -> dict[str, float]:
    """The test net's outputs (loss, accuracy ...) over the test part of `data`, or all of it.

    `device` is a device as in `worker.device_selection`.
    """
    wanted = parse_device(device)
    read = read_solver(solver)
    if not read.tests:
        raise BadInput(
            f"{solver}: expected a test_iter, which says that it has a test net; got none"
        )
    source, net = fitted(read.tests[0].net, data, _split(None, data))
    model = CaffeModel(net)
    needed = model.net.tensors_for(model.net.outputs)
    arena, _ = read_weights(weights, model.net, model.initial(0), needed)
    with threadpool_limits(1), lent(arena, wanted) as there:
        return evaluate(model, there, source.batches(), model.net.batch_size)


def run_features(
    net: Path,
    weights: Path,
    data: Path,
    blobs: list[str],
    output: Path,
    split: str | None,
    batch_size: int,
    device: str = "auto",
) -> tuple[Path, int]:
    """Write `blobs` of every row into a new folder; returns the Parquet file and its row count.

    `split` None selects the data's test part, or all rows if it has none. `device` is a device as
    in `worker.device_selection`.
    """
    wanted = parse_device(device)
    if not blobs:
        raise BadInput("--blobs: expected names of blobs, got none")
    if batch_size < 1:
        raise BadInput(f"--batch-size: expected at least 1, got {batch_size}")
    if output.exists():
        raise BadInput(f"--output {output}: expected a folder to create, got one that exists")
    read = with_files(Description(read_text(net), Phase.TEST, file=str(net)))
    source, shaped = fitted(read, data, _split(split, data))
    model = CaffeModel(shaped)
    check_blobs(model, blobs)
    needed = model.net.tensors_for(blobs)
    arena, _ = read_weights(weights, model.net, model.initial(0), needed)
    try:
        output.mkdir(parents=True)
    except OSError as error:
        raise BadInput(f"--output {output}: {error.strerror}") from None
    try:
        with lent(arena, wanted) as there:
            rows = _write(output / "features.parquet", model, there, source, blobs, batch_size)
    except BaseException as error:
        shutil.rmtree(output)
        if isinstance(error, OSError):  # an error of pyarrow does not name the file
            raise GiveUp(f"--output {output}: {error}") from None
        raise
    return output / "features.parquet", rows


def fitted(net: Description, data: Path, split: Split) -> tuple[ImageSource, Description]:
    """One part of `data`, read in the row format of `net`, and the net for that row shape."""
    source = open_net_data(data_of(net), data, split)
    return source, replace(net, data_shape=source.shape, row_shapes=row_shapes(source))


def _write(
    path: Path,
    model: CaffeModel,
    arena: AnyArray,
    source: ImageSource,
    blobs: list[str],
    batch_size: int,
) -> int:
    rows = 0
    writer: pq.ParquetWriter | None = None
    with threadpool_limits(1):
        for batch in features(model, arena, source.batches(), blobs, batch_size):
            writer = writer or pq.ParquetWriter(path, batch.schema)
            writer.write_batch(batch)
            rows += batch.num_rows
    if writer is None:
        raise BadInput("features: expected rows, got none")
    writer.close()
    return rows


def _split(name: str | None, data: Path) -> Split:
    match name:
        case "train" | "test":
            return name
        case None:
            return part_to_test(data)
        case _:
            raise BadInput(f"--split: expected train or test, got {name}")
