"""The arrays of a client: the gradients that its caller fills, and the weights that it receives.

Each is flat, float32, and of the table's size. With shared memory, gradients are allocated where
the shards see them. Weights stay where they arrived, if they are contiguous there. Otherwise the
client uses arrays of its own, which are recycled when nothing refers to them any more.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from ps.session.events import Pulled
from ps.shared_memory.worker_side import WorkerSide
from shards import payloads
from shards.messages import Kind
from shards.tables import ShardMap
from shards.versions import Allocator, Buffers, heap_allocator

Floats = NDArray[np.float32]


class PulledWeights(msgspec.Struct, frozen=True):
    """Pulled weights: a flat array of the table's size, and the version of each shard's part."""

    weights: Floats
    versions: tuple[int, ...]


class ClientBuffers:
    """The arrays of one client; call `turn_to` first."""

    def __init__(self, floats: int, allocate: Allocator) -> None:
        """`allocate` makes the client's own arrays: page-locked ones if they go to a GPU."""
        self._own = Buffers(floats, allocate)
        self._pinned = allocate is not heap_allocator
        self._map: ShardMap | None = None
        self._sharing: WorkerSide | None = None

    def turn_to(self, shard_map: ShardMap, sharing: WorkerSide | None) -> None:
        """Set the shards to push to and pull from, and the memory shared with them, if any."""
        self._map, self._sharing = shard_map, sharing

    def __len__(self) -> int:
        """The number of the client's own arrays."""
        return len(self._own)

    def take(self) -> Floats:
        """An array for a gradient; dropping it recycles it."""
        # Page-locked arrays were asked for explicitly; a push copies them into shared memory.
        if self._sharing is not None and not self._pinned:
            return self._sharing.buffers.take()
        return self._own.take()

    def placed(self, gradient: Floats) -> Floats:
        """`gradient`, copied if necessary to where shards that share memory see it."""
        return gradient if self._sharing is None else self._sharing.placed(gradient)

    def assembled(self, pulled: Pulled) -> PulledWeights:
        """The weights as one read-only array: where they arrived, or copied together."""
        whole = self._whole(pulled)
        if whole is not None:
            return PulledWeights(whole, pulled.versions)
        assert self._map is not None, "some shard has sent them"
        arena = self._own.take()
        for shard, frames in enumerate(pulled.frames):
            for part, frame in zip(self._map.cut(arena, shard), frames, strict=True):
                payloads.decode(pulled.kind, np.frombuffer(frame, np.uint8), part)
        return PulledWeights(_read_only(arena), pulled.versions)

    def _whole(self, pulled: Pulled) -> Floats | None:
        """The weights as one read-only array where they arrived, if they are contiguous there."""
        if pulled.kind is not Kind.F4:
            return None
        if self._pinned or len(pulled.frames) > 1 or len(pulled.frames[0]) > 1:
            return self._sharing.whole(pulled.frames) if self._sharing is not None else None
        whole = np.frombuffer(pulled.frames[0][0], np.float32)
        whole.flags.writeable = False
        return whole if whole.flags.aligned else None


def _read_only(arena: Floats) -> Floats:
    """A view that cannot be written, as weights in a shard's memory cannot be."""
    view = arena.view()
    view.flags.writeable = False
    return view
