"""Kill -9 in the middle of a snapshot: the last good one stays readable, at any line."""

import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder where flushing costs nothing, as a kill loses nothing that was written."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_a_kill_at_any_line_leaves_a_good_one(memory: Path) -> None:
    """Children are killed at many places, from the first line to after the commit."""
    first = random.randrange(1, 8)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kill_snapshots", memory, str(first), "12"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"first line {first}: {done.stderr}"
    died, new = map(int, done.stdout.split())
    assert died >= 60
    assert 0 < new < died
