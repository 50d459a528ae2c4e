"""The one door to h5py: named arrays in HDF5 files, as Caffe's snapshots have them.

A file from outside is bounded by its own size: every dataset must be stored in it, contiguous and
without a second name, so nothing that a file merely states takes memory. Links to other files are
refused, not followed.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shards.errors import BadInput, quote
from shards.extras import missing
from worker.caffe.blobs import write_whole

Array = NDArray[Any]

_MAX_OBJECTS = 100_000
_DEEPEST = 32
_LONGEST = 4096  # bytes of a text
_FAULTS = (OSError, RuntimeError, ValueError, TypeError, KeyError, MemoryError)
"""What h5py raises for a damaged file."""


def read_arrays(path: Path, names: tuple[str, ...] = ()) -> dict[str, Array]:
    """The numeric datasets of a file by their paths, such as "data/conv1/0"; raises BadInput.

    `names` limits them to these entries at the top of the file.
    """
    with _open(path) as file:
        arrays: dict[str, Array] = {}
        seen: set[Any] = set()
        for name, item in _walk(file, path, "", names, seen):
            arrays[name] = _array(item, f"{path}: {name}")
        return arrays


def read_string(path: Path, name: str) -> str:
    """The text of a dataset, "" if the file has no short one of that name; raises BadInput."""
    import h5py

    with _open(path) as file:
        item = file.get(name)
        short = isinstance(item, h5py.Dataset) and item.shape == () and item.nbytes <= _LONGEST
        value = item[()] if short else b""
        return value.decode(errors="replace") if isinstance(value, bytes) else ""


def write_arrays(path: Path, arrays: Mapping[str, Array], strings: Mapping[str, str]) -> None:
    """Write datasets by their paths, whole or not at all; raises BadInput."""
    h5py = _h5py(path)
    with h5py.File.in_memory() as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, track_times=False)
        for name, text in strings.items():
            file[name] = np.bytes_(text)
        file.flush()
        content = file.id.get_file_image()
    write_whole(path, content)


def _h5py(path: Path) -> Any:
    try:
        import h5py
    except ImportError:
        raise missing(str(path), "h5py for HDF5 files", "hdf5") from None
    return h5py


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """The file, with everything that h5py raises about it as BadInput."""
    h5py = _h5py(path)
    try:
        with h5py.File(path, "r") as file:
            yield file
    except OSError as error:
        if error.errno is not None:
            raise BadInput(f"{path}: cannot be read: {os.strerror(error.errno)}") from None
        raise _damage_error(path, error) from None
    except _FAULTS as error:
        raise _damage_error(path, error) from None


def _damage_error(path: Path, error: Exception) -> BadInput:
    return BadInput(path, expected=f"an HDF5 file: {quote(' '.join(str(error).split()), 200)}")


def _walk(
    group: Any, path: Path, above: str, names: tuple[str, ...], seen: set[Any]
) -> Iterator[tuple[str, Any]]:
    """The datasets of a group and of the groups below it, with their paths."""
    import h5py

    if above.count("/") > _DEEPEST:
        raise BadInput(f"{path}: {quote(above)}: nested too deeply")
    for name in group:
        if names and name not in names:
            continue
        full = f"{above}{name}"
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise BadInput(f"{path}: {quote(full)}", expected="a group or a dataset", got="a link")
        item = group[name]
        address = h5py.h5o.get_info(item.id).addr
        if address in seen:
            raise BadInput(f"{path}: {quote(full)}: has two names in the file; expected one")
        seen.add(address)
        if len(seen) > _MAX_OBJECTS:
            raise BadInput(path, expected=f"at most {_MAX_OBJECTS} groups and datasets")
        if isinstance(item, h5py.Group):
            yield from _walk(item, path, f"{full}/", (), seen)
        elif isinstance(item, h5py.Dataset):
            yield full, item
        else:
            raise BadInput(f"{path}: {quote(full)}", expected="a group or a dataset")


def _array(dataset: Any, where: str) -> Array:
    if dataset.dtype.kind not in "fiu":
        raise BadInput(where, expected="numbers", got=dataset.dtype)
    stored = dataset.id.get_storage_size()
    plain = not dataset.is_virtual and dataset.external is None and dataset.chunks is None
    if not plain or stored != dataset.nbytes:
        raise BadInput(
            where,
            expected=f"{dataset.nbytes} contiguous bytes for shape {dataset.shape}",
            got=stored,
        )
    return np.asarray(dataset[()])
