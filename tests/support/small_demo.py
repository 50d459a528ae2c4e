"""The demo in small: its own networks, few steps, and 500 images that take a blink to learn."""

import gzip
import shutil
from pathlib import Path
from struct import pack

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tests.support.doc_pages import ROOT

SHORTER = 250
"""What the demo's steps are divided by."""

_ROWS = {"train": 400, "t10k": 100}


def write_demo(folder: Path) -> None:
    """Make `folder`, with all that deploy/demo holds."""
    folder.mkdir(parents=True)
    for path in (ROOT / "deploy" / "demo").glob("*.prototxt"):
        shutil.copy(path, folder)
    solver = folder / "lenet_solver.prototxt"
    text = solver.read_text()
    for field, value in (("max_iter", 1200), ("snapshot", 400)):
        line = f"\n{field}: {value}"
        assert text.count(line) == 1, f"{solver.name}: expected {line.strip()}"
        text = text.replace(line, f"\n{field}: {value // SHORTER}")
    solver.write_text(text)
    _write_digits(folder / "mnist")


def write_parquet(path: Path) -> None:
    """A Parquet file of such images, in the columns label and image."""
    images, labels = _digits("train")
    pixels = [image.tobytes() for image in images]
    pq.write_table(pa.table({"label": labels, "image": pixels}), path)


def _write_digits(folder: Path) -> None:
    """IDX files, named as MNIST's."""
    folder.mkdir()
    for prefix in _ROWS:
        images, labels = _digits(prefix)
        for name, header, array in (
            ("images-idx3", pack(">4I", 2051, *images.shape), images),
            ("labels-idx1", pack(">2I", 2049, len(labels)), labels),
        ):
            content = gzip.compress(header + array.tobytes(), 1)
            (folder / f"{prefix}-{name}-ubyte.gz").write_bytes(content)


def _digits(part: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images (n, 28, 28) and labels (n,); an image's mean grey says its digit."""
    dice, count = np.random.default_rng(1), _ROWS[part]
    labels = dice.integers(0, 10, count, np.uint8)
    return dice.integers(0, 25, (count, 28, 28), np.uint8) + 23 * labels[:, None, None], labels
