"""The table that every data source yields, for files of any kind.

Its columns are those of an image DataFrame: id (int64), label (int64), channels, height, width
(int32) and data (binary uint8 pixels, or list<float>), one image a row, all of the same shape.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from worker.arrow_images import Shape

Split = Literal["train", "test"]

BATCH_ROWS = 1024


MOST_SKIPPED = 100
"""The number of images that one reader skips because they cannot be decoded."""


class Wanted(msgspec.Struct, frozen=True):
    """What a net wants of its data.

    `split` is the part of divided data. Labels must be in [0, classes). `shape` is the (channels,
    height, width) that the net states, used if the data does not state its own; `image` is whether
    the net needs images. Encoded images are decoded to 3 channels or 1 by `colour` (None: as they
    are), and then resized to (height, width) `resize`. `shuffle` is whether a list is read in a
    random order, which depends on `seed`. `root` precedes the names in a list of files. `tops` are
    the columns that the net reads by name, and `encoded` those of them that hold encoded images. A
    reader skips up to `most_skipped` images that cannot be decoded.
    """

    split: Split = "train"
    classes: int | None = None
    shape: Shape | None = None
    image: bool = False
    colour: bool | None = None
    resize: tuple[int, int] | None = None
    shuffle: bool = False
    seed: int = 0
    root: str = ""
    tops: tuple[str, ...] = ()
    encoded: tuple[str, ...] = ()
    most_skipped: int = MOST_SKIPPED


class ImageSource(Protocol):
    """Images with labels, of one shape (channels, height, width)."""

    @property
    def rows(self) -> int: ...

    @property
    def shape(self) -> Shape: ...

    @property
    def schema(self) -> Any:
        """The pyarrow schema of every batch."""
        ...

    def batches(self, rows: int = BATCH_ROWS) -> Iterator[Any]:
        """All rows in order, as pyarrow record batches of at most `rows`; each call starts over."""
        ...


def listing(folder: Path) -> str:
    """The contents of a folder, for an error message: at most eight names."""
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return (", ".join(names[:8]) + more) or "an empty folder"


def image_schema(pixels: Any) -> Any:
    """The schema of a source with a data column of Arrow type `pixels`."""
    return pa.schema(
        [
            ("id", pa.int64()),
            ("label", pa.int64()),
            ("channels", pa.int32()),
            ("height", pa.int32()),
            ("width", pa.int32()),
            ("data", pixels),
        ]
    )


def image_batch(schema: Any, ids: Any, labels: Any, shape: Shape, pixels: Any) -> Any:
    """A record batch of `image_schema` from arrays of equal length."""
    extents = [pa.array(np.full(len(pixels), extent, np.int32)) for extent in shape]
    return pa.record_batch([pa.array(ids), pa.array(labels), *extents, pixels], schema=schema)
