"""Shared memory against a Unix socket, TCP, and the shards' own work alone.

One worker pushes and pulls as fast as it can, over each transport in turn, to the same shards, each
in a process. The shards alone are as many processes, to which gradients are handed as arrays,
without a network. Rounds visit all of them in a shuffled order, so that a busy neighbour
slows them alike: compare within a row. CPU seconds are those of all processes together; a GB counts
what is pushed and what is pulled.

    python -m tests.bench.bench_shm [--floats 25000000 1000000] [--shards 1 2] [--rounds 5]
"""

import argparse
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import psutil

import ps
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.processes import process_shards
from ps.transport.transports import Transport
from shards.messages import PROTOCOL, Hello, Join, Kind, Part, Push
from shards.schedules import Fixed
from shards.schema_digest import SCHEMA
from shards.shard import Shard
from shards.spec import ShardSpec
from shards.tables import DenseTable, TensorSpec
from tests.bench.report import Goal, goals, save
from tests.support.shard_dsl import blank

ALONE, AHEAD = "shards alone", "shm, prefetch"
CARRIED = [Transport.SHM, Transport.IPC, Transport.TCP]


class Span(NamedTuple):
    """One contender's share of one round."""

    updates: int
    wall_s: float
    cpu_s: float


Contender = Callable[[float], int]
"""Works for so many seconds; returns how many updates it has made."""


def specs_of(floats: int, shards: int) -> list[ShardSpec]:
    table = DenseTable("bench", (TensorSpec("all", (floats,)),))
    return shard_specs(table, shards=shards, schedule=Fixed(base_rate=1e-3), lease_s=60)


# --- contenders -----------------------------------------------------------------------------------


def worker(
    cluster: ps.Cluster, transport: Transport, stack: ExitStack, *, ahead: bool = False
) -> Contender:
    """A worker that pushes one gradient again and again, and pulls in between.

    `ahead`: it asks for the next weights before it pushes, as training with --prefetch does.
    """
    name = f"{transport}{' ahead' if ahead else ''}"
    client = stack.enter_context(Client(cluster, worker=name, transport=transport))
    assert set(client.transports) == {transport}
    gradient = client.new_gradient(zeroed=False)
    gradient[:] = 1e-3

    def work(seconds: float) -> int:
        updates, until = 0, time.monotonic() + seconds
        while time.monotonic() < until:
            client.pull()
            if ahead:
                client.prefetch(client.clock + 1)
            client.push(gradient)
            updates += 1
        client.flush()
        return updates

    return work


@contextmanager
def alone(specs: list[ShardSpec]) -> Iterator[Contender]:
    """Every shard in a process of its own that is handed its gradients as arrays."""
    spawn = multiprocessing.get_context("spawn")
    pipes = []
    for spec in specs:
        ours, theirs = spawn.Pipe()
        spawn.Process(
            target=_apply_on, args=(spec.layout.size, len(specs), spec.shard, theirs)
        ).start()
        ours.recv()
        pipes.append(ours)

    def work(seconds: float) -> int:
        for pipe in pipes:
            pipe.send(seconds)
        return min(int(pipe.recv()) for pipe in pipes)

    yield work
    for pipe in pipes:
        pipe.send(None)


def _apply_on(floats: int, shards: int, number: int, pipe: Connection) -> None:
    spec = specs_of(floats, shards)[number]
    spec.prepare()
    shard, push = Shard(spec, boot=1), _register(spec)
    gradient = np.full(shard.size, 1e-3, np.float32)
    job = spec.job
    shard.restore(blank(spec=spec))
    shard.handle(b"", Hello(2, job, "w", 0, PROTOCOL, SCHEMA), (), 0.0)
    shard.handle(b"", Join(3, job, "w", 0, 1, 0), (), 0.0)
    pipe.send("ready")
    seq = 0
    while (seconds := pipe.recv()) is not None:
        first, until = seq, time.monotonic() + seconds
        while time.monotonic() < until:
            seq += 1
            shard.handle(b"", push(seq), [gradient.data], time.monotonic())
        assert shard.version == seq
        pipe.send(seq - first)


def _register(spec: ShardSpec) -> Callable[[int], Push]:
    parts = [
        Part(one.table, Kind.F4, one.keys.start, one.keys.stop)
        for one in spec.layout.sections(spec.keys)
    ]

    def push(seq: int) -> Push:
        return Push(
            request=seq + 3,
            job=spec.job,
            worker="w",
            incarnation=0,
            boot=1,
            epoch=spec.map.epoch,
            seq=seq,
            clock=seq,
            step=seq,
            steps=1,
            samples=1,
            read_version=0,
            parts=parts,
            loss=0.0,
            rtt_s=0.0,
            wait_s=0.0,
        )

    return push


# --- measuring ------------------------------------------------------------------------------------


def measure(floats: int, shards: int, rounds: int, seconds: float) -> dict[str, list[Span]]:
    """Every contender's spans at one size."""
    specs = specs_of(floats, shards)
    with ExitStack() as stack:
        cluster = stack.enter_context(process_shards(specs)).cluster
        with ps.AdminClient(cluster) as console:
            console.install(cluster.layout.empty())
        contenders = {str(kind): worker(cluster, kind, stack) for kind in CARRIED}
        contenders[AHEAD] = worker(cluster, Transport.SHM, stack, ahead=True)
        contenders[ALONE] = stack.enter_context(alone(specs))
        spans: dict[str, list[Span]] = {name: [] for name in contenders}
        order, dice = list(contenders), random.Random(7)
        for number in range(rounds + 1):
            dice.shuffle(order)
            for name in order:
                span = _timed(contenders[name], seconds if number else seconds / 2)
                if number:  # the first round warms up
                    spans[name].append(span)
    return spans


def _timed(work: Contender, seconds: float) -> Span:
    wall, cpu = time.monotonic(), _cpu_seconds()
    updates = work(seconds)
    return Span(updates, time.monotonic() - wall, _cpu_seconds() - cpu)


def _cpu_seconds() -> float:
    """Of this process and all that descend from it."""
    own = psutil.Process(os.getpid())
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def rate(spans: list[Span]) -> float:
    """The median of the rounds' updates a second."""
    return statistics.median(span.updates / span.wall_s for span in spans)


def cpu_per_gb(spans: list[Span], floats: int) -> float:
    moved = sum(span.updates for span in spans) * 8 * floats / 1e9
    return sum(span.cpu_s for span in spans) / moved


def ratio(spans: dict[str, list[Span]], name: str, to: str) -> float:
    """The median over rounds of one rate to another of the same round."""
    pairs = zip(spans[name], spans[to], strict=True)
    return statistics.median(
        (one.updates / one.wall_s) / (other.updates / other.wall_s) for one, other in pairs
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--floats", type=int, nargs="+", default=[25_000_000, 1_000_000])
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a contender in a round")
    given = parser.parse_args()
    rows: list[Goal] = []
    figures: dict[str, Any] = {"cores": os.cpu_count()}
    print(f"{'floats':>10} {'shards':>6}  {'':14}{'updates/s':>10}{'CPU s/GB':>10}{'x alone':>9}")
    for floats in given.floats:
        for shards in given.shards:
            spans = measure(floats, shards, given.rounds, given.seconds)
            figures[f"{floats} {shards}"] = spans
            for name, own in spans.items():
                print(
                    f"{floats:10} {shards:6}  {name:14}{rate(own):10.1f}"
                    f"{cpu_per_gb(own, floats):10.3f}{ratio(spans, name, ALONE):9.2f}"
                )
            at = f"{floats / 1e6:g} M, {shards} shard{'s' if shards > 1 else ''}"
            shm = Transport.SHM
            if floats >= 10_000_000:
                for name in (shm, AHEAD):
                    share, what = ratio(spans, name, ALONE), f"{name} against the apply alone"
                    rows.append(Goal(f"{what}, {at}", share, 0.9, at_least=True))
            rows.append(Goal(f"shm, {at}", cpu_per_gb(spans[shm], floats), 0.18, "CPU s/GB"))
            rows.append(
                Goal(f"shm against tcp, {at}", ratio(spans, shm, Transport.TCP), 2.0, "x", True)
            )
    print(save("shm", figures))
    goals(rows)


if __name__ == "__main__":
    main()
