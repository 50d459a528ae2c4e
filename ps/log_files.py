"""The files of a shard's log, as they are found again: which belong together, and what they hold.

    log-00000007     records from opening 7 to opening 8
    base-00000007    the state at opening 7, once it was written out in the background

What a shard knew is the newest whole base and the logs from there on, or all logs from number 0.
A kill or a power failure may have left a record unfinished, at the very end: it was never
acknowledged, and is cut off. Damage anywhere else is an error that names file and offset.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shards.errors import BadInput, GiveUp
from shards.log import (
    FORMAT,
    Damage,
    Opening,
    Record,
    Replay,
    State,
    decode_spec,
    next_record,
    read,
)
from shards.shard import Shard
from shards.spec import ShardSpec
from shards.state import ShardState

_LOG, _BASE, _LOCK = "log-", "base-", "lock"
_LOCK_S = 10.0
_LOOK_S = 0.05


class Chain(NamedTuple):
    """The files to replay: a base, unless they begin at number 0, and logs without a gap."""

    base: Path | None
    logs: list[Path]

    @property
    def last(self) -> int:
        """The number of the newest log; -1 where there is none."""
        return _number(self.logs[-1]) if self.logs else -1

    @property
    def log_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.logs)


def log_path(folder: Path, number: int) -> Path:
    return folder / f"{_LOG}{number:08}"


def base_path(folder: Path, number: int) -> Path:
    return folder / f"{_BASE}{number:08}"


def lock_folder(folder: Path) -> int:
    """A lock that lasts as long as this process and its descriptor; raises GiveUp or BadInput.

    One who was killed a moment ago may not have let go yet, and is waited for.
    """
    until = time.monotonic() + _LOCK_S
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise BadInput(f"log {folder}: {error.strerror}") from None
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(descriptor)
                raise GiveUp(f"log {folder}: another process writes it") from None
            time.sleep(_LOOK_S)
        else:
            return descriptor


def find_chain(folder: Path) -> Chain:
    """What to replay; raises BadInput naming a file that is damaged or missing."""
    logs = {_number(path): path for path in folder.glob(f"{_LOG}*") if _begun(path)}
    bases = sorted(folder.glob(f"{_BASE}*"), key=_number, reverse=True)
    damage: Damage | None = None
    base = None
    for path in bases:
        try:
            _state(path)
        except Damage as error:
            damage = damage or error  # an older base does as well, if the logs since are there
        else:
            base = path
            break
    start = _number(base) if base else 0
    last = max(logs, default=-1 if base is None else start)
    wanted = range(start, last + 1)
    if missing := [number for number in wanted if number not in logs]:
        gone = f"log {log_path(folder, missing[0])}: expected it, for there are others, got none"
        raise damage or BadInput(gone)
    return Chain(base, [logs[number] for number in wanted])


def replay(chain: Chain, replayed: Replay) -> int | None:
    """Take what a chain holds; the size that the last log is to be cut to, None if it is whole."""
    if chain.base is not None:
        record = _state(chain.base)
        replayed.take(record.entry, record.frames)
    for path in chain.logs:
        content, offset = _content(path), 0
        while offset < len(content):
            try:
                record = read(content, offset, f"log {path}")
            except Damage:
                if path != chain.logs[-1] or next_record(content, offset) is not None:
                    raise
                return offset
            replayed.take(record.entry, record.frames)
            offset = record.end
    return None


def spec_in(folder: Path) -> ShardSpec:
    """The spec of the shard whose log `folder` holds; raises BadInput."""
    logs = sorted(path for path in folder.glob(f"{_LOG}*") if _begun(path))
    if not logs:
        raise BadInput(f"log {folder}: expected the log of a shard, got none")
    return spec_of(logs[-1])


def spec_of(path: Path) -> ShardSpec:
    """The spec in a log's opening; raises BadInput."""
    opening = read(_content(path), 0, f"log {path}").entry
    if not isinstance(opening, Opening):
        raise Damage(f"log {path}: expected an opening at byte 0", 0)
    if opening.format != FORMAT:
        raise BadInput(f"log {path}: expected format {FORMAT}, got {opening.format}")
    return decode_spec(opening.spec, f"log {path}")


def recovered(folder: Path) -> tuple[ShardSpec, ShardState]:
    """The state at the end of a log that nobody writes any more; raises BadInput, GiveUp."""
    lock = lock_folder(folder)
    try:
        spec = spec_in(folder)
        spec.rule.prepare()
        shard = Shard(spec, boot=0)
        replay(find_chain(folder), Replay(shard))
        return spec, ShardState(*shard.copy())
    finally:
        os.close(lock)


def _number(path: Path) -> int:
    digits = path.name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1


def _begun(path: Path) -> bool:
    """Whether a log has an opening: one that is created just before a crash has none."""
    content = _content(path)
    try:
        read(content, 0, f"log {path}")
    except Damage:
        return next_record(content, 0) is not None
    return True


def _state(path: Path) -> Record:
    record = read(_content(path), 0, f"log {path}")
    if not isinstance(record.entry, State):
        raise Damage(f"log {path}: expected a state at byte 0", 0)
    return record


def _content(path: Path) -> memoryview:
    """A file's bytes, in the page cache; they stay valid while referred to."""
    try:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return memoryview(b"")
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except OSError as error:
        raise BadInput(f"log {path}: {error.strerror}") from None
    mapped.madvise(mmap.MADV_SEQUENTIAL)
    return memoryview(mapped)


def numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    """Every log and base, with its number."""
    for prefix in (_LOG, _BASE):
        for path in folder.glob(f"{prefix}*"):
            yield _number(path), path
