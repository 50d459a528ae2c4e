"""Workers' residuals on their way into a snapshot, and out of it again.

A worker writes what it holds beside the snapshots, in the folder `workers`, whenever it hears that
the shards have given away a state (channel_recorder.py), and at its end. First the arrays, then a
note that says of whom and of when they are, and by which checksums to know them: with the note they
are whole. Whoever writes the snapshot waits a while for those that belong to its states, and has
them in the snapshot's own folder, named in its manifest. Files stay here until two newer ones of
their worker are: one that was written for a snapshot may be wanted after the worker's last has
come.

Workers must reach the place where snapshots go. What cannot be written holds up nobody: the
snapshot goes without, and its writer says so.

Whoever takes a file into a snapshot does so with its own rights, on the word of a worker. So a note
can speak of one file alone: both are named after what the note says, and stand side by side.
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
    """Writes one worker's states beside the snapshots at `place`, in a thread of its own."""

    def __init__(self, place: Place, worker: str) -> None:
        """Raises BadInput for what names no place."""
        self.failure = ""
        self._store = open_store(place).below(FOLDER)
        self._worker = worker
        self._written: list[str] = []
        self._pool = ThreadPoolExecutor(1, "residual")
        self._under_way: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether the last one is still being written; another would have to wait in memory."""
        return self._under_way is not None and not self._under_way.done()

    def keep(self, state: WorkerState, arrays: Arrays) -> None:
        """Begin to write this state; the arrays are the keeper's from here on."""
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
    """Of whom a residual belongs to these states: incarnation, and the push that it goes on after.

    Who has pushed nothing has none.
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
    """What workers have written for states that `awaited` this: file and note of each, in order.

    Second, of whom nothing has come within `patience_s`. Raises OSError.
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
    """Remove what workers of this job have left, none of which live. Raises OSError."""
    store = shelf.below(FOLDER)
    for name in store.names():
        if name.endswith((_NOTE, _ARRAYS)):
            store.remove(name)
    store.drop()


def residual_in(snapshot: Place, worker: str) -> tuple[WorkerState, Arrays] | None:
    """What the snapshot at a path or URI holds of a worker, if anything.

    Raises BadInput where it cannot be read, or is damaged.
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
    """What its note and its arrays are called, but for the ending."""
    return f"{quote(state.worker, safe='')}.{state.incarnation}.{state.base}-{state.seq}"


def _note(store: Store, name: str) -> SavedWorkerState | None:
    """A note; None for one that has gone, is not whole yet, or is not of the file beside it."""
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
    store.remove(name + _NOTE)  # first, for without it the arrays are nothing
    store.remove(name + _ARRAYS)
