"""Processes with a job fork at any moment, and the child tries all that it has inherited.

Each call of the child must be refused in a sentence that says what to do. Then the child leaves all
blocks around it and runs what is registered for the exit of the interpreter, as a program's child
does. It must end, and nothing that it does may change what its parent and the shards have: the
parent carries on with the same session, and reads and weights are judged like all others.
"""

import atexit
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ps import DownpourError
from ps.client import Client

CHILD_S = 30.0
"""How long a child may take to end; a call that waits for answers would take a patience of 90 s."""
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.002
_REFUSAL = "this is its fork"


class ChildLeaves(BaseException):
    """Raised in a forked child, to leave all blocks around the call that was interrupted."""


def fork_log(folder: Path, worker: str) -> Path:
    """The file that gets a line for each fork of a worker: nothing, or what was wrong."""
    return folder / f"{worker}.forks"


def fork_on_signal(client: Client, log: Path) -> None:
    """On each SIGUSR1 fork, await the child, and write a line to `log`."""

    def leave() -> None:
        raise ChildLeaves

    def fork(*_: object) -> None:
        calls = (client.pull, client.new_gradient, client.flush, client.poll)
        fault = fault_of_fork(calls, leave)
        with log.open("a") as lines:
            lines.write(f"{fault}\n")

    signal.signal(signal.SIGUSR1, fork)


def fault_of_fork(calls: Iterable[Callable[[], object]], leave: Callable[[], None]) -> str:
    """Fork; the child makes these calls, then leaves. Returns what was wrong, or nothing."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        die_with_parent()
        os.write(write, "; ".join(filter(None, map(_fault_of, calls))).encode())
        leave()
        os._exit(leave_interpreter())
    os.close(write)
    fault = _await_child(child)
    with os.fdopen(read) as said:
        return said.read() or fault


def _fault_of(call: Callable[[], object]) -> str:
    name = getattr(call, "__name__", "call")
    try:
        call()
    except DownpourError as error:
        return "" if _REFUSAL in str(error) else f"{name}: {error}"
    return f"{name} was not refused"


def leave_interpreter() -> int:
    """Do what an interpreter does at its exit; returns the child's exit status."""
    atexit._run_exitfuncs()
    return 0


def _await_child(child: int) -> str:
    """What was wrong with the end of a child; nothing if it has ended by itself, with status 0."""
    until = time.monotonic() + CHILD_S
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return f"the child ended with status {status}" if status else ""
        time.sleep(_POLL_S)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"the child did not end within {CHILD_S:g} s"


def die_with_parent() -> None:
    """End this process by SIGKILL when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
