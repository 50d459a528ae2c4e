"""Pulls of changes: the shard sends a worker only the difference to the weights it already has.

The shard keeps a copy of each such worker's weights, its *view*, and sends the difference to the
version it serves: rounded, or only its largest values. Both sides add exactly the floats that the
payload stands for, so the view equals the worker's weights bit for bit. What a payload leaves out
is still a difference at the next pull.

A pull names the view that its worker holds. It may be several answers old, because those are still
on their way. If one of them is lost, the worker cannot use the next and requests whole weights,
which become the new view. The same happens if either side has restarted. An incarnation of a shard
uses no view number twice, and each answer names the incarnation, so a worker never applies the
changes of another incarnation.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shards import payloads
from shards.messages import Kind

Floats = NDArray[np.float32]

KINDS = (Kind.INT8, Kind.INT4, Kind.SPARSE)


class _View(NamedTuple):
    """The views `first`, which was sent whole, to `last`, which equals `weights`."""

    first: int
    last: int
    weights: Floats


class Change(NamedTuple):
    """A payload of `kind` to add to view `base`, or whole weights if that is 0; makes `number`."""

    kind: Kind
    base: int
    number: int
    frame: NDArray[np.uint8]


class DeltaViews:
    """The views of one section of a table that a shard's workers hold."""

    def __init__(self) -> None:
        self._last = 0
        self._views: dict[str, _View] = {}

    def __len__(self) -> int:
        return len(self._views)

    def forget(self, worker: str) -> None:
        """Answer the worker's next pull with whole weights."""
        self._views.pop(worker, None)

    def serve(self, worker: str, weights: Floats, kind: Kind, share: float, base: int) -> Change:
        """The change that takes `worker`, which holds view `base`, to `weights` or near them."""
        view = self._views.get(worker)
        # One count for all workers: a worker that is forgotten and returns must not get a number
        # that an answer has which is still on its way to it.
        self._last += 1
        # A base before `first` is of a view that was dropped. One before `last` is no fault: the
        # worker applies the answers in between, which are still on their way, before this one.
        if view is None or not view.first <= base <= view.last:
            # Copied, because later changes are added to the view in place, and a version never
            # changes.
            self._views[worker] = _View(self._last, self._last, weights.copy())
            return Change(Kind.F4, 0, self._last, weights.view(np.uint8))
        frame = _difference(kind, share, weights, view.weights)
        self._views[worker] = view._replace(last=self._last)
        return Change(kind, view.last, self._last, frame)


def _difference(kind: Kind, share: float, new: Floats, view: Floats) -> NDArray[np.uint8]:
    """The payload of new - view; adds it to `view` in place."""
    # `encode_rounded` adds `new` itself as it reads both arrays, which saves a pass over memory.
    difference = -view
    if kind is Kind.SPARSE:
        difference += new
        payload = payloads.largest(difference, None, payloads.pairs_of(share, new.size))
    else:
        payload = payloads.encode_rounded(kind, new, difference)
    # By the decoded payload and not by `new`: the worker can only add what the payload stands for,
    # and both views must stay equal bit for bit.
    add(kind, payload, view, view)
    return payload


def add(kind: Kind, payload: NDArray[np.uint8], view: Floats, out: Floats) -> None:
    """Write view + decoded payload into `out`; shard and worker both use this function."""
    change = np.empty_like(view)
    payloads.decode(kind, payload, change)
    np.add(view, change, out=out)
