"""What a shard that keeps no log comes back with: its own state, saved now and then beside serving.

At the durability `memory` nothing is written down before it is acknowledged. So the life of a shard
that follows a dead one goes on from the last save, and takes back what was acknowledged since: it
has rolled back, and its workers are told so when they greet it (shards/shard.py).

    save            an opening, which says whose it is, and the state; the newest whole one
    save.partial    the next one, until it is whole: then it is renamed
    empty           the shard has been given nothing yet

A save outlives the process that wrote it, and no more, so nothing is flushed; its records are read
and checked as a log's are (shards/log.py). It is written in a thread, from a version that no longer
changes. Saves may take a fiftieth of a core: a state that costs more than that, saved as often as
asked for, is saved less often, and a death takes back more. A save's cost is the CPU time of its
thread: the time that the process is stopped, or waits for a core or its disk, is no reason to save
less often.

A shard that dies before its first save is whole has lost what it was given. What it is given
replaces what it had: the file `empty`, or a former save, goes before whoever gave it is answered.
So a next life with neither ends, rather than serve as if nothing had ever been.

A save that fails, on a full disk, leaves the one before it, and is tried again in its turn: then
more is lost if the shard dies, but it does not die of that.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

from ps.logs.log_files import check_spec, spec_told
from ps.logs.shard_log import Aside, in_a_thread
from ps.storage.log_disk import Disk, Folder
from shards import log
from shards.errors import BadInput, GiveUp
from shards.log import Opening, Replay, State
from shards.messages import Installed
from shards.shard import Shard
from shards.transitions import Arrival, Outgoing

ROLLBACK_S = 10.0
"""How much a shard's death may take back, where nobody says otherwise."""

_SAVE, _PARTIAL, _EMPTY = "save", "save.partial", "empty"
_NUMBER = 0  # of every save: none is written over another
_SHARE = 50  # saves take at most one such part of a core
_MOVING_S = 1.0  # between two looks at a shard that stands still


class Saves:
    """The saves of one shard in a folder, which is this process's alone until `close`."""

    def __init__(
        self,
        folder: Path | Disk,
        every_s: float,
        aside: Callable[[Callable[[], None]], Aside] = in_a_thread,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """One each `every_s`; `aside` writes it while requests are served.

        `clock` counts the CPU seconds of the thread that reads it, the one that writes a save.

        Raises BadInput where the folder cannot be had, GiveUp where another process has it.
        """
        self._folder = Folder(folder, "saves") if isinstance(folder, Path) else None
        self._disk: Disk = self._folder or folder  # type: ignore[assignment]  # one of them is it
        self._every_s = every_s
        self._aside = aside
        self._clock = clock
        self._version: int | None = None  # of the last save
        self._due = inf  # when the next may begin; not while one is being written
        self._writing: Aside | None = None
        if self._folder is not None:
            self._folder.make()
        fresh = not self._disk.names()
        if self._folder is not None:
            self._folder.lock()
        if fresh:
            with suppress(OSError):  # then a death before the first save is the end
                self._disk.create(_EMPTY).close()

    @property
    def where(self) -> Path:
        """The folder they lie in."""
        return self._disk.where

    def recover(self, shard: Shard, now: float) -> None:
        """Give an empty shard what its last life saved last, if it saved anything.

        Raises BadInput naming the file where it is damaged or another shard's, GiveUp where the
        last life was given something and has saved none of it.
        """
        names = self._disk.names()
        if _SAVE in names:
            self._restore(shard)
            shard.roll_back(now)
            self._version, self._due = shard.version, now + self._every_s
        elif _EMPTY not in names:
            raise GiveUp(
                f"saves {self.where}: expected what the last life of shard {shard.spec.shard} was"
                " given, got nothing: it died before it had saved it"
            )

    def replaced(self) -> None:
        """The shard was given another state: no life of it must go on from what it had before."""
        if self._writing is not None:
            self._writing.join()
        for name in {_SAVE, _EMPTY}.intersection(self._disk.names()):
            self._disk.remove(name)
        self._version, self._due = None, -inf

    def look(self, shard: Shard, now: float) -> None:
        """Begin a save if it is time for one and there is anything new; call it each turn."""
        if now < self._due or shard.version == self._version:
            return
        if shard.moving(now):  # the state would not tell of it, and nobody may forget it
            self._due = now + _MOVING_S
            return
        first = log.opening(shard, _NUMBER, begins=False, now=now)
        self._version, self._due = shard.version, inf
        state, frames = log.state_of(shard, _NUMBER)
        self._writing = self._aside(lambda: self._save(first, state, frames, now))

    def next_look(self, shard: Shard) -> float:
        """When `look` has something to do, even if nothing has come by then; infinity: unknown."""
        return inf if shard.version == self._version else self._due

    def close(self, *, forget: bool = False) -> None:
        """Let another have the folder; `forget`: there will be no other, and it goes."""
        if self._writing is not None:
            self._writing.join()
        self._disk.close()
        if forget and self._folder is not None:
            forget_saves(self._folder.where)

    def _save(self, first: Opening, state: State, frames: log.Frames, began: float) -> None:
        """Write a save, and put it in the place of the last one; beside everything else."""
        started = self._clock()
        try:
            self._write(first, state, frames)
        except OSError:
            self._version = None  # what is in the shard is still to be saved
            if _PARTIAL in self._disk.names():
                self._disk.remove(_PARTIAL)  # its room is somebody's
        finally:
            cost_s = self._clock() - started
            self._due = began + max(self._every_s, _SHARE * cost_s)

    def _write(self, first: Opening, state: State, frames: log.Frames) -> None:
        pieces = log.encode(first, number=_NUMBER)
        pieces += log.encode(state, frames, number=_NUMBER)
        file = self._disk.create(_PARTIAL)
        try:
            file.write(pieces, soon=False)
        finally:
            file.close()
        self._disk.rename(_PARTIAL, _SAVE)

    def _restore(self, shard: Shard) -> None:
        what = f"save {self.where / _SAVE}"
        try:
            content = self._disk.content(_SAVE)
        except OSError as error:
            raise BadInput(f"{what}: {error.strerror}") from None
        first = log.read(content, 0, what, number=_NUMBER)
        check_spec(spec_told(first.entry, what), shard.spec, what)
        state = log.read(content, first.end, what, number=_NUMBER)
        if not isinstance(state.entry, State):
            raise BadInput(f"{what}: expected a state at byte {first.end}")
        Replay(shard).take(state.entry, state.frames)


class Saving:
    """A shard whose saves are no older than what it was given last; called like a shard."""

    def __init__(self, shard: Shard, to: Saves) -> None:
        self._shard = shard
        self._saves = to

    def handle_together(self, arrivals: Sequence[Arrival], now: float) -> list[Outgoing]:
        """Answer what has come by the same moment."""
        answers = self._shard.handle_together(arrivals, now)
        if any(isinstance(answer.message, Installed) for answer in answers):
            self._saves.replaced()
        return answers

    def tick(self, now: float) -> list[Outgoing]:
        """Let leases run out."""
        return self._shard.tick(now)


def forget_saves(folder: Path) -> None:
    """Remove a shard's saves, and the folder that those of its job lie in with the last of them."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # another shard's lie there, or all are gone
        folder.parent.rmdir()
