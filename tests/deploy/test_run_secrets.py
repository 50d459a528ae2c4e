"""What other users can read of a run: none of its secrets, during the run and afterwards."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import ps
from deploy.run.folder import RunFolder
from deploy.run.observer import RunObserver
from deploy.run.progress import Progress
from deploy.run.settings import TrainSettings
from ps.cluster import Access, Cluster
from ps.durability import Durability
from ps.job_spec import make_cluster, shard_specs
from ps.wal.job_logs import drop_logs, logs_of
from ps.wal.writer import WriteAheadLog
from shards.job_ids import digest_of, short_id
from shards.shard import Shard
from tests.support.cli_in_process import Run
from tests.support.run_records import records, status
from tests.support.snapshot_stores import mocked

TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (60,)),))
TOKEN, OPERATOR = "the-join-token", "the-operators-key"
STORE = "s3://key:the-stores-secret@bucket/run"
ROWS = 40_000  # more than a row group, so that some are on disk before the end


@pytest.fixture(autouse=True)
def everybodys() -> Iterator[None]:
    """New files are readable by everybody, as on most systems."""
    former = os.umask(0o022)
    yield
    os.umask(former)


def seen_by_others(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Each name that a user with access to `folder` can see, with the content if it is readable."""
    for path in folder.iterdir():
        found = path.stat()
        others = stat.S_IMODE(found.st_mode) & (stat.S_IRWXG | stat.S_IRWXO)
        yield path, path.read_bytes() if path.is_file() and others else b""
        if path.is_dir() and others:
            yield from seen_by_others(path)


def no_secret_in(folder: Path, *secrets: str) -> bool:
    seen = list(seen_by_others(folder))
    assert seen, "there is something to look at"
    return not any(
        secret in path.name or secret.encode() in content
        for path, content in seen
        for secret in secrets
    )


def test_no_file_of_a_run_tells_a_secret(tmp_path: Path) -> None:
    """Neither the job's id, which is all that shards without CURVE ask for, nor a key of ours or
    of a store's is in any file, finished or not, or in any name."""
    (spec,) = shard_specs(TABLE)
    cluster = make_cluster([spec], ["tcp://127.0.0.1:5001"], Access(TOKEN, OPERATOR))
    secrets = spec.job, spec.job.rpartition("-")[2], TOKEN, OPERATOR, "stores-secret"
    run, logs = tmp_path / "run", tmp_path / "logs"
    settings = TrainSettings(solver=run, data=run, out=run, snapshots=STORE)
    logs.mkdir()
    log = WriteAheadLog(logs_of(logs, [spec]) / "shard-0", Durability.PROCESS)
    log.recover(Shard(spec, boot=1), 0.0)
    with (
        RunFolder.create(run, settings.plain()) as folder,
        Progress(steps=1, workers=1, bound=None) as progress,
        RunObserver(folder, progress, settings) as observer,
    ):
        observer.started(cluster, None)
        observer.progressed([status()], [records(ROWS)])
        folder.resettle(settings.plain(), cluster)
        assert TrainSettings.load(run / "settings.json").snapshots == STORE
        assert list((run / "updates.parquet").glob(".part-*"))
        assert Cluster.load(run / "cluster.json").access == Access(TOKEN, OPERATOR)
        assert no_secret_in(tmp_path, *secrets)
    assert no_secret_in(tmp_path, *secrets)
    told = pq.read_table(run / "updates.parquet", columns=["job"]).column("job")
    assert told.unique().to_pylist() == [short_id(spec.job)]
    log.close()
    drop_logs(logs, but=spec.job)
    assert [path.name for path in logs.iterdir()] == [short_id(spec.job)], "they are found again"


def test_a_store_is_shown_without_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, downpour: Run
) -> None:
    """Keys are hidden in lists and errors of commands that get the URI, or find it in settings."""
    monkeypatch.setattr("ps.snapshots.catalog.open_store", lambda _: mocked())
    settings = TrainSettings(solver=tmp_path, data=tmp_path, out=tmp_path / "run", snapshots=STORE)
    RunFolder.create(tmp_path / "run", settings.plain()).close()
    for origin in (f"{STORE}/", str(tmp_path / "run")):
        said = ""
        for expected, *command in (
            (0, "snapshots", "ls", origin),
            (2, "snapshots", "verify", origin),
            (2, "snapshots", "take", origin),
            (2, "reshard", origin, "--shards", "2"),
            (2, "train", "--resume", f"{origin.rstrip('/')}@4"),
        ):
            code, out, err = downpour(*command)
            assert code == expected, (command, out, err)
            said += out + err
        assert "s3://bucket/run" in said
        assert "secret" not in said


def test_what_a_job_is_called() -> None:
    """A job is named by its name and a digest, which distinguishes two jobs of one name."""
    assert digest_of("mnist-00") == "ce40cbbb51766704"
    assert short_id("mnist-00") == f"mnist-{digest_of('mnist-00')}"
    assert short_id("mnist-00") != short_id("mnist-01")
    assert short_id("00") == digest_of("00")
