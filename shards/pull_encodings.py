"""The served version in each encoding that pulls have requested; each is made once.

Plain floats are the version itself. 16-bit floats are rounded from each version
separately, without error feedback: a pull replaces the worker's weights, so errors do not add up.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.ops import codecs
from shards import delta_pulls, zstd_frames
from shards.errors import BadMessage
from shards.messages import Kind

Frame = NDArray[Any]

KINDS = (Kind.F4, Kind.FP16, Kind.BF16)
MAX_SHARE = 0.5


def check(kind: Kind, zstd: bool, share: float) -> None:
    """Raise BadMessage or BadInput if weights cannot be served in this encoding."""
    if kind not in KINDS + delta_pulls.KINDS:
        raise BadMessage(f"pull as {kind}: expected {', '.join(KINDS + delta_pulls.KINDS)}")
    if kind is Kind.SPARSE and not 0 < share <= MAX_SHARE:
        raise BadMessage(f"pull as {kind}: expected a share above 0, up to 0.5, got {share:g}")
    if zstd:
        zstd_frames.require()


def prepare(kind: Kind) -> None:
    """Compile the code that encodes answers of this kind."""
    weights = np.zeros(2, np.float32)
    if kind in delta_pulls.KINDS:
        changes = delta_pulls.DeltaViews()
        for base in (0, 1):  # whole weights, then a change to them
            changes.serve("", weights, kind, MAX_SHARE, base)
    else:
        PullEncodings().frame(weights, 0, kind, zstd=False)


class PullEncodings:
    """The frames of one version of a section of a table."""

    def __init__(self) -> None:
        self._version = -1
        self._frames: dict[tuple[Kind, bool], Frame] = {}

    def frame(self, weights: NDArray[np.float32], version: int, kind: Kind, zstd: bool) -> Frame:
        """The frame of `weights`; receivers must not write into it."""
        if version != self._version:
            self._frames.clear()
            self._version = version
        if kind is Kind.F4 and not zstd:
            return weights  # kept here, it would hold the buffer
        encoded = self._frames.get((kind, zstd))
        if encoded is None:
            encoded = self._frames[kind, zstd] = _encode(weights, kind, zstd)
        return encoded

    def forget(self) -> None:
        """Drop the frames: other weights are being installed, perhaps under the same version."""
        self._frames.clear()


def _encode(weights: NDArray[np.float32], kind: Kind, zstd: bool) -> Frame:
    frame: Frame = weights
    if kind is Kind.FP16 or kind is Kind.BF16:
        payload = np.empty(2 * weights.size, np.uint8)
        codecs.cast("fp16" if kind is Kind.FP16 else "bf16", weights, payload)
        frame = payload.view(np.uint16)
    return zstd_frames.pack(frame) if zstd else frame
