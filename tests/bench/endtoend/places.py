"""Places with a slow line each, for programs that are made of several processes.

A place is a network namespace with a host name and an address of its own. The only way from one to
another is its line to a router, which no program runs at, and the other's line: a pair of TUN
devices with tests/bench/delayed_line.c between them. TCP is the kernel's own, from end to end.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.bench.bench_links import build_line
from tests.bench.bench_links import missing as missing_line
from tests.bench.endtoend.caretaker import Caretaker

_QUEUE_S = 0.2
# Names are known from one file alone: to ask a server that is out of reach takes seconds.
_START = """hostname "$1" && mount --bind "$2/hosts" /etc/hosts &&
mount --bind "$2/resolv.conf" /etc/resolv.conf && shift 2 && exec "$@\""""


class Line(NamedTuple):
    """The line of each place: the round trip between two of them, and the bytes a second."""

    rtt_s: float = 0.1
    bytes_per_s: float = 12.5e6


class Place(NamedTuple):
    """A network namespace."""

    space: str
    host: str
    address: str
    names: Path
    """The folder with hosts and resolv.conf."""

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command that runs another one here, with this host name."""
        apart = ("ip", "netns", "exec", self.space, "unshare", "--uts", "sh", "-c", _START)
        return [*apart, "sh", self.host, str(self.names), *command]

    def count_bytes(self) -> int:
        """The bytes that have left by the line."""
        command = ("ip", "-json", "-statistics", "-netns", self.space, "link", "show", self.space)
        (device,) = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        return int(device["stats64"]["tx"]["bytes"])


def missing() -> str | None:
    """Why no places can be made here, if so."""
    why = missing_line()
    return "it needs unshare" if why is None and shutil.which("unshare") is None else why


@contextmanager
def make_places(count: int, line: Line) -> Iterator[list[Place]]:
    """Make places, which last as long as the context: nothing may run there when it ends."""
    with ExitStack() as stack:
        caretaker = stack.enter_context(Caretaker())
        folder = caretaker.make_folder("places-")
        binary = build_line(folder)
        router = _make_space(caretaker, "r")
        _run("ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        places = []
        for number in range(count):
            space = _make_space(caretaker, str(number))
            places.append(Place(space, f"place{number}", f"10.78.0.{number + 1}", folder))
            _join(stack, caretaker, places[-1], router, binary, line)
        names = [f"{place.address} {place.host}" for place in places]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        (folder / "resolv.conf").touch()
        yield places


def _make_space(caretaker: Caretaker, end: str) -> str:
    space = f"dp{end}x{os.getpid()}"
    caretaker.add("space", space)
    _run("ip", "netns", "add", space)
    _run("ip", "-netns", space, "link", "set", "lo", "up")
    return space


def _join(
    stack: ExitStack, caretaker: Caretaker, place: Place, router: str, binary: Path, line: Line
) -> None:
    """Lay the line from a place to the router, over which half of a way takes half of its time."""
    near, far = place.space, f"{place.space}r"
    figures = line.rtt_s / 4 * 1e6, line.bytes_per_s, line.bytes_per_s * _QUEUE_S
    command = [str(binary), near, far, *(str(round(figure)) for figure in figures)]
    program = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
    caretaker.add("line", program.pid)
    stack.callback(program.kill)
    assert program.stdout is not None
    if program.stdout.readline() != b"ready\n":
        raise OSError(f"{place.host}: its line did not come up")
    for space, device in ((place.space, near), (router, far)):
        _run("ip", "link", "set", device, "netns", space)
        _run("ip", "-netns", space, "link", "set", device, "txqueuelen", "10000", "up")
    _run("ip", "-netns", place.space, "addr", "add", f"{place.address}/32", "dev", near)
    _run("ip", "-netns", place.space, "route", "add", "default", "dev", near)
    _run("ip", "-netns", router, "route", "add", f"{place.address}/32", "dev", far)


def _run(*command: str) -> None:
    """Run a program; raises OSError with its complaint when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
