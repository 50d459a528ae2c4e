"""A run with its snapshots on S3: moto's server stands for AWS."""

import json
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from ps.snapshots.manifest import MANIFEST
from ps.storage import Store, open_store
from tests.support import tiny_job
from tests.support.aws_server import KEY, REGION, SECRET, aws_server
from tests.support.cli_in_process import command
from tests.support.cli_process import PATIENCE_S, downpour
from tests.support.eventually import eventually
from worker import spark as door

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[str]:
    """The URI of a place in a bucket, with key and options."""
    with aws_server(tmp_path / "moto.log") as address:
        options = f"endpoint_override={address}&scheme=http&region={REGION}"
        root = f"s3://{KEY}:{SECRET}@bucket"
        system, _ = fs.FileSystem.from_uri(f"{root}?{options}&allow_bucket_creation=true")
        system.create_dir("bucket")
        yield f"{root}/run?{options}"


def whole(store: Store) -> list[int]:
    """The numbers of the whole snapshots in a store."""
    folders = [name for name in store.folders() if name.isdecimal()]
    return sorted(int(name) for name in folders if MANIFEST in store.below(name).names())


def test_a_killed_run_resumes_from_s3(
    place: str,
    spark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After signal 9 the newest snapshot on S3 is whole, and the run continues from there.

    The bucket is all that it needs: the resumed run has a folder of its own.
    """
    tiny_job.write_job(tmp_path, extra="snapshot: 20")
    plan = ["train", "--solver", "solver.prototxt", "--data", "data", "--workers", "1"]
    plan += ["--shards", "1", "--shards-in", "processes"]
    store = open_store(place)
    with downpour(
        tmp_path, *plan, "--out", "killed", "--max-iter", 10**6, "--snapshots", place
    ) as run:

        def check() -> None:
            assert run.process.poll() is None, run.end()

        eventually(lambda: whole(store), because="a snapshot", within_s=PATIENCE_S, check=check)
        run.process.send_signal(signal.SIGKILL)
        run.end()
    newest = whole(store)[-1]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(door, "start_session", lambda *_, **__: nullcontext(spark))
    resume = ("--resume", place, "--out", "resumed", "--max-iter", newest + 20)
    status, out, err = command(capsys, monkeypatch)(*plan, *resume)
    assert status == 0, err
    assert SECRET not in out + err
    summary = json.loads((tmp_path / "resumed" / "summary.json").read_text())
    assert summary["updates"] == newest + 20
    assert whole(store)[-1] == newest
