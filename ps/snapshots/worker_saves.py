"""States that workers save by themselves after exchanges, next to the snapshots.

A snapshot has the states of workers as they were when it was taken. A worker that is killed later
would go back to that, so it also saves its state itself: in the folder `worker-saves`, as arrays
and then a note with their checksums, as for a snapshot (residual_writer.py). Its next life reads
its newest save, and a worker without any that of another one. Each worker's two newest remain, for
the newest may be damaged. Writing takes at most a twentieth of a worker's time.

The note names the job, because a folder may still hold saves of an earlier one.
"""

import re
import time
from contextlib import suppress
from urllib.parse import quote

import msgspec

from ps.snapshots import checked_json
from ps.snapshots.worker_state import (
    Arrays,
    SavedWorkerState,
    WorkerState,
    read_worker_state,
    write_worker_state,
)
from ps.storage import Store, content_of
from shards.errors import UNDECODABLE, BadInput
from shards.messages import Name

FOLDER = "worker-saves"
_MAX_NOTE_BYTES = 1 << 20
NOTE, ARRAYS = ".json", ".safetensors"
_PAUSE = 19  # seconds without writing, for each second of it
_COUNT = 2  # saves of a worker that remain
_MOST_RATIO, _MORE_BYTES = 16, 16 << 20
_FLOAT_BYTES = 4


class SaveNote(msgspec.Struct, frozen=True):
    """A save of a worker of `job`."""

    job: Name
    state: SavedWorkerState


def most_bytes(floats: int) -> int:
    """The size to which a worker's state is bounded, for tables of this number of floats.

    It has the weights twice, and an optimiser keeps a few floats for each.
    """
    return _MOST_RATIO * _FLOAT_BYTES * floats + _MORE_BYTES


class WorkerSaves:
    """The saves of one life of a worker; `write` runs in a thread of its own."""

    def __init__(self, snapshots: Store, job: str, worker: str) -> None:
        self._store = snapshots.below(FOLDER)
        self._job, self._worker = job, worker
        self._next_at = 0.0  # by the monotonic clock; inf while a save is under way

    def begin(self, *, waits: bool) -> bool:
        """Return whether a save may begin, and count it as begun; `waits`: it may in any case."""
        if not waits and time.monotonic() < self._next_at:
            return False
        self._next_at = float("inf")
        return True

    def write(self, state: WorkerState, arrays: Arrays) -> None:
        """Write a save and remove older ones. Raises OSError."""
        started = time.monotonic()
        try:
            name = f"{quote(self._worker, safe='')}.{state.incarnation}.{state.seq}"
            note = write_worker_state(self._store, name + ARRAYS, state, arrays)
            self._store.put(name + NOTE, [checked_json.encode(SaveNote(self._job, note))])
            with suppress(OSError):
                self._remove_old()
        finally:
            now = time.monotonic()
            self._next_at = now + _PAUSE * (now - started)

    def _remove_old(self) -> None:
        """Remove all saves of this worker but the newest of this job."""
        notes = [save.note for save in _read_notes(self._store, self._job, worker=self._worker)]
        notes.sort(key=lambda note: (note.incarnation, note.seq))
        keep = {note.part.file.removesuffix(ARRAYS) for note in notes[-_COUNT:]}
        for name in self._store.names():
            stem = _stem(name)
            if _is_of(self._worker, stem) and stem not in keep:
                self._store.remove(name)


class WorkerSave(msgspec.Struct, frozen=True):
    """A save that has not been read."""

    store: Store
    note: SavedWorkerState

    def read(self, floats: int) -> tuple[WorkerState, Arrays]:
        """Read and check it; `floats` are those of the job's tables.

        Raises BadInput naming the file if it is damaged or too large.
        """
        most = most_bytes(floats)
        if self.note.part.bytes > most:
            raise BadInput(
                f"worker state {self.store.place}/{self.note.part.file}",
                expected=f"at most {most} bytes for tables of {floats} floats",
                got=self.note.part.bytes,
            )
        return read_worker_state(self.store, self.note)


def find_saves(snapshots: Store, job: str) -> list[WorkerSave]:
    """The saves of a job's workers next to the snapshots, unread; raises OSError."""
    return _read_notes(snapshots.below(FOLDER), job)


def sweep_saves(snapshots: Store) -> None:
    """Remove the saves of workers, none of which may be running. Raises OSError."""
    store = snapshots.below(FOLDER)
    for name in store.names():
        if name.endswith((NOTE, ARRAYS)):
            store.remove(name)
    store.drop()


def _read_notes(store: Store, job: str, worker: str | None = None) -> list[WorkerSave]:
    """The saves of a job, or those of one worker, as the notes have them.

    Damaged notes are left out, and those that name another file than the one next to them.
    """
    saves = []
    for name in store.names():
        if not name.endswith(NOTE) or (worker is not None and not _is_of(worker, _stem(name))):
            continue
        with suppress(OSError, BadInput, *UNDECODABLE):
            content = content_of(store, name, _MAX_NOTE_BYTES)
            note = checked_json.decode(content, SaveNote, required=True)
            if note.job == job and note.state.part.file == _stem(name) + ARRAYS:
                saves.append(WorkerSave(store, note.state))
    return saves


def _stem(name: str) -> str:
    return name.removesuffix(NOTE).removesuffix(ARRAYS)


def _is_of(worker: str, stem: str) -> bool:
    """Return whether a file is of this worker, and not of one with a longer name."""
    return re.fullmatch(re.escape(quote(worker, safe="")) + r"\.\d+\.\d+", stem) is not None
