"""One shard's saved state as a file: a safetensors file, and checksums that verify it.

The file holds the weights, the rule's slots and, in one metadata value, the ledger and counters,
all of one version; the `safetensors` library can read it. It is written straight from the arrays, a
few megabytes at a time. Each such chunk has its own checksum, so an error can name the damaged
place. The checksums are not part of the file: `write_state` returns them in a `StateFile`, which
the caller stores, and passes to `read_state`.

The checksum is that of shards/checksums.py. It finds accidents, not malice.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from ps.storage import OpenFile, Store
from shards.checksums import HEX_DIGITS, hex_checksum
from shards.errors import UNDECODABLE, BadInput
from shards.messages import Count
from shards.shard_state import SavedProgress, ShardState, array_name, of_table
from shards.tables import KeyRange, Layout

CHUNK_BYTES = 4 << 20
_SAVED, _METADATA = "saved", "__metadata__"
_LENGTH_BYTES = 8
_ALIGNMENT = 8
_MOST_AXES = 2  # rows of a sparse table have two
_HELPERS = 2  # threads that compute checksums in parallel with the reading thread

_DTYPES = {
    "<f2": "F16",
    "<f4": "F32",
    "<f8": "F64",
    "|b1": "BOOL",
    **{f"{'|' if size == 1 else '<'}i{size}": f"I{8 * size}" for size in (1, 2, 4, 8)},
    **{f"{'|' if size == 1 else '<'}u{size}": f"U{8 * size}" for size in (1, 2, 4, 8)},
}
_STRINGS = {named: dtype for dtype, named in _DTYPES.items()}

Arrays = dict[str, NDArray[Any]]
Check = Annotated[str, Meta(pattern=f"^[0-9a-f]{{{HEX_DIGITS}}}$")]


class StateFile(msgspec.Struct, frozen=True):
    """A file of saved state: its name, length and version, and a checksum per `chunk_bytes`."""

    file: str
    bytes: Count
    version: Count
    checks: tuple[Check, ...]
    chunk_bytes: Annotated[int, Meta(ge=1, le=1 << 30)]


class _Tensor(msgspec.Struct, frozen=True):
    """A tensor's entry in a safetensors header; offsets count from the end of the header."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


class _Owned(msgspec.Struct, frozen=True):
    """The metadata of a shard's file: its keys of the arena, and its state other than arrays."""

    keys: KeyRange
    saved: SavedProgress


def write_state(store: Store, name: str, state: ShardState, keys: KeyRange) -> StateFile:
    """Write the state of the shard that owns `keys` of the arena as the file `name`.

    Returns the `StateFile` for `read_state`. The arrays are not copied, and must not change
    meanwhile. Raises OSError if the store fails.
    """
    owned = msgspec.json.encode(_Owned(keys, state.saved)).decode()
    return write_arrays(store, name, state.arrays, owned, state.saved.version)


def write_arrays(
    store: Store, name: str, arrays: Mapping[str, NDArray[Any]], metadata: str, version: int
) -> StateFile:
    """Write arrays of `version` and a metadata text, as `write_state` does."""
    content = _Checked(_chunks([_header(metadata, arrays), *map(_bytes, arrays.values())]))
    store.put(name, content)
    return StateFile(name, content.bytes, version, tuple(content.sums), CHUNK_BYTES)


def read_state(store: Store, part: StateFile, layout: Layout, keys: KeyRange) -> ShardState:
    """Read the state of the shard that owns `keys` of `layout`; its arrays are read-only.

    Raises BadInput naming the file if it is damaged or another shard's, and the chunk if its
    checksum is wrong.
    """
    with _naming_file(store, part):
        metadata, arrays = read_arrays(store, part)
        owned = msgspec.json.decode(metadata, type=_Owned)
        if owned.keys != keys or owned.saved.version != part.version:
            raise ValueError(
                f"that of keys {owned.keys} at version {owned.saved.version} where the"
                f" manifest has keys {keys} at version {part.version}"
            )
        for section in layout.sections(keys):
            for slot, array in of_table(arrays, section.table).items():
                if array.shape != (len(section.keys),):
                    name = array_name(section.table, slot)
                    raise ValueError(f"{name} of shape {array.shape}, {len(section.keys)} keys")
    return ShardState(owned.saved, arrays)


def read_arrays(store: Store, part: StateFile) -> tuple[str, Arrays]:
    """Read the metadata text and the arrays of `write_arrays`. Raises as `read_state` does."""
    content = _read(store, part).data.toreadonly()
    size = int.from_bytes(content[:_LENGTH_BYTES], "little")
    with _naming_file(store, part):
        header = msgspec.json.decode(content[_LENGTH_BYTES:][:size], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(header.pop(_METADATA), type=dict[str, str])
        data = content[_LENGTH_BYTES + size :]
        arrays = {
            key: _array(data, msgspec.json.decode(entry, type=_Tensor))
            for key, entry in header.items()
        }
        return metadata[_SAVED], arrays


@contextmanager
def _naming_file(store: Store, part: StateFile) -> Iterator[None]:
    """Turn decoding errors into BadInput that names the file."""
    try:
        yield
    except BadInput:
        raise
    except (*UNDECODABLE, KeyError) as error:
        detail = " ".join(str(error).split())
        raise BadInput(_path(store, part), expected="a saved state", got=detail) from None


def tensors_check(arrays: Mapping[str, NDArray[Any]], metadata: str) -> str:
    """The checksum of named arrays and their metadata, for a file that stores its own checksum.

    It has checksums.HEX_DIGITS hexadecimal digits.
    """
    parts = [metadata.encode()]
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        content = hex_checksum([array.reshape(-1).view(np.uint8).data])
        parts.append(f"{name} {array.dtype.str} {array.shape} {content}".encode())
    return hex_checksum([b"\0".join(parts)])


# --- the format -----------------------------------------------------------------------------------


def _header(metadata: str, arrays: Mapping[str, NDArray[Any]]) -> bytes:
    # One metadata value: the library writes several in random order, and files would differ.
    header: dict[str, object] = {_METADATA: {_SAVED: metadata}}
    start = 0
    for name, array in arrays.items():
        stop = start + array.nbytes
        header[name] = {
            "dtype": _DTYPES[array.dtype.str],
            "shape": list(array.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _array(data: memoryview, tensor: _Tensor) -> NDArray[Any]:
    start, stop = tensor.data_offsets
    if tensor.dtype not in _STRINGS or not 1 <= len(tensor.shape) <= _MOST_AXES:
        raise ValueError(f"a tensor of {tensor.dtype} and shape {list(tensor.shape)}")
    dtype, count = np.dtype(_STRINGS[tensor.dtype]), prod(tensor.shape)
    if not start <= stop <= len(data) or stop - start != dtype.itemsize * count:
        raise ValueError(f"a tensor of {count} values at [{start}, {stop})")
    return np.frombuffer(data, dtype, count, start).reshape(tensor.shape)


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


# --- chunks and their checksums -------------------------------------------------------------------


def _chunks(parts: Sequence[bytes | memoryview]) -> Iterator[tuple[memoryview, ...]]:
    """The concatenated parts, cut into chunks; a chunk is a tuple of one or more pieces."""
    chunk: list[memoryview] = []
    room = CHUNK_BYTES
    for whole in parts:
        part = memoryview(whole)
        while part:
            chunk.append(part[:room])
            part, room = part[room:], room - len(chunk[-1])  # the rest of the part and of the chunk
            if not room:
                yield tuple(chunk)
                chunk, room = [], CHUNK_BYTES
    if chunk:
        yield tuple(chunk)


class _Checked:
    """Chunks for a store, with checksums that are computed as they are consumed.

    The writing thread computes them: a snapshot is written during training, which would have to
    share its cores with helper threads, and a chunk is still in the cache when it is written.
    """

    def __init__(self, chunks: Iterator[tuple[memoryview, ...]]) -> None:
        self.bytes = 0
        self.sums: list[str] = []
        self._chunks = chunks

    def __iter__(self) -> Iterator[memoryview]:
        for chunk in self._chunks:
            self.sums.append(hex_checksum(chunk))
            for piece in chunk:
                self.bytes += len(piece)
                yield piece


def _read(store: Store, part: StateFile) -> NDArray[np.uint8]:
    """Read and check the whole file; raises BadInput naming the file and what is wrong."""
    path = _path(store, part)
    try:
        size = store.size(part.file)
        if size != part.bytes:
            raise BadInput(path, expected=f"{part.bytes} bytes", got=size)
        with store.open(part.file) as file:
            return _fill(file, part, path)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None


def _fill(file: OpenFile, part: StateFile, path: str) -> NDArray[np.uint8]:
    content = np.empty(part.bytes, np.uint8)
    whole, size = content.data, part.chunk_bytes
    if len(part.checks) != -(-part.bytes // size):
        raise BadInput(path, expected=f"a checksum for each {size} bytes of {part.bytes}")
    awaited: deque[tuple[int, Future[str]]] = deque()
    with ThreadPoolExecutor(_HELPERS, "checksums") as helpers:
        for number in range(len(part.checks)):
            chunk = whole[number * size : (number + 1) * size]
            _read_into(file, chunk, path)
            awaited.append((number, helpers.submit(hex_checksum, (chunk,))))
            while len(awaited) > _HELPERS:
                _compare(part, path, *awaited.popleft())
        for number, future in awaited:
            _compare(part, path, number, future)
    return content


def _read_into(file: OpenFile, chunk: memoryview, path: str) -> None:
    while chunk:
        count = file.readinto(chunk)
        if not count:
            raise BadInput(f"{path}: it ended {len(chunk)} bytes too early")
        chunk = chunk[count:]


def _compare(part: StateFile, path: str, number: int, future: Future[str]) -> None:
    expected, got = part.checks[number], future.result()
    if expected != got:
        start = number * part.chunk_bytes
        raise BadInput(
            (
                f"{path}: chunk {number} of {len(part.checks)}, bytes [{start}, "
                f"{min(start + part.chunk_bytes, part.bytes)})"
            ),
            expected=f"checksum {expected}",
            got=got,
        )


def _path(store: Store, part: StateFile) -> str:
    if not part.file or {"/", "\0"} & set(part.file) or part.file in (".", ".."):
        raise BadInput(f"snapshot {store.place}", expected="a file name", got=f"{part.file!r}")
    return f"snapshot {store.place}/{part.file}"
