"""MNIST's IDX files: a big-endian magic number, the extents, and bytes.

Images: magic 2051, count, rows, columns, then count*rows*columns uint8. Labels: magic 2049, count,
then count uint8. (LeCun, Cortes and Burges, "The MNIST database of handwritten digits".)

A gzipped file is unpacked only up to the size that its header states. A size that is impossible for
a file of this length is refused before any memory is allocated.
"""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from struct import unpack
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shards.errors import BadInput
from worker.data.arrow_images import check_labels
from worker.data.columns import Shape
from worker.data.image_table import BATCH_ROWS, image_batch, image_schema, listing
from worker.data.read_options import ReadOptions

Bytes = NDArray[np.uint8]
Readable = gzip.GzipFile | BufferedReader

_PREFIX = {"train": "train", "test": "t10k"}
_IMAGES, _LABELS = 2051, 2049
_DEFLATE_RATIO = 1032  # the most that deflate can unpack a byte to


@dataclass(frozen=True)
class IdxSource:
    """Images (n, h, w) and labels (n,), uint8, in memory."""

    images: Bytes
    labels: Bytes

    @property
    def rows(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> Shape:
        return (1, self.images.shape[1], self.images.shape[2])

    @property
    def schema(self) -> Any:
        return image_schema(pa.binary())

    def batches(self, rows: int = BATCH_ROWS) -> Iterator[Any]:
        size, buffer = self.images[0].size, pa.py_buffer(self.images.reshape(-1))
        for start in range(0, self.rows, rows):
            stop = min(start + rows, self.rows)
            ends = pa.py_buffer(np.arange(stop - start + 1, dtype=np.int32) * np.int32(size))
            part = buffer.slice(start * size, (stop - start) * size)
            pixels = pa.Array.from_buffers(pa.binary(), stop - start, [None, ends, part])
            labels = self.labels[start:stop].astype(np.int64)
            yield image_batch(self.schema, np.arange(start, stop), labels, self.shape, pixels)


def is_idx_folder(folder: Path) -> bool:
    """Return whether `folder` has any file that is named like one of MNIST's."""
    return folder.is_dir() and any("-ubyte" in entry.name for entry in folder.iterdir())


def open_idx(folder: Path, options: ReadOptions) -> IdxSource:
    """The training or test images and labels of a folder, read and checked."""
    split = options.split
    image_file = _find(folder, f"{_PREFIX[split]}-images-idx3-ubyte")
    label_file = _find(folder, f"{_PREFIX[split]}-labels-idx1-ubyte")
    images, labels = _read(image_file, _IMAGES, 3), _read(label_file, _LABELS, 1)
    if len(images) != len(labels):
        raise BadInput(
            label_file,
            expected=f"{len(images)} labels, one an image of {image_file.name}",
            got=len(labels),
        )
    if not images.size:
        raise BadInput(image_file, expected="images", got="x".join(map(str, images.shape)))
    if options.classes is not None:
        check_labels(labels, str(label_file), options.classes)
    return IdxSource(images, labels)


def _find(folder: Path, name: str) -> Path:
    # Some programs that unpack the files write a dot in place of the second hyphen.
    for stem in (name, name.replace("-idx", ".idx")):
        for path in (folder / stem, folder / f"{stem}.gz"):
            if path.is_file():
                return path
    raise BadInput(f"data folder {folder}", expected=f"{name} or {name}.gz", got=listing(folder))


def _read(path: Path, magic: int, axes: int) -> Bytes:
    """The array of one IDX file, with `axes` axes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _parse(path, file, magic, axes)
    except (gzip.BadGzipFile, zlib.error) as error:
        raise BadInput(path, expected=f"gzipped data, cannot unpack it: {error}") from None
    except OSError as error:
        raise BadInput(path, expected=f"a readable file: {error.strerror}") from None


def _parse(path: Path, file: Readable, magic: int, axes: int) -> Bytes:
    header = _take(file, 4 + 4 * axes)
    if len(header) < 4 + 4 * axes:
        raise BadInput(path, expected=f"a header of {4 + 4 * axes} bytes", got=len(header))
    number, *extents = unpack(f">{1 + axes}I", header)
    if number != magic:
        raise BadInput(path, expected=f"the magic number {magic}", got=number)
    expected = int(np.prod(extents, dtype=object))
    room = path.stat().st_size * (_DEFLATE_RATIO if path.suffix == ".gz" else 1)
    shown = "x".join(map(str, extents))
    if expected > room:
        raise BadInput(
            path,
            expected=f"{expected} bytes of data, as its header says ({shown})",
            got=f"a file of {path.stat().st_size} bytes",
        )
    data = _take(file, expected + 1)
    if len(data) != expected:
        got = "more" if len(data) > expected else str(len(data))
        raise BadInput(
            path, expected=f"{expected} bytes of data, as its header says ({shown})", got=got
        )
    return np.frombuffer(data, np.uint8).reshape(extents)


def _take(file: Readable, size: int) -> bytearray:
    """Read up to `size` bytes; fewer if the file ends early, even in the middle of gzip data."""
    data = bytearray()
    while len(data) < size:
        try:
            piece = file.read1(min(size - len(data), 1 << 20))
        except EOFError:
            break
        if not piece:
            break
        data += piece
    return data
