"""Hosts of one network on this machine: namespaces of their own, joined by a switch.

    with hosts("driver", "node") as lab:
        lab["node"].run("python", "-c", "...")

Each has its own network, host name, mounts and /dev/shm, and the address 10.88.0.N. None has a
default route, unless it is `routed`. Everything ends with the context.

Processes of such a host still see this machine's files and processes, and import what the test
does: the Java options of a test name a daemon for Spark's Python workers that is on that path. No
name resolves, unless a test adds that. A host of `bare_hosts` also has processes of its own, and a
root folder with the system's programs and libraries, Java and Spark, read-only, and what a test
adds; the checkout, its environment and every Python of the system are not there. Those hosts know
each other's names.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pyspark

from tests.chaos.namespaces import missing, run
from tests.support.eventually import eventually
from tests.support.quick_start import import_path

ROOT = Path(__file__).parents[2]
NETWORK, GATEWAY = "10.88.0", "10.88.0.254"
_SPACES = ("--net", "--uts", "--mount")
_BARE_SPACES = (*_SPACES, "--ipc", "--pid")
_PREPARE = """\
set -e
hostname "$HOST"
mount --make-rprivate /
mount -t tmpfs -o size="$SHM" tmpfs /dev/shm
mount -t tmpfs tmpfs /run
ip link set lo up
printf '127.0.0.1 localhost\\n' > /run/hosts
mount --bind /run/hosts /etc/hosts
printf 'hosts: files\\n' > /run/nsswitch.conf
[ ! -e /etc/nsswitch.conf ] || mount --bind /run/nsswitch.conf /etc/nsswitch.conf
exec sleep infinity
"""
_MASKED = ("usr/lib/python3", "usr/lib/python3.*", "usr/local", "usr/share/python3")
_SYSTEM = ("usr", "etc/alternatives", "etc/ssl", "etc/ld.so.cache", "etc/java*")
_PREPARE_BARE = """\
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
mount -t tmpfs -o mode=1777,size="$SHM" none dev/shm
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


class Host:
    """One host; `address` is its address in the network, `holder` the process that keeps it."""

    def __init__(
        self, name: str, address: str, holder: psutil.Process, environ: Mapping[str, str] | None
    ) -> None:
        """A host with its root folder and variables has `environ`, any other the test's."""
        self.name, self.address, self.holder = name, address, holder
        self._bare = environ

    def command(self, *words: str) -> list[str]:
        """The command, to be run on this host."""
        entered = ["nsenter", "--target", str(self.holder.pid)]
        if self._bare is None:
            return [*entered, *_SPACES, f"--wd={ROOT}", "--", *words]
        return [*entered, *_BARE_SPACES, "--root", "--wdns=/home/user", "--", *words]

    def run(
        self,
        *words: str,
        environ: Mapping[str, str] | None = None,
        line: str = "",
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host until it ends, and return what it printed.

        `line` is its standard input.
        """
        return subprocess.run(
            self.command(*words),
            env=self._environ(environ),
            input=line,
            capture_output=True,
            text=True,
            check=False,
            **options,
        )

    def python(self, script: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a script of Python on this host."""
        return self.run(sys.executable, "-c", script, **options)

    def start(
        self,
        *words: str,
        environ: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a command on this host."""
        return subprocess.Popen(
            self.command(*words), env=self._environ(environ), stdin=stdin, **options
        )

    def path(self, inside: str) -> Path:
        """The path of a file of this host, as other processes of this machine see it."""
        return Path(f"/proc/{self.holder.pid}/root") / inside.lstrip("/")

    def ip(self, *words: str) -> None:
        """Change this host's network by `ip`."""
        _run_in(self.holder, "ip", *words)

    def reaches(self, address: str, port: int) -> bool:
        """Return whether a TCP connection from this host is accepted."""
        probe = f"exec 3<>/dev/tcp/{address}/{port}"
        return self.run("timeout", "5", "bash", "-c", probe).returncode == 0

    def name_host(self, name: str, address: str) -> None:
        """Have a name resolve on this host."""
        done = self.run("sh", "-c", f"echo '{address} {name}' >> /etc/hosts")
        assert done.returncode == 0, done.stderr

    def _environ(self, more: Mapping[str, str] | None) -> dict[str, str]:
        usual = os.environ | import_path(ROOT) if self._bare is None else self._bare
        return {**usual, **(more or {})}


def missing_for_bare_hosts() -> str | None:
    """Return why no bare hosts can be made here, if so."""
    for program in ("nsenter", "setpriv", "unshare", "chroot", "java"):
        if shutil.which(program) is None:
            return f"hosts need {program}"
    return missing()


@contextmanager
def hosts(*names: str, shm: str = "256m") -> Iterator[dict[str, Host]]:
    """Hosts with these names in one network, with `shm` of shared memory each; needs root."""
    with ExitStack() as stack:
        switch = _switch(stack)
        lab = {}
        for number, name in enumerate(names, 1):
            environ = {**os.environ, "HOST": name, "SHM": shm}
            holder = _hold(stack, [*_SPACES], _PREPARE, environ)
            lab[name] = Host(name, f"{NETWORK}.{number}", holder, None)
            _plug(switch, lab[name])
        yield lab


@contextmanager
def bare_hosts(
    folder: Path, names: Sequence[str], files: Mapping[str, Path], *, routed: bool = False
) -> Iterator[list[Host]]:
    """Hosts without checkout or Python in one network; `files` are added by their paths on each.

    Their roots are below `folder`. `routed` gives each a default route. Needs root.
    """
    addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
    mounts = {"/opt/spark": Path(pyspark.__file__).parent, **files}
    words = [str(word) for inside, outside in mounts.items() for word in (outside, inside)]
    shared = {
        "PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin",
        "SHM": "2g",
        "NAMES": "\n".join(f"{address} {name}" for name, address in addresses.items()),
        "SYSTEM": " ".join(_SYSTEM),
        "MASKED": " ".join(_MASKED),
    }
    spaces = [*_BARE_SPACES, "--fork", "--kill-child"]
    with ExitStack() as stack:
        switch = _switch(stack)
        lab = []
        for name, address in addresses.items():
            root = folder / name
            root.mkdir(parents=True)
            environ = {**shared, "ROOT": str(root), "HOST": name}
            holder = _hold(stack, spaces, _PREPARE_BARE, environ, *words)
            host = Host(name, address, holder, _bare_environ(address))
            _plug(switch, host)
            if routed:
                host.ip("route", "add", "default", "via", GATEWAY)
            lab.append(host)
        yield lab


def _bare_environ(address: str) -> dict[str, str]:
    java = shutil.which("java")
    assert java is not None
    return {
        "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": "/home/user",
        "LC_ALL": "C.UTF-8",
        "JAVA_HOME": str(Path(java).resolve().parents[1]),
        "SPARK_HOME": "/opt/spark",
        "SPARK_LOCAL_IP": address,
        "SPARK_NO_DAEMONIZE": "1",
        "SPARK_DAEMON_MEMORY": "512m",
    }


def _switch(stack: ExitStack) -> psutil.Process:
    """Start a network with a bridge alone; returns the process that keeps it."""
    switch = _hold(stack, ["--net"], "exec sleep infinity", {**os.environ})
    _run_in(switch, "ip", "link", "add", "br0", "type", "bridge")
    _run_in(switch, "ip", "addr", "add", f"{GATEWAY}/24", "dev", "br0")
    _run_in(switch, "ip", "link", "set", "br0", "up")
    return switch


def _plug(switch: psutil.Process, host: Host) -> None:
    """Connect a host to the switch."""
    port = f"port{host.address.rpartition('.')[2]}"
    peer = ("type", "veth", "peer", "name", "eth0", "netns", str(host.holder.pid))
    _run_in(switch, "ip", "link", "add", port, *peer)
    _run_in(switch, "ip", "link", "set", port, "master", "br0", "up")
    host.ip("addr", "add", f"{host.address}/24", "dev", "eth0")
    host.ip("link", "set", "eth0", "up")


def _hold(
    stack: ExitStack, spaces: Sequence[str], script: str, environ: Mapping[str, str], *words: str
) -> psutil.Process:
    """Start the process that keeps a host's namespaces, once they are prepared.

    A host with processes of its own ends with it, and everything that ran there. It ends with the
    thread that calls this, too, so a test that is killed leaves no host.
    """
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, "sh", "-c", script, "sh", *words],
        env=environ,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    stack.callback(_end, process)

    def prepared() -> psutil.Process | None:
        assert process.poll() is None, process.stderr and process.stderr.read()
        first = psutil.Process(process.pid)
        with suppress(psutil.NoSuchProcess):  # a step of the script has just ended
            return next((kin for kin in [first, *first.children()] if kin.name() == "sleep"), None)
        return None

    holder = eventually(prepared, because="a host is prepared", within_s=60)
    assert holder is not None
    return holder


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _run_in(holder: psutil.Process, *words: str) -> None:
    run("nsenter", "--target", str(holder.pid), "--net", *words)
