"""Recovery from a shard's write-ahead log: finds the files that belong together, and replays them.

    log-00000007     records from opening 7 to opening 8
    base-00000007    the state at opening 7, once it was written in the background
    mark             which log is the newest, and up to where it is known to be complete

The state of a shard is the newest complete base and the logs from there on, or all logs from
number 0. A kill or a power failure may leave an incomplete record at the very end: it was never
acknowledged, and is cut off. Damage anywhere else is an error that names file and offset, and so is
a log that ends too early: the mark has the least length of the newest log, and each opening has the
length of the log before it. A mark that was damaged by a power failure is ignored.

Files older than that base are obsolete and are reused: a log or a base is written over one of them,
which takes half of the time of a new file, and no more disk space. So after the last record a file
may hold records of its earlier use. They fail the check with this file's number, and are ignored.
"""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from ps import path_checks
from ps.wal.log_folder import LogFolder, LogStorage
from shards.errors import BadInput
from shards.shard import Shard
from shards.shard_state import ShardState
from shards.spec import ShardSpec
from shards.wal_format import (
    FORMAT,
    Damage,
    Entry,
    LoggedState,
    LogRecord,
    Mark,
    Opening,
    Replay,
    decode_mark,
    decode_spec,
    encode_spec,
    next_record,
    read,
)

MARK = "mark"
"""The name of the file that says up to where the newest log is complete."""


class LogFileKind(StrEnum):
    """The kinds of numbered files; the value is the prefix of the name."""

    LOG = "log-"
    BASE = "base-"


class LogChain(NamedTuple):
    """The files to replay: a base, unless the logs start at number 0, and logs without a gap."""

    base: str | None
    logs: list[str]

    @property
    def files(self) -> list[str]:
        """All files, in the order of replay."""
        return ([] if self.base is None else [self.base]) + self.logs

    @property
    def first(self) -> int:
        """The number of the oldest log; the chain must have one."""
        return _number(self.logs[0])

    @property
    def last(self) -> int:
        """The number of the newest log; -1 if there is none."""
        return _number(self.logs[-1]) if self.logs else -1


def log_name(number: int) -> str:
    return f"{LogFileKind.LOG}{number:08}"


def base_name(number: int) -> str:
    return f"{LogFileKind.BASE}{number:08}"


def list_files(disk: LogStorage) -> Iterator[tuple[int, str]]:
    """Every log and base, with its number."""
    for kind in LogFileKind:
        for name in _names_of(disk, kind):
            yield _number(name), name


def kind_of(name: str) -> LogFileKind:
    """The kind of a numbered file."""
    return LogFileKind.LOG if name.startswith(LogFileKind.LOG) else LogFileKind.BASE


def find_chain(disk: LogStorage) -> LogChain:
    """The files to replay; raises BadInput naming a file that is damaged or missing."""
    logs = {_number(name): name for name in _logs(disk)}
    damage: Damage | None = None
    base = None
    for name in reversed(_names_of(disk, LogFileKind.BASE)):
        try:
            _state(disk, name)
        except Damage as error:
            damage = damage or error  # an older base will do if all logs since are there
        else:
            base = name
            break
    start = _number(base) if base else 0
    # A base without any log is a gap, too: the log of its number has the pushes since.
    last = max(logs, default=-1 if base is None else start)
    numbers = range(start, last + 1)
    if missing := [number for number in numbers if number not in logs]:
        path = disk.where / log_name(missing[0])
        gone = f"log {path}: expected this log, because others of its sequence exist, got none"
        raise damage or BadInput(gone)
    _check_newest(disk, last)
    return LogChain(base, [logs[number] for number in numbers])


def replay(disk: LogStorage, chain: LogChain, target: Replay) -> int | None:
    """Replay a chain; returns the size to cut the last log to, or None if it is complete."""
    if chain.base is not None:
        record = _state(disk, chain.base)
        target.take(record.entry, record.frames)
    end = 0
    before: int | None = None
    for name in chain.logs:
        before = end = _replay_log(disk, name, before, target, newest=name == chain.logs[-1])
    if not chain.logs:
        return None
    last, mark = chain.logs[-1], mark_in(disk)
    if mark is not None and mark.number == chain.last and mark.end > end:
        raise Damage(
            f"log {disk.where / last}: expected records up to byte {mark.end}, got them up to byte"
            f" {end}; {_remedy(disk)}",
            end,
        )
    return end if end < disk.size(last) else None


def _replay_log(
    disk: LogStorage, name: str, before: int | None, replayed: Replay, *, newest: bool
) -> int:
    """Replay a log; returns where its records end. Those of the log before it end at `before`."""
    content, offset, number = _content(disk, name), 0, _number(name)
    while offset < len(content):
        try:
            record = read(content, offset, f"log {disk.where / name}", number=number)
        except Damage:
            # Only the end of the newest log may be incomplete. A valid record behind the damage
            # shows that it is not the end.
            if not newest or next_record(content, offset, number=number) is not None:
                raise
            break
        entry = record.entry
        # A log that was cut between two records looks whole; only the next opening knows its
        # length.
        if isinstance(entry, Opening) and before not in (None, entry.after):
            path = disk.where / log_name(number - 1)
            expected = f"expected {entry.after} bytes, as {name} says"
            raise Damage(f"log {path}: {expected}, got {before}", entry.after)
        replayed.take(entry, record.frames)
        offset = record.end
    return offset


def mark_in(disk: LogStorage) -> Mark | None:
    """The mark of a log; None if there is none, or if it is damaged."""
    return decode_mark(_content(disk, MARK)) if MARK in disk.names() else None


def _check_newest(disk: LogStorage, last: int) -> None:
    """Raise BadInput if the mark names a newer log than number `last`."""
    mark = mark_in(disk)
    # A missing newest log would otherwise look like a clean end, and acknowledged pushes be lost.
    if mark is not None and mark.number > last:
        path = disk.where / log_name(mark.number)
        got = "got none, or one without an opening"
        raise BadInput(f"log {path}", expected=f"this log, {got}", hint=_remedy(disk))


def _remedy(disk: LogStorage) -> str:
    return f"restore the missing records, or remove {disk.where / MARK} to continue without them"


def has_begun(folder: Path) -> bool:
    """Return whether a shard has begun its WAL in `folder`."""
    disk = LogFolder(folder)
    return folder.is_dir() and (bool(_logs(disk)) or mark_in(disk) is not None)


def read_spec(folder: str | Path) -> ShardSpec:
    """The spec of the shard that keeps its WAL in `folder`; raises BadInput without a WAL there."""
    disk = LogFolder(path_checks.path("logged_spec: folder", folder))
    logs = _logs(disk)
    _check_newest(disk, _number(logs[-1]) if logs else -1)
    if not logs:
        raise BadInput(f"log {folder}", expected="the log of a shard", got="none")
    return spec_of(disk, logs[-1])


def spec_of(disk: LogStorage, name: str) -> ShardSpec:
    """The spec in a log's opening; raises BadInput."""
    source = f"log {disk.where / name}"
    return spec_of_opening(
        read(_content(disk, name), 0, source, number=_number(name)).entry, source
    )


def spec_of_opening(entry: Entry, source: str) -> ShardSpec:
    """The spec in the first entry of a file; `source` names the file. Raises BadInput."""
    if not isinstance(entry, Opening):
        raise Damage(f"{source}: expected an opening at byte 0", 0)
    if entry.format != FORMAT:
        raise BadInput(source, expected=f"format {FORMAT}", got=entry.format)
    return decode_spec(entry.spec, source)


def check_spec(written_spec: ShardSpec, spec: ShardSpec, source: str) -> None:
    """Raise BadInput unless a shard of `spec` may resume from what one of `theirs` wrote."""
    if encode_spec(written_spec) == encode_spec(spec):
        return
    for field in ("job", "shard", "build"):
        expected, got = getattr(spec, field), getattr(written_spec, field)
        if expected != got:
            raise BadInput(source, expected=f"{field} {expected}", got=got)
    raise BadInput(source, expected="the same configuration", got="another rule, map or setting")


def read_state(folder: Path) -> tuple[ShardSpec, ShardState]:
    """The spec and state at the end of a WAL that no process writes; raises BadInput, GiveUp."""
    disk = LogFolder(folder)
    disk.lock()
    try:
        spec = read_spec(folder)
        spec.prepare()
        return spec, replay_read_only(disk, spec).copy()
    finally:
        disk.close()


def replay_read_only(disk: LogStorage, spec: ShardSpec) -> Shard:
    """A shard recovered from the files on a disk, which stay unchanged; raises BadInput."""
    shard = Shard(spec, boot=0)
    replay(disk, find_chain(disk), Replay(shard))
    return shard


def _names_of(disk: LogStorage, kind: LogFileKind) -> list[str]:
    """The names of this kind in the order of number, without a base that is being written."""
    names = [n for n in disk.names() if n.startswith(kind) and n[len(kind) :].isdecimal()]
    return sorted(names, key=_number)


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def _logs(disk: LogStorage) -> list[str]:
    """The logs that have an opening: one that was created just before a crash has none."""
    return [name for name in _names_of(disk, LogFileKind.LOG) if _has_opening(disk, name)]


def _has_opening(disk: LogStorage, name: str) -> bool:
    content, number = _content(disk, name), _number(name)
    try:
        read(content, 0, f"log {disk.where / name}", number=number)
    except Damage:
        return next_record(content, 0, number=number) is not None
    return True


def _state(disk: LogStorage, name: str) -> LogRecord:
    source = f"log {disk.where / name}"
    record = read(_content(disk, name), 0, source, number=_number(name))
    if not isinstance(record.entry, LoggedState):
        raise Damage(f"{source}: expected a state at byte 0", 0)
    return record


def _content(disk: LogStorage, name: str) -> memoryview:
    try:
        return disk.content(name)
    except OSError as error:
        raise BadInput(f"log {disk.where / name}: {error.strerror}") from None
