"""Encodes gradients and decodes weights for a session's messages, each table as configured.

A shard holds sections of some tables; a message to it has one part and one frame for each of them.
A compressed gradient is encoded once, because encoding adds the residual of the previous ones to it
(error_feedback.py). Weights may arrive as changes to the weights of an earlier answer. So for each
shard and table the worker keeps a view of the weights that it has, as the shard does
(shards/delta_pulls.py).

A push to several shards is checked here as the shards would check it (shards/gradient_guard.py).
Otherwise one shard could refuse its part while the others apply theirs. The check takes a pass over
the gradient, 70 microseconds for a million floats. A push to a single shard is checked there, while
it is applied.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from cupy_kernels.ops.rows import Ids
from ps.session import row_requests
from ps.session.compression import Compression
from ps.session.error_feedback import ErrorFeedback, check_squares
from ps.session.events import Frames
from ps.session.row_requests import Gather, SplitIds
from shards import delta_pulls, payloads, row_codecs, zstd_frames
from shards.errors import BadInput, BadMessage
from shards.gradient_guard import Guard
from shards.messages import AskedPart, Kind, Part, PulledPart, Weights
from shards.row_frames import RowGradient
from shards.tables import ID_BYTES, KeyRange, Layout, ShardMap
from shards.wire_format import Buffer

Floats = NDArray[np.float32]

Gradients = Mapping[str, Any]
"""A gradient for each table that is pushed: flat float32 of the table's size, or a RowGradient."""


TakeRows = Callable[[int, int], NDArray[np.uint8] | None]
"""Makes memory that a shard sees for a number of bytes of rows; None if there is none."""

_LINE_BYTES = 64


class PulledView(msgspec.Struct, frozen=True):
    """View `number` of a section of a table in the shard's incarnation `boot`; `weights` are those
    of `version`, or close to them, as plain floats. They are never changed, because the caller may
    still read earlier answers.
    """

    boot: int
    number: int
    version: int
    weights: NDArray[np.float32]


def advance(
    view: PulledView | None, reply: Weights, part: PulledPart, payload: NDArray[np.uint8]
) -> PulledView | None:
    """The view after a part of an answer, with its checked payload; None if it cannot be applied.

    An answer that arrives after a later one changes nothing: the worker's view is newer already. An
    answer based on a later view than the worker's cannot be applied: an earlier answer was lost. A
    change to a view of another incarnation of the shard cannot be applied either, because each
    incarnation numbers its own views. Incarnations are only compared for equality: a copy that
    takes over may have the lower boot number.
    """
    if view is not None and view.boot != reply.boot:
        view = None
    if view is not None and view.number > part.number:
        return view
    if part.base == 0:
        # Copied, because the frame is the network's memory and the view outlives it.
        whole = np.frombuffer(payload, np.float32).copy()
        return PulledView(reply.boot, part.number, reply.version, whole)
    if view is None or part.base != view.number:
        return None
    weights = np.empty_like(view.weights)
    delta_pulls.add(part.kind, payload, view.weights, weights)
    return PulledView(reply.boot, part.number, reply.version, weights)


class _Section(NamedTuple):
    """A shard's section of a table, and its parts in the messages to that shard."""

    table: str
    keys: KeyRange
    where: slice
    plain: Part
    encoded: Part
    ask: AskedPart


class PayloadEncoder:
    """The payloads of one worker's messages; `feedback` is set where pushes are compressed.

    `arrives` is the kind of each table's payloads that `read` returns. `take_rows` is the driver's
    allocator of memory that it shares with shards.
    """

    def __init__(
        self,
        layout: Layout,
        shard_map: ShardMap,
        compression: Mapping[str, Compression],
        max_norms: Mapping[str, float],
    ) -> None:
        self.compression = compression
        self._limits = {name: Guard(most) for name, most in max_norms.items()}
        self.feedback = ErrorFeedback.of(layout, compression)
        self.views: dict[tuple[int, str], PulledView] = {}
        self.arrives = {name: _arrives(choice) for name, choice in compression.items()}
        self._shape = (layout.size,)  # kept, because `size` sums over the tensors at each access
        self._sizes = {table.name: table.size for table in layout.tables}
        # Kept, because a layout sums over tables and tensors at each access.
        self._slices = {
            name: slice(keys.start, keys.stop)
            for name in layout.names
            for keys in (layout.section(name),)
        }
        self._packs = any(choice.zstd for choice in compression.values())
        self._views_are_kept = any(choice.pulls_changes for choice in compression.values())
        self._sections = [
            [
                _section(section.table, section.keys, compression[section.table])
                for section in layout.sections(keys)
            ]
            for keys in shard_map.ranges
        ]
        self._all = layout.names
        self._layout, self._map = layout, shard_map
        self._sparse = {table.name: table for table in layout.sparse}
        self.take_rows: TakeRows = lambda _shard, _size: None
        self._asks = [[section.ask for section in sections] for sections in self._sections]
        self._keys = [
            {section.table: section.keys for section in sections} for sections in self._sections
        ]

    def tables(self, gradient: Floats | Gradients) -> Gradients:
        """The gradient of each table; raises BadInput unless it is contiguous float32 that fits.

        `gradient` is one arena of all tables, or a flat array for each of some tables.
        """
        if isinstance(gradient, np.ndarray):
            subject = f"push to table{'s' * (len(self._sizes) > 1)} {', '.join(self._sizes)}"
            if gradient.shape != self._shape or gradient.dtype != np.float32:
                raise BadInput(
                    subject,
                    expected=f"float32 of shape {self._shape}",
                    got=f"{gradient.dtype} of shape {gradient.shape}",
                )
            if not gradient.flags.c_contiguous:
                strides = gradient.strides
                raise BadInput(subject, expected="a contiguous array", got=f"strides {strides}")
            if len(self._sizes) > 1:
                return {name: gradient[part] for name, part in self._slices.items()}
            return dict.fromkeys(self._sizes, gradient)
        for name, array in gradient.items():
            if name in self._sparse:
                assert isinstance(array, RowGradient), "the driver has summed the rows by id"
                continue
            if name not in self._sizes:
                known = ", ".join(self._layout.all_names)
                raise BadInput("push", expected=f"tables {known}", got=name)
            fits = array.shape == (self._sizes[name],) and array.dtype == np.float32
            if not (fits and array.flags.c_contiguous):
                raise BadInput(
                    f"push to table {name}",
                    expected=f"contiguous float32 of shape ({self._sizes[name]},)",
                    got=f"{array.dtype} of shape {array.shape}",
                )
        return gradient

    def write(
        self, gradients: Gradients, seq: int, *, plain: bool
    ) -> list[tuple[list[Part], Frames]]:
        """Encode push `seq`: for each shard its parts, and the frames of each.

        Raises BadInput if a gradient is not finite or a shard would refuse it; then nothing has
        changed. `plain` is for a push that has been accepted before.
        """
        feedback = None if plain else self.feedback
        checks = len(self._sections) > 1 and not plain
        rows = self.split_rows(gradients) if self._sparse else ()
        for part in rows:
            if checks or (not plain and self._row_kind(part.table.name) is not Kind.F4):
                self._check_rows(part, gradients[part.table.name].rows, seq)
        if checks:
            for name, gradient in gradients.items():
                if name in self._sparse:
                    continue
                # A compressed gradient is checked as the shards will decode it, after it was
                # encoded.
                if feedback is None or name not in feedback.tables:
                    self._check(name, gradient, seq)
        if feedback is None:
            return self._encode(gradients, rows, None, plain=plain)
        feedback.begin(gradients, seq)
        limited = feedback.tables.keys() & self._limits.keys() & gradients.keys() if checks else ()
        # Encoding changes the residuals in place: a push that a limit refuses afterwards needs them
        # back.
        before = {name: array.copy() for name, array in feedback.state().items() if limited}
        written = self._encode(gradients, rows, feedback, plain=plain)
        try:
            for name in limited:
                self._check_encoded(name, written, seq)
        except BadInput:
            feedback.restore(before)
            raise
        return written

    def split_rows(self, gradients: Gradients) -> tuple[SplitIds, ...]:
        """The ids of sparse tables in a push, split over the shards; raises BadInput."""
        ids = {name: gradients[name].ids for name in self._sparse if name in gradients}
        return row_requests.split(self._layout, self._map, ids)

    def split_gather(self, gather: Gather) -> tuple[SplitIds, ...]:
        """The ids to read, split over the shards; raises BadInput."""
        return row_requests.split(self._layout, self._map, gather.ids)

    def _check_rows(self, part: SplitIds, rows: Floats, seq: int) -> None:
        """Raise BadInput if a shard would refuse its rows of a table."""
        table = part.table.name
        kind, limit = self._row_kind(table), self._limits.get(table)
        if limit is None or kind is not Kind.F4:
            # Rounding would turn NaN into a number, which no shard would refuse.
            check_squares(table, rows.reshape(-1), seq)
        if limit is None:
            return
        for shard in range(self._map.shards):
            # Rounding may lengthen rows: one to bf16 by 0.4 per cent, one to int8 by more.
            sent = row_codecs.round_rows(kind, part.of_shard(shard, rows))
            check_squares(table, sent.reshape(-1), seq, limit)

    def _check(self, table: str, gradient: Floats, seq: int) -> None:
        """Raise BadInput if a shard would refuse its section of a table's plain gradient."""
        limit = self._limits.get(table)
        if limit is None:
            check_squares(table, gradient, seq)
            return
        for sections in self._sections:
            for section in sections:
                if section.table == table:
                    check_squares(table, gradient[section.where], seq, limit)

    def _check_encoded(
        self, table: str, written: Sequence[tuple[list[Part], Frames]], seq: int
    ) -> None:
        """Raise BadInput if a shard would refuse what it decodes of a compressed gradient."""
        for parts, frames in written:
            for part, frame in zip(parts, frames, strict=True):
                if part.table != table:
                    continue
                keys = KeyRange(part.start, part.stop)
                payload = payloads.validate(f"push {seq}", part.kind, part.zstd, keys, frame.data)
                section = np.empty(len(keys), np.float32)
                payloads.decode(part.kind, payload, section)
                check_squares(table, section, seq, self._limits[table])

    def _encode(
        self,
        gradients: Gradients,
        rows: Sequence[SplitIds],
        feedback: ErrorFeedback | None,
        *,
        plain: bool,
    ) -> list[tuple[list[Part], Frames]]:
        packs = self._packs and not plain
        written: list[tuple[list[Part], Frames]] = []
        for shard, sections in enumerate(self._sections):
            parts: list[Part] = []
            frames: list[NDArray[Any]] = []
            for section in sections:
                if section.table not in gradients:
                    continue
                payload: NDArray[Any] = gradients[section.table][section.where]
                if feedback is not None and section.table in feedback.tables:
                    payload = feedback.encode(section.table, payload, section.keys)
                if packs and section.encoded.zstd:
                    payload = zstd_frames.pack(payload)
                parts.append(section.plain if plain else section.encoded)
                frames.append(payload)
            if rows:
                self._encode_rows(shard, rows, gradients, parts, frames, plain=plain)
            written.append((parts, tuple(frames)))
        return written

    def _encode_rows(
        self,
        shard: int,
        rows: Sequence[SplitIds],
        gradients: Gradients,
        parts: list[Part],
        frames: list[NDArray[Any]],
        *,
        plain: bool,
    ) -> None:
        """Append the parts and frames of a shard's rows; they are in its memory if it shares any.

        All rows of a message take one piece of that memory, as there are few.
        """
        splits = [split for split in rows if split.count(shard)]
        kinds = [Kind.F4 if plain else self._row_kind(split.table.name) for split in splits]
        sizes = [
            split.count(shard) * row_codecs.row_bytes(kind, split.table.dim)
            for split, kind in zip(splits, kinds, strict=True)
        ]
        ids_sizes = [ID_BYTES * split.count(shard) for split in splits]
        # Lines do not straddle two arrays, so that a view of each is aligned for its floats.
        # One piece for all: each has to be found again, and is a reference of 32 bytes.
        memory = self.take_rows(shard, sum(map(_round_up, ids_sizes + sizes)))
        buckets, start = self._map.buckets[shard], 0
        for split, kind, ids_size, size in zip(splits, kinds, ids_sizes, sizes, strict=True):
            parts.append(Part(split.table.name, kind, buckets.start, buckets.stop))
            gradient: Floats = gradients[split.table.name].rows
            if memory is None and kind is Kind.F4:
                # For a single shard without a copy: the arrays are the step's own, and stay.
                frames += split.of_shard(shard, split.ids), split.of_shard(shard, gradient)
                continue
            if memory is None:
                ids, rows_bytes = split.of_shard(shard, split.ids), np.empty(size, np.uint8)
            else:
                end = start + _round_up(ids_size)
                ids = memory[start : start + ids_size].view(np.uint64)
                rows_bytes = memory[end : end + size]
                start = end + _round_up(size)
                split.copy(shard, split.ids, ids)
            if kind is Kind.F4:
                # Written in place: for several shards each row would be copied anyway.
                values = rows_bytes.view(np.float32).reshape(split.count(shard), -1)
                split.copy(shard, gradient, values)
                frames += ids, values
            else:
                row_codecs.encode(kind, split.of_shard(shard, gradient), rows_bytes)
                frames += ids, rows_bytes

    def _row_kind(self, table: str) -> Kind:
        """The encoding of a table's rows in pushes."""
        return self.compression[table].push_kind

    def asks(self, shard: int, tables: Sequence[str]) -> list[AskedPart]:
        """The parts of a pull of these tables from a shard."""
        if tables == self._all and not self._views_are_kept:
            return self._asks[shard]
        asks = []
        for section in self._sections[shard]:
            if section.table in tables:
                ask = section.ask
                view = self.views.get((shard, section.table)) if self._views_are_kept else None
                asks.append(msgspec.structs.replace(ask, base=view.number) if view else ask)
        return asks

    def row_asks(
        self, shard: int, rows: Sequence[SplitIds]
    ) -> tuple[list[AskedPart], tuple[Ids, ...]]:
        """The parts and frames of a pull of rows from a shard; none for a table without any."""
        asked = [split for split in rows if split.count(shard)]
        parts = [
            AskedPart(split.table.name, self.compression[split.table.name].pull) for split in asked
        ]
        return parts, tuple(split.of_shard(shard, split.ids) for split in asked)

    def read(
        self,
        reply: Weights,
        asks: Sequence[AskedPart],
        asked_frames: Frames,
        frames: Sequence[Buffer],
    ) -> tuple[Weights, Sequence[Buffer]] | None:
        """The payloads in an answer, checked; changes are applied and returned as whole weights.

        `asked_frames` are the ids of rows that were asked for, of which the answer has two frames.
        None if they are changes to a view that this worker lacks because that answer was lost.
        Raises BadMessage.
        """
        payload_frames: list[Buffer] = []
        version, dense = reply.version, len(asks) - len(asked_frames)
        expected = dense + 2 * len(asked_frames)
        if len(reply.parts) != len(asks) or len(frames) != expected:
            raise BadMessage(
                f"weights: expected {len(asks)} parts and {expected} frames,"
                f" got {len(reply.parts)} and {len(frames)}"
            )
        row_frames: list[Buffer] = []
        if asked_frames:
            row_frames = self._read_rows(reply, asks[dense:], asked_frames, frames[dense:])
        for ask, part, frame in zip(asks[:dense], reply.parts, frames, strict=False):
            keys = self._keys[reply.shard][ask.table]
            if part.table != ask.table or part.start != keys.start or part.stop != keys.stop:
                raise BadMessage(
                    f"weights: expected keys {keys} of table {ask.table},"
                    f" got [{part.start}, {part.stop}) of {part.table}"
                )
            changes = self._views_are_kept and self.compression[ask.table].pulls_changes
            if part.kind is not ask.kind and not (changes and part.kind is Kind.F4):
                raise BadMessage(f"weights: expected kind {ask.kind}, got {part.kind}")
            payload = payloads.validate("weights", part.kind, part.zstd, keys, frame)
            if changes:
                key = reply.shard, ask.table
                view = advance(self.views.get(key), reply, part, payload)
                if view is None:
                    return None
                self.views[key] = view
                # A later answer may have made the view newer than this one. The older version
                # counts, so that the staleness of the push is never understated.
                payload, version = view.weights.view(np.uint8), min(version, view.version)
            payload_frames.append(payload.data)
        payload_frames += row_frames
        if version != reply.version:
            reply = msgspec.structs.replace(reply, version=version)
        return reply, payload_frames

    def _read_rows(
        self,
        reply: Weights,
        asks: Sequence[AskedPart],
        asked_frames: Frames,
        frames: Sequence[Buffer],
    ) -> list[Buffer]:
        """The rows of these ids in an answer as plain floats; raises BadMessage."""
        decoded: list[Buffer] = []
        parts = reply.parts[-len(asks) :]
        for number, (ask, part, ids) in enumerate(zip(asks, parts, asked_frames, strict=True)):
            table, buckets = self._sparse[ask.table], self._map.buckets[reply.shard]
            edges = part.table, part.kind, part.start, part.stop
            if edges != (ask.table, ask.kind, buckets.start, buckets.stop):
                raise BadMessage(f"weights: expected rows of buckets {buckets}, got {part}")
            rows, bits = frames[2 * number : 2 * number + 2]
            sizes = [memoryview(frame).nbytes for frame in (rows, bits)]
            expected = [row_codecs.row_bytes(ask.kind, table.dim) * len(ids), -(-len(ids) // 8)]
            if sizes != expected:
                raise BadMessage(
                    f"weights: rows of table {ask.table}: expected frames of {expected} bytes,"
                    f" got {sizes}"
                )
            if ask.kind is not Kind.F4:
                # Here, because what puts rows together knows plain floats alone.
                rows = row_codecs.decode("weights", ask.kind, rows, len(ids), table.dim).data
            decoded += rows, bits
        return decoded


def _round_up(size: int) -> int:
    return -(-size // _LINE_BYTES) * _LINE_BYTES


def _section(table: str, keys: KeyRange, compression: Compression) -> _Section:
    edges = keys.start, keys.stop
    return _Section(
        table,
        keys,
        slice(*edges),
        Part(table, Kind.F4, *edges),
        Part(table, compression.push_kind, *edges, compression.zstd),
        AskedPart(table, compression.pull, compression.zstd, 0, compression.pull_share),
    )


def _arrives(compression: Compression) -> Kind:
    """The kind of payloads that `read` returns: changes become plain floats."""
    return Kind.F4 if compression.pulls_changes else compression.pull
