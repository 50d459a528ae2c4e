"""The files of a shard's log, as they are found again: which belong together, and what they hold.

    log-00000007     records from opening 7 to opening 8
    base-00000007    the state at opening 7, once it was written out in the background

What a shard knew is the newest whole base and the logs from there on, or all logs from number 0.
A kill or a power failure may have left a record unfinished, at the very end: it was never
acknowledged, and is cut off. Damage anywhere else is an error that names file and offset.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ps.log_disk import Disk, Folder
from shards.errors import BadInput
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

_LOG, _BASE = "log-", "base-"


class Chain(NamedTuple):
    """The files to replay: a base, unless they begin at number 0, and logs without a gap."""

    base: str | None
    logs: list[str]

    @property
    def last(self) -> int:
        """The number of the newest log; -1 where there is none."""
        return _number(self.logs[-1]) if self.logs else -1


def log_name(number: int) -> str:
    return f"{_LOG}{number:08}"


def base_name(number: int) -> str:
    return f"{_BASE}{number:08}"


def numbered(disk: Disk) -> Iterator[tuple[int, str]]:
    """Every log and base, with its number."""
    for prefix in (_LOG, _BASE):
        for name in _named(disk, prefix):
            yield _number(name), name


def find_chain(disk: Disk) -> Chain:
    """What to replay; raises BadInput naming a file that is damaged or missing."""
    logs = {_number(name): name for name in _logs(disk)}
    damage: Damage | None = None
    base = None
    for name in reversed(_named(disk, _BASE)):
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
    return Chain(base, [logs[number] for number in wanted])


def replay(disk: Disk, chain: Chain, replayed: Replay) -> int | None:
    """Take what a chain holds; the size that the last log is to be cut to, None if it is whole."""
    if chain.base is not None:
        record = _state(disk, chain.base)
        replayed.take(record.entry, record.frames)
    for name in chain.logs:
        content, offset = _content(disk, name), 0
        while offset < len(content):
            try:
                record = read(content, offset, f"log {disk.where / name}")
            except Damage:
                if name != chain.logs[-1] or next_record(content, offset) is not None:
                    raise
                return offset
            replayed.take(record.entry, record.frames)
            offset = record.end
    return None


def has_begun(folder: Path) -> bool:
    """Whether a shard that lived long enough to begin its log did so in `folder`."""
    return folder.is_dir() and bool(_logs(Folder(folder)))


def spec_in(folder: Path) -> ShardSpec:
    """The spec of the shard whose log `folder` holds; raises BadInput."""
    disk = Folder(folder)
    logs = _logs(disk)
    if not logs:
        raise BadInput(f"log {folder}: expected the log of a shard, got none")
    return spec_of(disk, logs[-1])


def spec_of(disk: Disk, name: str) -> ShardSpec:
    """The spec in a log's opening; raises BadInput."""
    what = f"log {disk.where / name}"
    opening = read(_content(disk, name), 0, what).entry
    if not isinstance(opening, Opening):
        raise Damage(f"{what}: expected an opening at byte 0", 0)
    if opening.format != FORMAT:
        raise BadInput(f"{what}: expected format {FORMAT}, got {opening.format}")
    return decode_spec(opening.spec, what)


def recovered(folder: Path) -> tuple[ShardSpec, ShardState]:
    """The state at the end of a log that nobody writes any more; raises BadInput, GiveUp."""
    disk = Folder(folder)
    disk.lock()
    try:
        spec = spec_in(folder)
        spec.rule.prepare()
        return spec, ShardState(*looked_at(disk, spec).copy())
    finally:
        disk.close()


def looked_at(disk: Disk, spec: ShardSpec) -> Shard:
    """A shard made from what a disk holds, which is left as it is; raises BadInput."""
    shard = Shard(spec, boot=0)
    replay(disk, find_chain(disk), Replay(shard))
    return shard


def _named(disk: Disk, prefix: str) -> list[str]:
    """The files of this kind, by number; a base that is being written is not one yet."""
    found = [n for n in disk.names() if n.startswith(prefix) and n[len(prefix) :].isdecimal()]
    return sorted(found, key=_number)


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def _logs(disk: Disk) -> list[str]:
    """Those that have an opening: one that is created just before a crash has none."""
    return [name for name in _named(disk, _LOG) if _begun(disk, name)]


def _begun(disk: Disk, name: str) -> bool:
    content = _content(disk, name)
    try:
        read(content, 0, f"log {disk.where / name}")
    except Damage:
        return next_record(content, 0) is not None
    return True


def _state(disk: Disk, name: str) -> Record:
    what = f"log {disk.where / name}"
    record = read(_content(disk, name), 0, what)
    if not isinstance(record.entry, State):
        raise Damage(f"{what}: expected a state at byte 0", 0)
    return record


def _content(disk: Disk, name: str) -> memoryview:
    try:
        return disk.content(name)
    except OSError as error:
        raise BadInput(f"log {disk.where / name}: {error.strerror}") from None
