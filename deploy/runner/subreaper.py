"""Runs a command, and ends every process that it leaves behind.

    python -I -S subreaper.py COMMAND...

A process of a job may leave its session, clear its environment and outlive its parents: nothing in
it then says whose it is. On Linux this process is the subreaper of all that the command starts, so
each of them becomes its child when its own parent ends. Once the command has ended, those that are
left get SIGTERM, after `GRACE_S` SIGKILL, and this process ends as the command did. It imports the
standard library only, because there is one for each attempt.
"""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress

GRACE_S = 5.0
_PAUSE_S = 0.05
_PR_SET_CHILD_SUBREAPER = 36
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def main(command: list[str]) -> None:
    """Run the command and end as it does; does not return."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Handlers are reset in the command; signals that are ignored would stay so.
    for number in _IGNORED:
        signal.signal(number, lambda *_: None)
    runner = os.spawnvp(os.P_NOWAIT, command[0], command)
    status = _wait_for(runner)
    _end_children()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _wait_for(pid: int) -> int:
    """The wait status of a child, once it has ended; orphans that end meanwhile are reaped."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return status


def _end_children() -> None:
    """End all processes below this one; each becomes its child once those above it have ended."""
    begun, number = time.monotonic(), signal.SIGTERM
    signalled: set[int] = set()
    while children := _children():
        if number is signal.SIGTERM and time.monotonic() - begun > GRACE_S:
            number, signalled = signal.SIGKILL, set()
        for pid in children:
            if pid not in signalled:
                signalled.add(pid)
                with suppress(OSError):
                    os.kill(pid, number)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_PAUSE_S)


def _children() -> list[int]:
    """The ids of the children of this process that live; none where the system does not say."""
    with suppress(OSError, ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123  # light
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


if __name__ == "__main__":
    main(sys.argv[1:])
