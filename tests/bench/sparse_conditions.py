"""Steps of rows under conditions: durable shards, a slow link, and dense tables in the same job."""

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

import ps
from tests.bench.bench_durability import raw_disk
from tests.bench.bench_links import FAR_HOST, build_line, line
from tests.bench.loops import UpdateCost, measure_update
from tests.bench.report import Goal
from tests.bench.sparse_jobs import (
    DIM,
    DISTINCT,
    FILLED_AT_ONCE,
    Costs,
    Sizes,
    Turn,
    ZipfBatches,
    describe_table,
    make_turn,
    open_job,
    take_turns,
)

RTT_MS = 100
NET_FLOATS = 1_000_000
_LINE_RATE = 1.25e9  # bytes a second
_BUFFERS = "4096 131072 67108864"
_AHEAD = 32  # steps that are requested early
_WARM_S = 5.0  # in which TCP finds its window
_ROW_BYTES = 8 + 4 * DIM  # of a push: its id and its gradient
_LINK_ROWS = 200_000  # a line carries the table once in each round


class Conditions(NamedTuple):
    """Costs of a step by condition, MB/s of the bare disk, and ms of a step by round trip.

    Without a line there are no round trips.
    """

    costs: Costs
    disk_mb_per_s: float
    link_ms: dict[int, float]


def measure_conditions(sizes: Sizes, folder: Path) -> Conditions:
    """Measure each condition in turn with the plain job; logs are below `folder`."""
    stream = ZipfBatches(sizes.rows)
    rows = describe_table(sizes)
    net = ps.Dense.like({"w": np.zeros(NET_FLOATS, np.float32)})
    with ExitStack() as stack:
        logs = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
        kinds: Mapping[str, dict[str, Any]] = {
            "plain": {},
            "replicated": {"durability": "replicated", "silence_s": 30.0},
            "logged": {"durability": "logged", "logs": logs},
        }
        turns: dict[str, Turn] = {}
        for name, options in kinds.items():
            opened = open_job(ps.Tables(user=rows), stack, **options)
            opened.fill(stream)
            turns[name] = make_turn(opened, stream, DISTINCT, "numba", sizes)
        alone = open_job(ps.Tables(net=net), stack)
        beside = open_job(ps.Tables(net=net, user=rows), stack)
        beside.fill(stream)
        for name, opened in (("net alone", alone), ("net beside rows", beside)):
            turns[name] = _make_dense_turn(opened.workers[0], opened.servers, sizes)
        disk: list[float] = []

        def write() -> UpdateCost:
            floats = DISTINCT * _ROW_BYTES // 4
            disk.append(1e3 * raw_disk(floats, sizes.seconds, Path(logs)))
            return UpdateCost(0.0, 0.0)

        costs = take_turns({**turns, "disk": write}, sizes.rounds)
        del costs["disk"]
    return Conditions(costs, statistics.median(disk[1:]), {})


def _make_dense_turn(me: ps.Worker, servers: list[psutil.Process], sizes: Sizes) -> Turn:
    gradient = {"w": np.full(NET_FLOATS, 1e-6, np.float32)}

    def step() -> None:
        with me.step(samples=1) as opened:
            opened.pull("net")
            opened.push("net", gradient)

    return lambda: measure_update(step, servers, seconds=sizes.seconds)


def list_condition_goals(conditions: Conditions) -> Iterator[Goal]:
    """The goals of the conditions that were measured."""
    costs = conditions.costs
    doubled = costs["replicated"].cpu_us / costs["plain"].cpu_us
    yield Goal("sparse: CPU replicated against one copy", doubled, 2.2, "x")
    logged = DISTINCT * _ROW_BYTES / costs["logged"].wall_us
    share = logged / conditions.disk_mb_per_s
    yield Goal("sparse: logged against the bare disk", share, 0.8, "x", True)
    beside = costs["net beside rows"].cpu_us / costs["net alone"].cpu_us
    yield Goal("sparse: CPU of a dense table beside rows", beside, 1.03, "x")
    if conditions.link_ms:
        share = conditions.link_ms[0] / conditions.link_ms[RTT_MS]
        yield Goal(f"sparse: rate over {RTT_MS} ms, prefetched", share, 0.9, "x", True)


# --- the line -------------------------------------------------------------------------------------


def measure_links(sizes: Sizes) -> dict[int, float]:
    """Milliseconds of a step with and without the delay, in turn; medians."""
    taken: dict[int, list[float]] = {0: [], RTT_MS: []}
    with tempfile.TemporaryDirectory() as folder:
        binary = build_line(Path(folder))
        for number in range(sizes.rounds):
            for rtt_ms in random.Random(number).sample(list(taken), len(taken)):
                taken[rtt_ms].append(_measure_line(binary, rtt_ms, sizes))
    return {rtt_ms: statistics.median(values) for rtt_ms, values in taken.items()}


def _measure_line(binary: Path, rtt_ms: int, sizes: Sizes) -> float:
    rows = str(min(sizes.rows, _LINK_ROWS))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        near, far = stack.enter_context(line(binary, rtt_ms, _BUFFERS, None, _LINE_RATE))
        here = [sys.executable, "-m", __name__, "--cluster", str(folder / "cluster.json")]
        here += ["--rows", rows, "--seconds", str(3 * sizes.seconds)]
        server = stack.enter_context(
            subprocess.Popen(
                ["ip", "netns", "exec", far, *here, "--serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        stack.callback(server.communicate)
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n", "the shard did not start"
        worker = ["ip", "netns", "exec", near, *here]
        return float(subprocess.run(worker, stdout=subprocess.PIPE, check=True).stdout)


def serve(cluster: Path, sizes: Sizes) -> None:
    """Hold the shard until the standard input ends."""
    tables = ps.Tables(user=describe_table(sizes))
    with ps.start(tables, host=FAR_HOST, secure=False, lease_s=60.0, transport="tcp") as job:
        job.save(cluster)
        print("ready", flush=True)
        sys.stdin.read()


def work(cluster: Path, sizes: Sizes) -> None:
    """Print the milliseconds of a step whose rows are requested ahead."""
    stream = ZipfBatches(sizes.rows)
    batches = stream.draw(DISTINCT)
    gradient = np.full((FILLED_AT_ONCE, DIM), 1e-3, np.float32)
    with ps.connect(cluster) as job, job.worker("w0") as me:
        first_ids = stream.ids[:FILLED_AT_ONCE]
        with me.step(gather={"user": first_ids}) as step:
            step.scatter("user", gradient[: len(first_ids)])
        for batch in batches[:_AHEAD]:
            me.prefetch(gather={"user": batch})
        begun, counted, first, until = 0.0, 0, 0, time.monotonic() + _WARM_S
        while not begun or time.monotonic() < begun + sizes.seconds:
            batch = batches[counted % len(batches)]
            me.prefetch(gather={"user": batches[(counted + _AHEAD) % len(batches)]})
            with me.step(samples=1, gather={"user": batch}) as step:
                step.rows("user")
                step.scatter("user", gradient[: len(batch)])
            counted += 1
            if not begun and time.monotonic() > until:
                me.flush()
                begun, first = time.monotonic(), counted
        me.flush()
        print(1e3 * (time.monotonic() - begun) / (counted - first))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--cluster", type=Path, required=True)
    options.add_argument("--rows", type=int, required=True)
    options.add_argument("--seconds", type=float, required=True)
    options.add_argument("--serve", action="store_true")
    given = options.parse_args()
    sizes = Sizes(given.rows, given.seconds, 1)
    (serve if given.serve else work)(given.cluster, sizes)


if __name__ == "__main__":
    main()
