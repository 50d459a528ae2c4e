"""Kills child processes again and again while they write a log file.

    python -m tests.support.kill_log_writes FOLDER SEED

Each child writes records over the file that the one before it left, reports each record as written,
and is killed by signal 9 at a random moment. The records that are then read must be those that this
child has reported, and at most one more, with every byte correct; the rest must not be read as
records. The child's mark never exceeds what was written. The program continues until many children
died in the middle of a record; it prints how many did, and how many were killed.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ps.wal.log_folder import LogFolder
from shards import wal_format
from shards.wal_format import Damage, Expired, LogRecord, Mark

RECORDS, PAGES, WANTED, PATIENCE_S = 8, 256, 8, 120.0
BASE = np.random.default_rng(1).integers(1 << 32, size=(PAGES, 512), dtype=np.uint64)


def content(number: int, record: int) -> NDArray[np.uint64]:
    """A record's content: no two records share a word."""
    return BASE + np.uint64((number * RECORDS + record + 1) << 33)


def write(folder: LogFolder, number: int, told: int) -> None:
    """In a child: write until the file is full; exits with 0."""
    file = folder.create(f"log-{number}", f"log-{number - 1}" if number else None)
    mark, end = folder.create("mark", "mark" if number else None), 0
    for record in range(RECORDS):
        entry, frames = Expired(float(record), ["w"]), [content(number, record)]
        end += file.write(wal_format.encode(entry, frames, number=number), soon=False)
        mark.rewrite(wal_format.encode_mark(Mark(number, end)))
        os.write(told, b".")
    os._exit(0)


def whole(found: memoryview, number: int) -> tuple[list[LogRecord], int]:
    """The readable records, and where they end."""
    records, offset = list[LogRecord](), 0
    while offset < len(found):
        try:
            records.append(wal_format.read(found, offset, "log", number=number))
        except Damage:
            assert wal_format.next_record(found, offset, number=number) is None, (
                "damage in the middle"
            )
            break
        offset = records[-1].end
    return records, offset


def main(where: Path, seed: int) -> None:
    dice, folder = random.Random(seed), LogFolder(where)
    number, died, torn, former = 0, 0, 0, memoryview(b"")
    give_up_at = time.monotonic() + PATIENCE_S
    while torn < WANTED:
        assert time.monotonic() < give_up_at, f"{torn} of {died} died in the midst of a record"
        hear, told = os.pipe()
        child = os.fork()
        if not child:
            write(folder, number, told)
        os.close(told)
        if number:  # the first one writes a file to write over
            os.read(hear, 1)
            time.sleep(dice.random() * 0.003)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL), status
        said = bool(number) + len(os.read(hear, RECORDS))
        os.close(hear)
        found = memoryview(bytes(folder.content(f"log-{number}")))
        records, end = whole(found, number)
        assert said <= len(records) <= said + 1, (said, len(records))
        mark = wal_format.decode_mark(folder.content("mark"))
        assert mark is not None
        assert mark.number < number or mark.end <= end, (mark, number, end)
        assert not said or mark.number == number
        assert not said or mark.end >= records[said - 1].end
        for at, record in enumerate(records):
            assert record.entry == Expired(float(at), ["w"])
            assert record.frames == [content(number, at).data.cast("B")], (number, at)
        died += status == signal.SIGKILL
        torn += found[end:] != former[end:]
        number, former = number + 1, found
    print(torn, died)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
