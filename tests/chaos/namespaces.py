"""A network of our own, and links in it that can be cut.

The harness moves into new namespaces of network and mounts, where it may do as it likes: what it
makes there, links, routes, a small disk, vanishes with its last process. A worker on a link lives
in a namespace further, held by a process that does nothing else, and a pair of virtual Ethernet
devices leads there.

How a link is cut says who notices. `LINK_DOWN`: both ends lose the carrier. `BLACKHOLE`: the
worker's kernel refuses to send. `LOSS`: packets leave and never arrive, since the neighbour's
hardware address is wrong; nobody is told, as when a cable is cut behind the next switch. `Ports`
cuts off what speaks from or to some ports of this very namespace, likewise without a word.
"""

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

from tests.chaos.schedule import Kind
from tests.support.eventually import eventually

_NEWNS, _NEWNET = 0x00020000, 0x40000000
HERE = "10.77.255.1"
"""The harness's address in its own namespace, which all links lead to."""
_NOWHERE = "02:00:00:00:00:99"
_MOVED_S = 60.0


def missing() -> str | None:
    """Why no namespaces can be made here, if so."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "mount"):
        if shutil.which(program) is None:
            return f"links need {program}"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "true"], capture_output=True, text=True, check=False
    )
    return tried.stderr.strip() or "namespaces are not permitted" if tried.returncode else None


def move_into_own() -> None:
    """Leave this machine's network for one with HERE alone, and keep here what is mounted now."""
    _check(ctypes.CDLL(None, use_errno=True).unshare(_NEWNET | _NEWNS), "unshare")
    run("mount", "--make-rprivate", "/")
    run("ip", "link", "set", "lo", "up")
    run("ip", "addr", "add", f"{HERE}/32", "dev", "lo")


def keep_space() -> NoReturn:
    """Hold a network namespace of one's own; never returns."""
    _check(ctypes.CDLL(None, use_errno=True).unshare(_NEWNET), "unshare")
    while True:
        signal.pause()


def enter(holder: int) -> None:
    """Move this process, which must not have threads yet, into a holder's namespace."""
    space = os.open(f"/proc/{holder}/ns/net", os.O_RDONLY)
    _check(ctypes.CDLL(None, use_errno=True).setns(space, _NEWNET), "setns")
    os.close(space)


def small_disk(folder: Path, size: str) -> None:
    """Mount `size` of memory as a disk at `folder`."""
    folder.mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder))


class Link:
    """A pair of devices from this namespace to a holder's, by which HERE is reached from there."""

    def __init__(self, number: int, holder: int) -> None:
        eventually(lambda: _apart(holder), because=f"process {holder} has moved", within_s=_MOVED_S)
        self._holder = holder
        self._near_device, self._far_device = f"near{number}", f"far{number}"
        self.near, self.far = f"10.77.{number}.1", f"10.77.{number}.2"
        pair = ("type", "veth", "peer", "name", self._far_device, "netns", str(holder))
        self._near("link", "add", self._near_device, *pair)
        self._near("addr", "add", f"{self.near}/24", "dev", self._near_device)
        self._near("link", "set", self._near_device, "up")
        self._far("link", "set", "lo", "up")
        self._far("addr", "add", f"{self.far}/24", "dev", self._far_device)
        self._far("link", "set", self._far_device, "up")
        self._far("route", "add", f"{HERE}/32", "via", self.near, "src", self.far, "metric", "9")

    @contextmanager
    def cut(self, kind: Kind) -> Iterator[None]:
        """Cut it in the way of `kind` while the context lasts."""
        with ExitStack() as healing:
            match kind:
                case Kind.LINK_DOWN:
                    self._near("link", "set", self._near_device, "down")
                    healing.callback(self._near, "link", "set", self._near_device, "up")
                case Kind.BLACKHOLE:
                    route = ("blackhole", f"{HERE}/32", "metric", "1")
                    self._far("route", "add", *route)
                    healing.callback(self._far, "route", "del", *route)
                case Kind.LOSS_ONE_WAY:
                    self._lose(healing, self._far, self.near, self._far_device)
                case _:
                    self._lose(healing, self._far, self.near, self._far_device)
                    self._lose(healing, self._near, self.far, self._near_device)
            yield

    @staticmethod
    def _lose(healing: ExitStack, ip: Callable[..., None], neighbour: str, device: str) -> None:
        """Have one end send to an address that nobody has."""
        known = (neighbour, "dev", device)
        ip("neigh", "replace", *known, "lladdr", _NOWHERE, "nud", "permanent")
        healing.callback(ip, "neigh", "del", *known)

    def _near(self, *command: str) -> None:
        run("ip", *command)

    def _far(self, *command: str) -> None:
        run("nsenter", "--target", str(self._holder), "--net", "ip", *command)


class Ports:
    """Whatever is said from or to a TCP port of this namespace can be led nowhere.

    There is a device whose other end nobody listens at, and a routing table that leads to it. Rules
    say by which table a packet goes; those of the host's own addresses usually come first.
    """

    _TABLE = "77"

    def __init__(self) -> None:
        run("ip", "link", "add", "nowhere", "type", "veth", "peer", "name", "nobody")
        run("ip", "link", "set", "nobody", "up")
        run("ip", "link", "set", "nowhere", "arp", "off", "up")
        Path("/proc/sys/net/ipv4/conf/nowhere/route_localnet").write_text("1")
        run("ip", "route", "add", "default", "dev", "nowhere", "table", self._TABLE)
        run("ip", "rule", "add", "pref", "100", "lookup", "local")
        run("ip", "rule", "del", "pref", "0")

    @contextmanager
    def cut(self, ports: Iterable[int]) -> Iterator[None]:
        """Lose every packet from and to these while the context lasts."""
        with ExitStack() as healing:
            for port in ports:
                for end in ("sport", "dport"):
                    rule = ("pref", "10", "ipproto", "tcp", end, str(port), "lookup", self._TABLE)
                    run("ip", "rule", "add", *rule)
                    healing.callback(run, "ip", "rule", "del", *rule)
            yield


def run(*command: str) -> None:
    """Run a program; raises with what it said when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _apart(holder: int) -> bool:
    """Whether a process has moved into a network namespace of its own."""
    there, here = (Path(f"/proc/{process}/ns/net").readlink() for process in (holder, "self"))
    return there != here


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
