"""The catalog: the newest good snapshot is found, and old ones go, but never the last."""

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ps.snapshots import catalog as shelves
from ps.snapshots.catalog import Retention, SnapshotCatalog, SnapshotStatus
from ps.snapshots.manifest import Manifest, load_manifest, save_snapshot
from ps.storage import ArrowStore, LocalStore, Store
from shards.errors import BadInput, GiveUp
from tests.support.snapshot_stores import JOB, full_disk, mocked, same, states_of


@pytest.fixture(params=["local", "pyarrow"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A place that does not exist yet."""
    return LocalStore(tmp_path / "snapshots") if request.param == "local" else mocked()


def names(shelf: SnapshotCatalog) -> list[str]:
    return [entry.name for entry in shelf.entries()]


def spoil(store: Store, name: str, file: str) -> None:
    """Overwrite a snapshot's file."""
    store.below(name).put(file, [b"spoilt"])


def test_the_newest_is_found_by_its_time(store: Store) -> None:
    """Not by number: a job that resumed from an earlier one repeats iteration numbers.

    A folder that is not a snapshot, or not named by a number, is passed over.
    """
    shelf = SnapshotCatalog(store)
    with pytest.raises(BadInput, match="no snapshot in"):
        shelf.newest()
    for number in (100, 400, 9):
        shelf.save(number, states_of(number), **JOB)
    save_snapshot(store.below("best"), states_of(), **JOB)
    store.below("500").put("shard-0.safetensors", [b"begun"])
    assert names(shelf) == ["500", "100", "400", "9"]
    assert [entry.state for entry in shelf.entries()] == [SnapshotStatus.INCOMPLETE] + 3 * [
        SnapshotStatus.WHOLE
    ]
    assert shelf.newest().name == "9"
    found = shelf.newest_good()
    assert (found.name, found.passed_over) == ("9", ())
    assert same(found.states, states_of(9))


def test_a_clock_that_goes_back_changes_no_order(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each snapshot counts as later than those before it, also for a catalog opened again."""
    for number, now in ((1, 1000.0), (2, 900.0), (3, 950.0)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        SnapshotCatalog(store).save(number, states_of(number), **JOB)
    assert names(SnapshotCatalog(store)) == ["1", "2", "3"]


def test_what_is_damaged_is_passed_over(store: Store) -> None:
    """After a bad file, or a bad manifest, the one before is taken, and each bad file is named."""
    shelf = SnapshotCatalog(store)
    for number in (1, 2, 3):
        shelf.save(number, states_of(number), **JOB)
    spoil(store, "3", "shard-1.safetensors")
    spoil(store, "2", "manifest.json")
    found = shelf.newest_good()
    assert found.name == "1"
    assert same(found.states, states_of(1))
    manifest, file = found.passed_over
    assert f"{store.place}/2/manifest.json: " in manifest
    assert f"{store.place}/3/shard-1.safetensors: expected " in file
    spoil(store, "1", "shard-0.safetensors")
    with pytest.raises(BadInput, match=r"; no other snapshot in .* is whole"):
        shelf.newest_good()
    with pytest.raises(BadInput, match=r"3/shard-1.safetensors: expected \d+ bytes, got 6"):
        shelf.load("3")


def test_a_snapshot_of_another_job_ends_the_search(store: Store) -> None:
    """That is not damage: an older one would be no better."""
    shelf = SnapshotCatalog(store)
    for number in (1, 2):
        shelf.save(number, states_of(number), **JOB)
    seen = []

    def check(place: str, _: Manifest) -> None:
        seen.append(place)
        raise BadInput("another job's")

    with pytest.raises(BadInput, match="another job's"):
        shelf.newest_good(check)
    assert seen == [f"{store.place}/2"]


def test_one_is_asked_for_by_name(store: Store) -> None:
    """The error for an unknown name lists the known ones."""
    shelf = SnapshotCatalog(store)
    for number in (1, 2):
        shelf.save(number, states_of(number), **JOB)
    assert same(shelf.load("1").states, states_of(1))
    with pytest.raises(BadInput, match=r"no snapshot 7 in .*; it has 1 2$"):
        shelf.load("7")


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (Retention(), ["1", "2", "3", "4"]),
        (Retention(count=2), ["3", "4"]),
        (Retention(count=1), ["4"]),
        (Retention(seconds=150.0), ["3", "4"]),
        (Retention(seconds=1.0), ["4"]),
        (Retention(count=3, seconds=150.0), ["3", "4"]),
    ],
)
def test_as_many_stay_as_told(
    store: Store, keep: Retention, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention by count, by age, and by both; the newest always stays."""
    shelf = SnapshotCatalog(store, keep)
    for number in (1, 2, 3, 4):
        monkeypatch.setattr(time, "time", lambda now=1000.0 + 100 * number: now)
        shelf.save(number, states_of(number), **JOB)
    assert names(shelf) == left
    assert same(shelf.newest_good().states, states_of(4))


def test_a_snapshot_costs_no_reads_of_earlier_ones(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A catalog reads each manifest once, those of an earlier process too; retention still holds,
    and a number that is taken again is as new as its last time."""
    for number in (1, 2, 3):
        SnapshotCatalog(store).save(number, states_of(number), **JOB)
    read = list[str]()

    def read_manifest(place: Store) -> Manifest:
        read.append(place.place.rpartition("/")[2])
        return load_manifest(place)

    monkeypatch.setattr(shelves, "load_manifest", read_manifest)
    shelf = SnapshotCatalog(store, Retention(count=4))
    shelf.save(4, states_of(4), **JOB)
    assert sorted(read) == ["1", "2", "3"]
    read.clear()
    for number in (5, 2, 6):
        shelf.save(number, states_of(number), **JOB)
    assert not read
    assert names(shelf) == ["4", "5", "2", "6"]


def test_remains_go_with_the_next_snapshot(store: Store) -> None:
    """An incomplete snapshot of a killed writer is removed; one with a damaged manifest is left."""
    store.below("7").put("shard-0.safetensors", [b"begun"])
    store.below("8").put("manifest.json", [b"{"])
    store.below("9").put("thesis.tex", [b"mine"])
    shelf = SnapshotCatalog(store)
    shelf.save(10, states_of(), **JOB)
    assert store.names() == ["10", "8", "9"]
    assert [entry.state for entry in shelf.entries()] == [
        SnapshotStatus.DAMAGED,
        SnapshotStatus.INCOMPLETE,
        SnapshotStatus.WHOLE,
    ]


def test_a_snapshot_that_fails_removes_nothing(tmp_path: Path) -> None:
    """On a full disk even the snapshot that should make room stays."""
    shelf = SnapshotCatalog(tmp_path, Retention(count=1))
    shelf.save(1, states_of(1), **JOB)
    with full_disk(), pytest.raises(GiveUp, match=r"2: File too large; earlier snapshots are"):
        shelf.save(2, states_of(2), **JOB)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert same(shelf.newest_good().states, states_of(1))


def test_a_place_that_cannot_be_reached_is_named() -> None:
    """Any failure of a file system is reported in one line with the place."""

    class Broken:
        def get_file_info(self, _: Any) -> None:
            raise OSError("no\nroute")

    shelf = SnapshotCatalog(ArrowStore(Broken(), "b/run", *2 * ["s3://b/run"]))
    with pytest.raises(GiveUp, match=r"^snapshots s3://b/run: no route$"):
        shelf.newest()


def test_keep_is_a_value() -> None:
    """By default all snapshots stay."""
    assert msgspec.structs.asdict(shelves.EVERYTHING) == {"count": None, "seconds": None}
