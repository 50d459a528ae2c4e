"""Hosts of one network on this machine: namespaces of their own, joined by a switch.

    with hosts("driver", "node") as lab:
        lab["node"].run("python", "-c", "...")

Each has its own network, host name, mounts and /dev/shm, and the address 10.88.0.N. None has a
default route, and no name resolves, unless a test adds that. Everything ends with the context.
Processes of such a host still see this machine's files and processes, and import what the test
does: the Java options of a test name a daemon for Spark's Python workers that is on that path.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.eventually import eventually
from tests.support.quick_start import import_path

ROOT = Path(__file__).parents[2]
NETWORK = "10.88.0"
_PREPARE = """
set -e
hostname {name}
mount --make-rprivate /
mount -t tmpfs -o size={shm} tmpfs /dev/shm
mount -t tmpfs tmpfs /run
ip link set lo up
printf '127.0.0.1 localhost\\n' > /run/hosts
mount --bind /run/hosts /etc/hosts
printf 'hosts: files\\n' > /run/nsswitch.conf
[ ! -e /etc/nsswitch.conf ] || mount --bind /run/nsswitch.conf /etc/nsswitch.conf
touch /run/ready
exec sleep infinity
"""


class Host:
    """One host; `address` is its address in the network."""

    def __init__(self, name: str, address: str, holder: int) -> None:
        self.name, self.address, self._holder = name, address, holder

    def command(self, *words: str) -> list[str]:
        """The command, to be run on this host."""
        entered = ("nsenter", "--target", str(self._holder), "--net", "--uts", "--mount")
        return [*entered, f"--wd={ROOT}", "--", *words]

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
            env=os.environ | import_path(ROOT) | dict(environ or {}),
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
            self.command(*words),
            env=os.environ | import_path(ROOT) | dict(environ or {}),
            stdin=stdin,
            **options,
        )

    def ip(self, *words: str) -> None:
        """Change this host's network by `ip`."""
        done = self.run("ip", *words)
        assert done.returncode == 0, done.stderr

    def reaches(self, address: str, port: int) -> bool:
        """Return whether a TCP connection from this host is accepted."""
        probe = f"exec 3<>/dev/tcp/{address}/{port}"
        return self.run("timeout", "5", "bash", "-c", probe).returncode == 0

    def name_host(self, name: str, address: str) -> None:
        """Have a name resolve on this host."""
        done = self.run("sh", "-c", f"echo '{address} {name}' >> /etc/hosts")
        assert done.returncode == 0, done.stderr


@contextmanager
def hosts(*names: str, shm: str = "256m") -> Iterator[dict[str, Host]]:
    """Hosts with these names in one network, with `shm` of shared memory each; needs root."""
    with ExitStack() as stack:
        switch = _hold(stack, "switch", shm)
        _run(switch, "ip", "link", "add", "br0", "type", "bridge")
        _run(switch, "ip", "link", "set", "br0", "up")
        lab = {}
        for number, name in enumerate(names, 1):
            holder = _hold(stack, name, shm)
            port = f"port{number}"
            _run(
                switch, "ip", "link", "add", port, "type", "veth",
                "peer", "name", "eth0", "netns", str(holder),
            )  # fmt: skip
            _run(switch, "ip", "link", "set", port, "master", "br0", "up")
            host = lab[name] = Host(name, f"{NETWORK}.{number}", holder)
            host.ip("addr", "add", f"{host.address}/24", "dev", "eth0")
            host.ip("link", "set", "eth0", "up")
        yield lab


def _hold(stack: ExitStack, name: str, shm: str) -> int:
    """Start the process that holds a host's namespaces, prepared; returns its id."""
    script = _PREPARE.format(name=name, shm=shm)
    holder = subprocess.Popen(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", script],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    stack.callback(_end, holder)

    def is_ready() -> bool:
        assert holder.poll() is None, holder.stderr and holder.stderr.read()
        return Path(f"/proc/{holder.pid}/root/run/ready").exists()

    eventually(is_ready, because=f"{name} is prepared")
    return holder.pid


def _end(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.communicate()


def _run(holder: int, *words: str) -> None:
    command = ["nsenter", "--target", str(holder), "--net", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stderr)
