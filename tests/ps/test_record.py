"""The coordinator's record: what was saved is there again, and nobody else's file is taken."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ps.coordinator import Group
from ps.record import Record
from shards.errors import BadInput
from shards.group import Configuration

PAIR = Group(Configuration(0, 2, 11, 12), in_sync=True)
ALONE = Group(PAIR.settled, in_sync=True, pending=Configuration(0, 3, 12))
WRITER = """
import os, signal, sys
from pathlib import Path
from ps.record import Record
from tests.ps.test_record import PAIR

Record(Path(sys.argv[1]), "job").save({0: PAIR})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_saved_last_is_there_again(tmp_path: Path) -> None:
    """In another life, and whatever was saved before it."""
    record = Record(tmp_path / "c", "job")
    assert record.load() == {}
    record.save({0: PAIR, 1: Group()})
    record.save({0: ALONE, 1: PAIR})
    record.close()
    again = Record(tmp_path / "c", "job")
    assert again.load() == {0: ALONE, 1: PAIR}
    again.close()


def test_what_was_saved_survives_kill_9(tmp_path: Path) -> None:
    """It is there when `save` returns, not when somebody closes the file."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "c")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    record = Record(tmp_path / "c", "job")
    assert record.load() == {0: PAIR}
    record.close()


def test_another_jobs_record(tmp_path: Path) -> None:
    """It is refused, and whose it is stays a secret."""
    Record(tmp_path / "c", "theirs").close()
    with pytest.raises(BadInput, match=r"c: expected job ours, got another's$"):
        Record(tmp_path / "c", "ours")


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    """It is named and left as it was."""
    path = tmp_path / "c"
    path.write_bytes(os.urandom(10_000))
    before = path.read_bytes()
    with pytest.raises(BadInput, match=rf"^coordinator's record {path}: "):
        Record(path, "job")
    assert path.read_bytes() == before
