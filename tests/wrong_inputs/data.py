"""Wrong rows: columns that are missing, of another type, or hold what no row may."""

import zlib
from collections.abc import Callable, Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.tfrecord_bytes import framed
from tests.wrong_inputs.rows import Row
from tests.wrong_inputs.sdk import Env
from worker.data.batches import Batches
from worker.data.column_spool import ColumnSpool
from worker.data.column_values import VECTOR
from worker.data.sources import open_source
from worker.tfrecord.files import find_files, read_batches, schema_of

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
    "lists of lists of two lengths": (
        {"image": [[[1.0] * 8] * 8, [[1.0] * 8] * 7] * 2},
        "image.*lists of lists of one length",
    ),
    "lists of lists that differ": (
        {"image": [[[1.0] * 8, [1.0] * 7]] * _ROWS},
        "image.*of one length.*flatten",
    ),
    "lists four deep": ({"image": [[[[[1.0] * 8] * 8]]] * _ROWS}, "image.*4 deep.*flatten"),
    "a struct as pixels": ({"image": [{"a": 1}] * _ROWS}, "image.*a struct of a: select"),
    "a map as pixels": (
        {"image": pa.array([[("a", 1)]] * _ROWS, pa.map_(pa.string(), pa.int64()))},
        "image.*a map.*element_at",
    ),
    "dates as pixels": ({"image": pa.array([0] * _ROWS, pa.date32())}, "image.*unix_timestamp"),
    "lists of long decimals": (
        {"image": pa.array([[1]] * _ROWS, pa.list_(pa.decimal128(38, 18)))},
        "image.*15 digits.*cast it to double",
    ),
    "long decimals as labels": (
        {"label": pa.array([1] * _ROWS, pa.decimal128(38, 18))},
        "label.*15 digits.*cast it to double",
    ),
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


OF_A_FUNCTION: dict[str, tuple[Any, str]] = {
    "structs": (pa.array([{"a": 1}]), "a struct of a: select its fields"),
    "lists of structs": (pa.array([[{"a": 1}]]), "a struct of a: select its fields"),
    "maps": (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), "a map.*element_at"),
    "times of day": (pa.array([1], pa.time64("us")), "unix_timestamp"),
    "long decimals": (pa.array([1], pa.decimal128(16, 0)), "15 digits.*cast it to double"),
    "nothing but nulls": (pa.array([None]), "null: leave it out"),
    "null vectors": (pa.array([None], VECTOR), "got a null in row 0"),
    "vectors of two sizes": (
        pa.array([{"type": 1, "values": [1.0] * size} for size in (1, 2)], VECTOR),
        "vectors of one size, got 1 and 2",
    ),
}
"""The columns that a function cannot read, and what an error is to name."""


def rows(env: Env) -> Iterator[Row]:
    """Each wrong table as a Parquet file, read as training data is; each column in a batch."""
    for title, (column, names) in OF_A_FUNCTION.items():
        yield Row("data", f"ctx.batches: {title}", _batch(column), f"column x: .*{names}")
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
    yield from _tfrecords(env.folder / "tfrecords")
    none = folder / "rowless.parquet"
    pq.write_table(pa.table({"label": pa.array([], pa.int64()), "image": []}), none)
    yield Row("data", "no rows", _read(none), "rowless")


def _tfrecords(folder: Path) -> Iterator[Row]:
    """TFRecord folders with no records, with others than all files have, or with damage."""
    folder.mkdir()
    record = framed(b"\n\x0b\n\t\n\x01a\x12\x04\x1a\x02\n\x00")
    contents: dict[str, tuple[dict[str, bytes], str]] = {
        "no files": ({"_SUCCESS": b""}, "got none there"),
        "no records": ({"part-0": b""}, "part-0: expected a schema, or records with features"),
        "a readme": ({"README": b"hello"}, "README: record 0: .*truncated"),
        "another folder": ({"train/part-0": record}, "train: expected a file, or a folder of part"),
        "folders of two partitions": (
            {"a=1/part-0": record, "b=1/part-0": record},
            "the same folders of partitionBy.* got a for part-0 and b for .*b=1/part-0",
        ),
        "half of a ZLIB file": (
            {"part-0": zlib.compress(record * 90)[:-6]},
            "part-0: record .*whole ZLIB data",
        ),
    }
    for number, (title, (files, names)) in enumerate(contents.items()):
        place = folder / str(number)
        for name, content in files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
        yield Row("data", f"TFRecord: {title}", _records(place), rf"tfrecords/{number}.*{names}")


def _records(place: Path) -> Callable[[], object]:
    def act() -> object:
        files = find_files(str(place))
        schema = schema_of(files, 1000)
        return [batch.num_rows for file in files for batch in read_batches(file, schema)]

    return act


def _batch(column: Any) -> Callable[[], object]:
    def act() -> object:
        stream = iter([pa.record_batch({"x": column})])
        with Batches(stream, ColumnSpool("rows"), 2, 1, "w0", epochs=1) as batches:
            return next(batches)

    return act


def _read(path: Path) -> Callable[[], object]:
    def act() -> int:
        source = open_source(path, "train", classes=_CLASSES)
        return sum(len(batch) for batch in source.batches())

    return act
