"""Local data sources: files of images and labels, opened, checked and read as Arrow.

For every kind of file the result is one table (image_table.py). A source checks as much as it can
when it is opened, labels included, so that a mistake shows before anything has started; `batches`
raises the errors that only reading shows. Each error is a BadInput of one line that names the file,
what was expected and what was found.

PyArrow comes with Spark; `import worker` does not load this file.
"""

from collections.abc import Sequence
from pathlib import Path

from shards.errors import BadInput
from worker.idx import is_idx_folder, open_idx
from worker.image_table import ImageSource, Split, listing
from worker.parquet import open_parquet, parquet_files

__all__ = ["ImageSource", "Split", "has_test", "open_source", "part_to_test"]


def open_source(
    path: str | Path,
    split: Split = "train",
    *,
    classes: int | None = None,
    shape: Sequence[int] | None = None,
    image: bool = False,
) -> ImageSource:
    """The training or test part of the data at `path`.

    `path` is a folder of MNIST's four IDX files, raw or gzipped; a Parquet file; or a folder of
    Parquet files. Parquet needs a column `label` and one named `image` or `data`, and may have id,
    channels, height and width. A folder's parts are its subfolders `train` and `test`, or files
    with names that begin with these words; other files there are ignored. Parquet that is not
    divided in this way is all training data.

    With `classes`, labels outside [0, classes) are refused. `shape` is the (channels, height,
    width) that a net states: it is used if the data does not state its own and has as many values.
    Otherwise lists of numbers are vectors, or square images for a net that needs an `image`
    (worker/arrow_images.py has the rule).
    """
    folder = Path(path)
    if not folder.exists():
        raise BadInput(f"data {folder}: expected a folder or a Parquet file, got nothing there")
    if folder.is_dir() and is_idx_folder(folder):
        return open_idx(folder, split, classes)
    if folder.is_file() or parquet_files(folder):
        return open_parquet(folder, split, classes, shape, image)
    raise BadInput(
        f"data folder {folder}: expected MNIST's IDX files or Parquet files, got {listing(folder)}"
    )


def has_test(path: str | Path) -> bool:
    """Whether the data at `path` is divided, so that a missing test part would be a mistake.

    A folder of IDX files is divided. A folder of Parquet files is divided if a subfolder or a
    Parquet file in it is named `test...`.
    """
    folder = Path(path)
    if not folder.is_dir():
        return False
    tests = (part for part in folder.glob("test*") if part.is_dir() or part.suffix == ".parquet")
    return is_idx_folder(folder) or any(tests)


def part_to_test(path: str | Path) -> Split:
    """The part of the data at `path` to test on: `test`, or all of data that is not divided."""
    return "test" if has_test(path) else "train"
