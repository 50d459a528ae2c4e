"""Hosts on one machine: each with a network, a name, processes, /dev/shm and files of its own.

A host is a set of namespaces that an idle process holds. Its root folder has the system's programs
and libraries, Java and Spark, read-only, and what a test adds; the checkout, its environment and
every Python of the system are not there. All hosts are on one bridge, in a network namespace of
the test's own process, so nothing of this machine is changed. A host ends with its first process,
and everything that it ran with it.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pyspark

from tests.chaos.namespaces import missing, move_into_own, run
from tests.support.eventually import eventually

BRIDGE, GATEWAY = "hosts", "10.88.0.1"
_MASKED = ("usr/lib/python3", "usr/lib/python3.*", "usr/local", "usr/share/python3")
_SYSTEM = ("usr", "etc/alternatives", "etc/ssl", "etc/ld.so.cache", "etc/java*")

_SET_UP = """\
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 none "$ROOT"
cd "$ROOT"
mkdir -p proc dev dev/shm tmp etc home/user opt run var/tmp
for name in bin sbin lib lib64; do ln -s usr/$name $name; done
bind() { mkdir -p "$(dirname "$2")"
  if [ -d "$1" ]; then mkdir -p "$2"; else : >"$2"; fi
  mount --bind "$1" "$2"; mount -o remount,bind,ro "$2"; }
for name in $SYSTEM; do for path in $(cd / && ls -d $name 2>/dev/null); do
  bind "/$path" "$path"; done; done
for path in $(ls -d $MASKED 2>/dev/null); do [ -d "$path" ] && mount -t tmpfs none "$path"; done
: >empty
for path in $(ls usr/bin/python* usr/bin/pip* 2>/dev/null); do
  [ -L "$path" ] || mount --bind empty "$path"; done
mount -t proc none proc
for name in null zero full random urandom tty; do
  : >dev/$name; mount --bind /dev/$name dev/$name; done
ln -s /proc/self/fd dev/fd
mount -t tmpfs -o mode=1777,size=2g none dev/shm
mount -t tmpfs -o mode=1777 none tmp
echo root:x:0:0:root:/home/user:/bin/sh >etc/passwd
echo root:x:0: >etc/group
echo 'hosts: files' >etc/nsswitch.conf
printf '%s\\n' "127.0.0.1 localhost" "$NAMES" >etc/hosts
while [ $# -gt 0 ]; do bind "$1" "${2#/}"; shift 2; done
hostname "$HOST"
ip link set lo up
exec chroot . /bin/sleep infinity
"""


def missing_for_hosts() -> str | None:
    """Return why no hosts can be made here, if so."""
    for program in ("nsenter", "unshare", "chroot", "java"):
        if shutil.which(program) is None:
            return f"hosts need {program}"
    return missing()


def found_java() -> Path:
    """The folder of the system's Java, which hosts see."""
    java = shutil.which("java")
    assert java is not None
    return Path(java).resolve().parents[1]


class BareHost:
    """One host; `address` is its own on the bridge."""

    def __init__(self, name: str, address: str, holder: psutil.Process) -> None:
        self.name, self.address = name, address
        self.holder = holder

    def start(
        self, command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a program on this host; its output goes to a file outside."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self._command(command),
                env=self._environ(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def run(
        self, command: Sequence[str], environ: Mapping[str, str] | None = None, limit_s: float = 600
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program on this host to its end, and return its output."""
        return subprocess.run(
            self._command(command),
            env=self._environ(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def path(self, inside: str) -> Path:
        """The path of a file of this host, as other processes of this machine see it."""
        return Path(f"/proc/{self.holder.pid}/root") / inside.lstrip("/")

    def _command(self, command: Sequence[str]) -> list[str]:
        spaces = ("--net", "--uts", "--ipc", "--pid", "--mount", "--root", "--wdns=/home/user")
        return ["nsenter", "--target", str(self.holder.pid), *spaces, *command]

    def _environ(self, more: Mapping[str, str] | None) -> dict[str, str]:
        return {
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": "/home/user",
            "LC_ALL": "C.UTF-8",
            "JAVA_HOME": str(found_java()),
            "SPARK_HOME": "/opt/spark",
            "SPARK_LOCAL_IP": self.address,
            "SPARK_NO_DAEMONIZE": "1",
            "SPARK_DAEMON_MEMORY": "512m",
            **(more or {}),
        }


@contextmanager
def bare_host(folder: Path, files: Mapping[str, Path]) -> Iterator[BareHost]:
    """One host without any network but loopback; `files` are added by their paths there."""
    root = folder / "alone"
    root.mkdir(parents=True)
    with _holder(root, "alone", "127.0.0.1 alone", files) as holder:
        yield BareHost("alone", "127.0.0.1", holder)


@contextmanager
def bare_hosts(
    folder: Path, names: Sequence[str], files: Mapping[str, Path], *, routed: bool
) -> Iterator[list[BareHost]]:
    """Hosts with these names on one network; `files` are added by their paths on each.

    `routed` gives each a default route. This process must be in a network namespace of its own
    (`enter_own_network`).
    """
    addresses = {name: f"10.88.0.{11 + index}" for index, name in enumerate(names)}
    lines = "\n".join(f"{address} {name}" for name, address in addresses.items())
    with ExitStack() as stack:
        hosts = []
        for name, address in addresses.items():
            root = folder / name
            root.mkdir(parents=True)
            holder = stack.enter_context(_holder(root, name, lines, files))
            host = BareHost(name, address, holder)
            _connect(host, routed)
            hosts.append(host)
        yield hosts


def enter_own_network() -> None:
    """Move this process, which must not have threads, into a network namespace with a bridge."""
    move_into_own()
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "addr", "add", f"{GATEWAY}/24", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")


@contextmanager
def _holder(
    root: Path, name: str, names: str, files: Mapping[str, Path]
) -> Iterator[psutil.Process]:
    mounts = {"/opt/spark": Path(pyspark.__file__).parent, **files}
    words = [str(word) for inside, outside in mounts.items() for word in (outside, inside)]
    environ = {
        "PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin",
        "ROOT": str(root),
        "HOST": name,
        "NAMES": names,
        "SYSTEM": " ".join(_SYSTEM),
        "MASKED": " ".join(_MASKED),
    }
    spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child"]
    process = subprocess.Popen(
        ["unshare", *spaces, "sh", "-c", _SET_UP, "sh", *words],
        env=environ,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )

    def is_ready() -> bool:
        if process.poll() is not None:
            assert process.stderr is not None
            raise AssertionError(process.stderr.read().decode())
        return any(child.name() == "sleep" for child in psutil.Process(process.pid).children())

    try:
        eventually(is_ready, because=f"host {name} is set up", within_s=60)
        yield psutil.Process(process.pid).children()[0]
    finally:
        process.kill()  # and with it its child, and all processes of that child's namespace
        process.wait()


def _connect(host: BareHost, routed: bool) -> None:
    """Plug a host into the bridge."""
    outer, pid = f"h{host.address.rpartition('.')[2]}", str(host.holder.pid)
    run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", pid)
    run("ip", "link", "set", outer, "master", BRIDGE, "up")
    inside = ("nsenter", "--target", pid, "--net", "ip")
    run(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
    run(*inside, "link", "set", "eth0", "up")
    if routed:
        run(*inside, "route", "add", "default", "via", GATEWAY)
