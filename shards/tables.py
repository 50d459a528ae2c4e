"""Tables: named sets of parameters, and how a dense one is laid out and cut.

A dense table is a list of named tensors that lie one behind the other in one flat float32 arena.
Each tensor starts on a multiple of 64 floats and each shard's key range on a multiple of 256, so
that neither a float4 access nor a quantisation block ever straddles two of them. A table that is
too small for that is cut at multiples of 4: then each shard has one short block. The gaps hold
zeros, and because every update rule maps a zero gradient on a zero weight to zero, they stay zero.

A key range is a half-open interval of the arena. The shard map says which shard owns which; its
epoch rises when the map changes, and every message names the epoch it was cut by.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import prod

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from shards import arguments
from shards.errors import BadInput

TENSOR_ALIGNMENT = 64
SHARD_ALIGNMENT = 256
FINEST_ALIGNMENT = 4  # of shards of a table that is too small for 256 floats each
MOST_SHARDS = 1024  # each has sockets at every worker
MOST_FLOATS = 2**40  # 4 TiB; more is a mistake in a shape
PAGE_FLOATS = 1024  # in 4 KB, a page of memory
_PAGES_A_SHARD = 64  # from here on, a page more or less makes no shard uneven


class TensorSpec(msgspec.Struct, frozen=True):
    """One named tensor of a dense table. A `shape` of one dimension may be given as a number.

    `lr_mult` and `decay_mult` scale the learning rate and the weight decay for this tensor alone.
    """

    name: str
    shape: tuple[int, ...]
    lr_mult: float = 1.0
    decay_mult: float = 1.0

    def __post_init__(self) -> None:
        name = arguments.name("TensorSpec: name", self.name)
        what = f"TensorSpec {name}"
        structs.force_setattr(self, "shape", _shape(f"{what}: shape", self.shape))
        for field in ("lr_mult", "decay_mult"):
            value = arguments.number(f"{what}: {field}", getattr(self, field))
            structs.force_setattr(self, field, value)

    @property
    def size(self) -> int:
        return prod(self.shape)


class KeyRange(msgspec.Struct, frozen=True, order=True):
    """The half-open interval [start, stop) of a dense table's arena."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


class DenseTable(msgspec.Struct, frozen=True):
    """A named set of tensors in one flat padded float32 arena."""

    name: str
    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        what = f"table {arguments.name('DenseTable: name', self.name)}"
        structs.force_setattr(self, "tensors", _tensors(what, self.tensors))
        names = Counter(tensor.name for tensor in self.tensors)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise BadInput(f"{what}: tensor {min(twice)} is named more than once")
        for tensor in self.tensors:
            if min(tensor.shape, default=1) < 1:
                raise BadInput(
                    f"{what}: tensor {tensor.name}: expected sizes of at least 1,"
                    f" got {tensor.shape}"
                )
        if self.parameters > MOST_FLOATS:
            raise BadInput(f"{what}: expected at most {MOST_FLOATS} floats, got {self.parameters}")

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor starts, in floats, in the order of `tensors`."""
        starts, position = [], 0
        for tensor in self.tensors:
            starts.append(position)
            position += _round_up(tensor.size, TENSOR_ALIGNMENT)
        return tuple(starts)

    @property
    def size(self) -> int:
        """Floats in the arena, padding included; a multiple of 256."""
        return _round_up(
            sum(_round_up(tensor.size, TENSOR_ALIGNMENT) for tensor in self.tensors),
            SHARD_ALIGNMENT,
        )

    @property
    def parameters(self) -> int:
        """Floats in the tensors themselves, without padding."""
        return sum(tensor.size for tensor in self.tensors)

    def empty(self) -> NDArray[np.float32]:
        """A zeroed arena of `size` floats."""
        return np.zeros(self.size, np.float32)

    def views(self, arena: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """Each tensor's name and a writable view of it, in its own shape, into `arena`."""
        expected = f"an arena of shape ({self.size},)"
        if not isinstance(arena, np.ndarray):
            raise arguments.wrong(f"table {self.name}", expected, arena)
        if arena.shape != (self.size,):
            raise BadInput(f"table {self.name}: expected {expected}, got {arena.shape}")
        return {
            tensor.name: arena[start : start + tensor.size].reshape(tensor.shape)
            for tensor, start in zip(self.tensors, self.offsets, strict=True)
        }


class ShardMap(msgspec.Struct, frozen=True):
    """Which shard owns which key ranges of a table: `ranges[shard]`, under an epoch."""

    epoch: int
    table: str
    ranges: tuple[tuple[KeyRange, ...], ...]

    @property
    def shards(self) -> int:
        return len(self.ranges)

    def cut(self, arena: NDArray[np.float32], shard: int) -> tuple[NDArray[np.float32], ...]:
        """The views of `arena` that `shard` owns, one a key range; nothing is copied."""
        return tuple([arena[keys.start : keys.stop] for keys in self.ranges[shard]])

    def join(self, parts: Sequence[NDArray[np.float32]], arena: NDArray[np.float32]) -> None:
        """Write each shard's own flat array, its key ranges one behind another, into `arena`."""
        for shard, part in enumerate(parts):
            base = 0
            for own in self.cut(arena, shard):
                own[:] = part[base : base + own.size]
                base += own.size


def cut_evenly(table: DenseTable, shards: int, epoch: int = 1) -> ShardMap:
    """Cut a table into one contiguous range a shard, as even as 256-float boundaries allow.

    A large table is cut where pages of memory end, so that parts can be mapped side by side. One
    with fewer than 256 floats a shard is cut finer, at most at every fourth float; some shards may
    then hold nothing but padding.
    """
    if not table.tensors:
        raise BadInput(f"table {table.name}: expected at least one tensor, got none")
    most = min(table.size // FINEST_ALIGNMENT, MOST_SHARDS)
    shards = arguments.whole("shards", shards)
    if not 1 <= shards <= most:
        raise BadInput(f"table {table.name}: expected 1 to {most} shards, got {shards}")
    unit = _cut_unit(table.size, shards)
    bounds = [unit * (table.size // unit * shard // shards) for shard in range(shards)]
    bounds.append(table.size)
    return ShardMap(
        epoch,
        table.name,
        tuple((KeyRange(a, b),) for a, b in pairwise(bounds)),
    )


def _cut_unit(size: int, shards: int) -> int:
    """What the bounds of so many shards are multiples of, in floats."""
    if size >= _PAGES_A_SHARD * PAGE_FLOATS * shards:
        return PAGE_FLOATS
    unit = SHARD_ALIGNMENT
    while size // unit < shards:
        unit //= 2
    return unit


def segments(table: DenseTable, ranges: Sequence[KeyRange]) -> tuple["RateRun", ...]:
    """The pieces of tensors that lie in `ranges`, placed in the ranges' own flat array."""
    found, base = [], 0
    for keys in ranges:
        for tensor, start in zip(table.tensors, table.offsets, strict=True):
            low, high = max(start, keys.start), min(start + tensor.size, keys.stop)
            if low < high:
                found.append(
                    RateRun(
                        base + low - keys.start,
                        base + high - keys.start,
                        tensor.lr_mult,
                        tensor.decay_mult,
                    )
                )
        base += len(keys)
    return tuple(found)


class RateRun(msgspec.Struct, frozen=True):
    """A run [start, stop) of one shard's own array that shares one pair of multipliers."""

    start: int
    stop: int
    lr_mult: float
    decay_mult: float


def _shape(what: str, shape: object) -> tuple[int, ...]:
    """A shape, of which one of a single dimension may be a number."""
    if isinstance(shape, int | np.integer):
        return (arguments.whole(what, shape, most=MOST_FLOATS),)
    sizes = arguments.items(what, shape, "a whole number or a tuple of them")
    return tuple(arguments.whole(what, size, most=MOST_FLOATS) for size in sizes)


def _tensors(what: str, tensors: object) -> tuple[TensorSpec, ...]:
    what, expected = f"{what}: tensors", "a list of TensorSpec"
    return tuple(
        arguments.instance(what, tensor, TensorSpec, expected)
        for tensor in arguments.items(what, tensors, expected)
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
