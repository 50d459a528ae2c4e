"""Sparse tables: kernels, the whole path, memory, resharding, conditions, other libraries.

    python tests/bench/bench_sparse.py [--rows 10000000] [--seconds 1] [--rounds 5]

Rows and batches are those of sparse_jobs.py: a step of 8,192 distinct ids has about 17,000 ids. CPU
time is that of worker and shards together. Contenders of a part take turns in a fresh random order
each round; a figure is the median over the rounds. Logs are below runs/bench, whose disk is what is
measured.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ps
from cupy_kernels.ops import rows
from cupy_kernels.ops.rows import Ids
from shards.buffer_pool import reserve
from shards.row_index import RowIndex
from shards.rules import ROW_RULES, Decay
from shards.tables import BUCKETS, META_WORDS, KeyRange
from tests.bench import bench_links
from tests.bench.loops import Step, UpdateCost
from tests.bench.report import FOLDER, Goal, goals, save
from tests.bench.sparse_conditions import (
    Conditions,
    list_condition_goals,
    measure_conditions,
    measure_links,
)
from tests.bench.sparse_jobs import (
    DIM,
    DISTINCT,
    RATE,
    Costs,
    OpenJob,
    Sizes,
    ZipfBatches,
    describe_table,
    make_turn,
    open_job,
    take_turns,
)
from tests.bench.sparse_rivals import open_rivals

RULES = ("adagrad", "row_adagrad", "ftrl", "adam")
OURS = "TCP"
RIVALS = {
    "torch Adagrad": 0.5,
    "torch SparseAdam": 0.35,
    "FBGEMM Adagrad": 1.0,
    "FBGEMM row-wise Adagrad": 1.0,
    "Redis MGET + MSET": 0.1,
}
"""The most CPU time over TCP, by library, as a multiple of the library's."""


# --- kernels --------------------------------------------------------------------------------------


def measure_kernels(sizes: Sizes) -> dict[str, float]:
    """Nanoseconds of CPU a row, on one core, by kernel; and of the same in a dict of rows."""
    rows.prepare()
    stream = ZipfBatches(sizes.rows)
    batches = [np.unique(batch) for batch in stream.draw(DISTINCT)]
    index = RowIndex(KeyRange(0, BUCKETS))
    for low in range(0, sizes.rows, 1 << 20):
        chunk = stream.ids[low : low + (1 << 20)]
        index.insert(chunk, np.arange(low, low + len(chunk)))
    slots = [index.find(batch) for batch in batches]
    distinct = len(batches[0])
    steps: dict[str, Callable[[int], object]] = {"probe": lambda at: index.find(batches[at])}
    gradient = np.full((distinct, DIM), 1e-3, np.float32)
    for name in RULES:
        steps |= _rule_steps(name, sizes.rows, slots, gradient)
    table = {int(number): np.full(2 * DIM, 0.01, np.float32) for number in np.unique(batches)}
    steps["gather, dict"] = lambda at: _gather_of_dict(table, batches[at])
    steps["adagrad, dict"] = lambda at: _update_dict(table, batches[at], gradient)

    def timed(step: Callable[[int], object]) -> Callable[[], UpdateCost]:
        turn = iter(range(10**9))
        return lambda: _measure_here(lambda: step(next(turn) % len(batches)), sizes.seconds / 10)

    costs = take_turns({name: timed(step) for name, step in steps.items()}, sizes.rounds)
    return {name: 1e3 * cost.cpu_us / distinct for name, cost in costs.items()}


def _measure_here(step: Step, seconds: float) -> UpdateCost:
    """The mean cost of a step that only this thread computes, which its own clock resolves."""
    started, used, done, elapsed_s = time.perf_counter(), time.thread_time(), 0, 0.0
    while elapsed_s < seconds:
        step()
        done += 1
        elapsed_s = time.perf_counter() - started
    return UpdateCost(1e6 * elapsed_s / done, 1e6 * (time.thread_time() - used) / done)


def _rule_steps(
    name: str, row_count: int, slots: list[NDArray[np.int64]], gradient: NDArray[np.float32]
) -> dict[str, Callable[[int], object]]:
    rule = ROW_RULES[name]()
    width = DIM * (1 + len(rule.slot_names))
    slab = reserve((row_count, -(-width // 16) * 16), np.float32)
    slab[:] = 0.01
    meta = reserve((row_count, META_WORDS), np.uint32)
    meta[:] = 0

    def update(at: int) -> None:
        rule.apply_rows(slab, meta, slots[at], gradient, rate=RATE, decay=Decay())

    steps: dict[str, Callable[[int], object]] = {name: update}
    if name == "adagrad":
        steps["gather"] = lambda at: rows.gather_rows(slab, slots[at], DIM)
    return steps


def _gather_of_dict(table: dict[int, NDArray[np.float32]], ids: Ids) -> NDArray[np.float32]:
    return np.stack([table[number][:DIM] for number in ids.tolist()])


def _update_dict(
    table: dict[int, NDArray[np.float32]], ids: Ids, gradient: NDArray[np.float32]
) -> None:
    for number, step in zip(ids.tolist(), gradient, strict=True):
        row = table[number]
        row[DIM:] += step * step
        row[:DIM] -= np.float32(RATE) * (step / (np.sqrt(row[DIM:]) + np.float32(1e-8)))


# --- the whole path -------------------------------------------------------------------------------


def measure_path(sizes: Sizes) -> dict[str, Any]:
    """Microseconds of a step, by number of distinct ids and by what computes at the worker."""
    stream = ZipfBatches(sizes.rows)
    with ExitStack() as stack:
        tables = ps.Tables(user=describe_table(sizes))
        single = open_job(tables, stack)
        several = open_job(tables, stack, workers=4, shards=2)
        sharing = open_job(tables, stack, transport="shm")
        empty_bytes = _resident_bytes(single)
        for opened in (single, several, sharing):
            opened.fill(stream)
        bytes_a_row = (_resident_bytes(single) - empty_bytes) / sizes.rows
        contenders = {
            f"{distinct}, {library}": make_turn(single, stream, distinct, library, sizes)
            for distinct in (DISTINCT, 512, 64)
            for library in ("numba", "NumPy")
        }
        for library in ("numba", "NumPy"):
            turn = make_turn(sharing, stream, DISTINCT, library, sizes)
            contenders[f"{DISTINCT}, {library}, shm"] = turn
        contenders["4 x 2"] = make_turn(several, stream, DISTINCT, "numba", sizes)
        figures: dict[str, Any] = {"costs": take_turns(contenders, sizes.rounds)}
        figures["shard's bytes a row"] = bytes_a_row
        figures["reshard s a 100 MB"] = _reshard_seconds(single, sizes)
    return figures


def _resident_bytes(opened: OpenJob) -> int:
    return sum(server.memory_info().rss for server in opened.servers)


def _reshard_seconds(opened: OpenJob, sizes: Sizes) -> float:
    started = time.perf_counter()
    opened.job.reshard(2)
    state_bytes = sizes.rows * (8 + 4 * 2 * DIM + 4 * META_WORDS)
    return (time.perf_counter() - started) * 1e8 / state_bytes


# --- other libraries ------------------------------------------------------------------------------


def measure_rivals(sizes: Sizes) -> tuple[Costs, dict[str, str]]:
    """Microseconds of a step over TCP and of other libraries, in turn; and why some are missing."""
    stream = ZipfBatches(sizes.rows)
    with ExitStack() as stack:
        rivals = open_rivals(stream, sizes, stack)
        opened = open_job(ps.Tables(user=describe_table(sizes)), stack)
        opened.fill(stream)
        ours = {OURS: make_turn(opened, stream, DISTINCT, "numba", sizes)}
        return take_turns({**ours, **rivals.turns}, sizes.rounds), rivals.missing


# --- figures --------------------------------------------------------------------------------------


def list_goals(
    kernels: Mapping[str, float],
    path: Mapping[str, Any],
    conditions: Conditions,
    rivals: Costs,
) -> Iterator[Goal]:
    """The goals of sparse tables, for the default of 10 M rows."""
    for name, target in (
        ("probe", 25.0),
        ("gather", 10),
        ("adagrad", 12),
        ("row_adagrad", 12),
        ("ftrl", 8),
        ("adam", 5),
    ):
        yield Goal(f"sparse: {name}, one core", 1e3 / kernels[name], target, "M rows/s", True)
    for name, target in (("gather", 20.0), ("adagrad", 80.0)):
        ratio = kernels[f"{name}, dict"] / (kernels["probe"] + kernels[name])
        yield Goal(f"sparse: {name} against a dict of rows", ratio, target, "x", True)
    costs: Costs = path["costs"]
    for distinct, target in ((DISTINCT, 1.5), (512, 0.5), (64, 0.08)):
        rate = distinct / costs[f"{distinct}, numba"].wall_us
        yield Goal(f"sparse: {distinct} ids a step, TCP", rate, target, "M rows/s", True)
    rate = DISTINCT / costs[f"{DISTINCT}, numba, shm"].wall_us
    yield Goal(f"sparse: {DISTINCT} ids a step, shared memory", rate, 2.0, "M rows/s", True)
    row_ns = {name: 1e3 * cost.cpu_us / DISTINCT for name, cost in costs.items()}
    numba_ns = row_ns[f"{DISTINCT}, numba"]
    yield Goal("sparse: CPU a row, TCP, numba", numba_ns, 700, "ns")
    yield Goal("sparse: CPU a row, TCP, NumPy", row_ns[f"{DISTINCT}, NumPy"], 1300, "ns")
    for library, target in (("numba", 500.0), ("NumPy", 1100.0)):
        shared_ns = row_ns[f"{DISTINCT}, {library}, shm"]
        yield Goal(f"sparse: CPU a row, shared memory, {library}", shared_ns, target, "ns")
    yield Goal("sparse: CPU a row, 4 x 2 against 1 x 1", row_ns["4 x 2"] / numba_ns, 1.2, "x")
    yield Goal("sparse: memory a row at the shard", path["shard's bytes a row"], 173, "B")
    yield Goal("sparse: reshard, 100 MB", path["reshard s a 100 MB"], 1, "s")
    yield from list_condition_goals(conditions)
    for name, target in RIVALS.items():
        if name in rivals:
            ratio = rivals[OURS].cpu_us / rivals[name].cpu_us
            yield Goal(f"sparse: CPU over TCP against {name}", ratio, target, "x")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    sizes = Sizes(**vars(parser.parse_args(arguments)))
    FOLDER.mkdir(parents=True, exist_ok=True)
    kernels, path = measure_kernels(sizes), measure_path(sizes)
    conditions = measure_conditions(sizes, FOLDER)
    rivals, missing = measure_rivals(sizes)
    if why := bench_links.missing():
        missing["a line with latency"] = why
    else:
        conditions = conditions._replace(link_ms=measure_links(sizes))
    for name, nanoseconds in kernels.items():
        print(f"{name:24}{nanoseconds:10.0f} ns of CPU a row")
    for name, cost in {**path["costs"], **conditions.costs, **rivals}.items():
        print(f"{name:24}{cost.wall_us:10.0f} us a step{cost.cpu_us:10.0f} us of CPU")
    for rtt_ms, milliseconds in conditions.link_ms.items():
        print(f"{rtt_ms:3} ms, prefetched      {1e3 * milliseconds:10.0f} us a step")
    print(f"bare disk               {conditions.disk_mb_per_s:10.0f} MB/s")
    for name, reason in missing.items():
        print(f"not measured: {name}: {reason}")
    figures = {"kernels": kernels, "path": path, "conditions": conditions, "others": rivals}
    print(save("sparse", {"sizes": sizes._asdict(), **figures}))
    goals(list_goals(kernels, path, conditions, rivals))


if __name__ == "__main__":
    main()
