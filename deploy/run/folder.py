"""The folder of a training run, and the names of its files.

Each run has its own folder: a folder that holds anything but settings is never used for a new run,
and two processes never write into the same one. Small files appear whole or not at all.
"""

import fcntl
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from deploy.run.summary import Summary
from ps import Cluster
from ps.snapshots import checked_json
from ps.storage import place_error
from ps.whole_files import Flush, whole_file
from shards.errors import BadInput, DownpourError, GiveUp

if TYPE_CHECKING:
    from deploy.run.updates_parquet import UpdatesWriter

SETTINGS = "settings.json"
CLUSTER = "cluster.json"
SUMMARY = "summary.json"
UPDATES = "updates.parquet"
EVALUATIONS = "evaluations.csv"
WEIGHTS = "weights.safetensors"
CAFFEMODEL = "weights.caffemodel"
LOSS_PLOT = "loss.png"
STALENESS_PLOT = "staleness.png"
COSTS_PLOT = "costs.png"
SNAPSHOTS = "snapshots"
LOGS = "logs"
FILES = {
    SUMMARY: "The results: accuracy, samples, updates, staleness, the largest clock gap, how the"
    " workers spent their time.",
    UPDATES: "A folder of parts with one row for each update and shard: which worker pushed, how"
    " stale the gradient was, the loss, the clock gap, how the worker spent its time. Readable"
    " while the run trains.",
    EVALUATIONS: "One row for each test of the weights: iteration, accuracy, loss.",
    LOSS_PLOT: "The loss over samples and over time, a point for each update.",
    STALENESS_PLOT: "The staleness of the updates, and the clock gap over time.",
    WEIGHTS: "The final weights.",
    CAFFEMODEL: "The same in Caffe's format.",
    SNAPSHOTS: "A folder of complete states to resume from, each a folder named by its iteration.",
    LOGS: "A folder of the shards' logs with `--durability` `process` or `logged`: during the run,"
    " and after it was killed.",
    CLUSTER: "The addresses of the shards while the run trains, for `downpour doctor`; later that"
    " the run has ended. Only its owner can read it.",
    SETTINGS: "The run's options, including any key in a URI. `--resume` reads it. Only its owner"
    " can read it.",
}
"""What each file and folder of a run contains, in Markdown."""
A_RUN = "a run"
"""What a folder holds in which a run has begun."""
_LOCK = ".lock"


class RunFolder:
    """An open run folder: a context manager that unlocks it. Use `create` or `resume` to open."""

    def __init__(
        self, path: Path, lock: int, created: Sequence[Path], former: bytes | None
    ) -> None:
        """`created`: the folders that this run created; `former`: the earlier run's settings."""
        self.path = path
        self._created = created
        self._former = former
        self._begun = False
        self.settings = path / SETTINGS
        self.cluster = path / CLUSTER
        self.summary = path / SUMMARY
        self.updates = path / UPDATES
        self.evaluations = path / EVALUATIONS
        self.weights = path / WEIGHTS
        self.caffemodel = path / CAFFEMODEL
        self.loss_plot = path / LOSS_PLOT
        self.staleness_plot = path / STALENESS_PLOT
        self.snapshots = path / SNAPSHOTS
        self.logs = path / LOGS
        self._lock = lock

    @classmethod
    def create(cls, path: Path, settings: Mapping[str, object]) -> "RunFolder":
        """Create the folder of a new run and write its settings, a mapping of JSON values.

        Raises BadInput for a folder that already holds another run's results or other files, GiveUp
        for one on a disk that is full, fails or is read-only. A run that ends before its shards
        have started removes what is created here.
        """
        above = next(folder for folder in (path, *path.parents) if folder.exists())
        if not above.is_dir():
            got = "a file" if above == path else f"one below the file {above}"
            raise BadInput(
                f"run folder {path}", expected="a new folder", got=got, hint="choose another --out"
            )
        created = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = content_of(path)
        except OSError as error:
            raise place_error(f"run folder {path}", error) from None
        if content == A_RUN:
            raise BadInput(
                f"run folder {path}",
                expected="a new folder",
                got=f"one that holds {A_RUN}",
                hint=f"choose another --out, or continue that run with --resume {path}",
            )
        if content is not None:
            raise BadInput(f"run folder {path}", expected="a new folder", got=f"one with {content}")
        return cls._open(path, settings, created)

    @classmethod
    def resume(cls, path: Path, settings: Mapping[str, object]) -> "RunFolder":
        """Open the folder of an earlier run to continue it, with its present settings.

        Raises BadInput for a folder that holds no run, GiveUp for one that cannot be written now. A
        run that ends before its shards have started leaves the earlier settings.
        """
        try:
            former = (path / SETTINGS).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise BadInput(
                f"run folder {path}", expected=f"one with {SETTINGS}", got="none to resume"
            ) from None
        except OSError as error:
            raise GiveUp(f"run folder {path}: {error.strerror}") from None
        return cls._open(path, settings, former=former)

    @classmethod
    def _open(
        cls,
        path: Path,
        settings: Mapping[str, object],
        created: Sequence[Path] = (),
        former: bytes | None = None,
    ) -> "RunFolder":
        try:
            lock = lock_folder(path)
        except GiveUp:
            _remove(created)
            raise
        folder = cls(path, lock, created, former)
        try:
            write_whole(folder.settings, checked_json.encode(settings), private=True)
        except BaseException:
            folder.undo()
            folder.close()
            raise
        return folder

    def undo(self) -> None:
        """Restore the folder to its state before this run, which has not begun."""
        if self._former is not None:
            with suppress(DownpourError):
                write_whole(self.settings, self._former, private=True)
            return
        for path in (self.settings, self.cluster, self.path / _LOCK):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.logs, ignore_errors=True)
        _remove(self._created)

    def open_updates(
        self, *, job: str, seed: int, part_s: float, restored: Sequence[int] | None = None
    ) -> "UpdatesWriter":
        """Open `updates.parquet` for writing; `restored`: each shard's version when resuming.

        A part of it is closed every `part_s` seconds.

        This marks the run as begun: from now on its folder stays, even if the run fails.
        """
        from deploy.run.updates_parquet import (
            UpdatesWriter,  # the service reads folders without Arrow
        )

        self._begun = True
        return UpdatesWriter(self.updates, job=job, seed=seed, restored=restored, part_s=part_s)

    def resettle(self, settings: Mapping[str, object], cluster: Cluster) -> None:
        """After a resharding, write the new settings for `--resume` and the shards' addresses."""
        self.write_settings(settings)
        cluster.save(self.cluster)

    def write_settings(self, settings: Mapping[str, object]) -> None:
        """Write settings that have changed, for `--resume`; raises GiveUp if the disk is full."""
        write_whole(self.settings, checked_json.encode(settings), private=True)

    def write_summary(self, summary: Summary) -> None:
        """Write `summary.json`; raises GiveUp if the disk is full or fails."""
        write_whole(self.summary, msgspec.json.encode(summary))

    def close(self) -> None:
        """Unlock the folder for other processes; closing twice does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and not self._begun:
            self.undo()
        self.close()


def content_of(path: Path) -> str | None:
    """The obstacle to a new run in an existing folder: A_RUN, or the name of another file.

    None if nothing does. Raises OSError for a folder that cannot be read.
    """
    present = sorted(entry.name for entry in path.iterdir())
    others = [name for name in present if name not in {SETTINGS, _LOCK}]
    if not others:
        return None
    return A_RUN if SETTINGS in present else others[0]


def lock_folder(path: Path) -> int:
    """Lock the folder until this process ends, however it ends; returns the file descriptor.

    Raises BadInput if another process holds the lock, GiveUp if the disk fails or is read-only.
    """
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise place_error(f"run folder {path}", error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise _in_use(path) from None
    except OSError:
        pass  # A file system without locks: the user has to keep other runs out.
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock


def check_unused(path: Path) -> None:
    """Raise BadInput if a process on this machine writes a run folder now."""
    if writer_of(path) is not None:
        raise _in_use(path)


def _in_use(path: Path) -> BadInput:
    return BadInput(
        f"run folder {path}", expected="one without a running writer", got="one in use by a run"
    )


def _remove(folders: Sequence[Path]) -> None:
    """Remove those folders that are empty, starting with the innermost."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def writer_of(path: Path) -> int | None:
    """The id of the process on this machine that writes a run folder now; None if there is none."""
    lock = path / _LOCK
    try:
        pid = lock.read_text()
        files = list(Path("/proc", pid, "fd").iterdir()) if pid.isdecimal() else []
        # The id may be from another machine, or reused by another process, so check that this
        # process has the lock file open.
        return int(pid) if any(file.resolve() == lock.resolve() for file in files) else None
    except OSError:
        return None


def write_whole(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write indented JSON atomically: `path` holds all of it, or what it held before.

    `private`: only this user can read the file. Raises GiveUp if the disk is full or fails.
    """
    try:
        with whole_file(path, flush=Flush.CONTENT, private=private) as partial:
            partial.write_bytes(msgspec.json.format(content) + b"\n")
    except OSError as error:
        raise GiveUp(f"{path}: {error.strerror}") from None
