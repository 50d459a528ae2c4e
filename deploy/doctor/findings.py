"""Judges the facts of a cluster's hosts: what is missing there, each with its remedy.

Pure functions: host_probe.py reads the facts, cluster_check.py collects them.
"""

import shlex
from collections.abc import Iterator

import msgspec
from packaging.requirements import Requirement

from deploy.clusters.requirements import EXECUTOR, compare_version
from deploy.run.disk_space import megabytes
from shards.errors import UNDECODABLE, BadInput, DownpourError, quote
from shards.plurals import format_count
from worker.job.network import ClusterNetwork

_SKEW_S = 1.0
_OTHERS = 0o077
_SHM_BYTES = 256 << 20
_OPEN_FILES = 1024
_SPOOL_BYTES = 1_000_000_000
"""Free space for the rows of a partition, which later epochs read again."""


class Finding(msgspec.Struct, frozen=True):
    """Something that a host lacks, and its remedy.

    Without `expected`, `got` is a whole sentence, which says all.
    """

    host: str
    subject: str
    expected: str
    got: str
    remedy: str

    def __str__(self) -> str:
        text = f"expected {self.expected}, got {self.got}" if self.expected else self.got
        return (
            f"{self.host}: {self.subject}"
            + (f": {text}" if text else "")
            + (f"; {self.remedy}" if self.remedy else "")
        )


class FolderFacts(msgspec.Struct, frozen=True):
    """The free bytes of a folder's disk, and why no file could be written and renamed there."""

    free_bytes: int | None
    error: str


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that host_probe.py reads on a host.

    `time_s` is the host's clock, in seconds since 1970. `refused` has the servers that accepted no
    connection, with the reason. None stands for no limit, or for what is not there.
    """

    host: str
    time_s: float
    python: str
    executable: str
    packages: dict[str, str | None]
    name_error: str
    local_ip: str
    user: int
    user_name: str | None
    shm_bytes: int | None
    open_files: int | None
    gpus: int
    home: str
    temporary: str
    folders: dict[str, FolderFacts]
    secrets: dict[str, int | None]
    refused: dict[str, str]


def judge_host(facts: HostFacts, gpus: int = 0) -> Iterator[Finding]:
    """Yield what a host of any kind lacks; `gpus` is the number of devices that it needs."""
    if facts.name_error and not facts.local_ip:
        yield Finding(
            facts.host,
            "own name",
            f"{facts.host!r} to resolve",
            facts.name_error,
            "add it to /etc/hosts with this host's address, or set SPARK_LOCAL_IP to that",
        )
    if facts.user_name is None:
        yield Finding(
            facts.host,
            "user",
            f"a name for user id {facts.user}, which Spark's login asks for",
            "none",
            "add a line to /etc/passwd, or run as a named user",
        )
    yield from _judge_folders(facts)
    if facts.shm_bytes is None or facts.shm_bytes < _SHM_BYTES:
        size = "none" if facts.shm_bytes is None else megabytes(facts.shm_bytes)
        yield Finding(
            facts.host,
            "/dev/shm",
            f"at least {megabytes(_SHM_BYTES)}",
            size,
            "give a container more: --shm-size, shm_size, or an emptyDir of medium Memory",
        )
    if facts.open_files is not None and facts.open_files < _OPEN_FILES:
        yield Finding(
            facts.host,
            "open files",
            f"a limit of at least {_OPEN_FILES}",
            str(facts.open_files),
            "raise it: ulimit -n 65536, or LimitNOFILE= of a unit",
        )
    if facts.gpus < gpus:
        yield Finding(
            facts.host,
            "GPU",
            format_count(gpus, "device"),
            f"{facts.gpus} of /dev/nvidia*",
            "install NVIDIA's driver, and give the container its devices",
        )
    yield from _judge_secrets(facts)
    for server, error in facts.refused.items():
        yield judge_connection(facts.host, server, error)


def judge_connection(host: str, server: str, error: str) -> Finding:
    """The finding for a server that accepted no connection from `host`."""
    return Finding(
        host,
        f"port of {server}",
        "a connection",
        error,
        "open it in the firewalls between the two hosts (downpour deploy network)",
    )


def _judge_folders(facts: HostFacts) -> Iterator[Finding]:
    remedies = {
        facts.home: "set HOME to a folder that this user may write: Ray, Spark and numba keep"
        " files there",
        facts.temporary: "set TMPDIR to a folder that this user may write",
    }
    for folder, state in facts.folders.items():
        if state.error:
            yield Finding(
                facts.host,
                folder,
                "a folder to write files and rename them in",
                state.error,
                remedies.get(folder, f"mount it there, and let user {facts.user} write"),
            )
    free = facts.folders[facts.temporary].free_bytes
    if free is not None and free < _SPOOL_BYTES:
        yield Finding(
            facts.host,
            facts.temporary,
            f"{megabytes(_SPOOL_BYTES)} free, for the rows of later epochs",
            megabytes(free),
            "set TMPDIR to a folder of a larger disk",
        )


def _judge_secrets(facts: HostFacts) -> Iterator[Finding]:
    for path, mode in facts.secrets.items():
        if mode is None:
            yield Finding(
                facts.host, path, "a file with a secret", "none", "write it, with mode 600"
            )
        elif mode & _OTHERS:
            yield Finding(
                facts.host,
                path,
                "mode 600, as it holds a secret",
                f"{mode:03o}",
                f"chmod 600 {shlex.quote(path)}",
            )


def judge_executor(
    facts: HostFacts, python: str, requirements: list[Requirement]
) -> Iterator[Finding]:
    """Yield what the Python of an executor lacks, for a driver with another minor version."""
    subject = f"Python of executors ({facts.executable})"
    remedy = f"set PYSPARK_PYTHON to a Python {python} there, or ship one (downpour pack)"
    yield from _judge_python(facts, subject, python, remedy)
    remedy = f"install the extra `{EXECUTOR}` there, or ship a Python with it (downpour pack)"
    yield from _judge_versions(facts, subject, requirements, remedy)


def judge_ray_node(
    facts: HostFacts, python: str, ray: str, requirements: list[Requirement]
) -> Iterator[Finding]:
    """Yield what the Python of a Ray node lacks, for a driver with these two versions.

    The base install is required there, and the driver's Ray exactly.
    """
    subject = f"Python of Ray's node ({facts.executable})"
    remedy = "start the node from an environment like the driver's (downpour pack --extra server)"
    yield from _judge_python(facts, subject, python, remedy)
    required = [Requirement(f"ray=={ray}"), *requirements]
    yield from _judge_versions(facts, subject, required, remedy)


def _judge_python(facts: HostFacts, subject: str, python: str, remedy: str) -> Iterator[Finding]:
    if facts.python != python:
        expected = f"version {python}, as the driver's"
        yield Finding(facts.host, subject, expected, facts.python, remedy)


def _judge_versions(
    facts: HostFacts, subject: str, requirements: list[Requirement], remedy: str
) -> Iterator[Finding]:
    for requirement in requirements:
        fault = compare_version(requirement, facts.packages.get(requirement.name))
        if fault is not None:
            yield Finding(facts.host, subject, str(requirement), fault, remedy)


def judge_silent_node(host: str, address: str, error: str) -> Finding:
    """The finding for a node of Ray that ran no task, for the reason `error`."""
    remedy = f"see /tmp/ray/session_latest/logs on {address}, and start the node again"
    return Finding(host, f"node {address} of Ray", "it to run a task", quote(error), remedy)


def judge_clock(facts: HostFacts, before_s: float, after_s: float) -> Iterator[Finding]:
    """Yield how far a host's clock is off, read between two times of the driver's clock.

    The difference is at least the stated one.
    """
    ahead_s, behind_s = facts.time_s - after_s, before_s - facts.time_s
    if max(ahead_s, behind_s) > _SKEW_S:
        off = f"{ahead_s:.0f} s ahead" if ahead_s > 0 else f"{behind_s:.0f} s behind"
        yield Finding(
            facts.host,
            "clock",
            f"the driver's, within {_SKEW_S:g} s",
            off,
            "run a time service there (chrony, systemd-timesyncd)",
        )


def judge_start(host: str, lines: list[str], status: int, error: str) -> Iterator[Finding]:
    """Yield what is wrong with the start of an executor's Python.

    `lines` is what it printed besides the facts, `status` how it ended, `error` its last words.
    """
    if status:
        yield Finding(
            host,
            "Python of executors",
            "it to run",
            quote(error) if error else f"exit status {status}",
            "set PYSPARK_PYTHON to a Python there, or ship one (downpour pack)",
        )
    if lines:
        yield Finding(
            host,
            "Python of executors",
            "nothing on standard output at its start, where Spark reads a port",
            quote(lines[0]),
            "remove what prints it: sitecustomize.py, a .pth file, or a module in PYTHONPATH",
        )


def judge_spark_start(host: str, error: DownpourError, network: ClusterNetwork) -> Finding:
    """A Spark that did not start; if executors never came, they may not reach the driver."""
    if "no executor ran a task" in str(error):
        ports = {ports.setting: f"{ports.first}-{ports.last}" for ports in network.ranges()}
        return Finding(
            host,
            "ports of Spark's driver",
            f"executors to reach {ports['driver_port']} and {ports['block_manager_port']} of"
            " this host, and a worker with free cores and memory",
            str(error),
            "open them in the firewalls, or give --driver-host",
        )
    return from_error(host, "Spark", error)


def from_error(host: str, subject: str, error: Exception) -> Finding:
    """The finding for an error that another check raised."""
    if isinstance(error, BadInput) and (error.expected or error.got):
        return Finding(host, error.what, error.expected or "", error.got or "", error.hint or "")
    return Finding(host, subject, "", str(error), "")


def decode_facts(lines: list[str]) -> tuple[HostFacts | None, list[str]]:
    """The facts among the lines that a program printed, None without any, and the other lines."""
    others = []
    facts = None
    for line in lines:
        try:
            facts = msgspec.json.decode(line, type=HostFacts)
        except UNDECODABLE:
            others.append(line)
    return facts, others
