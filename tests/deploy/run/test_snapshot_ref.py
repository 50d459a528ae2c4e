"""What a resumed run continues from: its newest good snapshot, or its logs if they hold more."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from deploy.run.snapshot_ref import newest
from ps.snapshots.catalog import LoadedSnapshot, SnapshotCatalog
from ps.snapshots.manifest import Manifest
from ps.wal.job_logs import load_logs
from shards.errors import BadInput
from tests.support.shard_with_wal import written
from tests.support.snapshot_stores import JOB, states_of


@pytest.fixture
def logs(tmp_path: Path) -> LoadedSnapshot:
    """The logs of a job of five steps."""
    written(tmp_path / "logs" / "shard-0", 5)
    return load_logs(tmp_path / "logs")


def ours(place: str, manifest: Manifest) -> None:
    """A check that accepts every job."""


def cut_short(shelf: SnapshotCatalog, number: int) -> None:
    """Leave the files of a process that was killed while it wrote a snapshot."""
    folder = Path(shelf.store.place) / str(number)
    folder.mkdir(parents=True)
    (folder / ".shard-0.safetensors.77.partial").write_bytes(b"half")


def damage(shelf: SnapshotCatalog, name: str) -> Path:
    """Cut the first file of a snapshot; returns it."""
    file = Path(shelf.store.place) / name / "shard-0.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    return file


def test_what_tells_more(logs: LoadedSnapshot, tmp_path: Path) -> None:
    """The logs, or a snapshot with more steps; either alone is used if there is only one."""
    shelf = SnapshotCatalog(tmp_path / "snapshots")
    assert newest(shelf, logs, ours) is logs
    with pytest.raises(BadInput, match=r"^no snapshot in "):
        newest(shelf, None, ours)
    for steps, name in ((4, "logs"), (9, "9")):
        states = [replace(state, saved=replace(state.saved, steps=steps)) for state in states_of()]
        shelf.save(steps, states, **JOB)
        assert newest(shelf, logs, ours).name == name
    assert newest(shelf, None, ours).name == "9"


def test_a_kill_in_the_midst_of_the_first_snapshot(logs: LoadedSnapshot, tmp_path: Path) -> None:
    """An unfinished snapshot does not count, and the logs hold everything."""
    shelf = SnapshotCatalog(tmp_path / "snapshots")
    cut_short(shelf, 4)
    assert newest(shelf, logs, ours) is logs


def test_every_snapshot_is_damaged(logs: LoadedSnapshot, tmp_path: Path) -> None:
    """The run continues from the logs, and the skipped snapshots are named."""
    shelf = SnapshotCatalog(tmp_path / "snapshots")
    shelf.save(9, states_of(), **JOB)
    file = damage(shelf, "9")
    found = newest(shelf, logs, ours)
    assert found.place == logs.place
    (complaint,) = found.passed_over
    assert str(file) in complaint
    with pytest.raises(BadInput, match=str(file)):
        newest(shelf, None, ours)


def test_logs_of_another_job(logs: LoadedSnapshot, tmp_path: Path) -> None:
    """Logs of another job are an error, and are not ignored in favour of a snapshot."""

    def check(place: str, manifest: Manifest) -> None:
        raise BadInput(f"{place} is another's")

    with pytest.raises(BadInput, match=f"^{logs.place} is another's$"):
        newest(SnapshotCatalog(tmp_path / "snapshots"), logs, check)
