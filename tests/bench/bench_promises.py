"""What each promise costs: an update over TCP with one promise after another switched on.

    python tests/bench/bench_promises.py [--floats 10000 1000000] [--seconds 1] [--rounds 5]

One worker, one shard in a process of its own, plain SGD; an update is a pull and a push of N
float32. The first row is a ZeroMQ stream of the same bytes that nobody applies. The second is the
least that the system can do: each gradient is applied, exactly once, after a check that it fits and
is finite. Each row after it has one promise more than that second row. All cases stay open, and
take turns in a fresh random order each round; a figure is the median over the rounds. CPU time is
that of the worker, the shard and its copies together. The folder of the logs is what `logged`
measures.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

import ps
from ps.durability import Durability
from ps.job_spec import shard_specs
from ps.launch.launch_plan import LaunchPlan
from ps.launch.launcher import Placement, start_shards
from ps.transport.transports import Transport
from shards.schedules import Fixed
from tests.bench.loops import UpdateCost, measure_update, median_cost
from tests.bench.peers import raw_zmq
from tests.bench.peers.contract import Setting
from tests.bench.report import save

BARE, LEAST = "bytes over ZeroMQ, not applied", "exactly once"


class PromiseCase(NamedTuple):
    """A promise, as the options that switch it on."""

    name: str
    promise: str
    bound: int | None = None
    secure: bool = False
    durability: Durability = Durability.MEMORY


CASES = (
    PromiseCase(LEAST, "a finite gradient counts once, whatever is sent again"),
    PromiseCase("+ staleness bound", "no worker reads weights that lack too many steps", bound=4),
    PromiseCase("+ CURVE", "only holders of keys connect; all bytes are encrypted", secure=True),
    PromiseCase("+ process", "a killed shard loses nothing", durability=Durability.PROCESS),
    PromiseCase("+ logged", "a host that stops loses nothing", durability=Durability.LOGGED),
    PromiseCase("+ replicated", "a lost host loses nothing", durability=Durability.REPLICATED),
)


class Contender(NamedTuple):
    """An open case: what does one update, and the processes that are its servers."""

    update: Callable[[], object]
    servers: list[psutil.Process]


def children() -> set[psutil.Process]:
    """The processes below this one."""
    return set(psutil.Process().children(recursive=True))


def opened(case: PromiseCase, floats: int, folder: Path, stack: ExitStack) -> Contender:
    """Start the shards of a case, and a worker in this process."""
    before = children()
    table = ps.DenseTable("net", (ps.TensorSpec("w", (floats,)),))
    specs = shard_specs(table, schedule=Fixed(base_rate=1e-6), bound=case.bound, lease_s=60.0)
    logs = folder / case.name.strip("+ ") if case.durability.keeps_log else None
    plan = LaunchPlan(specs=specs, secure=case.secure, durability=case.durability, logs=logs)
    hosts = stack.enter_context(start_shards(Placement.PROCESSES, plan))
    with ps.AdminClient(hosts.cluster) as admin:
        admin.install(table.empty())
    job = ps.connect(hosts.cluster)
    me = stack.enter_context(job.worker("w0", transport=Transport.TCP, patience_s=60.0))
    gradient = np.full(table.size, 1e-3, np.float32)

    def update() -> None:
        me.client.pull()
        me.client.push(gradient)

    return Contender(update, list(children() - before))


def bare(floats: int, stack: ExitStack) -> Contender:
    """The same bytes over ZeroMQ, in a process of its own."""
    before, wanted = children(), Setting(floats=floats, workers=1, shards=1, seconds=0.0)
    spawn = multiprocessing.get_context("spawn")
    door, other = spawn.Pipe()
    server = spawn.Process(target=raw_zmq.serve, args=(wanted, 0, other))
    server.start()
    stack.callback(server.join, 10)
    stack.callback(door.send, "stop")
    update, close = raw_zmq.connect(wanted, 0, [door.recv()])
    stack.callback(close)
    return Contender(update, list(children() - before))


def costs(floats: int, seconds: float, rounds: int, folder: Path) -> dict[str, UpdateCost]:
    """The median cost of an update, by case."""
    found: dict[str, list[UpdateCost]] = defaultdict(list)
    with ExitStack() as stack:
        contenders = {BARE: bare(floats, stack)}
        contenders |= {case.name: opened(case, floats, folder, stack) for case in CASES}
        for contender in contenders.values():
            measure_update(contender.update, contender.servers, seconds=seconds / 4)  # warm
        for number in range(rounds):
            for name in random.Random(number).sample(list(contenders), len(contenders)):
                contender = contenders[name]
                found[name].append(
                    measure_update(contender.update, contender.servers, seconds=seconds)
                )
    return {name: median_cost(found[name]) for name in contenders}


def show(floats: int, figures: dict[str, UpdateCost]) -> None:
    """Print a row a case, with the ratio to the least that the system can do."""
    least = figures[LEAST]
    promises = {case.name: case.promise for case in CASES}
    print(f"\n{floats:,} floats each way, TCP, one worker, one shard")
    print(f"{'':32}{'wall us':>10}{'CPU us':>10}{'x wall':>8}{'x CPU':>8}")
    for name, one in figures.items():
        ratios = f"{one.wall_us / least.wall_us:8.2f}{one.cpu_us / least.cpu_us:8.2f}"
        line = f"{name:32}{one.wall_us:10,.0f}{one.cpu_us:10,.0f}{ratios}"
        print(f"{line}  {promises.get(name, '')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--floats", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    kept: dict[str, Any] = {}
    for floats in given.floats:
        Path("runs/bench").mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="promises-", dir="runs/bench"))
        try:
            figures = costs(floats, given.seconds, given.rounds, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        show(floats, figures)
        kept[str(floats)] = {name: one._asdict() for name, one in figures.items()}
    print(f"\nkept in {save('promises', kept | {'cpus': os.cpu_count()})}")


if __name__ == "__main__":
    main()
