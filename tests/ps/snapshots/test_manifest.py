"""Snapshots: a written one is read back equal, and a failure leaves the one before unchanged."""

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

import ps
from ps import AdminClient, ShardState
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.threads import local_shards
from ps.snapshots import checked_json
from ps.snapshots.catalog import SnapshotCatalog
from ps.snapshots.manifest import (
    are_aligned,
    damage,
    discard,
    load_manifest,
    load_snapshot,
    save_snapshot,
    sweep,
)
from ps.storage import LocalStore, Store
from ps.whole_files import flush_to_disk
from shards.errors import BadInput, GiveUp
from shards.rules import Momentum
from shards.schedules import Fixed
from shards.tables import cut_evenly
from tests.support.snapshot_stores import (
    JOB,
    LAYOUT,
    MAP,
    TABLE,
    full_disk,
    mocked,
    same,
    states_of,
)


def save(place: Path | Store, version: int = 5) -> None:
    save_snapshot(place, states_of(version), **JOB, taken_at=1e9)


def test_a_snapshot_comes_back(tmp_path: Path) -> None:
    """Ledgers, weights and slots of every shard, the description, and no other file."""
    save(tmp_path / "runs" / "12")
    manifest, states = load_snapshot(tmp_path / "runs" / "12")
    assert same(states, states_of())
    assert (manifest.layout, manifest.map) == (LAYOUT, MAP)
    assert (manifest.rules, manifest.workers) == (("momentum",), 3)
    assert [part.version for part in manifest.parts] == [5, 6]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["12"]


def test_others_can_read_it(tmp_path: Path) -> None:
    """A shard's file is plain safetensors, and equal states give equal bytes."""
    for name in ("1", "2"):
        save(tmp_path / name)
    arrays = load_file(tmp_path / "1" / "shard-1.safetensors")
    assert {name: array.dtype for name, array in arrays.items()} == {
        "net/weights": np.float32,
        "net/history": np.float32,
    }
    np.testing.assert_array_equal(arrays["net/weights"], states_of()[1].arrays["net/weights"])
    for file in (tmp_path / "1").iterdir():
        assert file.read_bytes() == (tmp_path / "2" / file.name).read_bytes()


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """Five steps, a snapshot, other shards, five steps: bit for bit the same as ten."""
    rng = np.random.default_rng(4)
    start, scale = (rng.standard_normal(TABLE.size, np.float32) for _ in range(2))

    def specs() -> list[Any]:
        options: dict[str, Any] = {"shards": 2, "rule": Momentum(0.9), "bound": 0}
        return shard_specs(TABLE, schedule=Fixed(base_rate=0.1), **options)

    def steps(cluster: ps.Cluster, count: int, incarnation: int) -> list[ShardState]:
        with AdminClient(cluster) as console:
            with Client(cluster, worker="w", incarnation=incarnation) as client:
                for _ in range(count):
                    client.push(scale * np.tanh(client.pull().weights))
            return console.export()

    with local_shards(specs(), start) as cluster:
        wanted = steps(cluster, 10, 0)
    with local_shards(specs(), start) as cluster:
        save_snapshot(tmp_path / "5", steps(cluster, 5, 0), **JOB)
    with local_shards(specs()) as cluster:
        with AdminClient(cluster) as console:
            for shard, state in enumerate(load_snapshot(tmp_path / "5")[1]):
                console.restore(shard, state)
        got = steps(cluster, 5, 1)
    for one, other in zip(got, wanted, strict=True):
        assert one.arrays.keys() == other.arrays.keys() == {"net/weights", "net/history"}
        for name, array in one.arrays.items():
            assert array.tobytes() == other.arrays[name].tobytes()
        assert (one.saved.version, one.saved.steps) == (10, 10)
        assert one.saved.ledger.entries["w"].seq == 10


def test_any_place_holds_one() -> None:
    """Written, replaced and discarded through pyarrow, a snapshot is the same as on disk."""
    store = mocked()
    for version in (5, 6):
        save(store, version)
        assert same(load_snapshot(store)[1], states_of(version))
        assert list(damage(store)) == []
        assert len(store.names()) == 3
    discard(store)
    assert store.names() == []
    with pytest.raises(BadInput, match=r"mock://bucket/run/manifest.json: No such file"):
        load_manifest(store)


def test_states_are_aligned_when_they_hold_the_same_pushes(tmp_path: Path) -> None:
    """One push or one incarnation more on one shard, and they are not."""
    states = states_of()
    assert are_aligned(states)
    assert save_snapshot(tmp_path / "1", states, **JOB).aligned
    states[1].saved.ledger.entries["w7"].seq += 1
    assert not are_aligned(states)
    assert not save_snapshot(tmp_path / "2", states, **JOB).aligned


# --- damage ---------------------------------------------------------------------------------------


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("file", ["shard-0.safetensors", "shard-1.safetensors"])
@pytest.mark.parametrize("damage", [_flip, _truncate, _empty, Path.unlink])
def test_a_damaged_file_is_named(tmp_path: Path, file: str, damage: Callable[[Path], None]) -> None:
    """For one bit, one byte, a part or all of it, the error names the file in one line."""
    save(tmp_path / "1")
    damage(tmp_path / "1" / file)
    with pytest.raises(BadInput) as caught:
        load_snapshot(tmp_path / "1")
    assert str(tmp_path / "1" / file) in str(caught.value)
    assert "\n" not in str(caught.value)


def _garble(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"momentum", b"\xedomentum"))


@pytest.mark.parametrize("damage", [_truncate, _empty, _garble, Path.unlink])
def test_a_damaged_manifest_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """A folder without a manifest is not a snapshot."""
    save(tmp_path / "1")
    damage(tmp_path / "1" / "manifest.json")
    with pytest.raises(BadInput, match=r"manifest.json: ") as caught:
        load_manifest(tmp_path / "1")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": 7}, "expected format 6, got 7"),
        ({"format": 2, "parts": [{"file": "x", "crc32": [1]}]}, "expected format 6, got 2"),
        ({"workers": "many"}, "Expected `int`, got `str`"),
        ({"parts": [{"file": "x", "bytes": 1}]}, "missing required field `version`"),
        (
            {"layout": {"tables": [{"name": "t", "tensors": [{"name": "a", "shape": [-1]}]}]}},
            "sizes of at least 1",
        ),
        ({"step": 7}, "unknown field `step`"),
        ({"steps": 900}, "it is damaged or was edited: expected checksum"),
        ({"check": "0" * 16}, "it is damaged or was edited: expected checksum"),
    ],
)
def test_a_manifest_that_says_something_else(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    """Another format, another type, a missing field: each is reported."""
    save(tmp_path / "1")
    path = tmp_path / "1" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BadInput, match=complaint):
        load_manifest(tmp_path / "1")


def test_a_field_that_is_repeated_is_named(tmp_path: Path) -> None:
    """One of the two values would be lost without a word."""
    save(tmp_path / "1")
    path = tmp_path / "1" / "manifest.json"
    for field in ('"format": 6', '"name": "net"'):
        content = path.read_text()
        assert field in content
        path.write_text(content.replace(field, f"{field}, {field}", 1))
        name = field.split('"')[1]
        with pytest.raises(BadInput, match=f"{name}: expected this field once, got it again"):
            load_manifest(tmp_path / "1")
        path.write_text(content)


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    """Whatever it names, only files of its own folder are read."""
    save(tmp_path / "1")
    manifest = load_manifest(tmp_path / "1")
    for name in ("../2/shard-0.safetensors", "/etc/hostname", "..", "a\0b", ""):
        part = msgspec.structs.replace(manifest.parts[0], file=name)
        changed = msgspec.structs.replace(manifest, parts=(part, manifest.parts[1]))
        (tmp_path / "1" / "manifest.json").write_bytes(checked_json.encode(changed))
        with pytest.raises(BadInput, match="expected a file name, got"):
            load_snapshot(tmp_path / "1")


def test_every_flipped_bit_of_a_manifest_shows(tmp_path: Path) -> None:
    """Unless its content is unchanged, as where a space became a tab."""
    save(tmp_path / "1")
    manifest = load_manifest(tmp_path / "1")
    path = tmp_path / "1" / "manifest.json"
    content = path.read_bytes()
    noticed = 0
    for bit in range(8 * len(content)):
        spoiled = bytearray(content)
        spoiled[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoiled)
        try:
            assert load_manifest(tmp_path / "1") == manifest, bit
        except BadInput as error:
            assert str(error).startswith(f"snapshot {path}: ")  # noqa: PT017  # or it is harmless
            noticed += 1
    assert noticed > 7 * len(content)


def test_parts_that_were_exchanged_are_named(tmp_path: Path) -> None:
    """Files of two shards of equal size were exchanged, by name or in a manifest.

    Each file holds its own key ranges. `damage` names both.
    """
    save(tmp_path / "1")
    folder = tmp_path / "1"
    manifest = load_manifest(folder)
    parts = manifest.parts[::-1]
    changed = msgspec.structs.replace(manifest, parts=parts, map=cut_evenly(LAYOUT, 2))
    (folder / "manifest.json").write_bytes(checked_json.encode(changed))
    with pytest.raises(BadInput) as caught:
        load_snapshot(folder)
    assert "expected a saved state, got that of keys [256, 768) at version 6" in str(caught.value)
    assert len(list(damage(folder))) == 2


@pytest.mark.parametrize("change", ["fewer", "smaller", "another version"])
def test_parts_that_cannot_be_its_shards(tmp_path: Path, change: str) -> None:
    """Too few parts, too small for their keys, or of another version than the file's own."""
    save(tmp_path / "1")
    manifest = load_manifest(tmp_path / "1")
    first, second = manifest.parts
    parts, text = {
        "fewer": ((first,), "expected 2 parts, one per shard, got 1"),
        "smaller": (
            (msgspec.structs.replace(first, bytes=99), second),
            "shard-0.safetensors: expected at least 1024 bytes, got 99",
        ),
        "another version": (
            (msgspec.structs.replace(first, version=4), second),
            "at version 5 where the manifest has keys",
        ),
    }[change]
    changed = msgspec.structs.replace(manifest, parts=parts)
    (tmp_path / "1" / "manifest.json").write_bytes(checked_json.encode(changed))
    with pytest.raises(BadInput, match=re.escape(text)):
        load_snapshot(tmp_path / "1")


def test_others_on_the_machine_cannot_look_in(tmp_path: Path) -> None:
    """A folder created for snapshots is its owner's only; an existing one keeps its mode."""
    SnapshotCatalog(tmp_path / "own").save(1, states_of(), **JOB)
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    save(tmp_path / "one")
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o700
    (tmp_path / "shared").mkdir(mode=0o755)
    SnapshotCatalog(tmp_path / "shared").save(1, states_of(), **JOB)
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "shared" / "1").stat().st_mode & 0o777 == 0o777 & ~umask


def test_a_flipped_bit_is_told_with_its_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names file, chunk and place; `damage` has a line for each file."""
    monkeypatch.setattr("ps.snapshots.shard_file.CHUNK_BYTES", 1000)
    save(tmp_path / "1")
    monkeypatch.undo()  # how large a chunk was is in the manifest
    for shard in (0, 1):
        path = tmp_path / "1" / f"shard-{shard}.safetensors"
        content = bytearray(path.read_bytes())
        content[2345] ^= 1
        path.write_bytes(content)
    complaints = list(damage(tmp_path / "1"))
    assert len(complaints) == 2
    for shard, line in enumerate(complaints):
        assert f"1/shard-{shard}.safetensors: chunk 2 of " in line
        assert "bytes [2000, 3000): expected checksum" in line


# --- failures while writing -----------------------------------------------------------------------


def test_a_full_disk_leaves_what_there_was(tmp_path: Path) -> None:
    """A file that cannot grow fails the snapshot in one line; the last good one stays."""
    save(tmp_path / "1")
    for name in ("2", "1"):
        with full_disk(), pytest.raises(GiveUp) as caught:
            save(tmp_path / name, version=50)
        expected = f"snapshot {tmp_path / name}: File too large; earlier snapshots are intact"
        assert str(caught.value) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert len(list((tmp_path / "1").iterdir())) == 3
    assert same(load_snapshot(tmp_path / "1")[1], states_of(5))


@pytest.mark.parametrize("at", range(12))
def test_a_failure_at_any_point_leaves_what_there_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """If writing, flushing or renaming fails, the snapshot of that name is the old or the new."""
    save(tmp_path / "1", version=5)
    calls = 0

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "put", failing(LocalStore.put))
        patch.setattr("ps.storage.flush_to_disk", failing(flush_to_disk))
        patch.setattr(os, "fsync", failing(os.fsync))
        patch.setattr(Path, "replace", failing(Path.replace))
        try:
            save(tmp_path / "1", version=50)
        except GiveUp as error:
            assert "No space left on device" in str(error)  # noqa: PT017  # it may also succeed
    _, states = load_snapshot(tmp_path / "1")
    assert same(states, states_of(5)) or same(states, states_of(50))
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert len(list((tmp_path / "1").iterdir())) == 3


def test_what_is_not_ours_is_never_removed(tmp_path: Path) -> None:
    """Our remains are removed; other files stay, and so does the folder with them."""
    for name in ("shard-0.safetensors", ".shard-1.safetensors.77.partial", "notes.txt"):
        (tmp_path / name).touch()
    sweep(LocalStore(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    """An unreadable manifest does not prevent a new snapshot from replacing it."""
    save(tmp_path / "1")
    (tmp_path / "1" / "manifest.json").write_text("{")
    with pytest.raises(BadInput, match=r"manifest\.json"):
        sweep(LocalStore(tmp_path / "1"))
    save(tmp_path / "1", version=50)
    assert same(load_snapshot(tmp_path / "1")[1], states_of(50))
