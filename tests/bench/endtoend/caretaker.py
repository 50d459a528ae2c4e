"""Ends and removes what a run of the contest has made, however the contest itself ends.

    python -I -S caretaker.py

A contest that is killed, or interrupted once more while it cleans up, removes nothing. So another
process does it, in a session of its own. A line of its standard input names each thing that there
is; the input ends with the contest, whatever ends that. The last thing is removed first.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_PAUSE_S = 0.05
# This project's killed workers leave shared memory to whichever process of the project comes next.
_SWEEP = "from ps.shared_memory.shm_files import sweep_all; sweep_all()"


class Caretaker:
    """The process, which removes everything that it was given as the context ends."""

    def __enter__(self) -> "Caretaker":
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        return self

    def add(self, kind: str, name: object) -> None:
        """Give it a thing of one of the kinds of `REMOVE`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind} {name}\n".encode())
        self._process.stdin.flush()

    def make_folder(self, prefix: str) -> Path:
        """Make a folder for temporary files."""
        folder = tempfile.mkdtemp(prefix=prefix)
        self.add("folder", folder)
        return Path(folder)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.communicate()


def end_command(reaper: str) -> None:
    """Kill the command below runner/subreaper.py, which then ends the rest; wait until it has."""
    children, killed = Path(f"/proc/{reaper}/task/{reaper}/children"), False
    while _runs(reaper, "subreaper.py"):
        with suppress(OSError):  # it has just ended
            commands = [] if killed else children.read_text().split()  # it may not have one yet
            for command in commands:
                os.kill(int(command), signal.SIGKILL)
                killed = True
        time.sleep(_PAUSE_S)


def _end_line(process: str) -> None:
    if _runs(process, "delayed_line"):
        os.kill(int(process), signal.SIGKILL)


def _runs(process: str, program: str) -> bool:
    """Return whether a process runs a program: its number may be another one's by now."""
    try:
        return program in Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return False


def _remove_space(name: str) -> None:
    if Path("/run/netns", name).exists():
        subprocess.run(["ip", "netns", "del", name], check=False)


def _remove_folder(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _remove_segments(root: str) -> None:
    environment = os.environ | {"PYTHONPATH": root}
    subprocess.run([sys.executable, "-c", _SWEEP], env=environment, check=False)


REMOVE: Mapping[str, Callable[[str], None]] = {
    "folder": _remove_folder,
    "line": _end_line,
    "reaper": end_command,
    "segments": _remove_segments,
    "space": _remove_space,
}


def main() -> None:
    """Remove what the lines of the standard input name, once it has ended."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for line in reversed(sys.stdin.read().splitlines()):
        kind, _, name = line.partition(" ")
        REMOVE[kind](name)


if __name__ == "__main__":
    main()
