"""Where a client's arrays lie: the gradients that its caller fills, and the weights it is given.

Each is flat, float32, and of the table's size. Gradients lie where the shards see them, if memory
is shared, and weights where they arrived, if they lie there as one. All else is in arrays of the
client's own, which are recycled when nobody refers to them any more.
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
    """One client's; `turn_to` shards before anything else."""

    def __init__(self, floats: int, allocate: Allocator) -> None:
        """`allocate` makes the client's own: page-locked ones, where they go to a GPU."""
        self._own = Buffers(floats, allocate)
        self._pinned = allocate is not heap_allocator
        self._map: ShardMap | None = None
        self._sharing: WorkerSide | None = None

    def turn_to(self, shard_map: ShardMap, sharing: WorkerSide | None) -> None:
        """Push to these shards and pull from them, with this end of the memory shared with them."""
        self._map, self._sharing = shard_map, sharing

    def __len__(self) -> int:
        """How many of the client's own there are."""
        return len(self._own)

    def take(self) -> Floats:
        """One for a gradient; dropping it recycles it."""
        # Page-locked ones stay what was asked for, and are copied into shared memory when pushed.
        if self._sharing is not None and not self._pinned:
            return self._sharing.buffers.take()
        return self._own.take()

    def placed(self, gradient: Floats) -> Floats:
        """`gradient` where shards that share memory see it."""
        return gradient if self._sharing is None else self._sharing.placed(gradient)

    def assembled(self, pulled: Pulled) -> PulledWeights:
        """The weights as one array that cannot be written: where they lie, or side by side."""
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
        """The weights as one read-only array where they arrived, if they lie there so."""
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
