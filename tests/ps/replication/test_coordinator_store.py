"""The coordinator's record: saved groups are loaded again, and no other file is overwritten."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ps.replication.coordinator import ShardGroup
from ps.replication.coordinator_store import CoordinatorStore
from ps.whole_files import write_private
from shards.errors import BadInput
from shards.replication_messages import Configuration

PAIR = ShardGroup(Configuration(0, 2, 11, 12), in_sync=True)
ALONE = ShardGroup(PAIR.settled, in_sync=True, pending=Configuration(0, 3, 12))
WRITER = """
import os, signal, sys
from pathlib import Path
from ps.replication.coordinator_store import CoordinatorStore
from tests.ps.replication.test_coordinator_store import PAIR

CoordinatorStore(Path(sys.argv[1]), "job").save({0: PAIR})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_saved_last_is_there_again(tmp_path: Path) -> None:
    """A reopened store loads the groups that were saved last."""
    record = CoordinatorStore(tmp_path / "c", "job")
    assert record.load() == {}
    record.save({0: PAIR, 1: ShardGroup()})
    record.save({0: ALONE, 1: PAIR})
    record.close()
    again = CoordinatorStore(tmp_path / "c", "job")
    assert again.load() == {0: ALONE, 1: PAIR}
    again.close()


def test_what_was_saved_survives_kill_9(tmp_path: Path) -> None:
    """It is on disk when `save` returns, not only when the file is closed."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "c")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    record = CoordinatorStore(tmp_path / "c", "job")
    assert record.load() == {0: PAIR}
    record.close()


def test_another_jobs_record(tmp_path: Path) -> None:
    """It is refused, and the error does not reveal its job."""
    CoordinatorStore(tmp_path / "c", "theirs").close()
    with pytest.raises(BadInput, match=r"c: expected job ours, got another's$"):
        CoordinatorStore(tmp_path / "c", "ours")


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    """The error names it, and it stays as it was."""
    path = tmp_path / "c"
    write_private(path, os.urandom(10_000))
    before = path.read_bytes()
    with pytest.raises(BadInput, match=rf"^coordinator's record {path}: "):
        CoordinatorStore(path, "job")
    assert path.read_bytes() == before


def test_a_file_that_others_can_read(tmp_path: Path) -> None:
    """Others may know its key, so it is refused and stays as it was; ours is our user's only.

    Changing its mode now would hide the problem.
    """
    CoordinatorStore(tmp_path / "c", "job").close()
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o600
    (tmp_path / "c").chmod(0o640)
    with pytest.raises(BadInput, match=r"^coordinator's record: .*c: expected a file of yours"):
        CoordinatorStore(tmp_path / "c", "job")
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o640


def test_a_place_where_no_file_can_be(tmp_path: Path) -> None:
    """The error names the place."""
    with pytest.raises(BadInput, match=rf"^coordinator's record {tmp_path}/away/c: No such file"):
        CoordinatorStore(tmp_path / "away/c", "job")


def test_each_life_has_the_same_key(tmp_path: Path) -> None:
    """The key is made once; another record has another key."""
    record = CoordinatorStore(tmp_path / "c", "job")
    keys = record.keys()
    assert record.keys() == keys
    record.close()
    again, other = CoordinatorStore(tmp_path / "c", "job"), CoordinatorStore(tmp_path / "d", "job")
    assert again.keys() == keys
    assert other.keys() != keys
    again.close()
    other.close()
