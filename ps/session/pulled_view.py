"""A worker's copy of a section of a table, for pulls of changes: the other end of
shards/delta_pulls.py.

A view is never changed once it is made, because the caller may still read earlier answers.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from shards import delta_pulls
from shards.messages import PulledPart, Weights


class PulledView(msgspec.Struct, frozen=True):
    """View `number` of a section of a table in the shard's life `boot`; `weights` are those of
    `version`, or close to them, as plain floats.
    """

    boot: int
    number: int
    version: int
    weights: NDArray[np.float32]


def advanced(
    view: PulledView | None, reply: Weights, part: PulledPart, payload: NDArray[np.uint8]
) -> PulledView | None:
    """The view after a part of an answer, with its checked payload; None if it cannot be applied.

    An answer that was overtaken changes nothing: the worker's view is newer than the one it leads
    to. An answer based on a later view than the worker's cannot be applied, since an earlier answer
    was lost. Nor can a change to a view of another life: its numbers have no meaning here. Lives
    are only compared for equality: a copy that takes over may have the lower boot number.
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
