"""Wrong rows: columns that are missing, of another type, or hold what no row may."""

from collections.abc import Callable, Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.wrong_inputs.rows import Row
from tests.wrong_inputs.sdk import Env
from worker.sources import open_source

_ROWS = 4
_CLASSES = 3
_LABELS = [0, 1, 2, 0]
_PIXELS = [bytes(64)] * _ROWS
_SHAPE = {"channels": [1] * _ROWS, "height": [8] * _ROWS, "width": [8] * _ROWS}

COLUMNS: dict[str, tuple[dict[str, Any], str]] = {
    "no label": ({"label": None}, "label"),
    "no pixels": ({"image": None}, "data or image"),
    "no columns of ours": ({"label": None, "image": None, "x": _LABELS}, "label"),
    "text as labels": ({"label": ["a", "b", "c", "d"]}, "label"),
    "halves as labels": ({"label": [0.0, 0.5, 1.0, 2.0]}, "label.*row 1"),
    "NaN as a label": ({"label": [0.0, 1.0, nan, 2.0]}, "label.*row 2"),
    "infinity as a label": ({"label": [inf, 1.0, 0.0, 2.0]}, "label.*row 0"),
    "a null label": ({"label": [0, None, 1, 2]}, "label.*row 1"),
    "a negative label": ({"label": [0, 1, -1, 2]}, "label.*row 2"),
    "a label beyond the classes": ({"label": [0, 1, 2, 3]}, "label.*row 3"),
    "a huge label": ({"label": [0, 1, 2**62, 3]}, "label.*row 2"),
    "a label beyond int64": ({"label": [0.0, 1.0, 1e30, 2.0]}, "label.*row 2"),
    "lists as labels": ({"label": [[0], [1], [2], [0]]}, "label"),
    "dates as labels": ({"label": pa.array([0] * _ROWS, pa.date32())}, "label"),
    "text as pixels": ({"image": ["a" * 64] * _ROWS}, "image"),
    "a number as pixels": ({"image": [1.0] * _ROWS}, "image"),
    "lists of text": ({"image": [["a"] * 64] * _ROWS}, "image"),
    "lists of lists": ({"image": [[[1.0] * 8] * 8] * _ROWS}, "image"),
    "null pixels": ({"image": [*_PIXELS[:3], None]}, "image.*row 3"),
    "a null among the pixels": (
        {"image": [[1.0] * 64, [None] * 64, [1.0] * 64, [1.0] * 64]},
        "image.*row 1",
    ),
    "rows of two lengths": ({"image": [*_PIXELS[:3], bytes(49)]}, "image.*row 3"),
    "no pixels in a row": ({"image": [b""] * _ROWS}, "image"),
    "PNG files": (
        {"image": [b"\x89PNG\r\n\x1a\n" + bytes(58)] * _ROWS},
        "image that can be decoded",
    ),
    "a shape of another size": (_SHAPE | {"width": [9] * _ROWS}, "8x9"),
    "a shape that changes": (_SHAPE | {"width": [8, 8, 9, 8]}, "width.*row 2"),
    "a shape of nothing": (_SHAPE | {"width": [0] * _ROWS}, "8x0"),
    "a negative shape": (_SHAPE | {"height": [-8] * _ROWS, "width": [-8] * _ROWS}, "-8"),
    "a shape of text": (_SHAPE | {"width": ["wide"] * _ROWS}, "width"),
    "a null shape": (_SHAPE | {"width": [8, None, 8, 8]}, "width"),
    "a text as id": ({"id": ["a", "b", "c", "d"]}, "id"),
}
"""The columns that differ from a good table's (None: left out), and what an error is to name."""


def rows(env: Env) -> Iterator[Row]:
    """Each wrong table as a Parquet file, read as training data is."""
    folder = env.folder / "tables"
    folder.mkdir()
    for number, (title, (columns, names)) in enumerate(COLUMNS.items()):
        path = folder / f"{number}.parquet"
        good: dict[str, Any] = {"label": _LABELS, "image": _PIXELS}
        pq.write_table(
            pa.table({name: v for name, v in (good | columns).items() if v is not None}), path
        )
        yield Row("data", f"Parquet: {title}", _read(path), rf"{number}\.parquet.*{names}")
    empty = folder / "empty"
    empty.mkdir()
    yield Row("data", "an empty folder", _read(empty), "empty")
    yield Row("data", "nothing there", _read(folder / "none"), "none")
    (empty / "notes.txt").write_text("hello")
    yield Row("data", "a folder of other files", _read(empty), "empty")
    none = folder / "rowless.parquet"
    pq.write_table(pa.table({"label": pa.array([], pa.int64()), "image": []}), none)
    yield Row("data", "no rows", _read(none), "rowless")


def _read(path: Path) -> Callable[[], object]:
    def act() -> int:
        source = open_source(path, "train", classes=_CLASSES)
        return sum(len(batch) for batch in source.batches())

    return act
