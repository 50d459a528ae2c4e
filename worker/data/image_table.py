"""The table that every data source yields, for files of any kind.

Its columns are those of an image DataFrame: id (int64), label (int64), channels, height, width
(int32) and data (binary uint8 pixels, or list<float>), one image a row, all of the same shape.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from worker.data.columns import Shape

BATCH_ROWS = 1024


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
