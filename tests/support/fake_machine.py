"""A machine whose processes are objects, for a service that may be killed between any two writes.

The real launcher, journals and job folders run on it: the module replaces what they take from the
operating system. Files are real, and so are locks, so that two runners of a job exclude each other
as they do on a disk. The clock stands still until it is set.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import SIGKILL, Signals
from types import SimpleNamespace
from typing import Any
from unittest import mock

import sqlalchemy as sa

from deploy.run.folder import write_whole
from deploy.runner import job_folder, journal
from deploy.service import job_store, launcher, supervisor

START = 1_700_000_000.0


class ServiceKilled(BaseException):
    """The service is killed here. No `except Exception` of the code keeps it alive."""


class FakeProcess:
    """A process of a job. `stubborn` ones ignore SIGTERM."""

    def __init__(self, pid: int, marks: set[str], folder: Path | None, *, stubborn: bool) -> None:
        self.pid = pid
        self.marks = marks
        self.folder = folder
        self.stubborn = stubborn
        self.status: int | None = None
        self.lock: int | None = None

    def poll(self) -> int | None:
        return self.status

    def end(self, status: int) -> None:
        """Whatever ends a process also frees its locks."""
        if self.status is None:
            self.status = status
            if self.lock is not None:
                os.close(self.lock)


class FakeMachine:
    """Clock, process table, and the writes of the service, which is killed before one of them."""

    def __init__(self) -> None:
        self.now = START
        self.processes: dict[int, FakeProcess] = {}
        self.started: list[FakeProcess] = []
        """The runners that were started since this was last emptied."""
        self.writes_left: int | None = None
        """How many writes the service still makes before it is killed; None: it is not."""
        self.torn = False
        """Whether the last write is made in part."""
        self._drawn = 0

    def alive(self, mark: str) -> list[FakeProcess]:
        """The living processes with an assignment in their environment."""
        living = [each for each in self.processes.values() if each.status is None]
        return [each for each in living if mark in each.marks]

    def spawn(self, marks: set[str], folder: Path | None, *, stubborn: bool = False) -> FakeProcess:
        process = FakeProcess(len(self.processes) + 2, marks, folder, stubborn=stubborn)
        self.processes[process.pid] = process
        return process

    def kill_all(self) -> None:
        """The machine loses its power."""
        for process in self.processes.values():
            process.end(-int(SIGKILL))

    def write(self) -> bool:
        """Called before each write of the service; False if it is made in part only.

        Raises ServiceKilled where the service is killed first.
        """
        if self.writes_left is None:
            return True
        if self.writes_left == 0:
            raise ServiceKilled
        self.writes_left -= 1
        return not (self.torn and self.writes_left == 0)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the code run on this machine."""
        system = SimpleNamespace(environ={}, kill=self._kill, getpid=os.getpid)
        popen = SimpleNamespace(Popen=self._popen, DEVNULL=None)
        clock = SimpleNamespace(time=lambda: self.now)
        names = SimpleNamespace(token_hex=self._token)
        files = SimpleNamespace(**{name: getattr(os, name) for name in dir(os)})
        files.write, files.fsync = self._append, lambda _: None
        replaced: list[tuple[Any, str, Any]] = [
            (launcher, "os", system),
            (launcher, "subprocess", popen),
            (launcher, "processes_with", self._with_marks),
            (launcher, "_with_descendants", lambda pids: pids),
            (launcher, "is_subreaper", lambda _: False),
            (launcher, "_runs", lambda pid, folder: self.processes[pid].folder == folder),
            (journal, "os", files),
            (journal, "time", clock),
            (job_store, "time", clock),
            (job_store, "secrets", names),
            (supervisor, "secrets", names),
            (supervisor, "random", SimpleNamespace(random=lambda: 0.5)),
            (job_store, "write_whole", self._whole(write_whole)),
            (job_folder, "write_whole", self._whole(write_whole)),
        ]
        with ExitStack() as stack:
            for module, name, value in replaced:
                stack.enter_context(mock.patch.object(module, name, value))
            yield

    def listen(self, engine: sa.Engine) -> None:
        """Count the transactions of a database as writes."""
        sa.event.listen(engine, "commit", lambda _: self.write())

    def _token(self, size: int) -> str:
        self._drawn += 1
        return f"{self._drawn:0{2 * size}x}"[-2 * size :]

    def _popen(self, command: list[str], *, env: dict[str, str], **_: Any) -> FakeProcess:
        self.write()
        marks = {f"{name}={value}" for name, value in env.items()}
        process = self.spawn(marks, Path(command[-1]))
        self.started.append(process)
        return process

    def _with_marks(self, marks: set[str]) -> list[int]:
        return [each.pid for mark in marks for each in self.alive(mark)]

    def _kill(self, pid: int, number: Signals) -> None:
        self.write()
        process = self.processes[pid]
        if number is SIGKILL or not process.stubborn:
            process.end(-int(number))

    def _append(self, file: int, content: bytes) -> int:
        if self.write():
            return os.write(file, content)
        os.write(file, content[: len(content) // 2])
        raise ServiceKilled

    def _whole(self, real: Callable[..., None]) -> Callable[..., None]:
        def write(path: Path, content: bytes, **options: Any) -> None:
            if not self.write():
                path.with_name(f".{path.name}.partial").write_bytes(content[:7])
                raise ServiceKilled
            real(path, content, **options)

        return write
