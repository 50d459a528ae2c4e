"""Tables: named sets of parameters, and how a job's tables are laid out and partitioned.

A dense table is a list of named tensors. All dense tables of a job are stored one after another in
one flat float32 arena. Each tensor starts on a multiple of 64 floats, each table and each shard's
key range on a multiple of 256, so that neither a float4 access nor a quantisation block ever
straddles two of them. An arena that is too small for that is cut more finely, down to multiples of
4: then each shard has one short block. The gaps hold zeros, and because every update rule maps a
zero gradient on a zero weight to zero, they stay zero.

A sparse table has a row of floats for each 64-bit id that was ever pushed. It has no place in the
arena: an id's *bucket* is the top 16 bits of its mixed value, and a shard owns a range of the
65,536 buckets of all sparse tables.

A key range is a half-open interval of the arena, of one table, or of buckets. The shard map says
which shard owns which range of the arena and which buckets, without regard to the borders of
tables; so a shard holds a section of some dense tables and nothing of others, and a part of every
sparse one. Only where an update rule or an average needs whole tensors are ranges cut between them.
The map's epoch rises when it changes, and pushes and pulls name the epoch of their map.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import ceil, prod, sqrt

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from cupy_kernels.ops.rows import Ids, mix
from shards import argument_checks
from shards.errors import BadInput
from shards.first_values import FirstValues, Init, Zeros

Buffer = bytes | bytearray | memoryview

TENSOR_ALIGNMENT = 64
SHARD_ALIGNMENT = 256
FINEST_ALIGNMENT = 4  # for shards of a table too small for 256 floats each
MAX_SHARDS = 1024  # every worker has sockets for each
MAX_FLOATS = 2**40  # 4 TiB; more is a mistake in a shape
PAGE_FLOATS = 1024  # 4 KB, a page of memory
MAX_TABLES = 64  # a header names each table that it concerns
BUCKET_BITS = 16
BUCKETS = 1 << BUCKET_BITS
MAX_DIM = 4096
MAX_ROWS = 2**32 - 2  # a slot is a number of 32 bits, and one means that there is none
MAX_STORED = 1 << 27
"""The most rows of a sparse table that are stored, by default."""
MAX_PART_BYTES = 64 << 20
"""The most bytes of ids and rows of one sparse table in a message."""
ID_BYTES = 8
META_WORDS = 4
"""The uint32 numbers of a row's meta (sparse_part.py)."""
_PAGES_A_SHARD = 64  # from this size on, cutting at pages keeps shards even enough


class TensorSpec(msgspec.Struct, frozen=True):
    """One named tensor of a dense table; a one-dimensional `shape` may be a number.

    `lr_mult` and `decay_mult` scale the learning rate and the weight decay for this tensor alone. A
    `buffer` is not trained: a push's values are subtracted as they are, whatever the rule and the
    rate, as the running statistics of a batch normalisation need it.
    """

    name: str
    shape: tuple[int, ...]
    lr_mult: float = 1.0
    decay_mult: float = 1.0
    buffer: bool = False

    def __post_init__(self) -> None:
        name = argument_checks.name("TensorSpec: name", self.name)
        subject = f"TensorSpec {name}"
        structs.force_setattr(self, "shape", _shape(f"{subject}: shape", self.shape))
        for field in ("lr_mult", "decay_mult"):
            value = argument_checks.number(f"{subject}: {field}", getattr(self, field))
            structs.force_setattr(self, field, value)
        structs.force_setattr(
            self, "buffer", argument_checks.flag(f"{subject}: buffer", self.buffer)
        )

    @property
    def size(self) -> int:
        """The number of its floats."""
        return prod(self.shape)


class KeyRange(msgspec.Struct, frozen=True, order=True):
    """The half-open interval [start, stop) of an arena or of a table."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


class DenseTable(msgspec.Struct, frozen=True, tag_field="kind", tag="dense"):
    """A named set of tensors in one flat padded float32 array."""

    name: str
    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        subject = f"table {argument_checks.name('DenseTable: name', self.name)}"
        structs.force_setattr(self, "tensors", _tensors(subject, self.tensors))
        names = Counter(tensor.name for tensor in self.tensors)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise BadInput(f"{subject}: tensor {min(twice)} is named more than once")
        for tensor in self.tensors:
            if min(tensor.shape, default=1) < 1:
                raise BadInput(
                    f"{subject}: tensor {tensor.name}",
                    expected="sizes of at least 1",
                    got=tensor.shape,
                )
        if self.parameters > MAX_FLOATS:
            raise BadInput(subject, expected=f"at most {MAX_FLOATS} floats", got=self.parameters)

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
        """Floats in the table, padding included; a multiple of 256."""
        return _round_up(
            sum(_round_up(tensor.size, TENSOR_ALIGNMENT) for tensor in self.tensors),
            SHARD_ALIGNMENT,
        )

    @property
    def parameters(self) -> int:
        """Floats in the tensors themselves, without padding."""
        return sum(tensor.size for tensor in self.tensors)

    def empty(self) -> NDArray[np.float32]:
        """A zeroed array of `size` floats."""
        return np.zeros(self.size, np.float32)

    def views(self, arena: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """A writable view into the flat array for each tensor, by name and in its own shape."""
        expected = f"an arena of shape ({self.size},)"
        if not isinstance(arena, np.ndarray):
            raise argument_checks.wrong(f"table {self.name}", expected, arena)
        if arena.shape != (self.size,):
            raise BadInput(f"table {self.name}", expected=expected, got=arena.shape)
        return {
            tensor.name: arena[start : start + tensor.size].reshape(tensor.shape)
            for tensor, start in zip(self.tensors, self.offsets, strict=True)
        }


class SparseTable(msgspec.Struct, frozen=True, tag_field="kind", tag="sparse"):
    """A named set of rows of `dim` floats by 64-bit id.

    A row that nobody has pushed has the values that follow from `init`, `seed` and its id. `rows`
    is the most rows that may be stored, over all shards.
    """

    name: str
    dim: int
    init: Init = Zeros()
    seed: int = 0
    rows: int = MAX_STORED

    def __post_init__(self) -> None:
        argument_checks.name("SparseTable: name", self.name)
        for field, least, most in (
            ("dim", 1, MAX_DIM),
            ("seed", 0, argument_checks.MAX_INT),
            ("rows", 1, MAX_ROWS),
        ):
            value = argument_checks.whole(f"Sparse: {field}", getattr(self, field), least, most)
            structs.force_setattr(self, field, value)
        expected = "first values such as Uniform(0.01)"
        argument_checks.instance("Sparse: init", self.init, FirstValues, expected)

    @property
    def message_rows(self) -> int:
        """The most rows of the table in one message."""
        return MAX_PART_BYTES // self.row_bytes

    @property
    def row_bytes(self) -> int:
        """The bytes of a row and its id in a message."""
        return ID_BYTES + 4 * self.dim

    @property
    def capacity(self) -> int:
        """The most rows that all shards together store: no sum of `most_rows` over shards is more.

        It is above `rows`, and one shard has room for them all, since a reshard may merge them.
        """
        surplus = ceil(6 * sqrt(self.rows * MAX_SHARDS)) + 2 * MAX_SHARDS
        return min(self.rows + surplus, self.rows * MAX_SHARDS, MAX_ROWS)

    def most_rows(self, buckets: int) -> int:
        """The most rows that a shard of this number of buckets stores.

        It is more than its share, because ids spread over the buckets evenly, not equally.
        """
        share = self.rows * buckets / BUCKETS
        return min(self.rows, ceil(share + 6 * sqrt(share) + 1))


def buckets_of(ids: Ids) -> NDArray[np.int64]:
    """The bucket of each id."""
    return (mix(ids) >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)


Table = DenseTable | SparseTable


class Section(msgspec.Struct, frozen=True):
    """The keys of one table within a range of the arena, where they begin at `start`."""

    table: str
    keys: KeyRange
    start: int


class Layout(msgspec.Struct, frozen=True):
    """A job's dense tables, one after another in one flat arena, and its sparse tables."""

    tables: tuple[DenseTable, ...]
    sparse: tuple[SparseTable, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.tables) + len(self.sparse)
        if not 1 <= count <= MAX_TABLES:
            raise BadInput("tables", expected=f"1 to {MAX_TABLES}", got=count)
        twice = [name for name, count in Counter(self.all_names).items() if count > 1]
        if twice:
            raise BadInput(f"tables: {min(twice)} is named more than once")
        for table in self.tables:
            if not table.tensors:
                raise BadInput(f"table {table.name}", expected="at least one tensor", got="none")

    @classmethod
    def of(cls, tables: Iterable[Table]) -> "Layout":
        """The layout of tables of both kinds, each kind in its order."""
        tables = list(tables)
        return cls(
            tuple(table for table in tables if isinstance(table, DenseTable)),
            tuple(table for table in tables if isinstance(table, SparseTable)),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the dense tables, in the arena's order."""
        return tuple(table.name for table in self.tables)

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of all tables, the dense ones first."""
        return (*self.names, *(table.name for table in self.sparse))

    @property
    def size(self) -> int:
        """Floats in the arena, padding included; a multiple of 256."""
        return sum(table.size for table in self.tables)

    def empty(self) -> NDArray[np.float32]:
        """A zeroed arena of `size` floats."""
        return np.zeros(self.size, np.float32)

    @property
    def borders(self) -> tuple[int, ...]:
        """Where each tensor starts in the arena, in order, and the arena's end."""
        starts, base = list[int](), 0
        for table in self.tables:
            starts += [base + offset for offset in table.offsets]
            base += table.size
        return (*starts, base)

    def section(self, table: str) -> KeyRange:
        """The range of the arena that holds `table`; raises BadInput if there is no such table."""
        start = 0
        for dense_table in self.tables:
            if dense_table.name == table:
                return KeyRange(start, start + dense_table.size)
            start += dense_table.size
        expected = f"one of {', '.join(self.names)}" if self.names else "a job with a dense table"
        raise argument_checks.wrong("table", expected, table)

    def sections(self, keys: KeyRange) -> tuple[Section, ...]:
        """The section of each table within a range of the arena, in order; none is empty."""
        sections, start = [], 0
        for table in self.tables:
            low, high = max(start, keys.start), min(start + table.size, keys.stop)
            if low < high:
                sections.append(Section(table.name, KeyRange(low - start, high - start), low))
            start += table.size
        return tuple(sections)

    def select(self, tables: Sequence[str]) -> "Layout":
        """The layout of these dense tables alone, in this layout's order, and of all sparse ones.

        Raises BadInput.
        """
        names = argument_checks.items("tables", tables, "a list of names of tables")
        for name in names:
            self.section(name)
        return Layout(tuple(table for table in self.tables if table.name in names), self.sparse)

    def split(self, arena: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """A view into `arena` for each table: its own flat array."""
        arena = argument_checks.array("arena", arena, self.size)
        sections = ((name, self.section(name)) for name in self.names)
        return {name: arena[keys.start : keys.stop] for name, keys in sections}

    def views(self, arena: NDArray[np.float32]) -> dict[str, dict[str, NDArray[np.float32]]]:
        """A view into `arena` for each tensor, by table and name and in its own shape."""
        parts = self.split(arena)
        return {table.name: table.views(parts[table.name]) for table in self.tables}


class ShardMap(msgspec.Struct, frozen=True):
    """The range of a job's arena that each shard owns (`ranges[shard]`), in one epoch.

    `buckets` has the range of the buckets of sparse tables that each owns; by default they are cut
    evenly.
    """

    epoch: int
    ranges: tuple[KeyRange, ...]
    buckets: tuple[KeyRange, ...] = ()

    def __post_init__(self) -> None:
        if not self.buckets:  # also those of a file that was written without them
            bounds = [BUCKETS * shard // self.shards for shard in range(self.shards + 1)]
            buckets = tuple(KeyRange(a, b) for a, b in pairwise(bounds))
            structs.force_setattr(self, "buckets", buckets)

    @property
    def shards(self) -> int:
        return len(self.ranges)

    def cut(self, arena: NDArray[np.float32], shard: int) -> NDArray[np.float32]:
        """The view of `arena` that `shard` owns; nothing is copied."""
        keys = self.ranges[shard]
        return arena[keys.start : keys.stop]

    def fill(self, arena: NDArray[np.float32], shard: int, frames: Sequence[Buffer]) -> None:
        """Write the plain frames of a shard's sections, in their order, into `arena`."""
        base = self.ranges[shard].start
        for frame in frames:
            part = np.frombuffer(frame, np.float32)
            arena[base : base + part.size] = part
            base += part.size
        assert base == self.ranges[shard].stop, "a shard's sections are its whole range"


def cut_evenly(layout: Layout, shards: int, epoch: int = 1) -> ShardMap:
    """Cut a job's arena into one range per shard, as even as 256-float boundaries allow.

    A large arena is cut at page boundaries of memory, so that parts can be mapped next to each
    other. One with fewer than 256 floats per shard is cut more finely, at multiples of at least 4
    floats; some shards may then hold only padding.
    """
    size = layout.size
    finest = size // FINEST_ALIGNMENT
    shards = _check_shards(layout, shards, finest)
    # With sparse tables, a shard may own none of a small arena.
    owners = min(shards, finest)
    unit = _cut_unit(size, owners)
    # Multiplied before it is divided, so that the remainder is spread over all shards.
    bounds = [unit * (size // unit * shard // owners) for shard in range(owners)]
    return _map_of(bounds, size, shards, epoch)


def cut_at_tensors(layout: Layout, shards: int, epoch: int = 1) -> ShardMap:
    """Cut a job's arena into one range per shard, as even as the borders of its tensors allow.

    Every tensor is whole at one shard, and no other such cut has a smaller largest range. With
    sparse tables a shard may own no tensor.
    """
    borders = layout.borders
    tensors = len(borders) - 1
    shards = _check_shards(layout, shards, tensors, " of whole tensors")
    owners = min(shards, tensors)
    largest = _least_largest(borders, owners)
    first = _latest_ranges(borders, owners, largest)
    cuts = [0] if owners else []
    for left in range(owners - 1, 0, -1):
        start = borders[cuts[-1]]
        even = start + (layout.size - start) // (left + 1)
        # The ranges behind the cut need a tensor each, and may be as large as the largest.
        low = max(cuts[-1] + 1, first[left])
        high = min(bisect_right(borders, start + largest) - 1, tensors - left)
        after = bisect_left(borders, even, low, high)
        nearer = after > low and even - borders[after - 1] <= borders[after] - even
        cuts.append(after - nearer)
    return _map_of([borders[cut] for cut in cuts], layout.size, shards, epoch)


def _check_shards(layout: Layout, shards: int, ranges: int, kind: str = "") -> int:
    """The number of shards, checked; more than `ranges` need a sparse table. Raises BadInput."""
    most = MAX_SHARDS if layout.sparse else min(ranges, MAX_SHARDS)
    shards = argument_checks.whole("shards", shards)
    if not 1 <= shards <= most:
        subject = f"table{'s' * (len(layout.all_names) > 1)} {', '.join(layout.all_names)}"
        raise BadInput(subject, expected=f"1 to {most} shards{kind}", got=shards)
    return shards


def _map_of(starts: Sequence[int], size: int, shards: int, epoch: int) -> ShardMap:
    """The map of shards whose ranges begin at `starts`; the others own none of the arena."""
    bounds = [*starts, *[size] * (shards + 1 - len(starts))]
    return ShardMap(epoch, tuple(KeyRange(a, b) for a, b in pairwise(bounds)))


def _least_largest(borders: Sequence[int], shards: int) -> int:
    """The size of the largest of this many ranges between borders, where it is smallest."""
    low = max((b - a for a, b in pairwise(borders)), default=0)
    high = borders[-1]
    while low < high:
        middle = (low + high) // 2
        if _latest_ranges(borders, shards, middle)[-1] == 0:
            high = middle
        else:
            low = middle + 1
    return low


def _latest_ranges(borders: Sequence[int], shards: int, largest: int) -> list[int]:
    """For each number of ranges up to `shards`, the first border that they reach from the end.

    Each range ends at a border and is at most `largest`, which no tensor exceeds.
    """
    reached = [len(borders) - 1]
    for _ in range(shards):
        reached.append(bisect_left(borders, borders[reached[-1]] - largest))
    return reached


def _cut_unit(size: int, shards: int) -> int:
    """The unit, in floats, that the bounds of this number of shards are multiples of."""
    if size >= _PAGES_A_SHARD * PAGE_FLOATS * shards:
        return PAGE_FLOATS
    unit = SHARD_ALIGNMENT
    while size // unit < shards:
        unit //= 2
    return unit


def segments(table: DenseTable, keys: KeyRange) -> tuple["RateRun", ...]:
    """The parts of tensors within `keys`, with bounds relative to the start of `keys`."""
    return tuple(
        RateRun(low, high, tensor.lr_mult, tensor.decay_mult, tensor.buffer)
        for tensor, low, high in _tensors_within(table, keys)
    )


def tensor_parts(table: DenseTable, keys: KeyRange) -> dict[str, slice]:
    """The part within `keys` of each tensor that is no buffer, from the start of `keys`."""
    return {
        tensor.name: slice(low, high)
        for tensor, low, high in _tensors_within(table, keys)
        if not tensor.buffer
    }


def _tensors_within(table: DenseTable, keys: KeyRange) -> Iterator[tuple[TensorSpec, int, int]]:
    """Each tensor with a part within `keys`, and the bounds of that part, from their start."""
    for tensor, start in zip(table.tensors, table.offsets, strict=True):
        low, high = max(start, keys.start), min(start + tensor.size, keys.stop)
        if low < high:
            yield tensor, low - keys.start, high - keys.start


class RateRun(msgspec.Struct, frozen=True):
    """A run [start, stop) of a flat array with one pair of multipliers, or of a buffer."""

    start: int
    stop: int
    lr_mult: float
    decay_mult: float
    buffer: bool = False

    @property
    def keys(self) -> slice:
        """The slice of the array that the run covers."""
        return slice(self.start, self.stop)


def _shape(argument: str, shape: object) -> tuple[int, ...]:
    """A shape as a tuple; a one-dimensional shape may be given as a number."""
    if isinstance(shape, int | np.integer):
        return (argument_checks.whole(argument, shape, most=MAX_FLOATS),)
    sizes = argument_checks.items(argument, shape, "a whole number or a tuple of them")
    return tuple(argument_checks.whole(argument, size, most=MAX_FLOATS) for size in sizes)


def _tensors(argument: str, tensors: object) -> tuple[TensorSpec, ...]:
    argument, expected = f"{argument}: tensors", "a list of TensorSpec"
    return tuple(
        argument_checks.instance(argument, tensor, TensorSpec, expected)
        for tensor in argument_checks.items(argument, tensors, expected)
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
