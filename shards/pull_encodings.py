"""The served version in each encoding that pulls have requested; each is made once.

Plain floats are views of the version itself. 16-bit floats are rounded from each version
separately, without error feedback: a pull replaces the worker's weights, so errors do not add up.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_kernels import codecs
from shards import delta_pulls, zstd_frames
from shards.errors import BadMessage
from shards.messages import Kind
from shards.tables import KeyRange

Frames = tuple[NDArray[Any], ...]

KINDS = (Kind.F4, Kind.FP16, Kind.BF16)
MOST_SHARE = 0.5


def check(kind: Kind, zstd: bool, share: float) -> None:
    """Raise BadMessage or BadInput if weights cannot be served in this encoding."""
    if kind not in KINDS + delta_pulls.KINDS:
        raise BadMessage(f"pull as {kind}: expected {', '.join(KINDS + delta_pulls.KINDS)}")
    if kind is Kind.SPARSE and not 0 < share <= MOST_SHARE:
        raise BadMessage(f"pull as {kind}: expected a share above 0, up to 0.5, got {share:g}")
    if zstd:
        zstd_frames.require()


def prepare(kind: Kind) -> None:
    """Compile the code that encodes answers of this kind."""
    ranges, weights = (KeyRange(0, 2),), np.zeros(2, np.float32)
    if kind in delta_pulls.KINDS:
        changes = delta_pulls.DeltaViews(ranges)
        for base in (0, 1):  # whole weights, then a change to them
            changes.serve("", weights, kind, MOST_SHARE, base)
    else:
        PullEncodings(ranges).frames(weights, 0, kind, zstd=False)


class PullEncodings:
    """The frames of one version, one per key range."""

    def __init__(self, ranges: Sequence[KeyRange]) -> None:
        ends = list(accumulate(map(len, ranges)))
        self._cuts = [slice(*cut) for cut in pairwise([0, *ends])]
        self._version = -1
        self._made: dict[tuple[Kind, bool], Frames] = {}

    def frames(self, weights: NDArray[np.float32], version: int, kind: Kind, zstd: bool) -> Frames:
        """The frames of `weights`; receivers must not write into them."""
        if version != self._version:
            self._made.clear()
            self._version = version
        if kind is Kind.F4 and not zstd:
            return tuple(map(weights.__getitem__, self._cuts))  # kept, it would hold the buffer
        made = self._made.get((kind, zstd))
        if made is None:
            made = self._made[kind, zstd] = self._make(weights, kind, zstd)
        return made

    def forget(self) -> None:
        """Drop the frames: other weights are being installed, perhaps under the same version."""
        self._made.clear()

    def _make(self, weights: NDArray[np.float32], kind: Kind, zstd: bool) -> Frames:
        plain: NDArray[Any] = weights
        if kind is Kind.FP16 or kind is Kind.BF16:
            payload = np.empty(2 * weights.size, np.uint8)
            codecs.cast("fp16" if kind is Kind.FP16 else "bf16", weights, payload)
            plain = payload.view(np.uint16)
        cut = self._cut(plain)
        return tuple(zstd_frames.pack(part) for part in cut) if zstd else cut

    def _cut(self, whole: NDArray[Any]) -> Frames:
        return tuple([whole[cut] for cut in self._cuts])
