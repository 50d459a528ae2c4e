"""The artefacts of a run: its results, with sizes and digests, and the names to fetch them by."""

import hashlib
import threading
from pathlib import Path

import msgspec

from deploy.run.folder import (
    CAFFEMODEL,
    EVALUATIONS,
    LOSS_PLOT,
    STALENESS_PLOT,
    SUMMARY,
    UPDATES,
    WEIGHTS,
)  # fmt: skip

KINDS = {
    WEIGHTS: "application/octet-stream",
    CAFFEMODEL: "application/octet-stream",
    LOSS_PLOT: "image/png",
    STALENESS_PLOT: "image/png",
    SUMMARY: "application/json",
    EVALUATIONS: "text/csv; charset=utf-8",
}
"""The media type of each artefact; parts of `updates.parquet` are artefacts as well."""
_CHUNK = 1 << 20


class Artefact(msgspec.Struct, frozen=True):
    """A file of a run: its name, bytes, when it was written, and its SHA-256 in hexadecimal."""

    name: str
    bytes: int
    modified: float
    sha256: str


class Artefacts:
    """The artefacts of runs. A digest is computed once for each version of a file."""

    def __init__(self) -> None:
        self._digests: dict[tuple[str, int, int], str] = {}
        self._lock = threading.Lock()

    def of(self, run: Path) -> list[Artefact]:
        """The artefacts of a run folder that exist by now."""
        artefacts = []
        for name, path in _files(run).items():
            try:
                seen = path.stat()
                digest = self._digest(path, seen.st_size, seen.st_mtime_ns)
            except OSError:
                continue  # a run replaces its files while it trains
            artefacts.append(Artefact(name, seen.st_size, seen.st_mtime, digest))
        return artefacts

    def _digest(self, path: Path, size: int, modified: int) -> str:
        key = (str(path), size, modified)
        with self._lock:
            known = self._digests.get(key)
        if known is None:
            known = sha256_of(path)
            with self._lock:
                if len(self._digests) > 10_000:
                    self._digests.clear()
                self._digests[key] = known
        return known


def artefact_file(run: Path, name: str) -> Path | None:
    """The file of an artefact; None if the run has no artefact of this name."""
    return _files(run).get(name)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal; raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _files(run: Path) -> dict[str, Path]:
    """The files by name. A symbolic link in a run folder is none: it may lead anywhere."""
    parts = sorted((run / UPDATES).glob("part-*.parquet"))
    paths = [*(run / name for name in KINDS), *parts]
    return {
        path.relative_to(run).as_posix(): path
        for path in paths
        if path.is_file() and not path.is_symlink()
    }
