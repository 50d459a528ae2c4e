"""A zip of this project's packages, for the Python workers of a cluster.

Executors have no installation of ours, only the small base install of libraries. The zip holds the
code that the driver runs, sources and package data, and is named by the build id, so that two
drivers of different builds on one cluster do not shadow each other.
"""

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from ps.build_id import build_id

PACKAGES = ("cupy_kernels", "shards", "ps", "worker", "deploy")
_EXCLUDED = {"__pycache__", "deploy/demo"}


def pack_code(folder: str | Path) -> Path:
    """Write this project's code as a zip for executors into an existing folder; returns its path.

    Equal code gives equal bytes.
    """
    path = Path(folder) / f"downpour-{build_id()}.zip"
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        for package in PACKAGES:
            for name, content in _contents(files(package), package):
                archive.writestr(ZipInfo(name), content, ZIP_DEFLATED)
    return path


def _contents(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name = f"{path}/{entry.name}"
        if _EXCLUDED & {entry.name, name}:
            continue
        if entry.is_dir():
            yield from _contents(entry, name)
        else:
            yield name, entry.read_bytes()
