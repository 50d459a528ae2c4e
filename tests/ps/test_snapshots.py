"""Snapshots: what is written comes back, and what went wrong leaves the one before as it was."""

import errno
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

import ps
from ps import Client, Console, ShardState, snapshots
from ps.snapshots import latest_snapshot, load_manifest, load_snapshot, save_snapshot
from shards.errors import BadInput, GiveUp
from shards.ledger import Entry, Ledger
from shards.messages import Standing
from shards.rules import Momentum
from shards.schedules import Fixed
from shards.state import Saved
from shards.tables import cut_evenly

TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (700,)),))
MAP = cut_evenly(TABLE, 2)
JOB: dict[str, Any] = {"table": TABLE, "shard_map": MAP, "rule": "momentum", "workers": 3}


def states_of(version: int = 5) -> list[ShardState]:
    """Two shards' states, all numbers different, with a ledger that no header could hold."""
    entries = {
        f"w{n}": Entry(n, seq=n + 1, clock=n, step=n, standing=Standing.ACTIVE, loss=0.1 * n)
        for n in range(200)
    }
    return [
        ShardState(
            Saved(version + shard, 7, 9, Ledger(dict(entries), floor=3)),
            np.arange(len(keys), dtype=np.float32) + 1000 * shard,
            {"history": -np.arange(len(keys), dtype=np.float32)},
        )
        for shard, (keys,) in enumerate(MAP.ranges)
    ]


def same(states: list[ShardState], others: list[ShardState]) -> bool:
    return all(
        one.saved == other.saved
        and one.weights.tobytes() == other.weights.tobytes()
        and {name: a.tobytes() for name, a in one.slots.items()}
        == {name: a.tobytes() for name, a in other.slots.items()}
        for one, other in zip(states, others, strict=True)
    )


def save(folder: Path, version: int = 5) -> None:
    save_snapshot(folder, states_of(version), **JOB)


def test_a_snapshot_comes_back(tmp_path: Path) -> None:
    """Ledgers, weights and slots of every shard, what it is of, and nothing beside it."""
    save(tmp_path / "runs" / "12")
    manifest, states = load_snapshot(tmp_path / "runs" / "12")
    assert same(states, states_of())
    assert (manifest.table, manifest.map) == (TABLE, MAP)
    assert (manifest.rule, manifest.workers) == ("momentum", 3)
    assert [part.version for part in manifest.parts] == [5, 6]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["12"]


def test_others_can_read_it(tmp_path: Path) -> None:
    """A shard's file is plain safetensors, and the same states give the same bytes."""
    for name in ("1", "2"):
        save(tmp_path / name)
    arrays = load_file(tmp_path / "1" / "shard-1.safetensors")
    assert {name: array.dtype for name, array in arrays.items()} == {
        "weights": np.float32,
        "slot.history": np.float32,
    }
    np.testing.assert_array_equal(arrays["weights"], states_of()[1].weights)
    for file in (tmp_path / "1").iterdir():
        assert file.read_bytes() == (tmp_path / "2" / file.name).read_bytes()


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """Five steps, a snapshot, other shards, five steps: bit for bit the same as ten."""
    rng = np.random.default_rng(4)
    start, scale = (rng.standard_normal(TABLE.size, np.float32) for _ in range(2))

    def specs() -> list[Any]:
        options: dict[str, Any] = {"shards": 2, "rule": Momentum(0.9), "bound": 0}
        return ps.shard_specs(TABLE, schedule=Fixed(base_rate=0.1), **options)

    def steps(cluster: ps.Cluster, count: int, incarnation: int) -> list[ShardState]:
        with Console(cluster) as console:
            with Client(cluster, worker="w", incarnation=incarnation) as client:
                for _ in range(count):
                    client.push(scale * np.tanh(client.pull().weights))
            return console.export()

    with ps.local_shards(specs(), start) as cluster:
        wanted = steps(cluster, 10, 0)
    with ps.local_shards(specs(), start) as cluster:
        save_snapshot(tmp_path / "5", steps(cluster, 5, 0), **JOB)
    with ps.local_shards(specs()) as cluster:
        with Console(cluster) as console:
            for shard, state in enumerate(load_snapshot(tmp_path / "5")[1]):
                console.restore(shard, state)
        got = steps(cluster, 5, 1)
    for one, other in zip(got, wanted, strict=True):
        assert one.weights.tobytes() == other.weights.tobytes()
        assert one.slots["history"].tobytes() == other.slots["history"].tobytes()
        assert (one.saved.version, one.saved.steps) == (10, 10)
        assert one.saved.ledger.entries["w"].seq == 10


def test_the_latest_is_found_by_its_number(tmp_path: Path) -> None:
    """Not by name, nor by date; what is no whole snapshot is passed over."""
    with pytest.raises(BadInput, match="no snapshot in"):
        latest_snapshot(tmp_path)
    for name in ("100", "9", "best"):
        save(tmp_path / name)
    (tmp_path / "200").mkdir()
    (tmp_path / ".300.17").mkdir()
    (tmp_path / ".300.17" / "manifest.json").write_text("{}")
    assert latest_snapshot(tmp_path) == tmp_path / "100"


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
    """One bit, one byte, all or none of it: the error names the file in one line."""
    save(tmp_path / "1")
    damage(tmp_path / "1" / file)
    with pytest.raises(BadInput) as caught:
        load_snapshot(tmp_path / "1")
    assert str(tmp_path / "1" / file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", [_truncate, _empty, Path.unlink])
def test_a_damaged_manifest_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Without a manifest it is no snapshot."""
    save(tmp_path / "1")
    damage(tmp_path / "1" / "manifest.json")
    with pytest.raises(BadInput, match=r"manifest.json: ") as caught:
        load_manifest(tmp_path / "1")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": 2}, "expected format 1, got 2"),
        ({"workers": "many"}, "Expected `int`, got `str`"),
        ({"parts": [{"file": "x", "bytes": 1}]}, "missing required field `crc32`"),
        (
            {"table": {"name": "t", "tensors": [{"name": "a", "shape": [-1]}]}},
            "sizes of at least 1",
        ),
    ],
)
def test_a_manifest_that_says_something_else(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    """Another format, another type, a hole: each is told."""
    save(tmp_path / "1")
    path = tmp_path / "1" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BadInput, match=complaint):
        load_manifest(tmp_path / "1")


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    """Whatever it says, only files of its own folder are read."""
    save(tmp_path / "1")
    manifest = load_manifest(tmp_path / "1")
    for name in ("../2/shard-0.safetensors", "/etc/hostname", ""):
        part = msgspec.structs.replace(manifest.parts[0], file=name)
        changed = msgspec.structs.replace(manifest, parts=(part,))
        (tmp_path / "1" / "manifest.json").write_bytes(msgspec.json.encode(changed))
        with pytest.raises(BadInput, match="expected a file name, got"):
            load_snapshot(tmp_path / "1")


# --- failures while writing -----------------------------------------------------------------------


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond 2000 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_what_there_was(tmp_path: Path) -> None:
    """A file that may grow no further fails the snapshot in one line; the last good one stays."""
    save(tmp_path / "1")
    for name in ("2", "1"):
        with full_disk(), pytest.raises(GiveUp) as caught:
            save(tmp_path / name, version=50)
        expected = f"snapshot {tmp_path / name}: File too large; earlier snapshots are intact"
        assert str(caught.value) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert same(load_snapshot(latest_snapshot(tmp_path))[1], states_of(5))


@pytest.mark.parametrize("at", range(8))
def test_a_failure_at_any_point_leaves_what_there_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Writing, flushing or renaming may fail: the snapshot of that name is the old or the new."""
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
        patch.setattr(snapshots, "_flushed", failing(snapshots._flushed))
        patch.setattr(snapshots, "_flush_folder", failing(snapshots._flush_folder))
        patch.setattr(Path, "rename", failing(Path.rename))
        try:
            save(tmp_path / "1", version=50)
        except GiveUp as error:
            assert "No space left on device" in str(error)  # noqa: PT017  # it may also succeed
    _, states = load_snapshot(tmp_path / "1")
    assert same(states, states_of(5)) or same(states, states_of(50))
    assert same(states, states_of(5)) == (at < 6)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_a_kill_between_two_renames_is_undone(tmp_path: Path) -> None:
    """A process of the same number finds the former snapshot, and puts it back."""
    save(tmp_path / "1", version=5)
    (tmp_path / "1").rename(tmp_path / f".1.{os.getpid()}.former")
    with full_disk(), pytest.raises(GiveUp):
        save(tmp_path / "1", version=50)
    assert same(load_snapshot(tmp_path / "1")[1], states_of(5))
