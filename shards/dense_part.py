"""One shard's section of one dense table: its place in the shard's weights, and its rule's slots.

The weights themselves are a slice of the shard's flat array (parameters.py). Slots change in place,
unless a reader such as a snapshot holds them: then updates continue in a second set of arrays,
which is kept for the next time. While the shard is idle, `prepare` copies the slots there piece by
piece; the next push copies what is left before it is applied. So reading a state blocks no worker,
and the push after it waits only if it comes at once.

Several pushes under an additive rule, such as plain SGD, are applied in one pass. One after another
they would read and write all weights once each; an update by the sum of the gradients has the same
result, up to rounding. The sum is computed piece by piece, so that each piece is used while it is
in the cache. The norm of each gradient is computed in the same pass, for a single push too. If one
is not finite, the result is dropped and nothing has changed, because an additive rule has no slots.

A push that leaves the table out changes neither weights nor slots here, and does not count: a rule
with a bias correction, such as Adam, counts the updates of its own table.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, sqrt
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from cupy_kernels import backends
from cupy_kernels.backends import HOST, Backend
from cupy_kernels.ops.codecs import accumulate
from cupy_kernels.ops.updates import mean, sgd_measured, squared_norm
from shards import payloads, pull_encodings, zstd_frames
from shards.aggregation import BUFFER, DIRECTIONS
from shards.buffer_pool import Buffers, are_unshared
from shards.delta_pulls import KINDS, DeltaViews
from shards.errors import BadInput, BadMessage
from shards.messages import AskedPart, Kind, Part, PulledPart
from shards.pull_encodings import PullEncodings
from shards.rules import SGD, Decay
from shards.run_plans import cover_gaps
from shards.shard_state import WEIGHTS, Arrays, past_names
from shards.spec import ShardSpec, TableSpec
from shards.tables import DenseTable, RateRun, Section, segments, tensor_parts
from shards.wire_format import Buffer

Floats = NDArray[np.float32]

_PIECE = 1 << 19  # floats of each slot, 2 MB: a push waits for at most one piece, about 0.2 ms
_SUM_PIECE = 1 << 19  # floats of each array that are in the cache at once when pushes are summed
_LEAST_NORM = 1e-20  # a direction divides by the norm, and must stay finite in float32
_VANISHING = 1e-5  # of the sum of weights: a sum of unit directions below it is rounding


class DensePart:
    """One section of a dense table; see `TablePart`. Its arrays are flat float32 of `size`."""

    def __init__(
        self, shard: ShardSpec, spec: TableSpec, section: Section, backend: Backend
    ) -> None:
        """`backend` holds weights and slots."""
        table = spec.table
        assert isinstance(table, DenseTable)
        self.spec = spec
        base = section.start - shard.keys.start
        self.keys = section.keys
        self.size = len(section.keys)
        self.count = self.buffered = 0
        self.dense, self.push_frames, self.ask_frames = True, 1, 0
        self.sums = self.runs = backend == HOST and spec.rule.additive and spec.decay.weight == 0
        self.max_squares = spec.guard.max_squares
        self._where = slice(base, base + self.size)
        self._backend = backend
        self._on_host = backend == HOST
        self._slot_names = shard.slots_of(spec)
        self.copies = bool(self._slot_names)
        self._slots: list[Floats] = []
        self._spare: list[Floats] = []  # the second set of slots, once the first has been read
        self._moved = 0  # floats of each slot that are already copied to the second set
        self._segments = segments(table, section.keys)
        self._tensors = tensor_parts(table, section.keys)
        ends = [0, *(part.stop for part in self._tensors.values())]
        starts = [*(part.start for part in self._tensors.values()), self.size]
        self._untrained = [slice(*gap) for gap in zip(ends, starts, strict=True) if gap[0] < gap[1]]
        if shard.deltas:  # the workers have applied their own multipliers
            plain = {"lr_mult": 1.0, "decay_mult": 0.0}
            self._segments = tuple(structs.replace(run, **plain) for run in self._segments)
        if self.sums:
            self._pieces = list(_cut_pieces(self._segments, self.size, _SUM_PIECE))
            # One array for all pieces and pushes: fresh memory at each push costs page faults.
            self._sum = np.empty(min(_SUM_PIECE, self.size), np.float32)
        self._decoded = Buffers(self.size)
        self._encoded = PullEncodings()
        self._views = DeltaViews()
        edges = section.keys.start, section.keys.stop
        self._plain = PulledPart(table.name, Kind.F4, *edges)

    # --- pushes -----------------------------------------------------------------------------------

    def check(self, label: str, part: Part, frames: Sequence[Buffer]) -> Floats:
        """The gradient in the only frame, in the memory of the weights; raises BadMessage."""
        (frame,) = frames
        keys = self.keys
        if part.start != keys.start or part.stop != keys.stop:
            raise BadMessage(
                f"{label}: expected keys {keys} of table {part.table},"
                f" got [{part.start}, {part.stop})"
            )
        payload = payloads.validate(label, part.kind, part.zstd, keys, frame)
        if part.kind is Kind.F4:
            gradient = payload.view(np.float32)
        else:
            # A buffer for each push: all pushes of a run are decoded before the first of them is
            # applied.
            gradient = self._decoded.take()
            payloads.decode(part.kind, payload, gradient)
        return gradient if self._on_host else backends.copy_to(gradient, self._backend)

    def check_room(self, gradients: Sequence[Floats]) -> None:
        """A dense table never grows."""

    def measure(self, gradient: Floats) -> float:
        """The squared norm of a gradient; infinite or NaN if one of its values is."""
        return squared_norm(gradient)

    def is_finite(self, gradient: Floats) -> bool:
        """Return whether each value of a gradient is finite."""
        return bool(np.isfinite(backends.as_host(gradient)).all())

    def mean(self, gradients: Sequence[Floats], pushes: int) -> Floats:
        """The mean over the pushes of a round that include the table."""
        return mean(gradients)

    def apply(
        self,
        weights: Floats,
        gradients: Sequence[Floats],
        out: Floats,
        rate: float,
        read: Floats | None,
    ) -> list[float]:
        """Write the section's next version into `out`, and advance its slots."""
        where, rule = self._where, self.spec.rule
        if self.sums:
            # One compiled loop reads a single gradient once for both the norm and the update.
            if len(gradients) == 1 and isinstance(rule, SGD):
                runs = cover_gaps(self._segments, self.size, rate)
                return [sgd_measured(weights[where], gradients[0], out[where], runs)]
            return self._apply_sum(weights[where], gradients, out[where], rate)
        (gradient,) = gradients
        self._own_slots()
        rule.apply(
            weights[where],
            gradient,
            tuple(self._slots[: len(rule.slot_names)]),
            out[where],
            self._segments,
            rate=rate,
            decay=self.spec.decay,
            count=self.count + 1,
            read=None if read is None else read[where],
        )
        return []

    def _apply_sum(
        self, weights: Floats, gradients: Sequence[Floats], out: Floats, rate: float
    ) -> list[float]:
        """Write `weights` updated by all `gradients` into `out`; return each one's squared norm.

        If a norm is not finite, the contents of `out` are undefined.
        """
        squares = [0.0] * len(gradients)
        for piece, runs in self._pieces:
            for number, gradient in enumerate(gradients):
                squares[number] += squared_norm(gradient[piece])
            if not all(map(isfinite, squares)):
                continue  # the remaining norms are still needed
            # The first gradient is only read, and the sum goes elsewhere: a gradient may be a view
            # of the network's memory, or of a worker's.
            total = gradients[0][piece]
            for gradient in gradients[1:]:
                total = np.add(total, gradient[piece], out=self._sum[: len(total)])
            arrays = weights[piece], total, (), out[piece]
            self.spec.rule.apply(*arrays, runs, rate=rate, decay=Decay(), count=1)
        return squares

    def collect(self, gradient: Floats, factor: float) -> None:
        """Add `factor` times a gradient to the buffer, which is the last slot."""
        self._own_slots()
        # A product makes another array of this size, and most pushes count fully.
        self._slots[-1] += gradient if factor == 1 else np.float32(factor) * gradient
        self.buffered += 1

    def take_buffer(self, size: int) -> Floats:
        """The buffer divided by `size`, as a gradient; the buffer is then empty."""
        self._own_slots()
        gradient = self._slots[-1] / np.float32(size)
        # The division has made a new array, so the buffer can be emptied at once.
        self._slots[-1].fill(0)
        self.buffered = 0
        return gradient

    def collect_report(self, report: Floats, weight: float, norms: dict[str, float]) -> None:
        """Add `weight` times a report to the buffer, and each tensor's direction to theirs.

        `norms` has the weighted sums of the tensors' norms, for `take_reports`.
        """
        self._own_slots()
        sums = self._arrays_by_name()
        self._add(report, weight, sums[BUFFER])
        if DIRECTIONS in sums:
            for name, where in self._tensors.items():
                norm = sqrt(squared_norm(report[where]))
                norms[name] = norms.get(name, 0.0) + weight * norm
                if norm > _LEAST_NORM:  # a tensor that did not move has no direction
                    self._add(report[where], weight / norm, sums[DIRECTIONS][where])
        self.buffered += 1

    def take_reports(self, weight: float, norms: Mapping[str, float]) -> Floats:
        """The average of the reports in the buffer; it is then empty.

        It is their weighted mean; where directions were collected, it is for each tensor of N, the
        weighted mean norm, along U, the mean direction: N * U/|U| (arXiv 2604.21428). Where U
        vanishes it is the weighted mean.
        """
        self._own_slots()
        sums = self._arrays_by_name()
        # Recycled: fresh memory of this size costs more in page faults than the division.
        average = (
            self._decoded.take() if self._on_host else self._backend.empty((self.size,), np.float32)
        )
        by_mean = [slice(0, self.size)]
        if DIRECTIONS in sums:
            by_mean = list(self._untrained)
            for name, where in self._tensors.items():
                directions = sums[DIRECTIONS][where]
                length = sqrt(squared_norm(directions))
                # Opposite directions leave only rounding, which scaled up would be a step of noise.
                if length > _VANISHING * weight:
                    scale = np.float32(norms[name] / weight / length)
                    np.multiply(directions, scale, out=average[where])
                else:
                    by_mean.append(where)
            sums[DIRECTIONS].fill(0)
        for where in by_mean:
            np.divide(sums[BUFFER][where], np.float32(weight), out=average[where])
        sums[BUFFER].fill(0)
        self.buffered = 0
        return average

    def _add(self, report: Floats, factor: float, total: Floats) -> None:
        """Add `factor` times a report to a sum, in one pass."""
        if self._on_host:
            accumulate(report, None, total, factor=np.float32(factor))
        else:
            total += np.float32(factor) * report

    def _arrays_by_name(self) -> dict[str, Floats]:
        return dict(zip(self._slot_names, self._slots, strict=True))

    def keep(self, weights: Floats, out: Floats) -> None:
        """Copy the section to the next version."""
        backends.copy(weights[self._where], out[self._where])

    # --- pulls ------------------------------------------------------------------------------------

    def check_ask(self, ask: AskedPart, frames: Sequence[Buffer]) -> None:
        """Raise BadMessage or BadInput if weights cannot be served as `ask` says."""
        pull_encodings.check(ask.kind, ask.zstd, ask.share)

    def read(
        self,
        weights: Floats,
        version: int,
        ask: AskedPart,
        frames: Sequence[Buffer],
        worker: str,
    ) -> tuple[PulledPart, tuple[NDArray[Any]]]:
        """The section as plain floats, rounded, or as the changes to what the worker has."""
        section = weights[self._where]
        if ask.kind is Kind.F4 and not ask.zstd:
            # A view of the version, which is not overwritten while the frame refers to it.
            return self._plain, (section,)
        edges = self.keys.start, self.keys.stop
        if ask.kind not in KINDS:
            frame = self._encoded.frame(section, version, ask.kind, ask.zstd)
            return PulledPart(ask.table, ask.kind, *edges, ask.zstd), (frame,)
        change = self._views.serve(worker, section, ask.kind, ask.share, ask.base)
        frame = zstd_frames.pack(change.frame) if ask.zstd else change.frame
        read = PulledPart(ask.table, change.kind, *edges, ask.zstd, change.base, change.number)
        return read, (frame,)

    def forget(self, worker: str) -> None:
        """Answer the worker's next pull of changes with whole weights."""
        self._views.forget(worker)

    # --- state ------------------------------------------------------------------------------------

    def export(self, weights: Floats, past: Sequence[Floats]) -> Arrays:
        """The weights and each slot. Drop them when done: until then updates use other arrays."""
        earlier = past[: self.spec.rule.versions]
        # By reference: the next update finds that a reader holds them, and leaves them alone.
        arrays = dict(zip(self._slot_names, self._slots, strict=True))
        arrays |= zip(
            past_names(len(earlier)), [version[self._where] for version in earlier], strict=True
        )
        if not self._on_host:
            arrays = {name: backends.copy_to(array, HOST) for name, array in arrays.items()}
        return {WEIGHTS: weights[self._where], **arrays}

    def check_state(self, arrays: Arrays) -> None:
        """Raise BadInput unless these are the weights, and all slots or none."""
        slots = sorted(self._slot_names)
        subject = f"table {self.spec.table.name}"
        names = sorted(arrays.keys() - {WEIGHTS, *past_names(self.spec.rule.versions)})
        if WEIGHTS not in arrays or (names and names != slots):
            raise BadInput(
                subject,
                expected=f"weights and the slots {slots} of rule {type(self.spec.rule).__name__}",
                got=sorted(arrays),
            )
        for name, array in arrays.items():
            if array.dtype != np.float32 or array.shape != (self.size,):
                raise BadInput(
                    f"{subject}: {name}",
                    expected=f"{self.size} float32 for keys {self.keys}",
                    got=f"{array.dtype} of shape {array.shape}",
                )

    def restore(self, arrays: Arrays, out: Floats, past: Sequence[Floats]) -> None:
        """Take over a state; its weights are copied into `out`."""
        backends.copy(arrays[WEIGHTS], out[self._where])
        for name, version in zip(past_names(len(past)), past, strict=True):
            if name in arrays:
                backends.copy(arrays[name], version[self._where])
        zeros = np.zeros(self.size, np.float32)
        names = self._slot_names
        # Copied, because the arrays may be views of a message, a file or another shard's state.
        self._slots = [backends.copy_to(arrays.get(name, zeros), self._backend) for name in names]
        self._spare, self._moved = [], 0
        # The restored version may have the number of the one before, so the number alone does not
        # show that the frames are out of date.
        self._encoded.forget()

    @property
    def is_prepared(self) -> bool:
        """True if the next push has no slots to copy first."""
        return not self._slots or self._moved == self.size or are_unshared(self._slots)

    def prepare(self) -> None:
        """Copy one piece of the slots ahead of the next push; only while not `is_prepared`."""
        self._copy_slots(_PIECE)

    def _own_slots(self) -> None:
        """Prepare the slots for a change in place."""
        if not are_unshared(self._slots):  # a reader holds them
            self._move_slots()
        self._moved = 0  # pieces copied before this change are out of date

    def _move_slots(self) -> None:
        """Continue in the second set of slots, which nobody reads."""
        if self._moved < self.size:
            self._copy_slots(self.size)
        self._slots, self._spare = self._spare, self._slots

    def _copy_slots(self, most: int) -> None:
        """Copy at most `most` further floats of each slot to the second set."""
        # An earlier reader may still hold the second set, so it is checked before the first piece;
        # from then on only this part refers to it.
        if not self._moved and not (self._spare and are_unshared(self._spare)):
            self._spare = [self._backend.empty((self.size,), np.float32) for _ in self._slots]
        piece = slice(self._moved, min(self._moved + most, self.size))
        for slot, spare in zip(self._slots, self._spare, strict=True):
            backends.copy(slot[piece], spare[piece])
        self._moved = piece.stop


def _cut_pieces(
    runs: Sequence[RateRun], size: int, piece: int
) -> Iterator[tuple[slice, tuple[RateRun, ...]]]:
    """Each piece of an array, and its runs with bounds relative to the piece."""
    for start in range(0, size, piece):
        stop = min(start + piece, size)
        yield (
            slice(start, stop),
            tuple(
                structs.replace(
                    run, start=max(run.start, start) - start, stop=min(run.stop, stop) - start
                )
                for run in runs
                if run.start < stop and run.stop > start
            ),
        )
