"""The catalog of one job's snapshots at one place: finds the newest, and removes old ones.

A snapshot is named by its number, the iteration at which it was taken. The time in the manifest
decides which one is the newest: a job that resumed from an earlier snapshot repeats iteration
numbers. A place belongs to one job: an incomplete snapshot there counts as the remains of an
interrupted one, and is removed.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from math import inf

import msgspec
from msgspec import structs

from ps.snapshots.manifest import (
    MANIFEST,
    Manifest,
    discard,
    load_manifest,
    load_snapshot,
    save_snapshot,
    sweep,
)
from ps.snapshots.worker_state import SavedWorkerState
from ps.storage import LocalStore, Place, Store, open_store, place_error
from shards import argument_checks
from shards.errors import BadInput, DownpourError, GiveUp
from shards.named_fields import NamedFields
from shards.shard_state import ShardState
from shards.tables import Layout, ShardMap

_PROBE = "probe"
_TICK_S = 1e-3  # the least time between two snapshots, even if the clock was set back


class Retention(msgspec.Struct, frozen=True, metaclass=NamedFields):
    """The number of snapshots to keep, and for how many seconds; None is no limit.

    The newest is always kept.
    """

    count: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.count is not None:
            count = argument_checks.whole("retention: count", self.count, 1)
            structs.force_setattr(self, "count", count)
        if self.seconds is not None:
            argument, expected = "retention: seconds", "more than 0 s, and finite"
            seconds = argument_checks.number(argument, self.seconds, expected=expected)
            if not seconds > 0:
                raise argument_checks.wrong(argument, expected, seconds)
            structs.force_setattr(self, "seconds", seconds)


EVERYTHING = Retention()


class SnapshotStatus(StrEnum):
    """The state of a snapshot: with a manifest, none (while it is written), or a bad one."""

    WHOLE = "whole"
    INCOMPLETE = "incomplete"
    DAMAGED = "damaged"


class CatalogEntry(msgspec.Struct, frozen=True):
    """A snapshot, as far as its manifest describes it; `complaint` says what is wrong."""

    name: str
    state: SnapshotStatus
    manifest: Manifest | None = None
    complaint: str = ""


class LoadedSnapshot(msgspec.Struct, frozen=True):
    """A snapshot that was read completely, its place, and why newer ones were passed over."""

    store: Store
    name: str
    manifest: Manifest
    states: list[ShardState]
    passed_over: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The place of the snapshot, for messages."""
        return self.store.place


class SnapshotCatalog:
    """The snapshots at a place, a path or URI."""

    def __init__(self, location: Place | Store, keep: Retention = EVERYTHING) -> None:
        """Does not access the store yet. Raises BadInput if `location` is invalid."""
        self.store = open_store(location) if isinstance(location, Place) else location
        self._keep = keep
        self._times: dict[str, float] = {}  # when each was taken, of those that have been read
        self.untidy = ""  # why the last `save` could not remove old snapshots

    def __contains__(self, name: str) -> bool:
        with self._reach_store():
            return MANIFEST in self.store.below(name).names()

    def check_writable(self) -> None:
        """Raise BadInput if a folder of this machine cannot be written to.

        Raises GiveUp if its disk is full, fails or is read-only. Remote stores are not tried: they
        may be slow to fail.
        """
        if not isinstance(self.store, LocalStore):
            return
        is_new = not self.store.path.exists()
        try:
            self.store.put(_PROBE, ())
            self.store.remove(_PROBE)
            if is_new:
                self.store.drop()
        except OSError as error:
            raise place_error(f"snapshots {self.store.place}: cannot be written", error) from None

    def entries(self) -> list[CatalogEntry]:
        """All snapshots here, the newest last; those without a readable manifest come first."""
        return sorted(map(self._entry, self._names()), key=_age)

    def newest(self) -> CatalogEntry:
        """The newest snapshot with a valid manifest; raises BadInput if there is none."""
        whole = [entry for entry in self.entries() if entry.manifest is not None]
        if not whole:
            raise BadInput(f"no snapshot in {self.store.place}")
        return whole[-1]

    def check_name(self, name: str) -> None:
        """Raise BadInput that lists the snapshots that are here, unless `name` is one of them."""
        if name not in self:
            known = " ".join(entry.name for entry in self.entries()) or "none"
            raise BadInput(f"no snapshot {name} in {self.store.place}; it has {known}")

    def load(self, name: str) -> LoadedSnapshot:
        """The snapshot `name`; raises BadInput naming the file that is missing or damaged."""
        store = self.store.below(name)
        self.check_name(name)
        return LoadedSnapshot(store, name, *load_snapshot(store))

    def newest_good(
        self, check: Callable[[str, Manifest], None] = lambda *_: None
    ) -> LoadedSnapshot:
        """The newest snapshot that can be read completely; damaged ones are passed over.

        `check` is called with each place and manifest before the files are read; an error that it
        raises ends the search. Raises BadInput naming the fault of the newest if none is good.
        """
        passed: list[str] = []
        entries = self.entries()
        passed += [entry.complaint for entry in entries if entry.state is SnapshotStatus.DAMAGED]
        for entry in reversed(entries):
            if entry.manifest is None:
                continue
            store = self.store.below(entry.name)
            check(store.place, entry.manifest)
            try:
                return LoadedSnapshot(store, entry.name, *load_snapshot(store), tuple(passed))
            except BadInput as error:
                passed.append(str(error))
        if not passed:
            raise BadInput(f"no snapshot in {self.store.place}")
        raise BadInput(f"{passed[0]}; no other snapshot in {self.store.place} is whole")

    def save(
        self,
        number: int,
        states: Sequence[ShardState],
        *,
        layout: Layout,
        shard_map: ShardMap,
        rules: tuple[str, ...],
        workers: int,
        residuals: Sequence[tuple[str, SavedWorkerState]] = (),
    ) -> str:
        """Write a snapshot, then remove those that need not be kept; returns its place.

        `residuals` are files of workers, below this place. Raises GiveUp if the snapshot cannot be
        written; earlier ones stay intact.
        """
        taken_at = max(time.time(), self._latest_time() + _TICK_S)
        store = self.store.below(str(number))
        self._times.pop(str(number), None)
        save_snapshot(
            store,
            states,
            layout=layout,
            shard_map=shard_map,
            rules=rules,
            workers=workers,
            taken_at=taken_at,
            residuals=residuals,
        )
        self._times[str(number)] = taken_at
        self.untidy = ""
        try:
            self.tidy()
        except (OSError, DownpourError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            self.untidy = f"snapshots {self.store.place}: old ones could not be removed: {why}"
        return store.place

    def tidy(self) -> None:
        """Remove incomplete snapshots, and those beyond the retention. Raises OSError."""
        for entry in self._read_times():
            if entry.state is SnapshotStatus.INCOMPLETE:
                sweep(self.store.below(entry.name))
        for name in _find_expired(self._times, self._keep, time.time()):
            discard(self.store.below(name))

    def _read_times(self) -> list[CatalogEntry]:
        """Learn when each snapshot was taken; returns those without a readable manifest.

        A manifest does not change, and in an object store to read one costs a round trip.
        """
        names = self._names()
        known = {name: self._times[name] for name in names if name in self._times}
        entries = [self._entry(name) for name in names if name not in known]
        new = {entry.name: entry.manifest.taken_at for entry in entries if entry.manifest}
        self._times = known | new
        return [entry for entry in entries if entry.manifest is None]

    def _names(self) -> list[str]:
        with self._reach_store():
            return [name for name in self.store.names() if name.isdecimal()]

    @contextmanager
    def _reach_store(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise GiveUp(f"snapshots {self.store.place}: {error.strerror}") from None

    def _entry(self, name: str) -> CatalogEntry:
        store = self.store.below(name)
        if name not in self:
            return CatalogEntry(
                name, SnapshotStatus.INCOMPLETE, None, f"snapshot {store.place}: incomplete"
            )
        try:
            return CatalogEntry(name, SnapshotStatus.WHOLE, load_manifest(store))
        except BadInput as error:
            return CatalogEntry(name, SnapshotStatus.DAMAGED, None, str(error))

    def _latest_time(self) -> float:
        if not self._times:
            self._read_times()
        return max(self._times.values(), default=0.0)


def _age(entry: CatalogEntry) -> tuple[float, int]:
    return entry.manifest.taken_at if entry.manifest else 0.0, int(entry.name)


def _find_expired(times: Mapping[str, float], keep: Retention, now: float) -> list[str]:
    """The snapshots to remove, of those that were taken at these times; never the newest."""
    names = sorted(times, key=lambda name: (times[name], int(name)))
    surplus = len(names) - keep.count if keep.count is not None else 0
    oldest = now - keep.seconds if keep.seconds is not None else -inf
    return [
        name for number, name in enumerate(names[:-1]) if number < surplus or times[name] < oldest
    ]
