"""Encodes gradients and decodes weights for a session's messages, as the job compresses them.

A compressed gradient is encoded once, because encoding adds the residual of the previous ones to it
(error_feedback.py). Weights may arrive as changes to earlier weights, of which there is one view
per shard: the other end of shards/delta_pulls.py.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ps.session.compression import Compression
from ps.session.error_feedback import ErrorFeedback
from ps.session.events import Frames
from shards import delta_pulls, payloads, zstd_frames
from shards.errors import BadInput, BadMessage
from shards.messages import Kind, Weights
from shards.tables import DenseTable, ShardMap
from shards.wire_format import Buffer


class PulledView(msgspec.Struct, frozen=True):
    """View `number` of the shard's life `boot`; its weights are those of `version`, or close to
    them.

    Its `parts` are plain floats, one array per key range. They are never changed, because the
    caller may still read earlier answers.
    """

    boot: int
    number: int
    version: int
    parts: tuple[NDArray[np.float32], ...]

    @property
    def frames(self) -> list[Buffer]:
        """The floats as the frames of a plain answer."""
        return [part.view(np.uint8).data for part in self.parts]


def advanced(
    view: PulledView | None, reply: Weights, changes: Sequence[NDArray[np.uint8]]
) -> PulledView | None:
    """The view after an answer with checked `changes`; None if the answer cannot be applied.

    An answer that was overtaken changes nothing: the worker's view is newer than the one it leads
    to. An answer based on a later view than the worker's cannot be applied, since an earlier answer
    was lost. Nor can a change to a view of another life: its numbers have no meaning here. Lives
    are only compared for equality: a copy that takes over may have the lower boot number.
    """
    if view is not None and view.boot != reply.boot:
        view = None
    if view is not None and view.number > reply.number:
        return view
    if reply.base == 0:
        # Copied, because the frames are the network's memory and the view outlives them.
        whole = tuple(np.frombuffer(payload, np.float32).copy() for payload in changes)
        return PulledView(reply.boot, reply.number, reply.version, whole)
    if view is None or reply.base != view.number:
        return None
    parts = tuple(np.empty_like(part) for part in view.parts)
    for payload, part, out in zip(changes, view.parts, parts, strict=True):
        delta_pulls.add(reply.kind, payload, part, out)
    return PulledView(reply.boot, reply.number, reply.version, parts)


class PayloadEncoder:
    """The payloads of one worker's messages; `feedback` is set where its pushes are compressed."""

    def __init__(self, table: DenseTable, shard_map: ShardMap, compression: Compression) -> None:
        self.compression = compression
        self.feedback = (
            ErrorFeedback(compression, table.size) if compression.push is not None else None
        )
        self.views: dict[int, PulledView] = {}
        self._map = shard_map
        self._name = table.name
        self._shape = (table.size,)  # kept, because `size` sums over the tensors at each access

    def check(self, gradient: NDArray[np.float32]) -> None:
        """Raise BadInput unless `gradient` is contiguous float32 of the table's shape."""
        what = f"push to table {self._name}"
        if gradient.shape != self._shape or gradient.dtype != np.float32:
            raise BadInput(
                f"{what}: expected float32 of shape {self._shape},"
                f" got {gradient.dtype} of shape {gradient.shape}"
            )
        if not gradient.flags.c_contiguous:
            raise BadInput(f"{what}: expected a contiguous array, got strides {gradient.strides}")

    def write(
        self, gradient: NDArray[np.float32], seq: int, *, plain: bool
    ) -> tuple[Kind, bool, list[Frames]]:
        """Encode push `seq`: its kind, whether it is compressed by zstd, and the frames for each
        shard.
        """
        packed = self.compression.zstd and not plain
        if self.feedback is not None and not plain:
            frames = self.feedback.encode(gradient, seq, self._map.ranges)
            return self.feedback.kind, packed, frames
        cut: list[Frames] = [self._map.cut(gradient, shard) for shard in range(self._map.shards)]
        if packed:
            cut = [tuple(zstd_frames.pack(part) for part in parts) for parts in cut]
        return Kind.F4, packed, cut

    def base(self, shard: int) -> int:
        """The number of the view that `shard` may send changes to; 0 for none."""
        return self.views[shard].number if shard in self.views else 0

    @property
    def arrives(self) -> Kind:
        """The kind of the payloads that `read` returns."""
        pull = self.compression.pull
        return Kind.F4 if pull is Kind.F4 or self.compression.pulls_changes else pull

    def read(
        self, reply: Weights, frames: Sequence[Buffer]
    ) -> tuple[Weights, Sequence[Buffer]] | None:
        """The payloads in an answer, checked; changes are applied and returned as whole weights.

        None if they are changes to a view that this worker lacks because that answer was lost.
        Raises BadMessage.
        """
        ranges, wanted = self._map.ranges[reply.shard], self.compression.pull
        changes = wanted is not Kind.F4 and self.compression.pulls_changes
        if reply.kind is not wanted and not (changes and reply.kind is Kind.F4):
            raise BadMessage(f"weights: expected them as {wanted}, got {reply.kind}")
        parts = payloads.checked("weights", reply.kind, reply.zstd, ranges, frames)
        if not changes:
            return reply, [part.data for part in parts]
        view = advanced(self.views.get(reply.shard), reply, parts)
        if view is None:
            return None
        self.views[reply.shard] = view
        return msgspec.structs.replace(reply, version=view.version), view.frames
