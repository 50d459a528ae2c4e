"""`updates.parquet`: a folder of parts, one row for each update and each shard that applied it.

The shards' records (shards/update_records.py) are written as they are collected. A Parquet file is
readable only once its footer is written, so each part is one file of its own: it grows under a
temporary name, and appears under its name, `part-000000.parquet` and so on, when it is closed. That
happens every `part_s` seconds, so the record can be read while the run continues, and a run that is
killed loses the rows of one part at most. Readers of Parquet take the folder as one table: they
ignore names that begin with a dot.

If the disk is full, the rows of the open part are lost, and the next part is tried; all rows are
still counted.

A resumed run continues the folder. Rows of updates applied after the snapshot that it resumes from
are removed, because the weights no longer contain them.

Versions continue to count when a job is resharded, so (shard, apply_version) still identifies a
row. Shards that were added have no early rows, and shards that were removed have no late ones.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ps.closing_context import ClosingContext
from ps.whole_files import PARTIAL, Flush, put_in_place
from shards.errors import UNDECODABLE, BadInput, GiveUp, quote
from shards.update_records import RECORD
from worker.training.figures import TALLIED, Rows, UpdateTally


class UpdateColumn(NamedTuple):
    """A column of the file: its Arrow type, its unit ("" for none) and its meaning, in Markdown."""

    type: Any
    unit: str
    meaning: str


COLUMNS = {
    "job": UpdateColumn(
        pa.string(),
        "",
        "The job's public name: its name, and a digest of its id, which is a secret. A resumed "
        "run is a new job.",
    ),
    "seed": UpdateColumn(pa.int64(), "", "The seed of everything random in the run."),
    "worker": UpdateColumn(pa.string(), "", "The name of the worker that pushed."),
    "shard": UpdateColumn(pa.int32(), "", "The number of the shard that applied the push."),
    "seq": UpdateColumn(pa.int64(), "", "The number of the push among its worker's."),
    "read_version": UpdateColumn(
        pa.int64(),
        "versions",
        "The version the gradient was computed from; with several steps in a push, the version "
        "the first of them was.",
    ),
    "apply_version": UpdateColumn(
        pa.int64(),
        "versions",
        "The version that the push made, or is part of: all pushes of a round, or of a buffer, "
        "share it.",
    ),
    "staleness": UpdateColumn(
        pa.int64(),
        "versions",
        "Versions made between the two: `apply_version` - 1 - `read_version`.",
    ),
    "wall_age_s": UpdateColumn(
        pa.float64(),
        "seconds",
        "Time from when the shard sent `read_version` to this worker to when it applied the push. "
        "Null if the shard does not remember the read.",
    ),
    "clock_gap": UpdateColumn(pa.int64(), "steps", "The clock gap right after the push."),
    "wait_s": UpdateColumn(
        pa.float64(),
        "seconds",
        "How long the worker waited at the gate before the last step in the push. Waiting that a "
        "prefetch has hidden does not count.",
    ),
    "compute_s": UpdateColumn(
        pa.float64(),
        "seconds",
        "How long the worker computed for the steps in the push. Null if its loop does not say.",
    ),
    "data_s": UpdateColumn(
        pa.float64(),
        "seconds",
        "How long it waited for the batches of these steps. Null if its loop does not say.",
    ),
    "network_s": UpdateColumn(
        pa.float64(),
        "seconds",
        "How long it waited, since its previous push, for answers that the gate did not hold back.",
    ),
    "bytes": UpdateColumn(
        pa.int64(), "bytes", "The size of the gradient that this shard got, without the header."
    ),
    "rtt_s": UpdateColumn(
        pa.float64(),
        "seconds",
        "Round trip of the worker's latest push that was acknowledged before this one was sent: "
        "from sending it until the worker had seen the answers of all shards. Null if there was "
        "none yet.",
    ),
    "rate": UpdateColumn(
        pa.float64(),
        "",
        "The learning rate of the schedule, before `scale` and the multipliers of single tensors.",
    ),
    "scale": UpdateColumn(
        pa.float64(),
        "",
        "The strategy's factor on the rate: by the staleness of the push, or the number of "
        "workers. 0 for a push that was dropped.",
    ),
    "dropped": UpdateColumn(
        pa.int64(),
        "",
        "1 for a push that was dropped, too late for its round or too stale, else 0.",
    ),
    "deduplicated": UpdateColumn(
        pa.int64(),
        "",
        "Repetitions of this worker's pushes that the shard has recognised since its previous row.",
    ),
    "pass_pushes": UpdateColumn(
        pa.int64(),
        "",
        "How many pushes the shard applied in the same pass over the weights, this one included. "
        "The sum of several gradients rounds differently from one update after another.",
    ),
    "gradient_norm": UpdateColumn(
        pa.float64(), "", "Euclidean norm of the gradient that this shard got."
    ),
    "loss": UpdateColumn(
        pa.float64(), "", "Mean training loss of the steps in the push. Null if it is not a number."
    ),
    "clock": UpdateColumn(pa.int64(), "steps", "The worker's clock with this push."),
    "incarnation": UpdateColumn(pa.int64(), "", "Which incarnation of the worker pushed."),
    "steps": UpdateColumn(pa.int64(), "steps", "How many steps the push holds."),
    "samples": UpdateColumn(pa.int64(), "samples", "How many training examples these steps saw."),
    "time": UpdateColumn(
        pa.float64(),
        "seconds",
        "When the push was applied: 0 is the first row of its shard, and a resumed run continues "
        "counting where the kept rows end.",
    ),
}
SCHEMA = pa.schema([(name, column.type) for name, column in COLUMNS.items()])

PART_S = 60.0
_GROUP_ROWS = 1 << 15
_ROWS = "downpour.rows"  # a second row count in the footer, which no page checksum covers
# Times that a worker has not measured yet, or that a shard cannot know, arrive as 0.
_ZERO_IS_UNKNOWN = frozenset({"rtt_s", "wall_age_s", "compute_s", "data_s"})


class UpdatesWriter(ClosingContext):
    """The open `updates.parquet` of a run; a context manager.

    `fresh` tallies the new rows, `kept` those of the resumed run; `fresh_samples` is the number of
    samples in `fresh`, counted once per update and not once per shard. `earlier_s` are the seconds
    of training up to the last kept row. `lost` is set once the disk has failed, and rows with it.
    """

    def __init__(
        self,
        path: Path,
        *,
        job: str,
        seed: int,
        restored: Sequence[int] | None = None,
        part_s: float = PART_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the folder `path`, or continue it if `restored` gives each shard's version.

        Raises BadInput if a part cannot be read, GiveUp if the disk is full or fails.
        """
        self.path = path
        self.fresh = self.earlier = UpdateTally()
        self.fresh_samples = 0
        self.earlier_s = 0.0
        self.lost = False
        self._job, self._seed = job, seed
        self._part_s, self._clock = part_s, clock
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._begun_at: float | None = None  # when the open part got its first row
        self._origins: dict[int, float] = {}
        self._ends: dict[int, float] = {}
        self._moved_at = 0.0
        try:
            if path.is_file():  # of an earlier version, with fewer columns
                path.rename(path.with_name(f"{path.name}.former"))
            path.mkdir(mode=0o700, exist_ok=True)
            for remnant in path.glob(".*"):
                remnant.unlink()
            if restored is not None:
                self._keep(restored)
                self.earlier_s = max(self._ends.values(), default=0.0)
        except OSError as error:
            raise _write_error(path, error) from None
        numbers = [int(part.stem.rpartition("-")[2]) for part in parts_of(path)]
        self._part = _PartFile(path, max(numbers, default=-1) + 1)

    def write(self, records: Sequence[Rows]) -> None:
        """Add one array of dtype RECORD per shard, in the order of the shards.

        Raises GiveUp if the disk is full or fails, but only the first time.
        """
        self.fresh += UpdateTally.of(records)
        if records:
            self.fresh_samples += int(records[0]["samples"].sum())
        for shard, rows in enumerate(records):
            if len(rows):
                self._add(self._batch(shard, rows))
        if self._begun_at is not None and self._clock() - self._begun_at >= self._part_s:
            self._close_part()

    def restart_clocks(self) -> None:
        """The job was resharded: further records are from other shards, with their own clocks."""
        self._moved_at = max(self._ends.values(), default=0.0)
        self._origins.clear()
        self._ends.clear()

    def close(self) -> None:
        """Close the open part; closing twice does nothing. A run without rows leaves one part."""
        if self._begun_at is not None or not (self.lost or parts_of(self.path)):
            self._close_part()

    def _keep(self, restored: Sequence[int]) -> None:
        """Remove the rows of updates that the restored versions do not contain.

        Every part is read before the first one changes.
        """
        counts = {part: self._count(part, restored) for part in parts_of(self.path)}
        for number, (part, (remaining, total)) in enumerate(counts.items()):
            if not remaining:
                part.unlink()
            elif remaining < total:
                shorter = _PartFile(self.path, number)
                batches = [_select_restored(batch, restored) for batch in _read_part(part)]
                shorter.write(pa.Table.from_batches(batches, SCHEMA))
                shorter.close(part)

    def _count(self, part: Path, restored: Sequence[int]) -> tuple[int, int]:
        """Tally the rows of a part that the restored versions contain; returns these and all."""
        remaining = total = 0
        for batch in _read_part(part):
            total += batch.num_rows
            batch = _select_restored(batch, restored)
            remaining += batch.num_rows
            self.earlier += UpdateTally.of([columns_of(batch, TALLIED)])
            shards, times = batch.column("shard").to_numpy(), batch.column("time").to_numpy()
            for shard in np.unique(shards).tolist():
                last = float(times[shards == shard].max())
                self._ends[shard] = max(self._ends.get(shard, 0.0), last)
        return remaining, total

    def _batch(self, shard: int, rows: Rows) -> pa.RecordBatch:
        count = len(rows)
        begins_at = self._ends.get(shard, self._moved_at)
        origin = self._origins.setdefault(shard, float(rows["time"][0]) - begins_at)
        self._ends[shard] = float(rows["time"][-1]) - origin
        columns = {name: _column(name, rows[name]) for name in RECORD.names or ()}
        columns |= {
            "job": pa.repeat(self._job, count),
            "seed": pa.repeat(self._seed, count),
            "shard": pa.repeat(shard, count),
            "worker": _names(rows["worker"]),
            "time": pa.array(rows["time"] - origin),
        }
        return pa.record_batch(
            [columns[field.name].cast(field.type) for field in SCHEMA], schema=SCHEMA
        )

    def _add(self, batch: pa.RecordBatch) -> None:
        if self._begun_at is None:
            self._begun_at = self._clock()
        self._waiting.append(batch)
        self._waiting_rows += batch.num_rows
        if self._waiting_rows >= _GROUP_ROWS:
            with self._failing():
                self._flush()

    def _flush(self) -> None:
        waiting, self._waiting, self._waiting_rows = self._waiting, [], 0
        self._part.write(pa.Table.from_batches(waiting, SCHEMA))

    def _close_part(self) -> None:
        self._begun_at = None
        with self._failing():
            self._flush()
            self._part.close(self._part.target)
            self._part = _PartFile(self.path, self._part.number + 1)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Drop the open part if the disk fails, and raise GiveUp if that is the first time."""
        try:
            yield
        except OSError as error:
            self._part.discard()
            first, self.lost = not self.lost, True
            if first:
                raise _write_error(self.path, error) from None


class _PartFile:
    """One part while it is written, under a temporary name. All methods may raise OSError."""

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        self.target = folder / _name(number)
        self._partial = folder / f".{_name(number)}{PARTIAL}"
        self._writer: Any = None
        self._rows = 0

    def write(self, table: pa.Table) -> None:
        """Add a row group."""
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._partial, SCHEMA, compression="zstd", write_page_checksum=True
            )
        self._rows += table.num_rows
        if table.num_rows:
            self._writer.write_table(table)

    def close(self, target: Path) -> None:
        """Write the footer, and give the part its name once it is on disk."""
        writer, self._writer = self._writer, None
        writer.add_key_value_metadata({_ROWS: str(self._rows)})
        writer.close()
        put_in_place(self._partial, target, Flush.CONTENT)

    def discard(self) -> None:
        """Remove what is written."""
        writer, self._writer, self._rows = self._writer, None, 0
        with suppress(OSError):  # On a full disk, writing the footer fails as well.
            if writer is not None:
                writer.close()
        with suppress(OSError):
            self._partial.unlink()


def parts_of(path: Path) -> list[Path]:
    """The closed parts of a record of updates, in order."""
    return sorted(path.glob("part-*.parquet"))


def read_updates(
    path: Path, columns: Sequence[str] | None = None, shard: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Read the rows of an `updates.parquet` in batches, in the order applied on each shard.

    The run may be under way: its open part is left out. `columns` and `shard` select a part.
    Raises BadInput for an invalid part, or without a folder.
    """
    if not path.is_dir():
        raise BadInput(path, expected="a folder of updates", got="none")
    for part in parts_of(path):
        yield from _read_part(part, columns, shard)


def columns_of(batch: pa.RecordBatch, names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """These columns of a batch as arrays; an unknown value is NaN."""
    return {name: batch.column(name).to_numpy(zero_copy_only=False) for name in names}


def _name(number: int) -> str:
    return f"part-{number:06}.parquet"


def _select_restored(batch: pa.RecordBatch, restored: Sequence[int]) -> pa.RecordBatch:
    """The rows of updates that the restored versions contain.

    Of a shard that the snapshot no longer has, these are the rows from before the resharding.
    """
    shards = batch.column("shard").to_numpy()
    every = max(len(restored), 1 + int(shards.max(initial=0)))
    upto = np.full(every, min(restored), np.int64)
    upto[: len(restored)] = restored
    return batch.filter(pa.array(batch.column("apply_version").to_numpy() <= upto[shards]))


def _read_part(
    path: Path, columns: Sequence[str] | None = None, shard: int | None = None
) -> Iterator[pa.RecordBatch]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _check_footer(path, file)
            names = list(columns or SCHEMA.names)
            remaining = file.metadata.num_rows
            for batch in file.iter_batches(columns=sorted({"shard", *names})):
                remaining -= batch.num_rows
                if shard is not None:
                    batch = batch.filter(pc.equal(batch.column("shard"), shard))
                yield batch.select(names)
            if remaining:  # pyarrow skips an invalid page silently
                rows = file.metadata.num_rows
                raise BadInput(path, expected=f"{rows} rows", got=rows - remaining)
    except (pa.ArrowException, MemoryError, *UNDECODABLE) as error:
        text = quote(str(error).partition("\n")[0], 200)
        raise BadInput(path, expected=f"a record of updates: {text}") from None
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or quote(str(error), 200)}") from None


def _check_footer(path: Path, file: pq.ParquetFile) -> None:
    """Raise BadInput unless the footer lists the columns of updates and all row counts agree."""
    schema = file.schema_arrow
    lacking = sorted(set(SCHEMA.names) - set(schema.names))
    if lacking:
        raise BadInput(path, expected="the columns of updates", got=f"a file without {lacking}")
    for field in SCHEMA:
        if schema.field(field.name).type != field.type:
            got = quote(str(schema.field(field.name).type))
            raise BadInput(f"{path}: column {field.name}", expected=field.type, got=got)
    count = (file.metadata.metadata or {}).get(_ROWS.encode())
    groups = sum(file.metadata.row_group(n).num_rows for n in range(file.num_row_groups))
    expected = "" if count is None else count.decode(errors="replace")
    for rows in (file.metadata.num_rows, groups):
        if count is not None and expected != str(rows):
            raise BadInput(path, expected=f"{quote(expected)} rows", got=rows)


def _column(name: str, values: np.ndarray[Any, Any]) -> Any:
    """An Arrow array of a column, with null for unknown floats."""
    values = np.ascontiguousarray(values)
    if values.dtype.kind != "f":
        return pa.array(values)
    unknown = np.isnan(values)
    if name in _ZERO_IS_UNKNOWN:
        unknown |= values == 0
    return pa.array(values, mask=unknown)


def _names(workers: np.ndarray[Any, Any]) -> Any:
    """Worker names as strings, each distinct name decoded once: a long column holds few of them."""
    names, numbers = np.unique(workers, return_inverse=True)
    decoded = [name.decode(errors="replace") for name in names.tolist()]
    return pa.DictionaryArray.from_arrays(pa.array(numbers), pa.array(decoded)).dictionary_decode()


def _write_error(path: Path, error: OSError) -> GiveUp:
    return GiveUp(f"{path}: expected to write the record of updates, got: {error}")
