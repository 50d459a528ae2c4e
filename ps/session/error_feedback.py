"""Encodes the gradients of compressed pushes and keeps what the encoding leaves out.

What a codec does not send of a gradient is not lost: it is the residual, which is added to the next
gradient. So over all pushes of one life, what the shards received and the residual add up to the
gradients (docs/how-to/compression.md gives the details). The session calls `encode` once per push
and repeats the same frames as often as needed; a push that is refused for its content leaves the
residual unchanged.

A residual belongs to one position in a worker's sequence of pushes: restored at another position,
its content would be sent twice or never. `state` and `restore` carry it; the caller stores the push
number with it.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cupy_kernels import codecs
from cupy_kernels.updates import squared_norm
from ps.session.compression import Compression, Rounded, Sparse, TopK
from shards import payloads, zstd_frames
from shards.errors import BadInput
from shards.gradient_guard import Guard
from shards.tables import KeyRange

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

ERROR, VELOCITY = "error", "velocity"


class ErrorFeedback:
    """The residual of one worker's pushes to one table, encoded as `compression.push` configures.

    Its payloads are of one `kind`, and cut at the key ranges that `encode` is given.
    """

    def __init__(self, compression: Compression, size: int) -> None:
        assert compression.push is not None, "plain floats leave nothing behind"
        if compression.zstd:
            zstd_frames.require()
        self.kind = compression.pushed
        self._writing = compression.push
        self._zstd = compression.zstd
        self._error = np.zeros(size, np.float32)
        momentum = 0.0 if isinstance(self._writing, Rounded) else self._writing.momentum
        self._velocity = np.zeros(size, np.float32) if momentum else None

    def encode(
        self, gradient: Floats, seq: int, ranges: Sequence[Sequence[KeyRange]]
    ) -> list[tuple[Bytes, ...]]:
        """The frames of push `seq`: for each shard one payload per key range.

        `gradient` may be reused on return. Raises BadInput when it is not finite.
        """
        squares = squared_norm(gradient)
        if not np.isfinite(squares):
            fault = Guard().describe(squares, finite=bool(np.isfinite(gradient).all()))
            raise BadInput(f"push {seq} {fault}; is the rate too high?")
        return [
            tuple(self._frame(gradient, seq, squares**0.5, keys) for keys in owned)
            for owned in ranges
        ]

    def _frame(self, gradient: Floats, seq: int, norm: float, keys: KeyRange) -> Bytes:
        part = slice(keys.start, keys.stop)
        g, error = gradient[part], self._error[part]
        if isinstance(self._writing, Rounded):
            payload = payloads.rounded(self._writing.kind, g, error)
        else:
            velocity = self._velocity[part] if self._velocity is not None else None
            payload = _sparse(self._writing, seq, norm, g, velocity, error)
        return zstd_frames.pack(payload) if self._zstd else payload

    def state(self) -> dict[str, Floats]:
        """The residual's arrays by name, not copied: copy what must outlive the next push."""
        arrays = {ERROR: self._error}
        return arrays if self._velocity is None else arrays | {VELOCITY: self._velocity}

    def restore(self, arrays: Mapping[str, Floats]) -> None:
        """Continue with the arrays that `state` returned; raises BadInput when another codec wrote
        them.
        """
        own = self.state()
        if arrays.keys() != own.keys():
            raise BadInput(f"residual: expected {', '.join(own)}, got {', '.join(arrays)}")
        for name, array in arrays.items():
            if array.shape != own[name].shape or array.dtype != np.float32:
                raise BadInput(
                    f"residual: {name}: expected float32 of shape {own[name].shape},"
                    f" got {array.dtype} of shape {array.shape}"
                )
            own[name][:] = array


def _sparse(
    writing: Sparse, seq: int, norm: float, g: Floats, velocity: Floats | None, error: Floats
) -> Bytes:
    factor = np.float32(writing.clip / norm) if 0 < writing.clip < norm else np.float32(1)
    codecs.accumulate(g, velocity, error, writing.momentum, factor)
    if isinstance(writing, TopK):
        count = payloads.pairs_of(writing.share_at(seq), g.size)
        return payloads.largest(error, velocity, count)
    most = payloads.most_pairs(g.size)
    return payloads.sparse(*codecs.take_above(velocity, error, np.float32(writing.tau), most))
