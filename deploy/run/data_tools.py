"""The work of `downpour data`: inspect data, convert it, and compute its mean."""

import shutil
from collections.abc import Callable, Iterator
from math import ceil, prod
from pathlib import Path
from struct import pack
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from shards.errors import BadInput
from worker.caffe.blobs import write_blob
from worker.data import arrow_images, image_decoding
from worker.data.columns import pixel_column
from worker.data.databases import datum_bytes
from worker.data.image_table import image_schema
from worker.data.lmdb_file import write_lmdb
from worker.data.read_options import ReadOptions
from worker.data.source import images_as_batch
from worker.data.sources import ImageSource, open_with

Images = NDArray[Any]

_SHEET_ROWS, _SHEET_COLUMNS = 20, 10
_CELL = 64  # the side of an image in a contact sheet, in pixels
_BYTES = 255
_MAX_FOLDER = 9999  # a label of four digits
MEAN_SUFFIX = ".binaryproto"


class Inspection(msgspec.Struct, frozen=True):
    """Facts of one part of some data. `left_out` are the images that cannot be decoded.

    `labels` are the rows of each label, and the others are statistics of all pixels.
    """

    rows: int
    left_out: int
    shape: tuple[int, int, int]
    dtype: str
    labels: dict[int, int]
    least: float
    most: float
    mean: float
    deviation: float

    def json(self) -> str:
        """These facts as JSON."""
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    def text(self) -> str:
        """These facts as lines, with a bar for each label."""
        shown = "x".join(map(str, self.shape))
        bounds = f"{self.least:g} to {self.most:g}"
        lines = [
            f"{self.rows} rows of {shown} {self.dtype}",
            f"pixels from {bounds}, mean {self.mean:.4g}, deviation {self.deviation:.4g}",
        ]
        if self.left_out:
            lines.append(f"{self.left_out} images cannot be decoded, and are left out")
        largest = max(self.labels.values(), default=1)
        width = max((len(str(label)) for label in self.labels), default=1)
        for label, count in self.labels.items():
            bar = "#" * ceil(40 * count / largest)
            lines.append(f"label {label:>{width}}  {count:>8}  {bar}")
        return "\n".join(lines)


def inspect(data: Path, options: ReadOptions, sheet: Path | None = None) -> Inspection:
    """Read a part of some data, and return its facts; `sheet` is a picture to write."""
    source = open_with(data, options)
    labels: dict[int, int] = {}
    samples: dict[int, list[Images]] = {}
    sums, rows, bounds, kind, shape = np.zeros(2), 0, (np.inf, -np.inf), "", source.shape
    for images, labels_of_batch in arrays(source, options):
        kind, shape, rows = str(images.dtype), images.shape[1:], rows + len(images)
        values = images.astype(np.float64)
        sums += values.sum(), np.square(values).sum()
        bounds = min(bounds[0], float(values.min())), max(bounds[1], float(values.max()))
        for label, count in zip(*np.unique(labels_of_batch, return_counts=True), strict=True):
            labels[int(label)] = labels.get(int(label), 0) + int(count)
        if sheet is not None:
            _sample(samples, images, labels_of_batch)
    if not rows:
        raise BadInput(data, expected="rows", got="none")
    mean, square = sums / (rows * prod(shape))
    if sheet is not None:
        _write_sheet(sheet, samples)
    return Inspection(
        rows=rows,
        left_out=source.rows - rows,
        shape=shape,
        dtype=kind,
        labels=dict(sorted(labels.items())),
        least=bounds[0],
        most=bounds[1],
        mean=float(mean),
        deviation=float(max(square - mean**2, 0.0) ** 0.5),
    )


def convert(data: Path, out: Path, kind: str, options: ReadOptions) -> int:
    """Write a part of some data in another format to `out`, which must not exist.

    Returns the number of rows. What was written is removed if it fails.
    """
    if kind not in WRITERS:
        raise BadInput("--to", expected=f"one of {', '.join(WRITERS)}", got=kind)
    if out.exists():
        raise BadInput(out, expected="a place for new files", got="one that exists")
    source = open_with(data, options)
    try:
        return WRITERS[kind](source, out, options)
    except BaseException as error:
        if out.is_dir():
            shutil.rmtree(out)
        else:
            out.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise BadInput(f"{out}: cannot be written: {error.strerror or error}") from None
        raise


def mean_of(data: Path, out: Path | None, options: ReadOptions) -> list[float]:
    """The mean of each channel; with `out` the mean image is written there, as Caffe reads it.

    Raises BadInput for a file of another suffix than .binaryproto.
    """
    if out is not None and out.suffix != MEAN_SUFFIX:
        raise BadInput(
            f"--out {out}",
            expected=f"a {MEAN_SUFFIX} file, Caffe's format of a mean image",
            got=out.suffix or "no suffix",
        )
    source = open_with(data, options)
    total, rows = np.zeros(()), 0
    for images, _ in arrays(source, options):
        total = total + images.sum(axis=0, dtype=np.float64)
        rows += len(images)
    if not rows:
        raise BadInput(data, expected="rows", got="none")
    image = total / rows
    if out is not None:
        write_blob(out, image.astype(np.float32))
    return [float(value) for value in image.mean(axis=(1, 2))]


def arrays(source: ImageSource, options: ReadOptions) -> Iterator[tuple[Images, NDArray[np.int64]]]:
    """The rows of a source as images (rows, c, h, w) and labels (rows,)."""
    for batch in source.batches():
        if "label" not in batch.schema.names:
            raise BadInput(f"expected images with labels, got {', '.join(batch.schema.names)}")
        name = pixel_column(batch.schema.names, "data")
        flat = arrow_images.pixel_rows(batch.column(name), f"column {name}")
        labels = arrow_images.labels_as_int64(batch.column("label"), "column label")
        images = flat.reshape(-1, *source.shape)
        if options.resize is not None and images.dtype == np.uint8:
            images = np.stack([image_decoding.resize(image, *options.resize) for image in images])
        yield images, labels


def _to_lmdb(source: ImageSource, out: Path, options: ReadOptions) -> int:
    records = (
        (f"{number:08}".encode(), datum_bytes(label, image))
        for number, (image, label) in enumerate(_rows(source, options))
    )
    return write_lmdb(out, records)


def _to_parquet(source: ImageSource, out: Path, options: ReadOptions) -> int:
    rows = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    kind = source.schema.field("data").type
    with pq.ParquetWriter(out, image_schema(kind)) as writer:
        for images, labels in arrays(source, options):
            writer.write_batch(images_as_batch(np.arange(rows, rows + len(images)), labels, images))
            rows += len(images)
    return rows


def _to_idx(source: ImageSource, out: Path, options: ReadOptions) -> int:
    channels = source.shape[0]
    prefix = "train" if options.split == "train" else "t10k"
    if channels != 1 or source.schema.field("data").type != pa.binary():
        raise BadInput(f"{out}: IDX", expected="grey images of bytes", got=f"{channels} channels")
    out.mkdir(parents=True)
    batches = list(arrays(source, options))
    height, width = batches[0][0].shape[2:]
    labels = np.concatenate([part for _, part in batches])
    if labels.min() < 0 or labels.max() > _BYTES:
        raise BadInput(f"{out}: IDX", expected="labels in [0, 255]", got=f"up to {labels.max()}")
    with (out / f"{prefix}-images-idx3-ubyte").open("wb") as file:
        file.write(pack(">4I", 2051, len(labels), height, width))
        for images, _ in batches:
            file.write(images.tobytes())
    header = pack(">2I", 2049, len(labels))
    labels_file = out / f"{prefix}-labels-idx1-ubyte"
    labels_file.write_bytes(header + labels.astype(np.uint8).tobytes())
    return len(labels)


def _to_folder(source: ImageSource, out: Path, options: ReadOptions) -> int:
    if source.shape[0] not in {1, 3} or source.schema.field("data").type != pa.binary():
        raise BadInput(f"{out}: folder", expected="images of bytes with 1 or 3 channels")
    out.mkdir(parents=True)
    rows = 0
    labels = set[int]()
    for rows, (image, label) in enumerate(_rows(source, options), 1):
        if not 0 <= label <= _MAX_FOLDER:
            raise BadInput(f"{out}: folder", expected=f"labels in [0, {_MAX_FOLDER}]", got=label)
        labels.add(label)
        folder = out / f"{label:04}"
        folder.mkdir(exist_ok=True)
        (folder / f"{rows - 1:08}.png").write_bytes(image_decoding.encode(image))
    for label in range(max(labels, default=0)):  # labels are the places among the folders
        (out / f"{label:04}").mkdir(exist_ok=True)
    return rows


def _rows(source: ImageSource, options: ReadOptions) -> Iterator[tuple[Images, int]]:
    for images, labels in arrays(source, options):
        yield from zip(images, labels.tolist(), strict=True)


def _sample(samples: dict[int, list[Images]], images: Images, labels: NDArray[np.int64]) -> None:
    """Keep the first images of each label."""
    for image, label in zip(images, labels.tolist(), strict=True):
        if label not in samples and len(samples) == _SHEET_ROWS:
            continue
        row = samples.setdefault(label, [])
        if len(row) < _SHEET_COLUMNS:
            row.append(np.array(image))


def _write_sheet(path: Path, samples: dict[int, list[Images]]) -> None:
    """A picture with the first images of each label in a row of their own, after the label."""
    from PIL import Image, ImageDraw

    gap, margin = 4, 48
    size = (margin + _SHEET_COLUMNS * (_CELL + gap), len(samples) * (_CELL + gap) + gap)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for row, (label, images) in enumerate(sorted(samples.items())):
        top = gap + row * (_CELL + gap)
        draw.text((8, top + _CELL // 2 - 6), str(label), fill="black")
        for column, image in enumerate(images):
            cell = Image.fromarray(_to_rgb(image)).resize((_CELL, _CELL), Image.Resampling.BICUBIC)
            sheet.paste(cell, (margin + column * (_CELL + gap), top))
    try:
        sheet.save(path)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be written as a picture: {error}") from None


def _to_rgb(image: Images) -> NDArray[np.uint8]:
    """An image (c, h, w) as RGB (h, w, 3) bytes; other channels than BGR are shown as grey."""
    values = image.astype(np.float64)
    if image.dtype != np.uint8:
        low, high = values.min(), values.max()
        values = (values - low) * (_BYTES / (high - low or 1.0))
    shown = values[::-1] if len(values) == 3 else np.repeat(values.mean(axis=0)[None], 3, axis=0)
    return np.ascontiguousarray(shown.transpose(1, 2, 0).astype(np.uint8))


WRITERS: dict[str, Callable[[ImageSource, Path, ReadOptions], int]] = {
    "lmdb": _to_lmdb,
    "parquet": _to_parquet,
    "idx": _to_idx,
    "folder": _to_folder,
}
"""The formats that `convert` writes."""
