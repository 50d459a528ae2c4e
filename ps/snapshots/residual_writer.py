"""Adds workers' own states to snapshots, and reads them back.

A worker's state is the residual of its compressed pushes, and what its driver keeps between pushes
(worker_state.py). When the writer of a snapshot has the shards' states, it requests the workers'
states that belong to them, in the file `wanted` of the folder `workers` next to the snapshots. Each
worker reads that file regularly and, if asked, writes its present state into the folder; it also
does so at its end, and at most once per push number. It writes the arrays first, then a note with
the worker, the push number and the checksums: with the note the state is complete. The snapshot's
writer waits a while, puts the states into the snapshot's own folder, and names them in its
manifest. A worker's file stays until the worker has written two newer ones: the snapshot for which
it was written may still need it after the worker's final one.

For the last snapshot of a job whose workers still train the workers come first. The request says
so: each writes its state and then pushes no more. When all have, the driver takes the shards'
states, which then have exactly the pushes of the workers' states.

When a worker writes for another snapshot, it has already pushed a few times since. The part of its
residual that these pushes have sent is in no file, and is lost after a restart from the snapshot.
The opposite, a residual from before a push that the shards hold, would send values twice; such a
file is never used.

All of this is best effort: workers must be able to reach the place of the snapshots. A worker that
does not answer only delays the snapshot, which is then made without its state; the writer reports
that.

The snapshot's writer uses its own access rights to include a file that a worker has named. So a
note can name only one file: the names of both follow from the note's content, and both are in one
folder.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from urllib.parse import quote

import msgspec

from ps.logs import logger
from ps.snapshots import checked_json
from ps.snapshots.manifest import load_manifest
from ps.snapshots.worker_saves import WorkerSaves
from ps.snapshots.worker_state import (
    Arrays,
    SavedWorkerState,
    WorkerState,
    read_worker_state,
    write_worker_state,
)
from ps.storage import Place, Store, content_of, open_store
from shards.errors import UNDECODABLE, BadInput
from shards.shard_state import ShardState

FOLDER = "workers"
_NOTE, _ARRAYS, _WANTED = ".json", ".safetensors", "wanted"
_MAX_NOTE_BYTES = 1 << 20
_POLL_S = 0.1  # between two checks of a snapshot's writer that waits
_WORKER_POLL_S = 2.0  # between two checks of a worker, for as long as it runs
LOOK_S = 0.5
"""Between two looks of a worker that waits for an answer whether its state is requested."""
_END_S = 300.0  # longer than the end of a job takes


class _ResidualRequest(msgspec.Struct, frozen=True):
    """The content of `wanted`: the incarnation and the least push number, by worker.

    With `last`, each worker is to write its state and then wait for its end.
    """

    workers: dict[str, tuple[int, int]]
    last: bool = False


class ResidualWriter:
    """Writes one worker's states next to the snapshots at `uri`, in a thread of its own.

    `requested` says whether a snapshot waits for the present state: call `write` then.
    """

    def __init__(self, uri: Place, job: str, worker: str, incarnation: int) -> None:
        """Raises BadInput if `uri` is not a path or URI of a store."""
        self.failure = ""
        self.requested = False
        self._last = False  # whether the job's last snapshot has requested the state
        self._final = False  # whether that state is written
        self._store = open_store(uri).below(FOLDER)
        self._worker, self._incarnation = worker, incarnation
        self._logger = logger(__name__, job=job, worker=worker)
        self._seq = 0  # of the last state to keep
        self._written: list[str] = []
        self._saves = WorkerSaves(open_store(uri), job, worker)
        self._writes: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=f"residual-{worker}", daemon=True)
        self._thread.start()

    def write(self, state: WorkerState, arrays: Arrays) -> None:
        """Start writing a state; the caller must not change the arrays afterwards."""
        self.requested, self._seq, self._final = False, state.seq, self._last
        self._writes.put(partial(self._write, state, arrays))

    def await_end(self, turn: Callable[[float], None]) -> None:
        """After the state for the job's last snapshot, call `turn` until this process is ended.

        A job that has not ended it after five minutes trains on.
        """
        until = time.monotonic() + _END_S
        while self._final and time.monotonic() < until:
            turn(LOOK_S)

    def begin_save(self, *, waits: bool) -> bool:
        """Return whether `save` may be called now; `waits`: in any case, at a worker's end."""
        return self._saves.begin(waits=waits)

    def save(self, state: WorkerState, arrays: Arrays) -> None:
        """Start writing a state for the worker's next life (worker_saves.py)."""
        self._writes.put(partial(self._saves.write, state, arrays))

    def close(self) -> None:
        """Wait until everything is written."""
        self._writes.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                write = self._writes.get(timeout=_WORKER_POLL_S)
            except Empty:
                self.requested = self._is_requested()
                continue
            if write is None:
                return
            try:
                write()
            except OSError as error:
                self._fail(error)

    def _is_requested(self) -> bool:
        try:
            content = content_of(self._store, _WANTED, _MAX_NOTE_BYTES)
            request = checked_json.decode(content, _ResidualRequest, required=True)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._fail(error)
            return False
        except (BadInput, *UNDECODABLE):  # it is being written
            return False
        incarnation, seq = request.workers.get(self._worker, (-1, 0))
        if incarnation != self._incarnation:
            return False
        self._last = request.last
        return not self._final if request.last else seq > self._seq

    def _fail(self, error: OSError) -> None:
        # Reading and writing may fail in turn, with different errors: only the first is reported.
        if not self.failure:
            self.failure = f"residual in {self._store.place}: {error.strerror}"
            self._logger.warning("%s; training continues", self.failure)

    def _write(self, state: WorkerState, arrays: Arrays) -> None:
        name = _name(state)
        note = write_worker_state(self._store, name + _ARRAYS, state, arrays)
        self._store.put(name + _NOTE, [checked_json.encode(note)])
        self._written = [*(old for old in self._written if old != name), name]
        with suppress(OSError):
            for old in self._written[:-2]:
                _remove(self._store, old)
        self._written = self._written[-2:]


def find_residuals(states: Sequence[ShardState]) -> dict[str, tuple[int, int]]:
    """The residuals that belong to these states: each worker's incarnation and last applied push.

    A worker that has pushed nothing has no residual.
    """
    ledgers = [state.saved.ledger.entries for state in states]
    everywhere = set(ledgers[0]).intersection(*ledgers)
    residuals = {}
    for worker in sorted(everywhere):
        incarnations = {entries[worker].incarnation for entries in ledgers}
        seq = min(entries[worker].seq for entries in ledgers)
        if seq and len(incarnations) == 1:
            residuals[worker] = incarnations.pop(), seq
    return residuals


def gather_residuals(
    snapshots: Store,
    expected: Mapping[str, tuple[int, int]],
    patience_s: float,
    *,
    last: bool = False,
) -> tuple[list[tuple[str, SavedWorkerState]], list[str]]:
    """Collect the residuals that are `expected`; asks for them and waits at most `patience_s` s.

    With `last`, these workers push no more when they have written theirs. Returns file and note of
    each in the order of worker names, and the workers without one. Raises OSError.
    """
    store = snapshots.below(FOLDER)
    if patience_s > 0:
        store.put(_WANTED, [checked_json.encode(_ResidualRequest(dict(expected), last))])
    until = time.monotonic() + patience_s
    while True:
        residuals: dict[str, tuple[str, SavedWorkerState]] = {}
        for name in store.names():
            note = _note(store, name) if name.endswith(_NOTE) else None
            if note is not None and _fits(note, expected.get(note.worker)):
                residuals[note.worker] = f"{FOLDER}/{note.part.file}", note
        missing = [worker for worker in expected if worker not in residuals]
        if not missing or time.monotonic() >= until:
            return [residuals[worker] for worker in sorted(residuals)], missing
        time.sleep(_POLL_S)


def sweep_residuals(snapshots: Store) -> None:
    """Remove the files of this job's workers, none of which may be running. Raises OSError."""
    store = snapshots.below(FOLDER)
    for name in store.names():
        if name == _WANTED or name.endswith((_NOTE, _ARRAYS)):
            store.remove(name)
    store.drop()


def saved_residual(snapshot: Place, worker: str) -> tuple[WorkerState, Arrays] | None:
    """The worker's state and arrays in the snapshot at a path or URI, if it has any.

    Raises BadInput if they cannot be read, or are damaged.
    """
    store = open_store(snapshot)
    for residual in load_manifest(store).residuals:
        if residual.worker == worker:
            return read_worker_state(store, residual)
    return None


def _fits(note: SavedWorkerState, expected: tuple[int, int] | None) -> bool:
    if expected is None:
        return False
    incarnation, seq = expected
    return note.incarnation == incarnation and note.seq >= seq


def _name(state: WorkerState | SavedWorkerState) -> str:
    """The common name of the note and the arrays, without the suffix."""
    return f"{quote(state.worker, safe='')}.{state.incarnation}.{state.seq}"


def _note(store: Store, name: str) -> SavedWorkerState | None:
    """A note; None if it is gone or incomplete, or does not match the file next to it."""
    try:
        content = content_of(store, name, _MAX_NOTE_BYTES)
        note = checked_json.decode(content, SavedWorkerState, required=True)
        arrays = _name(note) + _ARRAYS
        if (name, note.part.file) != (_name(note) + _NOTE, arrays):
            return None
        return note if store.size(arrays) == note.part.bytes else None
    except (OSError, BadInput, *UNDECODABLE):
        return None


def _remove(store: Store, name: str) -> None:
    store.remove(name + _NOTE)  # first: without their note the arrays do not count
    store.remove(name + _ARRAYS)
