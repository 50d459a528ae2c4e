"""The processes that each kind of contender is made of, on one machine or at several places.

Place 0 has the servers and the program that the user starts, places 1, 2, ... a worker each. Spark
and Ray are up there before a program starts, as a user's cluster is; on one machine a program
starts its own.
"""

import socket
import subprocess
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from tests.bench.endtoend.places import Place

_SPARK_PORT, _RAY_PORT, _ROLE_PORT, _TORCHRUN_PORT = 7077, 6379, 23000, 29500
_OBJECT_STORE_BYTES = 200_000_000
# Without it, workers that are started again look for each other at the ends of those that died.
_NEW_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
_AGAIN = 'until "$@"; do sleep 1; done'


class Kind(Enum):
    """What a contender starts its processes with."""

    ALONE = "a process of its own"
    SPARK = "Spark"
    RAY = "Ray"
    TORCHRUN = "torchrun"
    ROLES = "a process for each role"


class Part(NamedTuple):
    """A process to start. `ready`: the words that it prints once the next ones may join it."""

    command: list[str]
    ready: str | None = None


def list_parts(
    kind: Kind,
    python: Path,
    program: Sequence[str],
    workers: int,
    places: Sequence[Place],
    folder: Path,
) -> Iterator[Part]:
    """Yield the processes of a contender; the last ones run the program.

    `places`: none, or one for the servers and one for each worker. `folder`: for their files.
    """
    words = [str(python), *program]
    match kind:
        case Kind.ALONE:
            yield Part(words)
        case Kind.SPARK if places:
            yield from _list_spark(python, places)
            yield Part([*words, "--cluster", f"spark://{places[0].host}:{_SPARK_PORT}"])
        case Kind.RAY if places:
            yield from _list_ray(python, places, folder)
            yield Part([*words, "--cluster", f"{places[0].address}:{_RAY_PORT}"])
        case Kind.SPARK | Kind.RAY:
            yield Part(words)
        case Kind.TORCHRUN:
            yield from _list_torchrun(python, program, workers, places)
        case Kind.ROLES:
            yield from _list_roles(words, workers, places)


def place_of(number: int, kind: Kind, places: Sequence[Place]) -> Place | None:
    """The place of the process with this number in `list_parts`; None on one machine."""
    if not places:
        return None
    match kind:
        case Kind.ALONE:
            return places[1]
        case Kind.SPARK | Kind.RAY:
            return places[number % len(places)]  # the program runs where the first one does
        case Kind.TORCHRUN:
            return places[number + 1]
        case Kind.ROLES:
            return places[max(0, number - 1)]  # the server and the chief are at one place


def _list_spark(python: Path, places: Sequence[Place]) -> Iterator[Part]:
    """A master, and a worker of one core at each other place."""
    asked = "import pyspark; print(pyspark.__path__[0])"
    home = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout
    start = str(Path(home.strip()) / "bin" / "spark-class"), "org.apache.spark.deploy"
    master, *others = places
    url = f"spark://{master.host}:{_SPARK_PORT}"
    ports = ["--webui-port", "0"]
    address = ["--host", master.host, "--port", str(_SPARK_PORT)]
    yield Part([start[0], f"{start[1]}.master.Master", *address, *ports], "New state: ALIVE")
    for place in others:
        sizes = ["--host", place.host, "--cores", "1", "--memory", "2g", "--work-dir", "spark"]
        command = [start[0], f"{start[1]}.worker.Worker", *sizes, *ports, url]
        yield Part(command, "Successfully registered")


def _list_ray(python: Path, places: Sequence[Place], folder: Path) -> Iterator[Part]:
    """A head, on which no worker is put, and a node of one CPU at each other place."""
    ray = [str(python), "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    ray += [f"--object-store-memory={_OBJECT_STORE_BYTES}"]
    # A folder of its own: others on this machine look for a running Ray in the usual one.
    files = [f"--temp-dir={folder / 'r'}", "--include-dashboard=false"]
    head = ["--head", f"--port={_RAY_PORT}", "--num-cpus=0", *files]
    node = [f"--address={places[0].address}:{_RAY_PORT}", "--num-cpus=1"]
    # On busy cores a node may miss Ray's limit of 30 s for its start.
    again = ["sh", "-c", _AGAIN, "sh"]
    for number, place in enumerate(places):
        start = [*again, *ray, *(node if number else head)]
        yield Part([*start, f"--node-ip-address={place.address}"], "Ray runtime started")


def _list_torchrun(
    python: Path, program: Sequence[str], workers: int, places: Sequence[Place]
) -> Iterator[Part]:
    """One torchrun with all workers, or one with a worker at each place but the servers'."""
    run = [str(python), "-m", "torch.distributed.run", "--max-restarts=100"]
    if not places:
        alone = [*run, "--standalone", f"--nproc-per-node={workers}", *program]
        yield Part(["env", _NEW_STORE, *alone])
    for rank, _ in enumerate(places[1:]):
        group = [f"--nnodes={workers}", f"--node-rank={rank}", "--nproc-per-node=1"]
        meet = [f"--master-addr={places[1].address}", f"--master-port={_TORCHRUN_PORT}"]
        yield Part([*run, *group, *meet, *program])


def _list_roles(words: list[str], workers: int, places: Sequence[Place]) -> Iterator[Part]:
    """A server, a chief and the workers, each started again when it fails, as a supervisor does."""
    roles = [("server", 0), ("chief", 0), *(("worker", member) for member in range(workers))]
    if places:
        hosts = [places[max(0, number - 1)].address for number in range(len(roles))]
        ports = [_ROLE_PORT + number for number in range(len(roles))]
    else:
        hosts, ports = ["127.0.0.1"] * len(roles), list(find_free_ports(len(roles)))
    ends = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
    for role, member in roles:
        options = ["--role", role, "--member", str(member), "--hosts", *ends]
        yield Part(["sh", "-c", _AGAIN, "sh", *words, *options])


def find_free_ports(count: int) -> list[int]:
    """Ports that nobody listened on a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports
