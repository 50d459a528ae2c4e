"""Kill -9 in the middle of a record: it is whole, or it is none."""

import random
import subprocess
import sys
from pathlib import Path


def test_a_kill_in_the_midst_of_a_record(tmp_path: Path) -> None:
    """Real kills, real page cache; a record that was said to be written is there to the bit, and
    none is taken for written whose end is still what the file held before."""
    seed = random.randrange(1 << 32)
    done = subprocess.run(
        [sys.executable, "-m", "tests.ps.wal.kill_log_writes", tmp_path, str(seed)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    torn, died = map(int, done.stdout.split())
    assert 8 <= torn <= died
