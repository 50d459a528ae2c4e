"""Sparse tables: kernels, the whole path, memory, resharding, and other libraries.

    python tests/bench/bench_sparse.py [--rows 10000000] [--seconds 1] [--rounds 5]

Rows of 16 floats under Adagrad, drawn by Zipf's law of exponent 1.05. A row that a step pulls and
pushes counts once, and the time of finding distinct ids, of handing out rows in the order of the
batch and of adding gradients up is part of it. A step of n distinct ids draws until it has them; of
8,192 that takes about 17,000 ids. CPU time is that of worker and shards together. Contenders of a
part take turns in a fresh random order each round; a figure is the median over the rounds.
"""

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray

import ps
from cupy_kernels.ops import rows
from cupy_kernels.ops.rows import Ids, mix
from shards.buffer_pool import reserve
from shards.row_index import RowIndex
from shards.rules import ROW_RULES, Decay
from shards.tables import BUCKETS, META_WORDS, KeyRange
from tests.bench.loops import UpdateCost, measure_update
from tests.bench.report import Goal, goals, save

DIM, RATE = 16, 0.05
DISTINCT = 8192
BATCHES = 40
RULES = ("adagrad", "row_adagrad", "ftrl", "adam")

Step = Callable[[], object]
Costs = dict[str, UpdateCost]


class Sizes(NamedTuple):
    """How much is measured: rows of a table, seconds of a turn, and rounds of turns."""

    rows: int
    seconds: float
    rounds: int


class ZipfBatches:
    """Batches of ids, drawn by Zipf's law from `rows` ids in random order."""

    def __init__(self, row_count: int) -> None:
        self.ids: Ids = mix(np.arange(1, row_count + 1, dtype=np.uint64))
        total = np.cumsum(np.arange(1, row_count + 1) ** -1.05)
        self._shares = total / total[-1]

    def draw(self, distinct: int, count: int = BATCHES) -> list[Ids]:
        """Batches of this number of distinct ids, or of all that there are."""
        dice = np.random.default_rng(distinct)
        return [self._draw_batch(dice, min(distinct, len(self.ids) // 2)) for _ in range(count)]

    def _draw_batch(self, dice: np.random.Generator, distinct: int) -> Ids:
        drawn = np.zeros(0, np.int64)
        while True:
            more = np.searchsorted(self._shares, dice.random(4 * distinct))
            drawn = np.concatenate([drawn, more])
            _, first = np.unique(drawn, return_index=True)
            if len(first) >= distinct:
                return self.ids[drawn[: np.sort(first)[distinct - 1] + 1]]


def take_turns(contenders: Mapping[str, Callable[[], UpdateCost]], rounds: int) -> Costs:
    """The median cost of each contender; one round more comes first and warms up."""
    costs: dict[str, list[UpdateCost]] = defaultdict(list)
    for number in range(rounds + 1):
        for name in random.Random(number).sample(list(contenders), len(contenders)):
            cost = contenders[name]()
            if number:
                costs[name].append(cost)
    return {
        name: UpdateCost(*(statistics.median(values) for values in zip(*costs[name], strict=True)))
        for name in contenders
    }


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


class OpenJob(NamedTuple):
    """A job of one sparse table with its workers, and the processes of its shards."""

    job: Any
    workers: list[ps.Worker]
    servers: list[psutil.Process]

    def step(
        self,
        batch: Ids,
        gradient: NDArray[np.float32],
        worker: int = 0,
        ahead: Ids | None = None,
    ) -> None:
        """Pull and push the rows of a batch; those of the batch `ahead` are requested meanwhile."""
        me = self.workers[worker]
        with me.step(samples=1, gather={"user": batch}) as step:
            step.rows("user")
            if ahead is not None:
                me.prefetch(gather={"user": ahead})
            step.scatter("user", gradient[: len(batch)])


def open_job(
    sizes: Sizes, stack: ExitStack, workers: int = 1, shards: int = 1, transport: str = "tcp"
) -> OpenJob:
    """Start a job in processes, and workers in this one."""
    before = set(psutil.Process().children(recursive=True))
    table = ps.Sparse(DIM, rule=ps.Adagrad(), rate=RATE, rows=max(1000, 2 * sizes.rows))
    tables = ps.Tables(user=table)
    job = stack.enter_context(
        ps.start(tables, shards=shards, workers=workers, lease_s=60.0, transport=transport)
    )
    servers = list(set(psutil.Process().children(recursive=True)) - before)
    members = [stack.enter_context(job.worker(f"w{number}")) for number in range(workers)]
    return OpenJob(job, members, servers)


def fill(opened: OpenJob, stream: ZipfBatches) -> None:
    """Push every row once."""
    gradient = np.full((1 << 17, DIM), 1e-3, np.float32)
    for low in range(0, len(stream.ids), 1 << 17):
        opened.step(stream.ids[low : low + (1 << 17)], gradient)
    for me in opened.workers:
        me.flush()


def measure_path(sizes: Sizes) -> dict[str, Any]:
    """Microseconds of a step, by number of distinct ids and by what computes at the worker."""
    stream = ZipfBatches(sizes.rows)
    with ExitStack() as stack:
        single, several = open_job(sizes, stack), open_job(sizes, stack, workers=4, shards=2)
        sharing = open_job(sizes, stack, transport="shm")
        empty_bytes = _resident_bytes(single)
        for opened in (single, several, sharing):
            fill(opened, stream)
        bytes_a_row = (_resident_bytes(single) - empty_bytes) / sizes.rows
        contenders = {
            f"{distinct}, {library}": _path_turn(single, stream, distinct, library, sizes)
            for distinct in (DISTINCT, 512, 64)
            for library in ("numba", "NumPy")
        }
        for library in ("numba", "NumPy"):
            turn = _path_turn(sharing, stream, DISTINCT, library, sizes)
            contenders[f"{DISTINCT}, {library}, shm"] = turn
        contenders["4 x 2"] = _path_turn(several, stream, DISTINCT, "numba", sizes)
        figures: dict[str, Any] = {"costs": take_turns(contenders, sizes.rounds)}
        figures["shard's bytes a row"] = bytes_a_row
        figures["reshard s a 100 MB"] = _reshard_seconds(single, sizes)
    return figures


def _path_turn(
    opened: OpenJob, stream: ZipfBatches, distinct: int, library: str, sizes: Sizes
) -> Callable[[], UpdateCost]:
    batches = stream.draw(distinct)
    gradient = np.full((max(map(len, batches)), DIM), 1e-3, np.float32)
    turn = iter(range(10**9))

    def step() -> None:
        at = next(turn)
        # Small steps compute too little to hide a request behind it.
        ahead = batches[(at + len(opened.workers)) % len(batches)] if distinct == DISTINCT else None
        opened.step(batches[at % len(batches)], gradient, at % len(opened.workers), ahead)

    def measure() -> UpdateCost:
        rows.use(compiled=library == "numba")
        return measure_update(step, opened.servers, seconds=sizes.seconds)

    return measure


def _resident_bytes(opened: OpenJob) -> int:
    return sum(server.memory_info().rss for server in opened.servers)


def _reshard_seconds(opened: OpenJob, sizes: Sizes) -> float:
    started = time.perf_counter()
    opened.job.reshard(2)
    state_bytes = sizes.rows * (8 + 4 * 2 * DIM + 4 * META_WORDS)
    return (time.perf_counter() - started) * 1e8 / state_bytes


# --- other libraries ------------------------------------------------------------------------------


def measure_torch(sizes: Sizes) -> Costs:
    """PyTorch's embedding bags in this process, with the vocabulary that they need."""
    import torch  # only where it is installed

    torch.set_num_threads(1)
    stream = ZipfBatches(sizes.rows)
    order = {int(number): at for at, number in enumerate(stream.ids.tolist())}
    batches = [np.array([order[n] for n in batch.tolist()]) for batch in stream.draw(DISTINCT)]

    def turn(make: Callable[[Any], Any]) -> Callable[[], UpdateCost]:
        bag = torch.nn.EmbeddingBag(sizes.rows, DIM, mode="sum", sparse=True)
        optimiser, number = make(list(bag.parameters())), iter(range(10**9))

        def step() -> None:
            ids = torch.from_numpy(batches[next(number) % len(batches)])
            bag(ids, torch.arange(0, len(ids), 8)).sum().backward()
            optimiser.step()
            optimiser.zero_grad()

        return lambda: _measure_here(step, sizes.seconds)

    return take_turns(
        {
            "torch Adagrad": turn(lambda given: torch.optim.Adagrad(given, lr=RATE)),
            "torch SparseAdam": turn(lambda given: torch.optim.SparseAdam(given, lr=RATE)),
        },
        sizes.rounds,
    )


# --- figures --------------------------------------------------------------------------------------


def list_goals(
    kernels: Mapping[str, float], path: Mapping[str, Any], others: Costs
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
    for name, target in (("torch Adagrad", 0.5), ("torch SparseAdam", 0.35)):
        if name in others:
            ratio = costs[f"{DISTINCT}, numba"].cpu_us / others[name].cpu_us
            yield Goal(f"sparse: CPU over TCP against {name} alone", ratio, target, "x")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    sizes = Sizes(**vars(parser.parse_args(arguments)))
    kernels, path = measure_kernels(sizes), measure_path(sizes)
    others: Costs = {}
    if find_spec("torch"):
        others = measure_torch(sizes)
    else:
        print("not measured: PyTorch (not installed)")
    print("not measured: Redis, FBGEMM (no adapter here)")
    for name, nanoseconds in kernels.items():
        print(f"{name:24}{nanoseconds:10.0f} ns of CPU a row")
    for name, cost in {**path["costs"], **others}.items():
        print(f"{name:24}{cost.wall_us:10.0f} us a step{cost.cpu_us:10.0f} us of CPU")
    print(save("sparse", {"sizes": sizes._asdict(), "kernels": kernels, "path": path} | others))
    goals(list_goals(kernels, path, others))


if __name__ == "__main__":
    main()
