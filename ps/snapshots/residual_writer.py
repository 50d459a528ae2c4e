"""Adds workers' residuals to snapshots, and reads them back.

A worker writes its residual next to the snapshots, in the folder `workers`, whenever it learns that
the shards have exported a state (channel_recorder.py), and at its end. It writes the arrays first,
then a note with the worker, the push numbers and the checksums: with the note the residual is
complete. The snapshot's writer waits a while for the residuals that belong to its states, puts them
into the snapshot's own folder, and names them in its manifest. A worker's file stays until it has
written two newer ones: a residual that was written for a snapshot may still be needed after the
worker's final one.

Workers must be able to reach the place of the snapshots. A residual that cannot be written delays
nothing: the snapshot is made without it, and its writer reports that.

The snapshot's writer takes a file with its own rights, but on the word of a worker. So a note can
only name one file: the names of both follow from the note's content, and both are in one folder.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from urllib.parse import quote

from ps.snapshots import checked_json
from ps.snapshots.manifest import load_manifest
from ps.snapshots.object_store import Place, Store, content_of, open_store
from ps.snapshots.worker_state import Arrays, SavedWorkerState, WorkerState, read_kept, write_kept
from shards.errors import UNDECODABLE, BadInput
from shards.parameters import ShardState

FOLDER = "workers"
_NOTE, _ARRAYS = ".json", ".safetensors"
_MAX_NOTE_BYTES = 1 << 20
_LOOK_S = 0.1


class ResidualWriter:
    """Writes one worker's states next to the snapshots at `place`, in a thread of its own."""

    def __init__(self, place: Place, worker: str) -> None:
        """Raises BadInput if `place` is not a path or URI of a store."""
        self.failure = ""
        self._store = open_store(place).below(FOLDER)
        self._worker = worker
        self._written: list[str] = []
        self._pool = ThreadPoolExecutor(1, "residual")
        self._under_way: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a state is still being written; another would have to wait in memory."""
        return self._under_way is not None and not self._under_way.done()

    def keep(self, state: WorkerState, arrays: Arrays) -> None:
        """Start writing a state; the caller must not change the arrays afterwards."""
        self._under_way = self._pool.submit(self._write, state, arrays)

    def close(self) -> None:
        """Wait until everything is written."""
        self._pool.shutdown()

    def _write(self, state: WorkerState, arrays: Arrays) -> None:
        name = _name(state)
        try:
            kept = write_kept(self._store, name + _ARRAYS, state, arrays)
            self._store.put(name + _NOTE, [checked_json.encode(kept)])
        except OSError as error:
            self.failure = f"residual in {self._store.place}: {error.strerror}"
            return
        self._written = [*(old for old in self._written if old != name), name]
        with suppress(OSError):
            for old in self._written[:-2]:
                _remove(self._store, old)
        self._written = self._written[-2:]


def awaited(states: Sequence[ShardState]) -> dict[str, tuple[int, int]]:
    """The residuals that belong to these states: each worker's incarnation and last applied push.

    A worker that has pushed nothing has no residual.
    """
    ledgers = [state.saved.ledger.entries for state in states]
    everywhere = set(ledgers[0]).intersection(*ledgers)
    wanted = {}
    for worker in sorted(everywhere):
        lives = {entries[worker].incarnation for entries in ledgers}
        seq = min(entries[worker].seq for entries in ledgers)
        if seq and len(lives) == 1:
            wanted[worker] = lives.pop(), seq
    return wanted


def gathered(
    shelf: Store, wanted: Mapping[str, tuple[int, int]], patience_s: float
) -> tuple[list[tuple[str, SavedWorkerState]], list[str]]:
    """Collect the residuals that `awaited` names; waits at most `patience_s` seconds.

    Returns file and note of each in the order of worker names, and the workers whose residual is
    missing. Raises OSError.
    """
    store = shelf.below(FOLDER)
    until = time.monotonic() + patience_s
    while True:
        found: dict[str, tuple[str, SavedWorkerState]] = {}
        for name in store.names():
            kept = _note(store, name) if name.endswith(_NOTE) else None
            if kept is not None and _fits(kept, wanted.get(kept.worker)):
                found[kept.worker] = f"{FOLDER}/{kept.part.file}", kept
        missing = [worker for worker in wanted if worker not in found]
        if not missing or time.monotonic() >= until:
            return [found[worker] for worker in sorted(found)], missing
        time.sleep(_LOOK_S)


def sweep_kept(shelf: Store) -> None:
    """Remove the files of this job's workers, none of which may be running. Raises OSError."""
    store = shelf.below(FOLDER)
    for name in store.names():
        if name.endswith((_NOTE, _ARRAYS)):
            store.remove(name)
    store.drop()


def saved_residual(snapshot: Place, worker: str) -> tuple[WorkerState, Arrays] | None:
    """The worker's state and arrays in the snapshot at a path or URI, if it has any.

    Raises BadInput if they cannot be read, or are damaged.
    """
    store = open_store(snapshot)
    for kept in load_manifest(store).residuals:
        if kept.worker == worker:
            return read_kept(store, kept)
    return None


def _fits(kept: SavedWorkerState, wanted: tuple[int, int] | None) -> bool:
    if wanted is None:
        return False
    incarnation, seq = wanted
    return kept.incarnation == incarnation and kept.base <= seq <= kept.seq


def _name(state: WorkerState | SavedWorkerState) -> str:
    """The common name of the note and the arrays, without the suffix."""
    return f"{quote(state.worker, safe='')}.{state.incarnation}.{state.base}-{state.seq}"


def _note(store: Store, name: str) -> SavedWorkerState | None:
    """A note; None if it is gone or incomplete, or does not match the file next to it."""
    try:
        content = content_of(store, name, _MAX_NOTE_BYTES)
        kept = checked_json.decode(content, SavedWorkerState, required=True)
        arrays = _name(kept) + _ARRAYS
        if (name, kept.part.file) != (_name(kept) + _NOTE, arrays):
            return None
        return kept if store.size(arrays) == kept.part.bytes else None
    except (OSError, BadInput, *UNDECODABLE):
        return None


def _remove(store: Store, name: str) -> None:
    store.remove(name + _NOTE)  # first: without their note the arrays do not count
    store.remove(name + _ARRAYS)
