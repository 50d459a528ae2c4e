"""Trained parameters as a .safetensors file: the arrays by name, at a path or in a store."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

import ps
from ps import paths
from ps.snapshots.object_store import open_store
from shards.errors import BadInput, GiveUp

_SUFFIX = ".safetensors"


def write_parameters(place: str | Path, tables: ps.Tables, params: Any) -> None:
    """Write the parameters of a job, a table's value or a dict of all tables', to a path or URI.

    Each array is named as in its table; with several tables, as TABLE.NAME. Raises BadInput for
    another suffix, GiveUp where the file cannot be written.
    """
    text = str(paths.place("save: path", place))
    if not text.endswith(_SUFFIX):
        raise BadInput(f"{text}: expected {_SUFFIX}, got {Path(text).suffix!r}")
    folder, _, name = text.rpartition("/")
    try:
        open_store(folder or ("/" if text.startswith("/") else ".")).put(
            name, [save(dict(_arrays(tables, params)))]
        )
    except OSError as error:
        raise GiveUp(f"{text}: cannot be written: {error.strerror or error}") from None


def _arrays(tables: ps.Tables, params: Any) -> Iterator[tuple[str, NDArray[np.float32]]]:
    several = len(tables) > 1
    for table, dense in tables.items():
        described = dense.table(table)
        arena = described.empty()
        views = described.views(arena)
        dense.structure.write(params[table] if several else params, views)
        for name, view in views.items():
            yield f"{table}.{name}" if several else name, view.copy()
