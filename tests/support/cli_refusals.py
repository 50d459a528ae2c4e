"""Asserts that the command line refuses a job, and prepares such jobs."""

import gzip
import re
from pathlib import Path
from struct import pack

from tests.support.cli_in_process import Run

TRAIN = "train --solver solver.prototxt --data data --out run"


def refuses(downpour: Run, folder: Path, arguments: str, line: str, *, status: int = 2) -> None:
    """The command prints one line that matches, and leaves every file unchanged."""
    before = files(folder)
    ended, out, err = downpour(*arguments.split())
    assert (ended, out) == (status, "")
    assert re.fullmatch(rf"downpour: error: (\S*/)?{line}.*\n", err), err
    assert files(folder) == before


def files(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def swap(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def write_idx(folder: Path, classes: int = 3) -> None:
    """Replace Parquet by MNIST's four files: 30 images of 8x8 with labels 0, 1 ... in turn."""
    for file in folder.iterdir():
        file.unlink()
    labels = bytes(row % classes for row in range(30))
    for part in ("train", "t10k"):
        images = gzip.compress(pack(">4I", 2051, 30, 8, 8) + bytes(30 * 64))
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(images)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(pack(">2I", 2049, 30) + labels)
