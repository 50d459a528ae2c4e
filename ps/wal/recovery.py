"""The files of a shard's log, as they are found again: which belong together, and what they hold.

    log-00000007     records from opening 7 to opening 8
    base-00000007    the state at opening 7, once it was written out in the background
    mark             which log is the newest, and how far it is known to be whole

What a shard knew is the newest whole base and the logs from there on, or all logs from number 0.
A kill or a power failure may have left a record unfinished, at the very end: it was never
acknowledged, and is cut off. Damage anywhere else is an error that names file and offset. So is a
log that ends too early: the mark says where the newest one ends at least, and each opening how long
the log before it is. A mark that a failing power has spoiled says nothing.

Files older than that base are superfluous, and room for later ones: a log or a base is written over
one of them, which takes half of the time that a new file takes, and no more of the disk. So
behind the last record may stand what the file was before, which is no record of this one.
"""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from ps.snapshots.log_storage import LogFolder, LogStorage
from shards.errors import BadInput
from shards.parameters import ShardState
from shards.shard import Shard
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
"""The name of the file that says how far the newest log is whole."""


class LogFileKind(StrEnum):
    """What a file's name begins with."""

    LOG = "log-"
    BASE = "base-"


class LogChain(NamedTuple):
    """The files to replay: a base, unless they begin at number 0, and logs without a gap."""

    base: str | None
    logs: list[str]

    @property
    def files(self) -> list[str]:
        """All of them, in their order."""
        return ([] if self.base is None else [self.base]) + self.logs

    @property
    def first(self) -> int:
        """The number of the oldest log; there is one."""
        return _number(self.logs[0])

    @property
    def last(self) -> int:
        """The number of the newest log; -1 where there is none."""
        return _number(self.logs[-1]) if self.logs else -1


def log_name(number: int) -> str:
    return f"{LogFileKind.LOG}{number:08}"


def base_name(number: int) -> str:
    return f"{LogFileKind.BASE}{number:08}"


def numbered(disk: LogStorage) -> Iterator[tuple[int, str]]:
    """Every log and base, with its number."""
    for kind in LogFileKind:
        for name in _named(disk, kind):
            yield _number(name), name


def kind_of(name: str) -> LogFileKind:
    """What a file with a number is."""
    return LogFileKind.LOG if name.startswith(LogFileKind.LOG) else LogFileKind.BASE


def find_chain(disk: LogStorage) -> LogChain:
    """What to replay; raises BadInput naming a file that is damaged or missing."""
    logs = {_number(name): name for name in _logs(disk)}
    damage: Damage | None = None
    base = None
    for name in reversed(_named(disk, LogFileKind.BASE)):
        try:
            _state(disk, name)
        except Damage as error:
            damage = damage or error  # an older base does as well, if the logs since are there
        else:
            base = name
            break
    start = _number(base) if base else 0
    last = max(logs, default=-1 if base is None else start)
    wanted = range(start, last + 1)
    if missing := [number for number in wanted if number not in logs]:
        path = disk.where / log_name(missing[0])
        gone = f"log {path}: expected it, for there are others, got none"
        raise damage or BadInput(gone)
    _check_newest(disk, last)
    return LogChain(base, [logs[number] for number in wanted])


def replay(disk: LogStorage, chain: LogChain, replayed: Replay) -> int | None:
    """Take what a chain holds; the size that the last log is to be cut to, None if it is whole."""
    if chain.base is not None:
        record = _state(disk, chain.base)
        replayed.take(record.entry, record.frames)
    end = 0
    before: int | None = None
    for name in chain.logs:
        before = end = _replay_log(disk, name, before, replayed, newest=name == chain.logs[-1])
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
    """Take a log's records, `before` bytes those of the log before it; returns where they end."""
    content, offset, number = _content(disk, name), 0, _number(name)
    while offset < len(content):
        try:
            record = read(content, offset, f"log {disk.where / name}", number=number)
        except Damage:
            if not newest or next_record(content, offset, number=number) is not None:
                raise
            break
        entry = record.entry
        if isinstance(entry, Opening) and before not in (None, entry.after):
            path = disk.where / log_name(number - 1)
            expected = f"expected {entry.after} bytes, as {name} says"
            raise Damage(f"log {path}: {expected}, got {before}", entry.after)
        replayed.take(entry, record.frames)
        offset = record.end
    return offset


def mark_in(disk: LogStorage) -> Mark | None:
    """What the mark of a log says; None where there is none, or a spoiled one."""
    return decode_mark(_content(disk, MARK)) if MARK in disk.names() else None


def _check_newest(disk: LogStorage, last: int) -> None:
    """Raise BadInput where a newer log than number `last` has begun."""
    mark = mark_in(disk)
    if mark is not None and mark.number > last:
        path = disk.where / log_name(mark.number)
        found = "got none, or one without an opening"
        raise BadInput(f"log {path}: expected it, {found}; {_remedy(disk)}")


def _remedy(disk: LogStorage) -> str:
    return f"put back what it held, or remove {disk.where / MARK} to go on without it"


def has_begun(folder: Path) -> bool:
    """Whether a shard that lived long enough to begin its log did so in `folder`."""
    disk = LogFolder(folder)
    return folder.is_dir() and (bool(_logs(disk)) or mark_in(disk) is not None)


def spec_in(folder: Path) -> ShardSpec:
    """The spec of the shard whose log `folder` holds; raises BadInput."""
    disk = LogFolder(folder)
    logs = _logs(disk)
    _check_newest(disk, _number(logs[-1]) if logs else -1)
    if not logs:
        raise BadInput(f"log {folder}: expected the log of a shard, got none")
    return spec_of(disk, logs[-1])


def spec_of(disk: LogStorage, name: str) -> ShardSpec:
    """The spec in a log's opening; raises BadInput."""
    what = f"log {disk.where / name}"
    return spec_told(read(_content(disk, name), 0, what, number=_number(name)).entry, what)


def spec_told(entry: Entry, what: str) -> ShardSpec:
    """The spec in what a file begins with; `what` names the file. Raises BadInput."""
    if not isinstance(entry, Opening):
        raise Damage(f"{what}: expected an opening at byte 0", 0)
    if entry.format != FORMAT:
        raise BadInput(f"{what}: expected format {FORMAT}, got {entry.format}")
    return decode_spec(entry.spec, what)


def check_spec(theirs: ShardSpec, spec: ShardSpec, what: str) -> None:
    """Raise BadInput unless a shard told `spec` may go on from what one told `theirs` wrote."""
    if encode_spec(theirs) == encode_spec(spec):
        return
    for field in ("job", "shard", "build"):
        expected, got = getattr(spec, field), getattr(theirs, field)
        if expected != got:
            raise BadInput(f"{what}: expected {field} {expected}, got {got}'s")
    raise BadInput(f"{what}: its shard was told otherwise than this one (rule, map, ...)")


def recovered(folder: Path) -> tuple[ShardSpec, ShardState]:
    """The state at the end of a log that nobody writes any more; raises BadInput, GiveUp."""
    disk = LogFolder(folder)
    disk.lock()
    try:
        spec = spec_in(folder)
        spec.prepare()
        return spec, ShardState(*looked_at(disk, spec).copy())
    finally:
        disk.close()


def looked_at(disk: LogStorage, spec: ShardSpec) -> Shard:
    """A shard made from what a disk holds, which is left as it is; raises BadInput."""
    shard = Shard(spec, boot=0)
    replay(disk, find_chain(disk), Replay(shard))
    return shard


def _named(disk: LogStorage, kind: LogFileKind) -> list[str]:
    """The files of this kind, by number; a base that is being written is not one yet."""
    found = [n for n in disk.names() if n.startswith(kind) and n[len(kind) :].isdecimal()]
    return sorted(found, key=_number)


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def _logs(disk: LogStorage) -> list[str]:
    """Those that have an opening: one that is created just before a crash has none."""
    return [name for name in _named(disk, LogFileKind.LOG) if _begun(disk, name)]


def _begun(disk: LogStorage, name: str) -> bool:
    content, number = _content(disk, name), _number(name)
    try:
        read(content, 0, f"log {disk.where / name}", number=number)
    except Damage:
        return next_record(content, 0, number=number) is not None
    return True


def _state(disk: LogStorage, name: str) -> LogRecord:
    what = f"log {disk.where / name}"
    record = read(_content(disk, name), 0, what, number=_number(name))
    if not isinstance(record.entry, LoggedState):
        raise Damage(f"{what}: expected a state at byte 0", 0)
    return record


def _content(disk: LogStorage, name: str) -> memoryview:
    try:
        return disk.content(name)
    except OSError as error:
        raise BadInput(f"log {disk.where / name}: {error.strerror}") from None
