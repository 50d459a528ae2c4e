"""Encodes the gradients of compressed pushes and keeps what the encoding leaves out.

What a codec does not send of a gradient is not lost: it is the residual, which is added to the next
gradient. So over all pushes of one incarnation, what the shards received and the residual add up to
the gradients (docs/how-to/compression.md gives the details). The session encodes each push once and
repeats the same frames as often as needed; a push that is refused for its content leaves the
residual unchanged.

A residual belongs to one position in a worker's sequence of pushes: restored at another position,
its content would be sent twice or never. `state` and `restore` carry it; the caller stores the push
number with it.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.ops import codecs
from cupy_kernels.ops.updates import squared_norm
from ps.session.compression import Compression, Rounded, Sparse, TopK, Writing
from shards import payloads, zstd_frames
from shards.errors import BadInput
from shards.gradient_guard import Guard
from shards.shard_state import array_name
from shards.tables import KeyRange, Layout

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

ERROR, VELOCITY = "error", "velocity"
_FINITE = Guard()
_CAUTION = 1 - 1e-6  # sums of squares here and at a shard differ in their last bits


class _Residual:
    """The rest of the gradients that the pushes to one table have not sent."""

    def __init__(self, writing: Writing, size: int) -> None:
        self.writing = writing
        self.error = np.zeros(size, np.float32)
        momentum = 0.0 if isinstance(writing, Rounded) else writing.momentum
        self.velocity = np.zeros(size, np.float32) if momentum else None
        self.norm = 0.0  # of the gradient that is being encoded

    def encode(self, g: Floats, keys: KeyRange, seq: int) -> Bytes:
        part = slice(keys.start, keys.stop)
        error = self.error[part]
        if isinstance(self.writing, Rounded):
            return payloads.encode_rounded(self.writing.kind, g, error)
        velocity = self.velocity[part] if self.velocity is not None else None
        return _sparse(self.writing, seq, self.norm, g, velocity, error)


class ErrorFeedback:
    """The residuals of one worker's compressed pushes, by table.

    For each push call `begin`, then `encode` for each section of the tables in it.
    """

    def __init__(self, tables: Mapping[str, _Residual]) -> None:
        self.tables = tables
        self._seq = 0

    @staticmethod
    def of(layout: Layout, compression: Mapping[str, Compression]) -> "ErrorFeedback | None":
        """The feedback of a new worker; None if the pushes to every table are plain floats.

        Raises BadInput where zstd is wanted and not installed.
        """
        for choice in compression.values():
            if choice.zstd:
                zstd_frames.require()
        residuals = {}
        for table in layout.tables:
            writing = compression[table.name].push
            if writing is not None:
                residuals[table.name] = _Residual(writing, table.size)
        return ErrorFeedback(residuals) if residuals else None

    def begin(self, gradients: Mapping[str, Floats], seq: int) -> None:
        """Begin push `seq` of these gradients; raises BadInput if one is not finite.

        A push that is refused here has changed no residual of any table.
        """
        self._seq = seq
        for name, residual in self.tables.items():
            if name not in gradients:
                continue
            # All tables are checked before the first is encoded, because encoding changes its
            # residual.
            residual.norm = check_squares(name, gradients[name], seq) ** 0.5

    def encode(self, table: str, gradient: Floats, keys: KeyRange) -> Bytes:
        """The payload of a section of a table, of which `gradient` has only these `keys`.

        `gradient` may be reused on return.
        """
        return self.tables[table].encode(gradient, keys, self._seq)

    def state(self) -> dict[str, Floats]:
        """The residuals' arrays by name, not copied: copy what must outlive the next push."""
        arrays = {}
        for name, residual in self.tables.items():
            arrays[array_name(name, ERROR)] = residual.error
            if residual.velocity is not None:
                arrays[array_name(name, VELOCITY)] = residual.velocity
        return arrays

    def restore(self, arrays: Mapping[str, Floats]) -> None:
        """Continue with the arrays that `state` returned; raises BadInput when another codec wrote
        them.
        """
        present = self.state()
        if arrays.keys() != present.keys():
            raise BadInput("residual", expected=", ".join(present), got=", ".join(arrays))
        for name, array in arrays.items():
            if array.shape != present[name].shape or array.dtype != np.float32:
                raise BadInput(
                    f"residual: {name}",
                    expected=f"float32 of shape {present[name].shape}",
                    got=f"{array.dtype} of shape {array.shape}",
                )
            present[name][:] = array


def check_squares(table: str, gradient: Floats, seq: int, limit: Guard = _FINITE) -> float:
    """The squared norm of a table's gradient in push `seq`, or of a shard's section of it.

    Raises BadInput, naming the table, if a shard's guard would refuse it, or might, by rounding.
    """
    squares = squared_norm(gradient)
    if not squares <= _CAUTION * limit.max_squares:
        finite = bool(np.isfinite(gradient).all())
        hint = "; is the rate too high?" if finite else ""
        error = BadInput(
            f"push {seq}: table {table} {limit.describe(squares, finite=finite)}{hint}"
        )
        error.table = table
        raise error
    return squares


def _sparse(
    writing: Sparse, seq: int, norm: float, g: Floats, velocity: Floats | None, error: Floats
) -> Bytes:
    # The norm is that of the whole table, so all its sections are clipped by one factor.
    factor = np.float32(writing.clip / norm) if 0 < writing.clip < norm else np.float32(1)
    codecs.accumulate(g, velocity, error, writing.momentum, factor)
    if isinstance(writing, TopK):
        count = payloads.pairs_of(writing.share_at(seq), g.size)
        return payloads.largest(error, velocity, count)
    most = payloads.max_pairs(g.size)
    return payloads.sparse(*codecs.take_above(velocity, error, np.float32(writing.tau), most))
