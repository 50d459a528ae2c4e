"""Data sources: files of images and labels, opened, checked and read as Arrow.

A format is one file of worker/data/ and one row of `FORMATS`. For every format the result is a
table (worker/data/image_table.py), or columns by name. A source checks as much as it can when it
is opened, so that a mistake shows before anything has started; `batches` raises the errors that
only reading shows. Each error is a BadInput of one line that names the file, what was expected and
what was found.

PyArrow comes with Spark; `import worker` does not load this file.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ps.path_checks import refuse_pipe
from shards.errors import BadInput
from worker.data.arrow_images import Extents
from worker.data.databases import DatabaseSource, is_leveldb, is_lmdb
from worker.data.hdf5 import Hdf5Source, is_hdf5
from worker.data.idx import is_idx_folder, open_idx
from worker.data.image_decoding import Undecodable
from worker.data.image_files import (
    check_classes,
    is_image_folder,
    is_list,
    open_folder,
    open_list,
)
from worker.data.image_table import ImageSource, listing
from worker.data.parquet import is_parquet, parquet_parts
from worker.data.parquet_columns import open_table
from worker.data.read_options import VALIDATION, ReadOptions, Split
from worker.data.source import Sample, Source

__all__ = [
    "FORMATS",
    "Format",
    "ImageSource",
    "ReadOptions",
    "Sample",
    "Source",
    "Split",
    "Undecodable",
    "has_test",
    "open_source",
    "open_with",
    "part_to_test",
    "row_shapes",
]
_PART_NAMES = (
    ("train", re.compile(r"(^|[^a-z])train([^a-z]|$)")),
    ("test", re.compile(r"(^|[^a-z])test([^a-z]|$)")),
    ("test", VALIDATION),
)
"""The parts of divided data, and their names; the first name that an entry has counts."""
TFRECORD_SUFFIXES = (".tfrecord", ".tfrecords", ".tfrec")
_READ_BY_SPARK = {".csv", ".tsv", ".json", ".jsonl", ".orc", ".avro", *TFRECORD_SUFFIXES}


class Format(NamedTuple):
    """A format of data: how files of it are recognised, and opened.

    `divided` is whether the format itself has a training and a test part; of any other format,
    these are two files or folders, with `train` and `test` in their names.
    """

    name: str
    matches: Callable[[Path], bool]
    open: Callable[[Path, ReadOptions], ImageSource]
    divided: bool = False


def open_source(
    path: str | Path,
    split: Split = "train",
    *,
    classes: int | None = None,
    shape: Sequence[int] | None = None,
    image: bool = False,
    **more: Any,
) -> ImageSource:
    """The training or test part of the data at `path`.

    `path` is a folder of MNIST's four IDX files, raw or gzipped; a Parquet file, or a folder of
    them; an LMDB or a LevelDB of Datum; a list of image files with labels; a folder with a
    subfolder of images for each class; or an HDF5 file, or a list of them. Parquet needs a column
    `label` and one named `image` or `data`, and may have id, channels, height and width.

    A folder's parts are its entries with `train` or `test` in their names, or `val` where none has
    `test`; others are ignored. Data that is not divided in this way is all training data.

    With `classes`, labels outside [0, classes) are refused. `shape` is the (channels, height,
    width) that a net states: it is used if the data does not state its own and has as many values.
    Otherwise lists of numbers are vectors, or square images for a net that needs an `image`
    (worker/data/arrow_images.py has the rule). Further keywords are fields of `ReadOptions`.
    """
    stated = None if shape is None else (shape[0], shape[1], shape[2])
    return open_with(Path(path), ReadOptions(split, classes, stated, image, **more))


def open_with(path: Path, options: ReadOptions, kind: str = "") -> ImageSource:
    """The part of the data at `path` that a net wants, as it wants it.

    `kind` is the name of its format, or "package.module.Class" for a source of the user's own;
    empty to recognise the format.
    """
    if "." in kind:
        return _check_source(_own(kind)(path, options))
    if not path.exists():
        raise BadInput(f"data {path}", expected="a folder or a file", got="nothing there")
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        refuse_pipe(file)
    formats = [form for form in FORMATS if not kind or form.name == kind]
    for form in formats:
        if form.divided and form.matches(path):
            return _check_source(form.open(path, options))
        parts = {} if form.divided else _parts(path, form.matches)
        if form.open is open_folder:
            check_classes(parts.values())
        if parts:
            return _check_source(form.open(_part(path, options.split, parts), options))
    names = ", ".join(form.name for form in formats) or kind
    got = listing(path) if path.is_dir() else "another file"
    if any(suffix in _READ_BY_SPARK for suffix in _suffixes(path)):
        got += "; read it with Spark, and pass the DataFrame to worker.train"
    raise BadInput(f"data {path}", expected=f"data of one of these formats: {names}", got=got)


def _suffixes(path: Path) -> set[str]:
    """The suffixes of a file, or of the files in a folder, `.gz` left out."""
    files = path.iterdir() if path.is_dir() else [path]
    return {Path(file.name.removesuffix(".gz")).suffix for file in files}


def row_shapes(source: ImageSource) -> dict[str, Extents]:
    """The shapes of a row of the columns of a source other than images and labels."""
    return source.row_shapes if isinstance(source, Source) else {}


def has_test(path: str | Path) -> bool:
    """Return whether the data at `path` is divided, so that a test part must be there.

    A folder of IDX files is divided. A folder of Parquet files is divided if a subfolder or a
    Parquet file in it is named `test...`, or `train...` and another `val...`.
    """
    folder = Path(path)
    if not folder.is_dir():
        return False
    if is_idx_folder(folder):
        return True
    if is_parquet(folder):
        tests = folder.glob("test*")
        named = any(part.is_dir() or part.suffix == ".parquet" for part in tests)
        return named or "test" in parquet_parts(folder)
    return any("test" in _parts(folder, form.matches) for form in FORMATS if not form.divided)


def part_to_test(path: str | Path) -> Split:
    """The part of the data at `path` to test on: `test`, or all of data that is not divided."""
    return "test" if has_test(path) else "train"


def _parts(path: Path, matches: Callable[[Path], bool]) -> dict[str, Path]:
    """The parts of the data of one format at `path`: all of it, or those of a divided folder."""
    if matches(path):
        return {"": path}
    if not path.is_dir():
        return {}
    parts: dict[str, Path] = {}
    entries = sorted(path.iterdir())
    for name, named in _PART_NAMES:
        if name in parts or (named is VALIDATION and "train" not in parts):
            continue
        matching = [entry for entry in entries if named.search(entry.name.lower())]
        matching = [entry for entry in matching if matches(entry)]
        if len(matching) > 1:
            raise BadInput(
                f"data {path}",
                expected=f"one part to {name} with",
                got=" and ".join(entry.name for entry in matching[:2]),
            )
        if matching:
            parts[name] = matching[0]
    return parts


def _part(path: Path, split: Split, parts: Mapping[str, Path]) -> Path:
    """The place of one of the parts; undivided data is all for training."""
    selected = parts.get("" if split == "train" and "" in parts else split)
    if selected is not None:
        return selected
    raise BadInput(
        path,
        expected=f"a part with {split} in its name for the {split} data",
        got=listing(path) if path.is_dir() else "one file",
    )


def _own(kind: str) -> Callable[[Path, ReadOptions], Source]:
    """A user's own class of sources, by its full name; raises BadInput."""
    module, _, name = kind.rpartition(".")
    try:
        source_class = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadInput(f"source_class {kind}: cannot be imported: {error}") from None
    if not isinstance(source_class, type) or not issubclass(source_class, Source):
        raise BadInput(f"source_class {kind}", expected="a subclass of worker.Source")
    return source_class


def _check_source(source: ImageSource) -> ImageSource:
    if isinstance(source, Source):
        source.check()
    return source


FORMATS = (
    Format("IDX", is_idx_folder, open_idx, divided=True),
    Format("Parquet", is_parquet, open_table, divided=True),
    Format("LMDB", is_lmdb, DatabaseSource),
    Format("LevelDB", is_leveldb, DatabaseSource),
    Format("HDF5", is_hdf5, Hdf5Source),
    Format("image list", is_list, open_list),
    Format("image folder", is_image_folder, open_folder),
)
"""The formats, in the order in which data is compared with them."""
