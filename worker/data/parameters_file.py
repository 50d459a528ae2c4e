"""Parameters as a .safetensors file: the arrays by name, at a path or in a store."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

import ps
from ps import path_checks
from ps.storage import content_of, open_store
from shards.errors import BadInput, GiveUp

_SUFFIX = ".safetensors"
_MAX_BYTES = 1 << 40
_MAX_NAMED = 12


def write_parameters(
    path: str | Path,
    tables: ps.Tables,
    params: Any,
    rows: Iterable[tuple[str, NDArray[Any]]] | None = None,
) -> None:
    """Write the parameters of a job, a table's value or a dict of all dense tables', to a file.

    `path` is a path or URI. Each array is named as in its table; with several dense tables, as
    TABLE.NAME. `rows` are the named arrays of the sparse tables. Raises BadInput for another suffix
    and for sparse tables without `rows`, GiveUp where the file cannot be written.
    """
    if rows is None:
        refuse_rows(tables)

    def content() -> bytes:
        return save({**dict(_arrays(tables, params)), **dict(rows or ())})

    write_file("save: path", path, _SUFFIX, content)


def refuse_rows(tables: ps.Tables) -> None:
    """Raise BadInput for tables of which the parameters alone would not be all."""
    for name in tables.sparse:
        expected = "dense tables: rows are saved by the result of a run, and by snapshots"
        raise BadInput(f"save: table {name}", expected=expected, got="a ps.Sparse")


def write_file(label: str, path: str | Path, suffix: str, content: Callable[[], bytes]) -> None:
    """Write a file with a name that ends in `suffix` to a path or URI, whole or not at all.

    `content` is called once the place is known to be right. Raises BadInput naming `label`, GiveUp
    where the file cannot be written.
    """
    folder, name, text = _parts(label, path, suffix)
    data = content()
    try:
        open_store(folder).put(name, [data])
    except OSError as error:
        raise GiveUp(f"{text}: cannot be written: {error.strerror or error}") from None


def read_parameters(path: str | Path, tables: ps.Tables, arena: NDArray[np.float32]) -> str:
    """Copy the arrays of a file into an arena of the tables; returns what was copied, in words.

    Names are those of `write_parameters`. An array that the file lacks keeps its value, as
    fine-tuning needs, and one that the tables lack is not used. Raises BadInput for a file that
    cannot be read or has no array of the tables, and for an array of another shape or type.
    """
    folder, name, text = _parts("weights", path, _SUFFIX)
    try:
        stored = load(content_of(open_store(folder), name, _MAX_BYTES))
    except (OSError, SafetensorError, KeyError, TypeError) as error:  # no float8 in NumPy
        line = getattr(error, "strerror", None) or error
        raise BadInput(f"weights {text}: cannot be read: {line}") from None
    for table in tables.sparse:
        if any(name.startswith(f"{table}/") for name in stored):
            expected = "arrays of dense tables: rows continue by `resume`, from a snapshot"
            raise BadInput(f"weights {text}", expected=expected, got=f"rows of table {table}")
    views = dict(_views(tables, arena))
    copied = [name for name in views if name in stored]
    if not copied:
        raise BadInput(
            f"weights {text}",
            expected=f"arrays among {_list_names(views)}",
            got=_list_names(stored),
        )
    for key in copied:
        if stored[key].shape != views[key].shape or stored[key].dtype != np.float32:
            shape, got = views[key].shape, stored[key]
            raise BadInput(
                f"weights {text}: {key}",
                expected=f"float32 of shape {shape}",
                got=(
                    f"{got.dtype} of {got.shape}: leave it out of the file, or "
                    "rename it, to begin without it"
                ),
            )
        views[key][...] = stored[key]
    missing = [name for name in views if name not in stored]
    unused = [name for name in stored if name not in views]
    return (
        f"{text}: copied {_list_names(copied)}; left at their first values: {_list_names(missing)};"
        f" not used: {_list_names(unused)}"
    )


def _parts(label: str, path: str | Path, suffix: str) -> tuple[str, str, str]:
    """The folder of a file, its name, and both together; raises BadInput for another suffix."""
    text = str(path_checks.place(label, path))
    if not text.endswith(suffix):
        raise BadInput(text, expected=suffix, got=f"{Path(text).suffix!r}")
    folder, _, name = text.rpartition("/")
    return folder or ("/" if text.startswith("/") else "."), name, text


def _list_names(names: Iterable[str]) -> str:
    shown = list(names)
    more = len(shown) - _MAX_NAMED
    return (", ".join(shown[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")) or "none"


def _views(tables: ps.Tables, arena: NDArray[np.float32]) -> Iterator[tuple[str, Any]]:
    """The arrays of an arena by the names that they have in a file."""
    for table, views in tables.layout.views(arena).items():
        for name, view in views.items():
            yield f"{table}.{name}" if len(tables.dense) > 1 else name, view


def _arrays(tables: ps.Tables, params: Any) -> Iterator[tuple[str, NDArray[np.float32]]]:
    several = len(tables.dense) > 1
    for table, dense in tables.dense.items():
        described = dense.table(table)
        arena = described.empty()
        views = described.views(arena)
        dense.structure.write(params[table] if several else params, views)
        for name, view in views.items():
            yield f"{table}.{name}" if several else name, view.copy()
