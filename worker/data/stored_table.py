"""A small table in files of this machine, one a worker: tasks map their rows without Spark SQL."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

_BATCH_ROWS = 10_000  # of Spark's own batches


class StoredTable(msgspec.Struct, frozen=True):
    """The parts of a table, in the files of a `folder` that are named by their numbers."""

    folder: Path

    @property
    def schema(self) -> Any:
        """The pyarrow schema of every batch."""
        with pa.memory_map(str(self._file(0))) as file:
            return pa.ipc.open_file(file).schema

    def batches(self, part: int) -> Iterator[Any]:
        """The rows of one part, in order, as Arrow batches in mapped memory."""
        with pa.memory_map(str(self._file(part))) as file:
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)

    def _file(self, part: int) -> Path:
        return self.folder / f"{part}.arrow"


def write_parts(table: Any, parts: int, folder: Path) -> StoredTable:
    """Divide the rows of `table` into `parts`, in order and evenly, each a file of `folder`."""
    stored = StoredTable(folder)
    cuts = [part * table.num_rows // parts for part in range(parts + 1)]
    for part, (start, stop) in enumerate(pairwise(cuts)):
        rows = table.slice(start, stop - start).combine_chunks()
        with (
            pa.OSFile(str(stored._file(part)), "wb") as file,
            pa.ipc.new_file(file, table.schema) as writer,
        ):
            writer.write_table(rows, _BATCH_ROWS)
    return stored
