"""Kills child processes in the middle of snapshots, at one line of code after another.

    python -m tests.support.kill_snapshots FOLDER FIRST STEP

Each child writes a snapshot to the same place and is killed by signal 9 at its n-th line of our own
code; n starts at FIRST and rises by STEP until a child survives to the end. After each child, the
catalog must load a complete snapshot, the last one or the new one. Prints how many children died,
and how many of them left the new snapshot.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from ps import storage
from ps.snapshots import catalog, manifest, shard_file
from ps.snapshots.catalog import Retention, SnapshotCatalog
from tests.support.snapshot_stores import JOB, same, states_of

FILES = {module.__file__ for module in (catalog, manifest, shard_file, storage)}

KEEP = Retention(count=2)


def write(folder: Path, number: int, version: int) -> None:
    SnapshotCatalog(folder, KEEP).save(number, states_of(version), **JOB)


def write_and_die(folder: Path, number: int, version: int, line: int) -> None:
    """In a child: write, and end at the given line; exits with 0 if there are fewer lines."""
    lines = 0

    def look(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in FILES:
            return None
        lines += event == "line"
        if lines == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return look

    sys.settrace(look)
    write(folder, number, version)
    sys.settrace(None)
    os._exit(0)


def main(folder: Path, first: int, step: int) -> None:
    shard_file.CHUNK_BYTES = 9000
    write(folder, 1, 1)
    write(folder, 2, 2)
    number, version, line, died, new = 2, 2, first, 0, 0
    while True:
        # Alternately a snapshot that replaces the last, and one next to it.
        wanted = number + died % 2, version + 1
        child = os.fork()
        if not child:
            write_and_die(folder, *wanted, line)
        _, status = os.waitpid(child, 0)
        found = SnapshotCatalog(folder).newest_good()
        assert not found.passed_over, found.passed_over
        if same(found.states, states_of(version + 1)):
            assert int(found.name) == wanted[0]
            number, version, new = *wanted, new + 1
        else:
            assert same(found.states, states_of(version)), f"line {line}"
            assert int(found.name) == number, f"line {line}"
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        died, line = died + 1, line + step
        SnapshotCatalog(
            folder, KEEP
        ).tidy()  # or every child would have more to tidy up than the one before
    write(folder, number + 1, version + 1)
    assert not list(folder.rglob("*.partial"))
    assert len(list(folder.iterdir())) == 2
    print(died, new)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
