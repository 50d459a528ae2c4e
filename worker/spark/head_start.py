"""A process that loads what Python workers need while Spark starts, and then is Spark's daemon.

    worker.spark.daemon, started by Spark            this process, started by the driver
    connects to the socket                           listens, and loads
    hands over its files and variables           ->  serves Spark with these
    waits, and ends when the other has ended

So the seconds of the imports are those in which Java is busy. Without this process, or where it has
more than one thread, the daemon loads them itself. The process ends with the driver, or after
`_UNCLAIMED_S` seconds, if no daemon comes. Only the standard library is imported, for another
Python may run this file.
"""

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

AHEAD = "DOWNPOUR_AHEAD"
"""The variable with the socket of such a process."""
OPTION = "--ahead"
"""The argument before the socket with which worker.spark.daemon becomes such a process."""
_UNCLAIMED_S = 120.0
_STARTED: list["subprocess.Popen[bytes]"] = []
"""An object that goes would warn that its process still runs."""


def start(environ: Mapping[str, str]) -> str:
    """Start a process of this Python with `environ`; returns its socket.

    What Spark gives its own daemon, and Python or a library reads only when it starts, is the same.
    """
    address = Path(tempfile.mkdtemp(prefix="downpour-ahead-")) / "socket"
    as_spark_does = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "worker.spark.daemon", OPTION, str(address)],
        env=as_spark_does | dict(environ),
        stdin=subprocess.PIPE,  # it is closed when this process ends
        stdout=subprocess.DEVNULL,
        process_group=0,  # Ctrl-C is for the driver
    )
    _STARTED[:] = [earlier for earlier in _STARTED if earlier.poll() is None]  # else zombies
    _STARTED.append(process)
    return str(address)


def hand_over(address: str) -> bool:
    """Have the process at this socket serve Spark in place of this one; returns when it has ended.

    Returns False at once if there is none, none that is safe to fork, or one at another place.
    """
    with socket.socket(socket.AF_UNIX) as line, suppress(OSError):
        request = {
            "place": describe_place(),
            "environ": dict(os.environ),
            "arguments": sys.argv,
            "folder": str(Path.cwd()),
        }
        line.connect(address)
        socket.send_fds(line, [b"f"], [0, 1, 2])
        line.sendall(json.dumps(request).encode())
        line.shutdown(socket.SHUT_WR)
        if line.recv(1):
            with suppress(OSError):
                line.recv(1)
            return True
    return False


def describe_place() -> list[str]:
    """The namespaces and control groups of this process, which its children have as well.

    An executor in a container may share files with the driver, but neither network nor limits.
    """
    facts = Path("/proc/self")
    namespaces = [str((facts / "ns" / name).readlink()) for name in ("mnt", "net", "pid", "user")]
    return [*namespaces, (facts / "cgroup").read_text()]


def await_daemon(address: Path, load: Callable[[], bool]) -> bool:
    """Load, wait for a daemon of Spark at the socket, and take its files and variables.

    Returns False if this process is not to serve in its place. `load` returns whether it is safe to
    fork after that.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(1)  # before the imports, so that a daemon that comes early waits
        safe = load()
        asked = listener.fileno()
        ready, _, _ = select.select([asked, 0], [], [], _UNCLAIMED_S)
        line = listener.accept()[0] if asked in ready else None
    address.unlink()
    address.parent.rmdir()
    if line is None or not safe:
        return False
    _, files, _, _ = socket.recv_fds(line, 1, 3)
    with line.makefile("rb") as sent:
        request = json.load(sent)
    if request["place"] != describe_place():
        return False
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    sys.argv[:] = request["arguments"]
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in folders if folder and folder not in sys.path]
    os.register_at_fork(after_in_child=line.close)
    line.send(b"s")
    return True
