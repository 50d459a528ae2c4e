"""What a shard holds: its weights, the slots beside them, and the version that they are.

Everything that changes them stands here: one gradient applied, several in one pass
(fused_apply.py), the whole state put in another's place. The next version is written into a buffer
that nobody reads (versions.py), so the present one can be served, copied and saved meanwhile.

Slots change in place, unless somebody reads them, as a snapshot does: then they go on in a second
set of arrays, which is kept for the next time. They are copied there piece by piece in the moments
that the shard has nothing else to do (`prepare`), and what is left when the next push has come is
copied before it is applied. So reading a state holds nobody up, and the push behind it waits only
if it came at once.

Weights and slots live where the host of the shard says: in this process's memory, or on a device
of which nothing is known here but how to move an array there and back. A device's version is
brought to the host once, when somebody first asks for it.

Left to others: who may bring a gradient, what it must look like, its rate, and who is told of it
(shard.py); how a version is sent (pull_replies.py).
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cupy_kernels import backends
from cupy_kernels.backends import HOST, Backend
from shards import wire_format
from shards.errors import BadInput, BadMessage, Retry
from shards.fused_apply import FusedApply, may_be_summed
from shards.ledger import Ledger
from shards.messages import Count
from shards.spec import ShardSpec
from shards.tables import segments
from shards.versions import Buffers, allocator, unshared
from shards.wire_format import Buffer

Floats = NDArray[np.float32]

_PIECE = 1 << 19  # floats of each slot, 2 MB: what a push may come to wait for, some 0.2 ms


class SavedProgress(msgspec.Struct, frozen=True):
    """What a snapshot holds beside the arrays, all of one version."""

    version: Count
    steps: Count
    samples: Count
    ledger: Ledger


class ShardState(msgspec.Struct, frozen=True):
    """One shard's whole state at one version; arrays are flat float32 over its own keys."""

    saved: SavedProgress
    weights: Floats
    slots: dict[str, Floats]


class ParameterStore:
    """One shard's weights and slots; empty until `restore` gives it some.

    Arrays are flat float32 of `size`, the shard's key ranges one behind another.
    """

    def __init__(self, spec: ShardSpec, buffers: Callable[[int], Buffers], place: Backend) -> None:
        """`buffers` makes what is sent of the weights, for so many floats in the host's memory;
        `place` is where weights and slots live.
        """
        ranges = spec.map.ranges[spec.shard]
        self.size = sum(len(keys) for keys in ranges)
        self.version = 0
        self.sums = place == HOST and may_be_summed(spec.rule, spec.decay)
        self._spec = spec
        self._place = place
        self._here = place == HOST
        self._weights: Floats | None = None
        self._slots: list[Floats] = []
        self._spare: list[Floats] = []  # their other set, once somebody has read the one
        self._moved = 0  # floats of each slot that the other set has of the present version
        self._readable = buffers(self.size)
        self._buffers = self._readable if place == HOST else Buffers(self.size, allocator(place))
        self._read: Floats | None = None
        self._segments = segments(spec.table, ranges)
        self._one_pass = FusedApply(self._segments, self.size)
        self._most_squares = spec.guard.most_squares

    @property
    def empty(self) -> bool:
        """Whether nothing has been installed yet."""
        return self._weights is None

    def weights(self) -> Floats:
        """The present version, which is not written while referred to; raises Retry if none."""
        if self._weights is None:
            raise Retry(
                f"shard {self._spec.shard} has no weights yet: give all shards theirs by"
                " Console.install"
            )
        return self._weights

    def host_weights(self) -> Floats:
        """The present version where it can be sent from: a device's as one copy for all who ask."""
        if self._here and self._weights is not None:
            return self._weights
        weights = self.weights()
        if self._read is None:
            self._read = self._readable.take()
            backends.copy(weights, self._read)
        return self._read

    def placed(self, gradient: Floats) -> Floats:
        """A gradient of the host's, where the weights live."""
        return gradient if self._here else backends.copied(gradient, self._place)

    def apply(self, gradient: Floats, rate: float) -> None:
        """Make the next version out of a gradient that lies where the weights do."""
        if not unshared(self._slots):
            self._move_slots()
        self._moved = 0
        out = self._buffers.take()
        self._spec.rule.apply(
            self.weights(),
            gradient,
            tuple(self._slots),
            out,
            self._segments,
            rate=rate,
            decay=self._spec.decay,
            count=self.version + 1,
        )
        self._become(self.version + 1, out)

    def apply_together(self, gradients: Sequence[Floats], rate: float) -> list[float] | None:
        """Make as many versions as there are gradients, of which only the last is ever seen.

        Only where `sums`. Returns the squared norm of each; None, and nothing has changed, if the
        guard refuses one of them.
        """
        assert self._weights is not None, "a push is examined before it is applied"
        out = self._buffers.take()
        squares = self._one_pass.apply(self._spec.rule, self._weights, gradients, out, rate)
        for square in squares:
            if not square <= self._most_squares:  # as NaN is not
                return None
        self._become(self.version + len(gradients), out)
        return squares

    def copy(self) -> tuple[Floats, dict[str, Floats]]:
        """Weights and slots, of one version, in the host's memory; the arrays stay as they are.

        Drop them when done: meanwhile the shard writes into others.
        """
        weights = self.host_weights()
        slots = [slot if self._here else backends.copied(slot, HOST) for slot in self._slots]
        return weights, dict(zip(self._spec.rule.slot_names, slots, strict=True))

    @property
    def prepared(self) -> bool:
        """Whether the next push would find nothing to copy first."""
        return not self._slots or self._moved == self.size or unshared(self._slots)

    def prepare(self) -> None:
        """Copy a piece of what the next push would have to copy; where not `prepared`."""
        self._copy_slots(_PIECE)

    def restore(self, version: int, weights: Floats, slots: dict[str, Floats]) -> None:
        """Become what `copy` returned elsewhere."""
        out = self._buffers.take()
        backends.copy(weights, out)
        names = self._spec.rule.slot_names
        self._slots = [backends.copied(slots[name], self._place) for name in names]
        self._spare, self._moved = [], 0
        self._become(version, out)

    def is_at(self, weights: Floats, slots: dict[str, Floats]) -> bool:
        """Whether these are what it holds, bit for bit; NaNs are, too."""
        if self.empty:
            return False
        held, beside = self.copy()
        pairs = [(held, weights), *((beside[name], slots[name]) for name in beside)]
        return all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in pairs)

    def read(
        self, names: Sequence[str], frames: Sequence[Buffer]
    ) -> tuple[SavedProgress, Floats, dict[str, Floats]]:
        """What an operator installs, for `restore`: slots that are not named begin at zero.

        `frames` are an encoded Saved, the weights, and a frame a name. Raises BadInput, BadMessage.
        """
        number, rule = self._spec.shard, self._spec.rule
        wanted = list(rule.slot_names)
        if names and sorted(names) != sorted(wanted):
            raise BadInput(
                f"install on shard {number}: expected the slots {wanted} of rule"
                f" {type(rule).__name__}, got {names}"
            )
        if len(frames) != 2 + len(names):
            raise BadMessage(f"install: expected {2 + len(names)} frames, got {len(frames)}")
        saved = wire_format.decode_state(frames[0], SavedProgress)
        slots = dict.fromkeys(wanted, np.zeros(self.size, np.float32))
        slots.update(zip(names, map(self._whole, frames[2:]), strict=True))
        return saved, self._whole(frames[1]), slots

    def _whole(self, frame: Buffer) -> Floats:
        if memoryview(frame).nbytes != self.size * 4:
            raise BadMessage(
                f"install: shard {self._spec.shard} has {self.size * 4} bytes of weights,"
                f" got {memoryview(frame).nbytes}"
            )
        return np.frombuffer(frame, "<f4")

    def _move_slots(self) -> None:
        """Go on in arrays that nobody reads."""
        if self._moved < self.size:
            self._copy_slots(self.size)
        self._slots, self._spare = self._spare, self._slots

    def _copy_slots(self, most: int) -> None:
        """Bring so many floats more of each slot to the other set."""
        # Who read the other set before may read it still; nobody does once it has a first piece.
        if not self._moved and not (self._spare and unshared(self._spare)):
            self._spare = [self._place.empty((self.size,), np.float32) for _ in self._slots]
        part = slice(self._moved, min(self._moved + most, self.size))
        for slot, spare in zip(self._slots, self._spare, strict=True):
            backends.copy(slot[part], spare[part])
        self._moved = part.stop

    def _become(self, version: int, weights: Floats) -> None:
        self.version, self._weights, self._read = version, weights, None
