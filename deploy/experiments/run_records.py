"""The record of a run that trained for real: read as columns, from a run folder or a file."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from deploy.run.folder import UPDATES
from deploy.run.updates_parquet import parts_of, read_updates
from shards.errors import UNDECODABLE, BadInput


def read_record(path: Path, columns: Sequence[str]) -> pa.Table:
    """These columns of the record of a run folder, of its updates.parquet, or of one file.

    Raises BadInput for anything else, and for a record without one of the columns.
    """
    source = path / UPDATES if (path / UPDATES).exists() else path
    if source.is_dir() and parts_of(source):
        return pa.Table.from_batches(read_updates(source, columns))
    if not source.is_file():
        raise BadInput(path, expected=f"a run folder or its {UPDATES}", got="neither")
    try:
        known = pq.read_schema(source).names
        missing = [name for name in columns if name not in known]
        if missing:
            raise BadInput(source, expected=f"a column {missing[0]}", got=", ".join(known))
        return pq.read_table(source, columns=list(columns))
    except (OSError, pa.ArrowException, *UNDECODABLE) as error:
        reason = str(error).partition("\n")[0]
        raise BadInput(f"{source}: expected a record of updates, got: {reason}") from None
