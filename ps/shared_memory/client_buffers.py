"""The arrays of a client: the gradients that its caller fills, and the weights that it receives.

Each is flat, float32, and holds all tables, or those that were asked for. With shared memory,
gradients are allocated where the shards see them. Weights stay where they arrived, if they are
contiguous there. Otherwise the client uses arrays of its own, which are recycled when nothing
refers to them any more.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ps.session.events import Pulled
from ps.session.payload_encoder import Gradients
from ps.session.row_requests import GatheredRows
from ps.shared_memory.worker_side import WorkerSide
from shards import payloads
from shards.buffer_pool import Allocator, Buffers, heap_allocator
from shards.messages import Kind
from shards.row_frames import RowGradient
from shards.tables import Layout, ShardMap

Floats = NDArray[np.float32]


class PulledWeights(msgspec.Struct, frozen=True):
    """Pulled weights: one flat array of the dense tables in `layout`, the version of each shard's
    part, and the rows that were gathered, by table.
    """

    weights: Floats
    versions: tuple[int, ...]
    layout: Layout
    rows: Mapping[str, GatheredRows] = {}


class ClientBuffers:
    """The arrays of one client; call `turn_to` first."""

    def __init__(self, layout: Layout, allocate: Allocator) -> None:
        """`allocate` makes the client's own arrays: page-locked ones if they go to a GPU."""
        self._layout = layout
        self._allocate = allocate
        self._recycled = Buffers(layout.size, allocate)
        self._some: dict[tuple[str, ...], _Target] = {}  # by the tables that are pulled
        self._pinned = allocate is not heap_allocator
        self._map: ShardMap | None = None
        self._sharing: WorkerSide | None = None

    def turn_to(self, shard_map: ShardMap, sharing: WorkerSide | None) -> None:
        """Set the shards to push to and pull from, and the memory shared with them, if any."""
        self._map, self._sharing = shard_map, sharing
        self._some.clear()

    def __len__(self) -> int:
        """The number of the client's own arrays."""
        return len(self._recycled)

    def take(self) -> Floats:
        """An array for a gradient; dropping it recycles it."""
        # Page-locked arrays were asked for explicitly; a push copies them into shared memory.
        if self._sharing is not None and not self._pinned:
            return self._sharing.buffers.take()
        return self._recycled.take()

    def place_in_memory(self, gradient: Floats | Gradients) -> Floats | Gradients:
        """`gradient`, copied if necessary to where shards that share memory see it."""
        if self._sharing is None:
            return gradient
        if isinstance(gradient, np.ndarray):
            return self._sharing.place(gradient)
        # Rows are placed when they are split over the shards (payload_encoder.py).
        dense = {
            name: array for name, array in gradient.items() if not isinstance(array, RowGradient)
        }
        return {**gradient, **self._sharing.place_tables(dense, self._layout)}

    def assemble(self, pulled: Pulled) -> PulledWeights:
        """The weights as one read-only array: where they arrived, or copied together."""
        target = self._some.get(pulled.tables)
        if target is None:
            target = self._some[pulled.tables] = self._target(pulled.tables)
        whole = self._whole(pulled)
        if whole is None:
            arena = target.buffers.take()
            for sections, frames in zip(target.sections, pulled.frames, strict=True):
                for (table, where), frame in zip(sections, frames, strict=True):
                    payload = np.frombuffer(frame, np.uint8)
                    payloads.decode(pulled.kinds[table], payload, arena[where])
            whole = _read_only(arena)
        return PulledWeights(whole, pulled.versions, target.layout, pulled.rows)

    def _target(self, tables: tuple[str, ...]) -> "_Target":
        """Where the frames of these tables go."""
        assert self._map is not None, "some shard has sent them"
        layout = self._layout.select(tables)
        start = {name: layout.section(name).start for name in tables}
        buffers = self._recycled if layout == self._layout else Buffers(layout.size, self._allocate)
        sections = [
            [
                (section.table, slice(base + section.keys.start, base + section.keys.stop))
                for section in self._layout.sections(keys)
                if (base := start.get(section.table)) is not None
            ]
            for keys in self._map.ranges
        ]
        return _Target(layout, buffers, sections)

    def _whole(self, pulled: Pulled) -> Floats | None:
        """The weights as one read-only array where they arrived, if they are contiguous there."""
        if not pulled.tables:
            return None
        for table in pulled.tables:
            if pulled.kinds[table] is not Kind.F4:
                return None
        if self._pinned or len(pulled.frames) > 1 or len(pulled.frames[0]) > 1:
            return self._sharing.whole(pulled.frames) if self._sharing is not None else None
        whole = np.frombuffer(pulled.frames[0][0], np.float32)
        whole.flags.writeable = False
        return whole if whole.flags.aligned else None


class _Target(NamedTuple):
    """Pulled tables: their layout, its arrays, and for each shard the place of each frame."""

    layout: Layout
    buffers: Buffers
    sections: list[list[tuple[str, slice]]]


def _read_only(arena: Floats) -> Floats:
    """A view that cannot be written, as weights in a shard's memory cannot be."""
    view = arena.view()
    view.flags.writeable = False
    return view
