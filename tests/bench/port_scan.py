"""Send a stranger to every port of a cluster that other hosts can reach, and judge the answers.

The stranger is a bare host of the same network, with Ray and without a secret. tests.bench.stranger
says how it knocks. In a cluster in plain text it is admitted, so the same scan can find faults.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import grpc
import typing_extensions

from ps.cluster import Cluster
from shards.errors import DownpourError
from tests.bench import stranger
from tests.support.hosts import Host

_TOOLS = "/opt/probe"
FILES = {
    f"{_TOOLS}/stranger.py": Path(stranger.__file__),
    f"{_TOOLS}/grpc": Path(grpc.__file__).parent,
    f"{_TOOLS}/typing_extensions.py": Path(typing_extensions.__file__),
}
"""What the stranger needs besides Python and Ray, by its path on the host."""
ARCHIVE = stranger.SPARK_FILES[0]
_LISTENING = re.compile(r"\s(\S+):(\d+)\s+\S+\s+users:\(\(\"([^\"]+)\",pid=(\d+)")
_TIMEOUT_S = 300.0


class Port(NamedTuple):
    """A TCP port on which a program of a host listens; `address` is the host's."""

    host: str
    address: str
    number: int
    program: str


Answers = Mapping[str, Any]


def list_ports(host: Host) -> Iterator[Port]:
    """The ports of a host that are not bound to loopback alone."""
    for address, number, program, process in _LISTENING.findall(host.run("ss", "-Hltnp").stdout):
        if "127.0.0." not in address and address != "[::1]":
            if program == "java":
                program = _java_class(host, process)
            yield Port(host.name, host.address, int(number), program)


class Scan:
    """What a stranger learns while a job runs."""

    def __init__(self, hosts: list[Host], guest: Host, cluster_file: Path, *, sends: bool) -> None:
        """`cluster_file` is the job's, with its secrets. `sends` is explained in stranger.py."""
        self.answers: dict[Port, Answers] = {}
        self.secrets: set[str] = set()
        self._hosts, self._guest, self._cluster_file = hosts, guest, cluster_file
        self._sends = sends

    @contextmanager
    def running(self) -> Iterator[None]:
        """Knock at all ports while the context lasts, from when the job has shards."""
        over = Event()
        with ThreadPoolExecutor(1) as pool:
            scan = pool.submit(self._knock_until, over)
            try:
                yield
            finally:
                over.set()
        scan.result()

    def _knock_until(self, over: Event) -> None:
        while not over.is_set():
            if not self.secrets:
                with suppress(DownpourError):  # there is no such file yet
                    self.secrets |= _secrets_of(Cluster.load(self._cluster_file))
            else:
                ports = [port for host in self._hosts for port in list_ports(host)]
                if new := [port for port in ports if port not in self.answers]:
                    addresses = [(port.address, port.number) for port in new]
                    request = {"ports": addresses, "sends": self._sends}
                    self.answers |= zip(new, run_stranger(self._guest, request), strict=True)
            over.wait(0.2)


def run_stranger(host: Host, request: Mapping[str, Any], **environ: str) -> Any:
    """What the stranger's program finds when it runs on a host."""
    line = json.dumps(request) + "\n"
    command = ("/opt/downpour/bin/python", f"{_TOOLS}/stranger.py")
    environ |= {"PYTHONPATH": _TOOLS}
    done = host.run(*command, environ=environ, line=line, timeout=_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def describe(answers: Mapping[Port, Answers]) -> Iterator[str]:
    """A line for each port: its program, and what it answered."""
    for port, answer in sorted(answers.items()):
        parts = []
        if answer["mechanism"]:
            parts.append(f"ZeroMQ {answer['mechanism']}, admits NULL: {answer['admits']}")
        if answer["pages"]:
            statuses = sorted({status for status, _ in answer["pages"].values()})
            parts.append(f"HTTP {len(answer['pages'])} pages {statuses}")
        if answer["calls"]:
            statuses = sorted(set(answer["calls"].values()))
            parts.append(f"gRPC {' '.join(statuses)}")
        if answer["message"]:
            parts.append(
                f"Spark {answer['message']}, files {sorted(set(answer['files'].values()))}"
            )
        yield f"{port.host}:{port.number} {port.program}: {'; '.join(parts) or 'silent'}"


def find_faults(answers: Mapping[Port, Answers], secrets: Iterable[str]) -> Iterator[str]:
    """A line for each answer that a stranger must not get.

    That is a ZeroMQ socket without CURVE, one of `secrets` in a page, a form or a program that is
    accepted, a call of Ray's that is obeyed, a message that Spark refuses for another reason than
    the lack of authentication, or a file that Spark's driver sends, except the archive for
    executors, which it sends to anyone and which has no secret. A server of gRPC that refuses none
    of the calls for lack of a token is named, too: it has others.
    """
    for port, answer in answers.items():
        if answer["mechanism"] not in ("", "CURVE") or answer["admits"]:
            yield f"{port}: offers {answer['mechanism']}, admits NULL: {answer['admits']}"
        for path, (status, text) in answer["pages"].items():
            if any(secret in text for secret in secrets):
                yield f"{port}: a secret is in {path}"
            if path.startswith("POST") and status < 400 and '"success" : false' not in text:
                yield f"{port}: {path} is obeyed, with status {status}"
        calls = answer["calls"]
        yield from (f"{port}: {name} is obeyed" for name, status in calls.items() if status == "OK")
        if calls and "UNAUTHENTICATED" not in calls.values():
            yield f"{port}: no call is refused"
        if answer["message"] and "Expected SaslMessage" not in answer["message"]:
            yield f"{port}: Spark asks for no secret: {answer['message']}"
        for path, kind in answer["files"].items():
            if kind == "file" and path != ARCHIVE:
                yield f"{port}: Spark sends {path}"


def _secrets_of(cluster: Cluster) -> set[str]:
    keys = cluster.access
    return {cluster.job} | ({keys.token, keys.operator} if keys is not None else set())


def _java_class(host: Host, process: str) -> str:
    try:
        words = host.path(f"/proc/{process}/cmdline").read_text().split("\0")
    except OSError:  # it has ended
        return "java"
    classes = [word for word in words if word.startswith("org.apache.spark")]
    return classes[0].rpartition(".")[2] if classes else "java"
