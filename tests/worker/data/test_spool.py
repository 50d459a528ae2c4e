"""The spool: rows are read as they were written, and no files are ever left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shards.errors import BadInput
from worker.data.spool import Column, Spool

COLUMNS = {
    "data": Column(np.dtype(np.float32), (2, 3, 4)),
    "label": Column(np.dtype(np.int64), ()),
}


def rows(count: int, seed: int) -> dict[str, np.ndarray]:
    dice = np.random.default_rng(seed)
    return {
        "data": dice.standard_normal((count, 2, 3, 4), np.float32),
        "label": dice.integers(-5, 5, count),
    }


def test_rows_come_back_in_any_order_while_more_arrive(tmp_path: Path) -> None:
    """After each append, every row so far can be taken, in any order and repeatedly."""
    whole: dict[str, list[np.ndarray]] = {"data": [], "label": []}
    with Spool(COLUMNS, tmp_path) as spool:
        for number, count in enumerate([1, 0, 7, 300, 2]):
            new = rows(count, number)
            spool.append(new)
            for name, parts in whole.items():
                parts.append(new[name])
            wanted = np.random.default_rng(number).integers(0, spool.rows, 50)
            taken = spool.take(wanted)
            for name, parts in whole.items():
                assert np.array_equal(taken[name], np.concatenate(parts)[wanted])
        assert spool.rows == 310


def test_what_is_taken_is_the_caller_s_own(tmp_path: Path) -> None:
    """Writing into a batch changes neither the spool nor another batch."""
    with Spool(COLUMNS, tmp_path) as spool:
        spool.append(rows(3, 1))
        first = spool.take(np.arange(3))
        first["data"][...] = 0
        assert np.array_equal(spool.take(np.arange(3))["data"], rows(3, 1)["data"])
    assert first["data"].shape == (3, 2, 3, 4), "it outlives the spool"


def test_the_files_have_no_name_and_are_for_nobody_else(tmp_path: Path) -> None:
    """While the spool is open its folder is empty, and its files' mode lets only the owner in."""
    with Spool(COLUMNS, tmp_path) as spool:
        spool.append(rows(3, 1))
        assert list(tmp_path.iterdir()) == []
        for file in spool._files.values():
            status = os.fstat(file.fileno())
            assert status.st_mode & 0o077 == 0
            assert status.st_nlink == 0


KILLED = """
import sys, time
import numpy as np
from worker.data.spool import Column, Spool
spool = Spool({"data": Column(np.dtype(np.uint8), (1000,))}, sys.argv[1])
spool.append({"data": np.ones((1000, 1000), np.uint8)})
spool.take(np.arange(9))
print("ready", flush=True)
time.sleep(60)
"""


def test_kill_9_leaves_nothing(tmp_path: Path) -> None:
    """A killed process leaves no files of its spool."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.kill()
        assert child.wait() == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_closing_gives_the_space_back(tmp_path: Path) -> None:
    """Once closed, twice even, the process holds no file of the spool."""
    spool = Spool(COLUMNS, tmp_path)
    spool.append(rows(10, 1))
    spool.take(np.arange(10))
    numbers = [file.fileno() for file in spool._files.values()]
    spool.close()
    spool.close()
    for number in numbers:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)


# A limit on a file's size stands for a full disk: `write` fails in the same way.
FULL = """
import resource, sys
import numpy as np
from shards.errors import BadInput
from worker.data.spool import Column, Spool
resource.setrlimit(resource.RLIMIT_FSIZE, (10_500, 10_500))
spool = Spool({"data": Column(np.dtype(np.uint8), (1000,))}, sys.argv[1])
spool.append({"data": np.full((9, 1000), 7, np.uint8)})
for attempt in range(2):
    try:
        spool.append({"data": np.full((5, 1000), 9, np.uint8)})
    except BadInput as error:
        print(error)
assert spool.rows == 9
spool.append({"data": np.full((1, 1000), 8, np.uint8)})
print(spool.take(np.arange(10))["data"].sum(axis=1).tolist())
"""


def test_a_full_disk_is_one_line_and_loses_no_row(tmp_path: Path) -> None:
    """On a full disk the error says how many bytes were needed; earlier rows stay readable."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    once, again, sums = result.stdout.splitlines()
    expected = (
        f"spool in {tmp_path}: File too large: expected room for 3500 bytes more after 9 rows"
    )
    assert once.startswith(expected)
    assert again.startswith(expected)
    assert sums == str([7000] * 9 + [8000])


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """The error for a spool that cannot be created names its folder."""
    with pytest.raises(BadInput, match=r"spool in .*/none: No such file or directory"):
        Spool(COLUMNS, tmp_path / "none")
