"""What a worker that pulls only changes has of a shard's weights: its end of shards/delta_pulls.py.

A view is never changed once it is made, because answers that came before may still be read.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from shards import delta_pulls
from shards.messages import Weights
from shards.wire_format import Buffer


class PulledView(msgspec.Struct, frozen=True):
    """View `number` of the shard's life `boot`, which is `version` or near it.

    Its floats are plain, one array a key range.
    """

    boot: int
    number: int
    version: int
    parts: tuple[NDArray[np.float32], ...]

    @property
    def frames(self) -> list[Buffer]:
        """The floats as a plain answer's frames."""
        return [part.view(np.uint8).data for part in self.parts]


def advanced(
    view: PulledView | None, reply: Weights, payloads: Sequence[NDArray[np.uint8]]
) -> PulledView | None:
    """The view after an answer, whose payloads are checked; None if it is of no use.

    An answer that was overtaken changes nothing: what the worker has is newer than what it would
    have led to. One to a later view than the worker's is of no use, since one before it was lost;
    nor is a change to a view of another life, whose numbers say nothing here. Lives are compared
    for being the same only: a copy that takes over may be the older one.
    """
    if view is not None and view.boot != reply.boot:
        view = None
    if view is not None and view.number > reply.number:
        return view
    if reply.base == 0:
        # Copied, for frames belong to the network.
        whole = tuple(np.frombuffer(payload, np.float32).copy() for payload in payloads)
        return PulledView(reply.boot, reply.number, reply.version, whole)
    if view is None or reply.base != view.number:
        return None
    parts = tuple(np.empty_like(part) for part in view.parts)
    for payload, part, out in zip(payloads, view.parts, parts, strict=True):
        delta_pulls.add(reply.kind, payload, part, out)
    return PulledView(reply.boot, reply.number, reply.version, parts)
