"""A worker's copy of a shard's weights, for pulls of changes: the other end of
shards/delta_pulls.py.

A view is never changed once it is made, because the caller may still read earlier answers.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from shards import delta_pulls
from shards.messages import Weights
from shards.wire_format import Buffer


class PulledView(msgspec.Struct, frozen=True):
    """View `number` of the shard's life `boot`; its weights are those of `version`, or close to
    them.

    Its `parts` are plain floats, one array per key range.
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
    view: PulledView | None, reply: Weights, payloads: Sequence[NDArray[np.uint8]]
) -> PulledView | None:
    """The view after an answer, with its checked payloads; None if the answer cannot be applied.

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
        whole = tuple(np.frombuffer(payload, np.float32).copy() for payload in payloads)
        return PulledView(reply.boot, reply.number, reply.version, whole)
    if view is None or reply.base != view.number:
        return None
    parts = tuple(np.empty_like(part) for part in view.parts)
    for payload, part, out in zip(payloads, view.parts, parts, strict=True):
        delta_pulls.add(reply.kind, payload, part, out)
    return PulledView(reply.boot, reply.number, reply.version, parts)
