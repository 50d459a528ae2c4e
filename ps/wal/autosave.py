"""Autosaves: periodic copies of a shard's state, for restarting a shard that keeps no WAL.

With the durability `memory` nothing is written before it is acknowledged. So a restarted shard
resumes from the last autosave and loses the updates that were acknowledged since: it has rolled
back, and reports that to its workers when they reconnect (shards/shard.py).

    save            the newest complete autosave: an opening with the shard's spec, and the state
    save.partial    the next autosave while it is written; then it is renamed
    empty           the shard has received no state yet
    settings        the bound and rate that an operator has set since the state was received

An autosave must survive the process that wrote it, but not a power failure, so nothing is flushed.
Its records are read and checked as those of a WAL (shards/wal_format.py). A thread writes it from a
version that no longer changes. Autosaves may use a fiftieth of a core: a state that would cost more
at the requested interval is saved less often, and a death then loses more updates. The cost of an
autosave is the CPU time of its thread: time during which the process is stopped, or waits for a
core or its disk, is no reason to save less often.

A shard that dies before its first autosave is complete has lost the state that it received. A
received state replaces the earlier one, so the file `empty`, or an older autosave, is removed
before the state is acknowledged. A restarted shard that finds neither `save` nor `empty` ends
rather than serve without the state.

Settings that an operator changes are few, and a rollback must not undo them: a change is written
before it is acknowledged, and is in force again after a restart.

If an autosave fails, for example on a full disk, the one before it stays, and the next one is made
when it is due. A death then costs more updates, but the failure itself does not end the shard. The
failure is logged, and the shard's status reports it until an autosave succeeds.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

from ps.logs import logger
from ps.wal.log_folder import LogFolder, LogStorage
from ps.wal.recovery import check_spec, spec_of_opening
from ps.wal.writer import BackgroundTask, in_a_thread
from shards import wal_format, wire_format
from shards.checksums import HEX_DIGITS, hex_checksum
from shards.errors import BadInput, BadMessage, GiveUp
from shards.messages import Installed, LiveSettings
from shards.shard import Shard
from shards.spec import ShardSpec
from shards.transition_io import Arrival, Outgoing
from shards.wal_format import LoggedState, Opening, Replay

ROLLBACK_S = 10.0
"""The default for how many seconds of updates a shard's death may cost."""

_SAVE, _PARTIAL, _EMPTY = "save", "save.partial", "empty"
_SETTINGS, _PARTIAL_SETTINGS = "settings", "settings.partial"
_NUMBER = 0  # of every autosave: files are not reused, so numbers need not differ
_SHARE = 50  # autosaves take at most this fraction (1/50) of a core
_MOVING_S = 1.0  # before the next attempt while the shard is being resharded


class Autosaves:
    """The autosaves of one shard, in a folder that this process has locked until `close`."""

    def __init__(
        self,
        folder: Path | LogStorage,
        every_s: float,
        background: Callable[[Callable[[], None]], BackgroundTask] = in_a_thread,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Save every `every_s` seconds; `background` runs the writing in the background.

        `clock` counts the CPU seconds of the calling thread, which is the one that writes a save.

        Raises BadInput if the folder cannot be created or locked, GiveUp if another process has
        locked it.
        """
        self._folder = LogFolder(folder, "saves") if isinstance(folder, Path) else None
        self._disk: LogStorage = self._folder or folder  # type: ignore[assignment]  # one of them is it
        self._every_s = every_s
        self._run_in_background = background
        self._clock = clock
        self._version: int | None = None  # of the last autosave
        self._due = inf  # when the next may begin; infinite while one is being written
        self._writing: BackgroundTask | None = None
        self._trouble = ""  # why the last autosave failed
        if self._folder is not None:
            self._folder.make()
        fresh = not self._disk.names()
        if self._folder is not None:
            self._folder.lock()
        if fresh:
            try:
                self._disk.create(_EMPTY).close()
            except OSError as error:  # without this file, a death before the first save is final
                self._trouble = self._describe_failure(error)

    @property
    def where(self) -> Path:
        """The folder of the autosaves."""
        return self._disk.where

    def recover(self, shard: Shard, now: float) -> None:
        """Load the last autosave, if there is one, into an empty shard.

        Raises BadInput naming the file if it is damaged or another shard's, GiveUp if the earlier
        process had received a state and died before saving it.
        """
        names = self._disk.names()
        if _SAVE in names:
            self._restore(shard)
            if _SETTINGS in names:
                self._follow_settings(shard)
            shard.roll_back(now)
            self._version, self._due = shard.version, now + self._every_s
        elif _EMPTY not in names:
            raise GiveUp(
                f"saves {self.where}: expected an autosave of shard {shard.spec.shard}, got none:"
                " its last process died before the first one was complete"
            )

    def remove_older(self) -> None:
        """Remove older autosaves: the shard has a new state, and must not resume an old one."""
        if self._writing is not None:
            self._writing.join()  # otherwise it would write an old state after the removal
        for name in {_SAVE, _EMPTY, _SETTINGS}.intersection(self._disk.names()):
            self._disk.remove(name)
        self._version, self._due = None, -inf

    def save_settings(self, settings: LiveSettings) -> None:
        """Write settings that an operator has changed; a failure is logged, as an autosave's."""
        packed = wire_format.encode_state(settings)
        try:
            file = self._disk.create(_PARTIAL_SETTINGS)
            try:
                file.write([hex_checksum((packed,)).encode(), packed], soon=False)
            finally:
                file.close()
            self._disk.rename(_PARTIAL_SETTINGS, _SETTINGS)
        except OSError as error:
            logger(__name__).warning("%s", self._describe_failure(error))

    def save_if_due(self, shard: Shard, now: float) -> None:
        """Start an autosave if one is due and the state has changed; call it each turn."""
        shard.metrics.trouble = self._trouble
        # An unchanged version is not saved again, so an idle job costs no disk.
        if now < self._due or shard.version == self._version:
            return
        if shard.moving(now):  # the state does not include the resharding, which must not be lost
            self._due = now + _MOVING_S
            return
        first = wal_format.opening(shard, _NUMBER, begins=False, now=now)
        self._version, self._due = shard.version, inf
        state, frames = wal_format.state_of(shard, _NUMBER)
        self._writing = self._run_in_background(
            lambda: self._save(shard.spec, first, state, frames, now)
        )

    def next_due(self, shard: Shard) -> float:
        """When to call `save_if_due` next even if no message arrives; infinite if not yet known."""
        return inf if shard.version == self._version else self._due

    def close(self, *, forget: bool = False) -> None:
        """Unlock the folder; with `forget`, remove it: the shard will not be restarted."""
        if self._writing is not None:
            self._writing.join()
        self._disk.close()
        if forget and self._folder is not None:
            delete_autosaves(self._folder.where)

    def _save(
        self,
        spec: ShardSpec,
        first: Opening,
        state: LoggedState,
        frames: wal_format.Frames,
        began: float,
    ) -> None:
        """Write an autosave in the background, and replace the last one by it."""
        log = logger(__name__, job=spec.job, shard=spec.shard)
        started = self._clock()
        try:
            self._write(first, state, frames)
            log.debug("autosave %s", self.where)
            self._trouble = ""
        except OSError as error:
            self._trouble = self._describe_failure(error)
            log.warning("%s", self._trouble)
            self._version = None  # the current state is not saved yet
            with suppress(OSError):  # without descriptors a folder cannot be listed either
                if _PARTIAL in self._disk.names():
                    self._disk.remove(_PARTIAL)  # free the space: the disk may be full
        finally:
            cost_s = self._clock() - started
            self._due = began + max(self._every_s, _SHARE * cost_s)

    def _describe_failure(self, error: OSError) -> str:
        return f"autosave {self.where}: {error.strerror}; a death loses more updates meanwhile"

    def _write(self, first: Opening, state: LoggedState, frames: wal_format.Frames) -> None:
        pieces = wal_format.encode(first, number=_NUMBER)
        pieces += wal_format.encode(state, frames, number=_NUMBER)
        file = self._disk.create(_PARTIAL)
        try:
            file.write(pieces, soon=False)
        finally:
            file.close()
        # Renamed when it is complete: a death in the middle leaves the former autosave.
        self._disk.rename(_PARTIAL, _SAVE)

    def _restore(self, shard: Shard) -> None:
        source = f"save {self.where / _SAVE}"
        try:
            content = self._disk.content(_SAVE)
        except OSError as error:
            raise BadInput(f"{source}: {error.strerror}") from None
        first = wal_format.read(content, 0, source, number=_NUMBER)
        check_spec(spec_of_opening(first.entry, source), shard.spec, source)
        state = wal_format.read(content, first.end, source, number=_NUMBER)
        if not isinstance(state.entry, LoggedState):
            raise BadInput(source, expected=f"a state at byte {first.end}")
        Replay(shard).take(state.entry, state.frames)

    def _follow_settings(self, shard: Shard) -> None:
        """Train with the settings that were written last, unless the autosave has later ones."""
        source = f"save {self.where / _SETTINGS}"
        try:
            content = bytes(self._disk.content(_SETTINGS))
            packed = content[HEX_DIGITS:]
            if content[:HEX_DIGITS] != hex_checksum((packed,)).encode():
                raise BadInput(source, expected="settings with their checksum", got="damaged ones")
            settings = wire_format.decode_state(packed, LiveSettings)
        except OSError as error:
            raise BadInput(f"{source}: {error.strerror}") from None
        except BadMessage as error:
            raise BadInput(f"{source}: {error}") from None
        if settings.revision > shard.part.settings.revision:
            shard.part.follow(settings)


class AutosavingShard:
    """Wraps a shard: before a new state is acknowledged, older autosaves are removed; before a
    change of the settings is, it is written.
    """

    def __init__(self, shard: Shard, to: Autosaves) -> None:
        self._shard = shard
        self._saves = to

    def handle_together(self, arrivals: Sequence[Arrival], now: float) -> list[Outgoing]:
        """Answer messages that have come together."""
        former = self._shard.part.settings
        answers = self._shard.handle_together(arrivals, now)
        if any(
            isinstance(answer.message, Installed) and not answer.message.missing
            for answer in answers
        ):
            # Before the answer leaves: after it, a death must not bring an older state back.
            self._saves.remove_older()
        settings = self._shard.part.settings
        if settings.revision and settings != former:
            self._saves.save_settings(settings)
        return answers

    def tick(self, now: float) -> list[Outgoing]:
        """Expire leases."""
        return self._shard.tick(now)


def delete_autosaves(folder: Path) -> None:
    """Remove a shard's autosaves; with the last shard's, also the folder of the job."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # it holds another shard's autosaves, or is gone
        folder.parent.rmdir()
