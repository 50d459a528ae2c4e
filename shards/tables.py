"""Tables: named sets of parameters, and how a dense one is laid out and cut.

A dense table is a list of named tensors that lie one behind the other in one flat float32 arena.
Each tensor starts on a multiple of 64 floats and each shard's key range on a multiple of 256, so
that neither a float4 access nor a quantisation block ever straddles two of them. The gaps hold
zeros, and because every update rule maps a zero gradient on a zero weight to zero, they stay zero.

A key range is a half-open interval of the arena. The shard map says which shard owns which; its
epoch rises when the map changes, and every message names the epoch it was cut by.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import msgspec
import numpy as np
from numpy.typing import NDArray

from shards.errors import BadInput

TENSOR_ALIGNMENT = 64
SHARD_ALIGNMENT = 256
PAGE_FLOATS = 1024  # in 4 KB, a page of memory
_PAGES_A_SHARD = 64  # from here on, a page more or less makes no shard uneven


class TensorSpec(msgspec.Struct, frozen=True):
    """One named tensor of a dense table.

    `lr_mult` and `decay_mult` scale the learning rate and the weight decay for this tensor alone.
    """

    name: str
    shape: tuple[int, ...]
    lr_mult: float = 1.0
    decay_mult: float = 1.0

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
        names = [tensor.name for tensor in self.tensors]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise BadInput(f"table {self.name}: tensor {min(twice)} is named more than once")
        for tensor in self.tensors:
            if min(tensor.shape, default=1) < 1:
                raise BadInput(
                    f"table {self.name}: tensor {tensor.name}: expected sizes of at least 1,"
                    f" got {tensor.shape}"
                )

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
        if arena.shape != (self.size,):
            raise BadInput(
                f"table {self.name}: expected an arena of shape ({self.size},), got {arena.shape}"
            )
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

    A large table is cut where pages of memory end, so that parts can be mapped side by side.
    """
    if not table.tensors:
        raise BadInput(f"table {table.name}: expected at least one tensor, got none")
    blocks = table.size // SHARD_ALIGNMENT
    if not 1 <= shards <= blocks:
        raise BadInput(
            f"table {table.name} has {blocks} blocks of {SHARD_ALIGNMENT} floats:"
            f" expected 1 to {blocks} shards, got {shards}"
        )
    unit = PAGE_FLOATS if table.size >= _PAGES_A_SHARD * PAGE_FLOATS * shards else SHARD_ALIGNMENT
    bounds = [unit * (table.size // unit * shard // shards) for shard in range(shards)]
    bounds.append(table.size)
    return ShardMap(
        epoch,
        table.name,
        tuple((KeyRange(a, b),) for a, b in pairwise(bounds)),
    )


def segments(table: DenseTable, ranges: Sequence[KeyRange]) -> tuple["Segment", ...]:
    """The pieces of tensors that lie in `ranges`, placed in the ranges' own flat array."""
    found, base = [], 0
    for keys in ranges:
        for tensor, start in zip(table.tensors, table.offsets, strict=True):
            low, high = max(start, keys.start), min(start + tensor.size, keys.stop)
            if low < high:
                found.append(
                    Segment(
                        base + low - keys.start,
                        base + high - keys.start,
                        tensor.lr_mult,
                        tensor.decay_mult,
                    )
                )
        base += len(keys)
    return tuple(found)


class Segment(msgspec.Struct, frozen=True):
    """A run [start, stop) of one shard's own array that shares one pair of multipliers."""

    start: int
    stop: int
    lr_mult: float
    decay_mult: float


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
