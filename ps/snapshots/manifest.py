"""Snapshots: a folder that holds a whole job's state at one moment.

Each shard's state is one file (shard_file.py). `manifest.json` names the files with their
checksums, describes the job, and has a checksum of its own (checked_json.py). The files are written
first and the manifest last: a snapshot exists from the moment when the manifest appears under its
name, on a disk as in an object store. So a crash, a full disk or a kill leaves the last good
snapshot unchanged. A snapshot that replaces another of its name is written into the same folder
under other file names, and the new manifest completes the exchange.

Files that are read are checked against the manifest, and errors name the file. catalog.py handles
all snapshots of a job.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from ps.snapshots import checked_json
from ps.snapshots.shard_file import StateFile, read_state, write_state
from ps.snapshots.worker_state import SavedWorkerState, read_worker_state
from ps.storage import Place, Store, content_of, open_store
from ps.whole_files import PARTIAL
from shards.errors import UNDECODABLE, BadInput, GiveUp, quote
from shards.live_settings import newest_settings
from shards.messages import Count, LiveSettings
from shards.shard_state import ShardState
from shards.tables import Layout, ShardMap

FORMAT = 6
MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 64 << 20
_VALUE_BYTES = 4
_OURS = re.compile(rf"(shard|worker)-\d+(\.\d+)?\.safetensors|{re.escape(MANIFEST)}|\..*{PARTIAL}")


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a snapshot.

    `rules` are the names of the update rules, in the order of the layout: dense tables first.
    `workers` is the number of workers of the job, `taken_at` a Unix time. `aligned` says whether
    all shards had applied exactly the same pushes of every worker. `residuals` are the files of
    workers' own states.
    `settings` are the job's settings after an operator's changes (None: no operator changed any).
    """

    format: int = FORMAT
    layout: Layout
    map: ShardMap
    rules: tuple[str, ...]
    workers: int
    steps: Count
    taken_at: float
    aligned: bool
    parts: tuple[StateFile, ...]
    residuals: tuple[SavedWorkerState, ...] = ()
    settings: LiveSettings | None = None

    @property
    def files(self) -> tuple[StateFile, ...]:
        """All files of the snapshot but the manifest."""
        return (*self.parts, *(residual.part for residual in self.residuals))

    @property
    def bytes(self) -> int:
        """The total size of `files`."""
        return sum(part.bytes for part in self.files)


class _Format(msgspec.Struct, frozen=True):
    """The field that manifests of all formats have."""

    format: int = FORMAT


def save_snapshot(
    location: Place | Store,
    states: Sequence[ShardState],
    *,
    layout: Layout,
    shard_map: ShardMap,
    rules: tuple[str, ...],
    workers: int,
    taken_at: float | None = None,
    residuals: Sequence[tuple[str, SavedWorkerState]] = (),
) -> Manifest:
    """Write the states of all shards as the snapshot `location`, a folder's path or URI.

    `taken_at` is a Unix time (default: now). `residuals` are files of workers to include, by their
    names below the parent folder, with their notes (residual_writer.py). Raises GiveUp naming the
    place if it fails.
    """
    store = _store(location)
    try:
        names = set()
        with suppress(BadInput):  # files of a damaged manifest need not be kept
            names = _list_files(store)
        parts = tuple(
            write_state(store, _free_name(f"shard-{shard}", names), state, shard_map.ranges[shard])
            for shard, state in enumerate(states)
        )
        saved_residuals = tuple(
            _include_residual(store, _free_name(f"worker-{number}", names), *residual)
            for number, residual in enumerate(residuals)
        )
        manifest = Manifest(
            layout=layout,
            map=shard_map,
            rules=rules,
            workers=workers,
            steps=states[0].saved.steps,
            taken_at=time.time() if taken_at is None else taken_at,
            aligned=are_aligned(states),
            parts=parts,
            residuals=saved_residuals,
            settings=newest_settings(states),
        )
        # Flushed first: a manifest must not survive a power failure without its files.
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


def load_snapshot(location: Place | Store) -> tuple[Manifest, list[ShardState]]:
    """Read a snapshot; raises BadInput naming the file that is missing or damaged."""
    store = _store(location)
    manifest = load_manifest(store)
    parts = zip(manifest.parts, manifest.map.ranges, strict=True)
    return manifest, [read_state(store, part, manifest.layout, keys) for part, keys in parts]


def load_manifest(location: Place | Store) -> Manifest:
    """The manifest of the snapshot at `location`; raises BadInput."""
    store = _store(location)
    path = f"snapshot {store.place}/{MANIFEST}"
    try:
        content = content_of(store, MANIFEST, _MAX_MANIFEST_BYTES)
        format_number = msgspec.json.decode(content, type=_Format).format
        if format_number != FORMAT:
            raise BadInput(f"expected format {FORMAT}, got {format_number}")
        manifest = checked_json.decode(content, Manifest, required=True)
        _check_parts(manifest)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    except (*UNDECODABLE, BadInput) as error:
        raise BadInput(f"{path}: {error}") from None
    return manifest


def _check_parts(manifest: Manifest) -> None:
    """Raise BadInput if the files of a manifest cannot be those of its shards."""
    shards = manifest.map.shards
    if len(manifest.parts) != shards:
        raise BadInput(f"expected {shards} parts, one per shard, got {len(manifest.parts)}")
    for part, keys in zip(manifest.parts, manifest.map.ranges, strict=True):
        least = _VALUE_BYTES * len(keys)
        if part.bytes < least:
            raise BadInput(quote(part.file), expected=f"at least {least} bytes", got=part.bytes)


def damage(location: Place | Store) -> Iterator[str]:
    """Read all of a snapshot; yields a line for each file that is damaged."""
    store = _store(location)
    try:
        manifest = load_manifest(store)
    except BadInput as error:
        yield str(error)
        return
    reads: list[Callable[[], object]] = [
        partial(read_state, store, part, manifest.layout, keys)
        for part, keys in zip(manifest.parts, manifest.map.ranges, strict=True)
    ]
    reads += [partial(read_worker_state, store, residual) for residual in manifest.residuals]
    for read in reads:
        try:
            read()
        except BadInput as error:
            yield str(error)


def sweep(store: Store) -> None:
    """Remove the files of a snapshot folder that its manifest does not name, left by a failure.

    Files that Downpour would not have written stay. Raises OSError, and BadInput for a damaged
    manifest, in which case nothing is removed.
    """
    names = _list_files(store)
    for name in store.names():
        if _OURS.fullmatch(name) and name not in names:
            store.remove(name)
    store.drop()


def discard(store: Store) -> None:
    """Remove a snapshot, the manifest first: without it the rest is no snapshot. Raises OSError."""
    store.remove(MANIFEST)
    store.settle()
    sweep(store)


def are_aligned(states: Sequence[ShardState]) -> bool:
    """Return whether all shards hold the same pushes of every worker."""
    seen = [
        {name: (entry.incarnation, entry.seq) for name, entry in state.saved.ledger.entries.items()}
        for state in states
    ]
    return all(pushes == seen[0] for pushes in seen)


def _store(location: Place | Store) -> Store:
    return open_store(location) if isinstance(location, Place) else location


def _list_files(store: Store) -> set[str]:
    """The names of the manifest and the files that it names; empty if there is none."""
    if MANIFEST not in store.names():
        return set()
    return {MANIFEST} | {part.file for part in load_manifest(store).files}


def _free_name(stem: str, names: set[str]) -> str:
    first, second = f"{stem}.safetensors", f"{stem}.2.safetensors"
    return second if first in names else first


def _include_residual(
    store: Store, name: str, file: str, residual: SavedWorkerState
) -> SavedWorkerState:
    """Include a worker's file in this snapshot."""
    store.take(name, file)
    return msgspec.structs.replace(residual, part=msgspec.structs.replace(residual.part, file=name))
