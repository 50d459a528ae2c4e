"""One shard's part of one sparse table: rows by 64-bit id, each with its optimiser state.

Rows are in a slab: a row's weights and its slots are next to each other, padded to lines of 64
bytes; `row_index.py` finds a row's number in the slab by its id. 16 bytes of meta a row are apart:
the updates of the row, a slot for rules that keep one number a row, and two words that are zero
until tables are bounded. Memory for the most rows is reserved at once and never moved; what is not
written costs nothing.

A row comes into being when it is first pushed. Until then a pull computes its first values and
stores nothing, so pulls change no state. Rows change in place: an answer copies them within its
transition, and so does `export`. Nothing depends on the order in which rows were stored; a state
has them in the order of their mixed ids, so equal contents are equal states.

All of it is in host memory, whichever backend has the dense tables.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.ops.rows import Ids, find_distinct, gather_rows, mix, sum_rows
from cupy_kernels.ops.updates import squared_norm
from shards import row_codecs
from shards.buffer_pool import reserve
from shards.errors import BadInput, BadMessage, Full
from shards.messages import AskedPart, Kind, Part, PulledPart
from shards.row_frames import RowGradient, check_ids, check_rows
from shards.row_index import RowIndex
from shards.shard_state import IDS, META, ROWS, Arrays, check_row_ids
from shards.spec import ShardSpec, TableSpec
from shards.tables import META_WORDS, SparseTable
from shards.wire_format import Buffer

Floats = NDArray[np.float32]

_LINE_FLOATS = 16

_Shapes = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]


class SparsePart:
    """The rows of a sparse table in a shard's buckets; see `TablePart`."""

    def __init__(self, shard: ShardSpec, spec: TableSpec) -> None:
        table = spec.table
        assert isinstance(table, SparseTable)
        self.spec = spec
        self.table = table
        self.count = self.buffered = 0
        self.dense, self.push_frames, self.ask_frames = False, 2, 1
        self.sums, self.runs = False, True
        self.copies, self.is_prepared = False, True
        self.max_squares = spec.guard.max_squares
        self.most_rows = table.most_rows(len(shard.buckets))
        self._buckets = shard.buckets
        # Made once: the header of an answer depends on its encoding alone.
        edges = shard.buckets.start, shard.buckets.stop
        self._pulled = {kind: PulledPart(table.name, kind, *edges) for kind in row_codecs.PULLED}
        self._width = spec.row_floats
        self._clear()

    @property
    def rows(self) -> int:
        """The number of rows that are stored."""
        return self._index.count

    def prepare(self) -> None:
        """Nothing has to be copied before a push."""

    # --- pushes -----------------------------------------------------------------------------------

    def check(self, label: str, part: Part, frames: Sequence[Buffer]) -> RowGradient:
        """The ids and rows of a push; of plain floats as views of its frames. Raises BadMessage."""
        edges = part.start, part.stop
        if edges != (self._buckets.start, self._buckets.stop):
            raise BadMessage(
                f"{label}: expected buckets {self._buckets} of table {part.table},"
                f" got [{part.start}, {part.stop})"
            )
        self._check_kind(label, part.kind, part.zstd, row_codecs.PUSHED)
        ids_frame, rows_frame = frames
        ids = check_ids(label, self.table, self._buckets, ids_frame)
        return check_rows(label, self.table, ids, part.kind, rows_frame)

    def check_room(self, gradients: Sequence[RowGradient]) -> None:
        """Raise Full if the ids that are not stored yet are more than there is room for."""
        room = max(0, self.most_rows - self.rows)  # a reshard may have brought more rows
        # Mostly there is room even if all ids are new, and the index need not be asked.
        if sum(len(gradient.ids) for gradient in gradients) <= room:
            return
        ids = np.unique(np.concatenate([gradient.ids for gradient in gradients]))
        births = np.count_nonzero(self._index.find(ids) < 0)
        if births > room:
            raise Full(
                f"table {self.table.name}: expected at most {self.most_rows} rows at a shard, its"
                f" share of rows={self.table.rows}, got {births} new ones beyond {self.rows};"
                " give the table more `rows`"
            )

    def measure(self, gradient: RowGradient) -> float:
        """The squared norm of all rows of a gradient."""
        return squared_norm(gradient.rows.reshape(-1))

    def is_finite(self, gradient: RowGradient) -> bool:
        return bool(np.isfinite(gradient.rows).all())

    def mean(self, gradients: Sequence[RowGradient], pushes: int) -> RowGradient:
        """The mean over all pushes of a round; a row that a push leaves out counts as zero there.

        Whether a push that has no rows here has some at another shard is not known, so the pushes
        that leave the table out count as well.
        """
        distinct = find_distinct(np.concatenate([gradient.ids for gradient in gradients]))
        rows = sum_rows(distinct, np.concatenate([gradient.rows for gradient in gradients]))
        return RowGradient(distinct.ids, rows / np.float32(pushes))

    def apply(
        self,
        weights: Floats,
        gradients: Sequence[RowGradient],
        out: Floats,
        rate: float,
        read: Floats | None,
    ) -> list[float]:
        """Update the rows of each gradient in turn; new ones begin with their first values."""
        for gradient in gradients:
            self._apply_rows(gradient, rate)
        return []

    def collect(self, gradient: RowGradient, factor: float) -> NoReturn:
        raise AssertionError("a strategy with a buffer is refused for rows (aggregation.py)")

    def take_buffer(self, size: int) -> NoReturn:
        raise AssertionError("a strategy with a buffer is refused for rows (aggregation.py)")

    def collect_report(self, report: object, weight: float, norms: dict[str, float]) -> NoReturn:
        raise AssertionError("a strategy with a quorum is refused for rows (aggregation.py)")

    def take_reports(self, weight: float, norms: Mapping[str, float]) -> NoReturn:
        raise AssertionError("a strategy with a quorum is refused for rows (aggregation.py)")

    def keep(self, weights: Floats, out: Floats) -> None:
        """Rows are in no version's array."""

    def _apply_rows(self, gradient: RowGradient, rate: float) -> None:
        slots = self._slots_for(gradient.ids)
        self.spec.rule.apply_rows(
            self._slab, self._meta, slots, gradient.rows, rate=rate, decay=self.spec.decay
        )

    def _slots_for(self, ids: Ids) -> NDArray[np.int64]:
        """The slot of each id; one that is not stored is, with its first values."""
        slots = self._index.find(ids)
        (missing,) = np.nonzero(slots < 0)
        if missing.size:
            assert self.rows + missing.size <= len(self._slab), "`check_room` has found room"
            new = np.arange(self.rows, self.rows + missing.size)
            first = self.table.init.make_rows(ids[missing], self.table.dim, self.table.seed)
            self._slab[new[0] : new[-1] + 1, : self.table.dim] = first
            self._index.insert(ids[missing], new)
            slots[missing] = new
        return slots

    # --- pulls ------------------------------------------------------------------------------------

    def check_ask(self, ask: AskedPart, frames: Sequence[Buffer]) -> None:
        """Raise BadMessage if rows cannot be served as `ask` says."""
        label = "pull"
        self._check_kind(label, ask.kind, ask.zstd, row_codecs.PULLED)
        (ids_frame,) = frames
        check_ids(label, self.table, self._buckets, ids_frame)

    def read(
        self,
        weights: Floats,
        version: int,
        ask: AskedPart,
        frames: Sequence[Buffer],
        worker: str,
    ) -> tuple[PulledPart, tuple[NDArray[Any], ...]]:
        """A copy of the rows asked for, and a bit for each that says whether it is stored."""
        ids = np.frombuffer(frames[0], np.uint64)
        slots = self._index.find(ids)
        rows = gather_rows(self._slab, slots, self.table.dim)
        (missing,) = np.nonzero(slots < 0)
        if missing.size:  # nothing is stored here, or a pull would change the state
            rows[missing] = self.table.init.make_rows(ids[missing], self.table.dim, self.table.seed)
        frame: NDArray[Any] = rows
        if ask.kind is not Kind.F4:
            # For this answer alone: rows change in place, so none can be made for several.
            frame = np.empty(len(ids) * row_codecs.row_bytes(ask.kind, self.table.dim), np.uint8)
            row_codecs.encode(ask.kind, rows, frame)
        return self._pulled[ask.kind], (frame, np.packbits(slots >= 0))

    def forget(self, worker: str) -> None:
        """Nothing is kept for single workers."""

    def _check_kind(self, label: str, kind: Kind, zstd: bool, kinds: Sequence[Kind]) -> None:
        if kind not in kinds or zstd:
            raise BadMessage(
                f"{label}: expected rows of table {self.table.name} as {', '.join(kinds)},"
                f" got {kind}{' packed by zstd' if zstd else ''}"
            )

    # --- state ------------------------------------------------------------------------------------

    def export(self, weights: Floats, past: Sequence[Floats]) -> Arrays:
        """Copies of ids, rows and meta, in the order of mixed ids; without rows the ids alone."""
        if not self.rows:
            return {IDS: np.zeros(0, np.uint64)}
        ids, slots = self._index.items()
        order = np.argsort(mix(ids), kind="stable")  # quick where much is in order already
        slots = slots[order]
        return {
            IDS: ids[order],
            ROWS: gather_rows(self._slab, slots, self._width),
            META: self._meta.take(slots, axis=0),
        }

    def check_state(self, arrays: Arrays) -> None:
        """Raise BadInput unless these are rows of this table and of the shard's buckets.

        Values that are not finite are accepted, as a dense table's are: a copy, a log and a
        snapshot have what the shard has, and a shard with NaN must be able to restart.
        """
        subject = f"table {self.table.name}"
        count = len(arrays[IDS]) if IDS in arrays else 0
        expected: _Shapes = {
            IDS: (np.dtype(np.uint64), (count,)),
            ROWS: (np.dtype(np.float32), (count, self._width)),
            META: (np.dtype(np.uint32), (count, META_WORDS)),
        }
        if not count:  # one form of each state, or equal ones would look different
            expected = {IDS: expected[IDS]}
        actual: _Shapes = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        if actual != expected:
            raise BadInput(
                subject, expected=_describe_arrays(expected), got=_describe_arrays(actual)
            )
        if count > self.table.capacity:
            raise BadInput(subject, expected=f"at most {self.table.capacity} rows", got=count)
        check_row_ids(subject, np.ascontiguousarray(arrays[IDS]), self._buckets)

    def restore(self, arrays: Arrays, out: Floats, past: Sequence[Floats]) -> None:
        """Take over copies of the arrays of a state, in place of all rows."""
        ids, count = np.ascontiguousarray(arrays[IDS]), len(arrays[IDS])
        self._clear()  # first: the memory of the former rows is then free for the new ones
        if not count:
            return
        self._slab[:count, : self._width] = arrays[ROWS]
        self._meta[:count] = arrays[META]
        self._index.insert(ids, np.arange(count))

    def _clear(self) -> None:
        """Begin without rows, in new memory: that of the former rows goes back to the system."""
        rows = self.table.capacity  # a state to restore may exceed this shard's own limit
        # Whole lines: a row that begins within one would touch a line more at each update.
        stride = -(-self._width // _LINE_FLOATS) * _LINE_FLOATS
        self._index = RowIndex(self._buckets)
        self._slab = reserve((rows, stride), np.float32)
        self._meta = reserve((rows, META_WORDS), np.uint32)


def _describe_arrays(arrays: _Shapes) -> str:
    return ", ".join(f"{name} {dtype} {shape}" for name, (dtype, shape) in sorted(arrays.items()))
