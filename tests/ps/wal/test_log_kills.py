"""Kill -9 in the middle of a record: the record is complete, or does not count."""

import random
import subprocess
import sys
from pathlib import Path


def test_a_kill_in_the_midst_of_a_record(tmp_path: Path) -> None:
    """With real kills and the real page cache, every record reported as written is there to the
    bit.

    No record counts whose end is still the earlier content of the file.
    """
    seed = random.randrange(1 << 32)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kill_log_writes", tmp_path, str(seed)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    torn, died = map(int, done.stdout.split())
    assert 8 <= torn <= died
