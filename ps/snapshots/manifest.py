"""Snapshots: a folder that holds a whole job at one moment, or is none.

Each shard's state is one file (shard_file.py); `manifest.json` names the files with their
checksums, says what they belong to, and has a checksum of its own (checked_json.py). The files come
first and the manifest last: the moment it appears under its name is the moment the snapshot exists,
on a disk as in an object store. So a crash, a full disk or a kill leaves the last good snapshot as
it was. One that replaces another of its name is written next to it under other file names, and the
new manifest is the moment of the exchange.

What is read back is checked against the manifest, and an error names the file. The snapshots of a
job stand on a shelf (catalog.py).
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from ps.snapshots import checked_json
from ps.snapshots.object_store import PARTIAL, Place, Store, content_of, open_store
from ps.snapshots.shard_file import StateFile, read_state, write_state
from ps.snapshots.worker_state import SavedWorkerState, read_kept
from shards.errors import UNDECODABLE, BadInput, GiveUp, quoted
from shards.messages import Count
from shards.parameters import ShardState
from shards.tables import DenseTable, ShardMap

FORMAT = 4
MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 64 << 20
_VALUE_BYTES = 4
_OURS = re.compile(rf"(shard|worker)-\d+(\.\d+)?\.safetensors|{re.escape(MANIFEST)}|\..*{PARTIAL}")


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a snapshot holds.

    `workers` is how many the job was run with, `taken_at` a Unix time. `aligned` says whether all
    shards had applied the very same pushes of every worker. `residuals` are what workers that
    compress their pushes had kept back.
    """

    format: int = FORMAT
    table: DenseTable
    map: ShardMap
    rule: str
    workers: int
    steps: Count
    taken_at: float
    aligned: bool
    parts: tuple[StateFile, ...]
    residuals: tuple[SavedWorkerState, ...] = ()

    @property
    def files(self) -> tuple[StateFile, ...]:
        """All of its files but the manifest."""
        return (*self.parts, *(kept.part for kept in self.residuals))

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return sum(part.bytes for part in self.files)


class _Format(msgspec.Struct, frozen=True):
    """What every manifest begins with, whatever else it says."""

    format: int = FORMAT


def save_snapshot(
    place: Place | Store,
    states: Sequence[ShardState],
    *,
    table: DenseTable,
    shard_map: ShardMap,
    rule: str,
    workers: int,
    taken_at: float | None = None,
    residuals: Sequence[tuple[str, SavedWorkerState]] = (),
) -> Manifest:
    """Write the states of all shards as the snapshot `place`, a folder's path or URI.

    `taken_at` is a Unix time (default: now); `residuals` are files of workers to have in it, by
    their names below the folder that it is in, with their notes (residual_writer.py). Raises GiveUp
    naming the place where it fails.
    """
    store = _store(place)
    try:
        taken = set()
        with suppress(BadInput):  # a damaged manifest keeps nothing
            taken = _named_by_manifest(store)
        parts = tuple(
            write_state(store, _free_name(f"shard-{shard}", taken), state, shard_map.ranges[shard])
            for shard, state in enumerate(states)
        )
        kept = tuple(
            _taken(store, _free_name(f"worker-{number}", taken), *residual)
            for number, residual in enumerate(residuals)
        )
        manifest = Manifest(
            table=table,
            map=shard_map,
            rule=rule,
            workers=workers,
            steps=states[0].saved.steps,
            taken_at=time.time() if taken_at is None else taken_at,
            aligned=are_aligned(states),
            parts=parts,
            residuals=kept,
        )
        store.settle()
        store.put(MANIFEST, [checked_json.encode(manifest)])
        store.settle()
    except OSError as error:
        raise GiveUp(
            f"snapshot {store.place}: {error.strerror}; earlier snapshots are intact"
        ) from None
    finally:
        with suppress(OSError, BadInput):
            sweep(store)
    return manifest


def load_snapshot(place: Place | Store) -> tuple[Manifest, list[ShardState]]:
    """Read a snapshot back; raises BadInput naming the file that is missing or damaged."""
    store = _store(place)
    manifest = load_manifest(store)
    parts = zip(manifest.parts, manifest.map.ranges, strict=True)
    return manifest, [read_state(store, part, ranges) for part, ranges in parts]


def load_manifest(place: Place | Store) -> Manifest:
    """What the snapshot at `place` says it is; raises BadInput."""
    store = _store(place)
    path = f"snapshot {store.place}/{MANIFEST}"
    try:
        content = content_of(store, MANIFEST, _MAX_MANIFEST_BYTES)
        told = msgspec.json.decode(content, type=_Format).format
        if told != FORMAT:
            raise BadInput(f"expected format {FORMAT}, got {told}")
        manifest = checked_json.decode(content, Manifest, required=True)
        _check_parts(manifest)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    except (*UNDECODABLE, BadInput) as error:
        raise BadInput(f"{path}: {error}") from None
    return manifest


def _check_parts(manifest: Manifest) -> None:
    """Raise BadInput where its files cannot be those of its shards."""
    shards = manifest.map.shards
    if len(manifest.parts) != shards:
        raise BadInput(f"expected {shards} parts, one a shard, got {len(manifest.parts)}")
    for part, ranges in zip(manifest.parts, manifest.map.ranges, strict=True):
        least = _VALUE_BYTES * sum(map(len, ranges))
        if part.bytes < least:
            raise BadInput(
                f"{quoted(part.file)}: expected at least {least} bytes, got {part.bytes}"
            )


def damage(place: Place | Store) -> Iterator[str]:
    """Read all of a snapshot, and say what is wrong with each of its files, in a line each."""
    store = _store(place)
    try:
        manifest = load_manifest(store)
    except BadInput as error:
        yield str(error)
        return
    reads: list[Callable[[], object]] = [
        partial(read_state, store, part, ranges)
        for part, ranges in zip(manifest.parts, manifest.map.ranges, strict=True)
    ]
    reads += [partial(read_kept, store, kept) for kept in manifest.residuals]
    for read in reads:
        try:
            read()
        except BadInput as error:
            yield str(error)


def sweep(store: Store) -> None:
    """Remove what a folder of ours holds beyond a whole snapshot: a broken one's remains.

    What may not be ours stays. Raises OSError, and BadInput for a damaged manifest, beside which
    nothing is touched.
    """
    kept = _named_by_manifest(store)
    for name in store.names():
        if _OURS.fullmatch(name) and name not in kept:
            store.remove(name)
    store.drop()


def discard(store: Store) -> None:
    """Remove a snapshot: first the manifest, so that it is never half of one. Raises OSError."""
    store.remove(MANIFEST)
    store.settle()
    sweep(store)


def are_aligned(states: Sequence[ShardState]) -> bool:
    """Whether all of them hold the same pushes of every worker."""
    seen = [
        {name: (entry.incarnation, entry.seq) for name, entry in state.saved.ledger.entries.items()}
        for state in states
    ]
    return all(one == seen[0] for one in seen)


def _store(place: Place | Store) -> Store:
    return open_store(place) if isinstance(place, Place) else place


def _named_by_manifest(store: Store) -> set[str]:
    """The manifest and what it names; nothing where there is none."""
    if MANIFEST not in store.names():
        return set()
    return {MANIFEST} | {part.file for part in load_manifest(store).files}


def _free_name(what: str, taken: set[str]) -> str:
    first, second = f"{what}.safetensors", f"{what}.2.safetensors"
    return second if first in taken else first


def _taken(store: Store, name: str, file: str, kept: SavedWorkerState) -> SavedWorkerState:
    """A worker's file, in this snapshot too."""
    store.take(name, file)
    return msgspec.structs.replace(kept, part=msgspec.structs.replace(kept.part, file=name))
