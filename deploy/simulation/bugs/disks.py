"""Bugs of shards with logs: what is written, when it is flushed, and how it is read back."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from deploy.simulation.config import ClusterConfig
from deploy.simulation.disk import SimulatedFileWriter
from deploy.simulation.mutants import Bugs, Patch
from ps.wal import recovery
from ps.wal.writer import LoggedShard, WriteAheadLog
from shards import wal_format
from shards.envelopes import Arrival, Outgoing
from shards.errors import GiveUp
from shards.messages import Refusal
from shards.shard import Shard
from shards.wal_format import Entry, LoggedState, Mark, Replay

BUGS = Bugs(ClusterConfig.LOGGED)


@BUGS.add
def answers_leave_before_their_record(patch: Patch) -> None:
    """A turn is written when the next one arrives."""

    def append(self: WriteAheadLog, *record: Any) -> None:
        late = vars(self).setdefault("late", [])
        late.append(record)
        while len(late) > 1:
            original(self, *late.pop(0))

    original = WriteAheadLog.append
    patch.setattr(WriteAheadLog, "append", append)


@BUGS.add
def a_turn_is_not_flushed(patch: Patch) -> None:
    def append(self: WriteAheadLog, *record: Any) -> None:
        synced, self._synced = self._synced, False
        original(self, *record)
        self._synced = synced

    original = WriteAheadLog.append
    patch.setattr(WriteAheadLog, "append", append)


@BUGS.add
def the_name_of_a_new_log_is_not_safe(patch: Patch) -> None:
    def begin(self: WriteAheadLog, *arguments: Any, **named: Any) -> None:
        synced, self._synced = self._synced, False
        original(self, *arguments, **named)
        self._synced = synced

    original = WriteAheadLog._begin
    patch.setattr(WriteAheadLog, "_begin", begin)


@BUGS.add
def frames_have_no_checksum(patch: Patch) -> None:
    patch.setattr(wal_format, "_check", lambda *_: 0)


@BUGS.add
def a_torn_tail_stays(patch: Patch) -> None:
    patch.setattr(WriteAheadLog, "_cut", lambda *_: None)


@BUGS.add
def a_tail_that_was_replayed_is_not_flushed(patch: Patch) -> None:
    """The bug that the simulation found when a process died between a write and its flush."""

    def cut(self: WriteAheadLog, name: str, size: int) -> None:
        if size < self._disk.size(name):
            original(self, name, size)

    original = WriteAheadLog._cut
    patch.setattr(WriteAheadLog, "_cut", cut)


@BUGS.add
def a_copy_in_the_same_turn_speaks_for_the_push(patch: Patch) -> None:
    """The log relied on servers that pass on one copy of each request."""

    class Once(Counter[Any]):
        def __getitem__(self, _: Any) -> int:
            return 1

    patch.setattr(wal_format, "Counter", Once)


@BUGS.add
def a_lease_that_ran_out_is_not_written(patch: Patch) -> None:
    def tick(self: LoggedShard, now: float) -> list[Outgoing]:
        return [answer for answer in self._shard.tick(now) if answer.to]

    patch.setattr(LoggedShard, "tick", tick)


@BUGS.add
def a_new_log_lacks_the_open_rounds(patch: Patch) -> None:
    patch.setattr(wal_format, "carried", lambda *_: [])


@BUGS.add
def a_base_is_named_before_it_is_safe(patch: Patch) -> None:
    def save(self: WriteAheadLog, *what: Any) -> None:
        synced, self._synced = self._synced, False
        original(self, *what)
        self._synced = synced

    original = WriteAheadLog._save
    patch.setattr(WriteAheadLog, "_save", save)


@BUGS.add
def old_files_are_written_over_before_the_base_is_there(patch: Patch) -> None:
    def save(self: WriteAheadLog, state: LoggedState, frames: Any) -> None:
        self._spare(state.number)
        original(self, state, frames)

    original = WriteAheadLog._save
    patch.setattr(WriteAheadLog, "_save", save)


@BUGS.add
def what_a_file_held_before_is_read_as_well(patch: Patch) -> None:
    """A record does not identify its file."""

    def head(described: bytes, frame_bytes: int, check: int, _: int) -> bytes:
        return original(described, frame_bytes, check, 0)

    original = wal_format._head
    patch.setattr(wal_format, "_head", head)


@BUGS.add
def what_a_file_held_before_stays_behind_its_end(patch: Patch) -> None:
    """A log is not truncated at its end before the next one starts."""

    def end(*_: Any, **__: Any) -> None:
        pass

    patch.setattr(SimulatedFileWriter, "end", end)


@BUGS.add
def a_base_tells_of_a_later_moment(patch: Patch) -> None:
    """The base describes the state when it is written, not when its log was started."""

    def shorten(self: WriteAheadLog, shard: Shard, now: float) -> None:
        vars(self)["shard"] = shard
        original(self, shard, now)

    def save(self: WriteAheadLog, state: LoggedState, _: Any) -> None:
        later, frames = wal_format.state_of(vars(self)["shard"], state.number)
        real(self, later, frames)

    original, real = WriteAheadLog.shorten, WriteAheadLog._save
    patch.setattr(WriteAheadLog, "shorten", shorten)
    patch.setattr(WriteAheadLog, "_save", save)


@BUGS.add
def a_full_disk_is_shrugged_off(patch: Patch) -> None:
    def append(self: WriteAheadLog, *record: Any) -> None:
        with suppress(GiveUp):
            original(self, *record)

    original = WriteAheadLog.append
    patch.setattr(WriteAheadLog, "append", append)


@BUGS.add
def a_refused_turn_hides_the_one_that_counted(patch: Patch) -> None:
    """A turn is not written if any request in it was refused."""

    def turn_of(arrivals: Sequence[Arrival], answers: Sequence[Outgoing], now: float) -> Any:
        refused = any(isinstance(answer.message, Refusal) for answer in answers)
        return None if refused else original(arrivals, answers, now)

    original = wal_format.turn_of
    patch.setattr(wal_format, "turn_of", turn_of)


@BUGS.add
def a_life_is_replayed_without_its_boot(patch: Patch) -> None:
    """Requests to the process that wrote the log are refused by the one that replays it."""

    def take(self: Replay, entry: Entry, frames: Any) -> None:
        original(self, entry, frames)
        self._boot = 0

    original = Replay.take
    patch.setattr(Replay, "take", take)


@BUGS.add
def a_mark_says_more_than_is_written(patch: Patch) -> None:
    """The mark is written before its record, and the process dies in between."""

    def append(self: WriteAheadLog, *record: Any) -> None:
        assert self._mark is not None
        self._mark.rewrite(wal_format.encode_mark(Mark(self._number, self._filled + 1)))
        original(self, *record)

    original = WriteAheadLog.append
    patch.setattr(WriteAheadLog, "append", append)


@BUGS.add
def nobody_looks_at_the_mark(patch: Patch) -> None:
    """A truncated log is taken for one that ends there."""
    patch.setattr(recovery, "mark_in", lambda _: None)


@BUGS.add
def a_mark_says_less_than_was_acknowledged(patch: Patch) -> None:
    """The mark is written when another log starts, and not after each record."""

    def encode(mark: Mark) -> bytes:
        return original(Mark(mark.number, 1))

    original = wal_format.encode_mark
    patch.setattr(wal_format, "encode_mark", encode)
