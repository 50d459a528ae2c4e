"""The ids, jobs and turns that the benchmarks of sparse tables share.

Rows of 16 floats under Adagrad, drawn by Zipf's law of exponent 1.05. A row that a step pulls and
pushes counts once, and the time of finding distinct ids, of handing out rows in the order of the
batch and of adding gradients up is part of it.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray

import ps
from cupy_kernels.ops import rows
from cupy_kernels.ops.rows import Ids, mix
from tests.bench.loops import UpdateCost, measure_update, median_cost

DIM, RATE = 16, 0.05
DISTINCT = 8192
BATCHES = 40
FILLED_AT_ONCE = 1 << 17

Turn = Callable[[], UpdateCost]
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

    def find_positions(self, batches: list[Ids]) -> list[NDArray[np.int64]]:
        """Batches as positions in a vocabulary of all ids, in which frequent ids are scattered."""
        vocabulary = np.sort(self.ids)
        return [np.searchsorted(vocabulary, batch) for batch in batches]


def take_turns(contenders: Mapping[str, Turn], rounds: int) -> Costs:
    """The median cost of each contender; one round more comes first and warms up."""
    costs: dict[str, list[UpdateCost]] = defaultdict(list)
    for number in range(rounds + 1):
        for name in random.Random(number).sample(list(contenders), len(contenders)):
            cost = contenders[name]()
            if number:
                costs[name].append(cost)
    return {name: median_cost(costs[name]) for name in contenders}


class OpenJob(NamedTuple):
    """A job with a sparse table and its workers, and the processes of its shards."""

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

    def fill(self, stream: ZipfBatches) -> None:
        """Push every row once."""
        gradient = np.full((FILLED_AT_ONCE, DIM), 1e-3, np.float32)
        for low in range(0, len(stream.ids), FILLED_AT_ONCE):
            self.step(stream.ids[low : low + FILLED_AT_ONCE], gradient)
        for me in self.workers:
            me.flush()


def describe_table(sizes: Sizes) -> ps.Sparse:
    """A sparse table with room for twice the rows."""
    return ps.Sparse(DIM, rule=ps.Adagrad(), rate=RATE, rows=max(1000, 2 * sizes.rows))


def open_job(
    tables: ps.Tables, stack: ExitStack, workers: int = 1, shards: int = 1, **options: Any
) -> OpenJob:
    """Start a job in processes, by default over TCP, and workers in this one."""
    options = {"lease_s": 60.0, "transport": "tcp", **options}
    if "durability" not in options:
        options["rollback_s"] = 0  # saves of all rows would fall into some turns, not into others
    before = set(psutil.Process().children(recursive=True))
    job = stack.enter_context(ps.start(tables, shards=shards, workers=workers, **options))
    members = [stack.enter_context(job.worker(f"w{number}")) for number in range(workers)]
    # The shards have answered: what was only there to start them has ended.
    servers = list(set(psutil.Process().children(recursive=True)) - before)
    return OpenJob(job, members, servers)


def make_turn(
    opened: OpenJob, stream: ZipfBatches, distinct: int, library: str, sizes: Sizes
) -> Turn:
    """A turn of steps of this number of distinct ids; `library` computes at the worker."""
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
