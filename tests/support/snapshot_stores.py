"""Distinct states to save, and places to save them at."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
from pyarrow import fs

import ps
from ps import ShardState
from ps.snapshots.manifest import save_snapshot
from ps.storage import ArrowStore, open_store
from shards.ledger import Ledger, LedgerEntry
from shards.shard_state import SavedProgress
from shards.shard_status import Standing
from shards.tables import Layout, cut_evenly

TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (700,)),))
LAYOUT = Layout((TABLE,))
MAP = cut_evenly(LAYOUT, 2)
JOB: dict[str, Any] = {
    "layout": LAYOUT,
    "shard_map": MAP,
    "rules": ("momentum",),
    "workers": 3,
}


def states_of(version: int = 5) -> list[ShardState]:
    """Two shards' states, all numbers different, with a ledger that no header could hold."""
    return [
        ShardState(
            SavedProgress(version + shard, 7, 9, Ledger(_entries(), floor=3)),
            {
                "net/weights": np.arange(len(keys), dtype=np.float32) + 1000 * shard,
                "net/history": -np.arange(len(keys), dtype=np.float32),
            },
        )
        for shard, keys in enumerate(MAP.ranges)
    ]


def write_snapshot(shelf: Path, number: int, *, steps: int) -> None:
    """A whole snapshot of a job that has taken this number of steps on all workers together."""
    states = [
        msgspec.structs.replace(state, saved=msgspec.structs.replace(state.saved, steps=steps))
        for state in states_of(number)
    ]
    save_snapshot(open_store(shelf).below(str(number)), states, taken_at=float(number), **JOB)


def _entries() -> dict[str, LedgerEntry]:
    return {
        f"w{n}": LedgerEntry(n, seq=n + 1, clock=n, step=n, standing=Standing.ACTIVE, loss=0.1 * n)
        for n in range(200)
    }


def same(states: list[ShardState], others: list[ShardState]) -> bool:
    return all(
        one.saved == other.saved
        and {name: a.tobytes() for name, a in one.arrays.items()}
        == {name: a.tobytes() for name, a in other.arrays.items()}
        for one, other in zip(states, others, strict=True)
    )


def mocked() -> ArrowStore:
    """A folder of an in-memory file system of pyarrow."""
    return ArrowStore(
        fs._MockFileSystem(datetime.now(UTC)), "bucket/run", *2 * ["mock://bucket/run"]
    )


class Keyed:
    """A replacement for `pyarrow.fs.FileSystem`: a folder that needs a key and an option.

    `URI` opens it; install it with `monkeypatch.setattr("pyarrow.fs.FileSystem", Keyed(folder))`.
    """

    URI = "s3://key:the-secret@bucket/run?endpoint_override=localhost:9"

    def __init__(self, folder: Path) -> None:
        self._system = fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem())

    def from_uri(self, uri: str) -> tuple[Any, str]:
        parts = urlsplit(uri)
        if (parts.password, parts.query) != ("the-secret", "endpoint_override=localhost:9"):
            raise OSError("access denied")
        return self._system, f"bucket{parts.path}"


@contextmanager
def full_disk(max_bytes: int = 2000) -> Iterator[None]:
    """No file of this process may grow beyond `max_bytes`."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
