"""Starts, probes and ends the processes of jobs on this machine.

A runner is in a session of its own, and its output goes to a file, so the service may end without
any effect on it. Its parent is the attempt's subreaper, which ends when all that the runner started
has ended (runner/subreaper.py). Every process of a job has the job's id in its environment, or is
below one that has. That is how processes are found that outlive both, such as Spark's JVM.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from deploy.run.folder import writer_of
from deploy.runner import job_folder, subreaper
from deploy.runner.job_folder import AttemptIdentity
from deploy.service.database import VARIABLE
from shards.errors import BadInput

SECRET_VARIABLES = {"DOWNPOUR_TOKEN", "DOWNPOUR_TOKEN_FILE", VARIABLE}
"""What a job does not inherit: the token of a user of a service, and the service's database."""
_RUNNER = (sys.executable, "-m", "deploy.runner")
_SUBREAPER = (sys.executable, "-I", "-S", subreaper.__file__)


class Liveness(StrEnum):
    """The knowledge about the process of an attempt. Unknown is not gone."""

    RUNNING = "running"
    GONE = "gone"
    UNKNOWN = "unknown"


class Launcher(Protocol):
    """Starts, probes and ends attempts. A supervisor calls it from one thread at a time."""

    def launch(self, folder: Path, attempt: int, nonce: str) -> None:
        """Start an attempt of the job in `folder`; raises OSError if that fails."""
        ...

    def probe(self, folder: Path, nonce: str) -> Liveness:
        """Return whether the attempt with this nonce is alive."""
        ...

    def exit_status(self, nonce: str) -> int | None:
        """The exit status of an attempt that has ended; None if it is not known."""
        ...

    def forget(self, nonce: str) -> None:
        """Drop what is kept about an attempt that is over."""
        ...

    def kill(self, folder: Path, number: signal.Signals) -> int:
        """Signal all that is left of the job in `folder`; returns how much there was.

        Raises OSError if that is unknown.
        """
        ...

    def close(self) -> None:
        """Let go of the launcher's own resources, and of no attempt."""
        ...


class LocalLauncher:
    """Launches attempts as processes. `command` is followed by the job's folder."""

    def __init__(self, command: tuple[str, ...] = _RUNNER) -> None:
        self._command = command
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def launch(self, folder: Path, attempt: int, nonce: str) -> None:
        """Start an attempt of the job in `folder`; raises OSError if that fails."""
        log = job_folder.driver_log(folder, attempt)
        inherited = {n: v for n, v in os.environ.items() if n not in SECRET_VARIABLES}
        environ = inherited | {
            job_folder.JOB_VARIABLE: folder.name,
            job_folder.ATTEMPT_VARIABLE: nonce,
        }
        with log.open("ab", buffering=0) as output:
            self._children[nonce] = subprocess.Popen(
                [*_SUBREAPER, *self._command, str(folder)],
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def probe(self, folder: Path, nonce: str) -> Liveness:
        """Return whether the attempt with this nonce is alive.

        It is gone if its lock is free, and no process with the nonce in its environment is its
        subreaper or a runner of this folder.
        """
        child = self._children.get(nonce)
        if child is not None and child.poll() is None:
            return Liveness.RUNNING
        try:
            identity = job_folder.load(folder / job_folder.ATTEMPT, AttemptIdentity)
        except BadInput:
            return Liveness.UNKNOWN
        writer = writer_of(folder)
        if writer is not None and identity is not None and identity.nonce == nonce:
            return Liveness.RUNNING
        marks = {f"{job_folder.ATTEMPT_VARIABLE}={nonce}"}
        # A runner that has just been started has no lock yet.
        young = any(_runs(pid, folder) for pid in processes_with(marks))
        return Liveness.RUNNING if young else Liveness.GONE

    def exit_status(self, nonce: str) -> int | None:
        """The exit status of an attempt that this service has started and that has ended."""
        child = self._children.get(nonce)
        return child.poll() if child is not None else None

    def forget(self, nonce: str) -> None:
        """Drop what is kept about an attempt that is over."""
        self._children.pop(nonce, None)

    def kill(self, folder: Path, number: signal.Signals) -> int:
        """Signal every process of the job in `folder`; returns how many there were.

        Its subreaper is left alone, for it ends with the last of them.
        """
        marked = processes_with({f"{job_folder.JOB_VARIABLE}={folder.name}"})
        below = _with_descendants(marked)
        for pid in below:
            if not is_subreaper(pid):
                with suppress(OSError):
                    os.kill(pid, number)
        return len(below)

    def close(self) -> None:
        """Nothing is held: runners are in sessions of their own."""


def processes_with(marks: set[str]) -> list[int]:
    """The ids of processes of this user with one of these assignments in their environment."""
    assignments = {mark.encode() for mark in marks}
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            if assignments & set((entry / "environ").read_bytes().split(b"\0")) and _lives(entry):
                pids.append(int(entry.name))
    return pids


def _with_descendants(pids: list[int]) -> list[int]:
    """These processes and all that are below them, whatever is in their environment."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir() if pids else ():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in {"Z", "X"}:
                    children.setdefault(int(parent), []).append(int(entry.name))
    tree = dict.fromkeys(pids)
    waiting = list(pids)
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            if pid not in tree and pid != os.getpid():
                tree[pid] = None
                waiting.append(pid)
    return list(tree)


def is_subreaper(pid: int) -> bool:
    """True if a process is the parent of a runner, which waits for all that the runner started."""
    try:
        words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return os.fsencode(subreaper.__file__) in words[:5]


def _lives(entry: Path) -> bool:
    """Return whether a process is more than an entry that its parent has not reaped."""
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}


def _runs(pid: int, folder: Path) -> bool:
    """True if a process was started with this folder as its last argument, as runners are."""
    try:
        words = Path("/proc", str(pid), "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return False
    return words[-1] == str(folder).encode()
