"""A worker's side of shared memory (references.py): offers its segment, and reads lent weights.

The worker offers its segment with each Hello. Weights from a shard that has accepted are read in
place; those of several shards are mapped contiguously if possible (segment.py). A loan
is returned when nothing refers to it any more.
"""

import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ps.session.payload_encoder import Gradients
from ps.shared_memory import handshake, references, shm_files
from ps.shared_memory.handshake import Accept, Decline, Lent, Offer, SharedFrames
from ps.shared_memory.references import Borrowed, Parts, Together
from ps.shared_memory.segment import MAX_SLOTS, ContiguousMapping, SharedBuffers, ShmSegment, Window
from shards import wire_format
from shards.errors import BadMessage
from shards.messages import Hello
from shards.tables import Layout
from shards.wire_format import Buffer


class WorkerSide:
    """A worker's side: offers its segment to every shard, and reads weights in place."""

    def __init__(self, job: str, floats: int, slots: int, *, rows: bool = False) -> None:
        """With `rows`, gradients of rows go through shared memory, too.

        Raises OSError when there is no shared memory, or no room in it.
        """
        self._job = job
        # Arrays beyond MAX_SLOTS are allocated on the heap.
        self._segment = ShmSegment(job, floats, min(slots, MAX_SLOTS), rows=rows)
        self._lenders: dict[int, tuple[Window, Borrowed]] = {}
        self._mapping = ContiguousMapping()
        self.reasons: dict[int, str] = {}
        self.by_socket = 0  # messages with large frames that found no room in shared memory
        self.buffers = SharedBuffers(floats, self._segment)

    def shares_with(self, shard: int) -> bool:
        """Return whether this worker and `shard` have proved that they see each other's memory."""
        return shard in self._lenders

    def take_rows(self, shard: int, size: int) -> NDArray[np.uint8] | None:
        """Memory that `shard` sees, for `size` bytes of rows; dropping it recycles it.

        None if it shares none, if there is no room, or if the socket is quicker.
        """
        if shard not in self._lenders or size < references.LEAST_SHARED_BYTES:
            return None
        rows = self._segment.take_rows(size)
        self.by_socket += rows is None
        return rows

    def place(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """`array` if it is in the segment, else a copy that is.

        Returns `array` itself if no shard shares memory, it does not fit, or there is no room.
        """
        fits = array.dtype == np.float32 and array.shape == (self.buffers.size,)
        fits = fits and array.flags.c_contiguous
        if not self._lenders or not fits or array in self._segment:
            return array
        copy = self.buffers.take()
        if copy not in self._segment:
            return array
        copy[:] = array
        return copy

    def place_tables(self, gradients: Gradients, layout: Layout) -> Gradients:
        """A gradient for each of some tables; copied into one array unless all are in the segment.

        Returns `gradients` itself where `place` returns its argument.
        """
        if not self._lenders or all(array in self._segment for array in gradients.values()):
            return gradients
        copy = self.buffers.take()
        if copy not in self._segment:
            return gradients
        parts = layout.split(copy)
        for name, array in gradients.items():
            parts[name][:] = array
        return {name: parts[name] for name in gradients}

    def whole(self, frames: Sequence[Sequence[Buffer]]) -> NDArray[np.float32] | None:
        """All shards' floats as one read-only array without a copy; None if that is impossible.

        `frames` are those of each shard, of plain floats and in the order of the arena.
        """
        if len(self._lenders) < len(frames):
            return None
        parts = [[np.frombuffer(frame, np.uint8) for frame in of_shard] for of_shard in frames]
        pieces = [
            self._lenders[shard][0].tile(shard_parts) for shard, shard_parts in enumerate(parts)
        ]
        tiles = [tile for tile in pieces if tile is not None]
        if len(tiles) < len(pieces):
            return None
        if len(parts) == 1 and len(parts[0]) == 1:
            return parts[0][0].view(np.float32)
        memory = self._mapping.lay(tiles)
        if memory is None:
            return None
        whole = np.frombuffer(memory, np.float32, sum(tile.length for tile in tiles) // 4)
        whole.flags.writeable = False
        # The parts keep their loans, and so the shards' memory, for as long as the whole array is
        # used.
        weakref.finalize(whole, references.let_go, parts).atexit = False
        return whole

    def seal(self, shard: int, messages: Together) -> Parts:
        """The parts that carry `messages` to `shard`."""
        if references.has(messages, Hello):
            return [handshake.encode(Offer(self._segment.name)), *wire_format.enclose(messages)]
        if shard not in self._lenders:
            return wire_format.enclose(messages)
        window, borrowed = self._lenders[shard]
        referring = references.with_references(self._segment, messages)
        carried = SharedFrames(
            self._segment.nonce,
            window.nonce,
            referring is not None,
            borrowed.seen,
            borrowed.loans,
        )
        note = handshake.encode(carried)
        if referring is None:
            return [note, *wire_format.enclose(messages)]
        return [note, *referring.enclose()]

    def open(self, shard: int, parts: Parts) -> Parts | None:
        """The parts without their note, with references resolved; None if outdated.

        Raises BadMessage.
        """
        if len(parts) < 2:
            return parts
        if not handshake.is_note(parts[0]):
            if shard in self._lenders:
                self._count_large(parts[1:])
            return parts
        match handshake.decode_from_shard(parts[0]):
            case Accept() as accept:
                self._on_accept(shard, accept)
            case Decline(reason):
                self._forget(shard)
                self.reasons[shard] = reason
            case Lent(loan):
                self._count_large(parts[3:])
                return self._borrow(shard, loan, parts[1:])
        return parts[1:]

    def close(self) -> None:
        """Stop sharing. Arrays that were read or handed out stay valid until they are dropped."""
        for shard in list(self._lenders):
            self._forget(shard)
        self._segment.close()
        shm_files.sweep()  # a shard that was killed cannot do it itself

    def _count_large(self, frames: Parts) -> None:
        """Count a message if a large frame of it came through the socket."""
        for frame in frames:
            if memoryview(frame).nbytes >= references.LEAST_SHARED_BYTES:
                self.by_socket += 1
                break

    def _on_accept(self, shard: int, accept: Accept) -> None:
        # The number that it read proves which memory the shard sees; in another container it
        # differs.
        if accept.read != self._segment.nonce:
            self.reasons[shard] = "the shard sees another segment than ours"
            return
        known = self._lenders.get(shard)
        if known is not None and known[0].name == accept.segment:
            return
        self._forget(shard)  # the shard was restarted
        try:
            self._lenders[shard] = Window(self._job, accept.segment), Borrowed()
        except BadMessage as error:
            self.reasons[shard] = str(error)

    def _forget(self, shard: int) -> None:
        """Stop reading a shard's memory; only arrays that still refer to it keep it."""
        if shard in self._lenders:
            window, _ = self._lenders.pop(shard)
            self._mapping.forget(window.name)
            window.close()

    def _borrow(self, shard: int, loan: int, parts: Parts) -> Parts | None:
        if shard not in self._lenders:
            return None
        window, borrowed = self._lenders[shard]
        if not borrowed.borrow(loan):
            return None
        return references.resolve(window, parts, references.Share(borrowed.give_back, loan))
