"""A shard's parameters: its weights, the update rule's slots, and their version.

Everything that changes them is in this file: applying one gradient or several in one pass
(fused_apply.py), and restoring a whole state. The next version is written into a buffer that nobody
reads (versions.py), so the present one can be served, copied and saved meanwhile.

Slots change in place, unless a reader such as a snapshot holds them: then updates continue in a
second set of arrays, which is kept for the next time. While the shard is idle, `prepare` copies the
slots there piece by piece; the next push copies what is left before it is applied. So reading a
state blocks no worker, and the push after it waits only if it comes at once.

Weights and slots are in the memory of a backend: the process's own, or that of a device, about
which this file knows only how to move an array there and back. A device's version is copied to the
host once, when it is first requested.

Some rules need the weights that a late gradient was computed from. Versions are immutable, so the
last few are kept by reference. They are part of the state, as `past.1` (the one before the present)
and so on: a shard that is restored or replayed makes the same bits.

Left to others: accepting and acknowledging a push (worker_requests.py), checking it (pushes.py),
its rate (updates.py), and sending a version (pull_replies.py).
"""

from collections import deque
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

_PIECE = 1 << 19  # floats of each slot, 2 MB: a push waits for at most one piece, about 0.2 ms


class SavedProgress(msgspec.Struct, frozen=True):
    """What a snapshot holds in addition to the arrays, all of one version.

    `buffered` is the number of pushes in the buffer, if the shard has one.
    """

    version: Count
    steps: Count
    samples: Count
    ledger: Ledger
    buffered: Count = 0


class ShardState(msgspec.Struct, frozen=True):
    """One shard's whole state at one version; arrays are flat float32 over its own keys."""

    saved: SavedProgress
    weights: Floats
    slots: dict[str, Floats]


class ParameterStore:
    """One shard's weights and slots; empty until `restore` provides them.

    Arrays are flat float32 of `size`: the shard's key ranges, concatenated.
    """

    def __init__(self, spec: ShardSpec, buffers: Callable[[int], Buffers], place: Backend) -> None:
        """Start without weights.

        `buffers` makes the host buffers that weights are sent from, given their size in floats;
        `place` is the backend that holds weights and slots in its memory.
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
        self._spare: list[Floats] = []  # the second set of slots, once the first has been read
        self._moved = 0  # floats of each slot that are already copied to the second set
        self._readable = buffers(self.size)
        self._buffers = self._readable if place == HOST else Buffers(self.size, allocator(place))
        self._read: Floats | None = None
        self.buffered = 0  # pushes in the buffer, which is the last slot
        self._past: deque[Floats] = deque(maxlen=spec.rule.versions)  # the newest version first
        self._segments = segments(spec.table, ranges)
        if spec.deltas:  # the workers have applied their own multipliers
            plain = {"lr_mult": 1.0, "decay_mult": 0.0}
            self._segments = tuple(msgspec.structs.replace(s, **plain) for s in self._segments)
        self._one_pass = FusedApply(self._segments, self.size)
        self._most_squares = spec.guard.most_squares

    @property
    def empty(self) -> bool:
        """Whether nothing has been installed yet."""
        return self._weights is None

    def weights(self) -> Floats:
        """The present version, which is not overwritten while referenced; raises Retry if none."""
        if self._weights is None:
            raise Retry(
                f"shard {self._spec.shard} has no weights yet: give all shards theirs by"
                " AdminClient.install"
            )
        return self._weights

    def host_weights(self) -> Floats:
        """The present version in host memory; a device's is copied once for all requests."""
        if self._here and self._weights is not None:
            return self._weights
        weights = self.weights()
        if self._read is None:
            self._read = self._readable.take()
            backends.copy(weights, self._read)
        return self._read

    def placed(self, gradient: Floats) -> Floats:
        """A host gradient, moved to the memory of the weights."""
        return gradient if self._here else backends.copied(gradient, self._place)

    def apply(self, gradient: Floats, rate: float, read_version: int | None = None) -> None:
        """Make the next version from a gradient in the memory of the weights (`placed`).

        `read_version` is the version that it was computed from (None: the present one).
        """
        self._own_slots()
        out = self._buffers.take()
        rule = self._spec.rule
        rule.apply(
            self.weights(),
            gradient,
            tuple(self._slots[: len(rule.slot_names)]),
            out,
            self._segments,
            rate=rate,
            decay=self._spec.decay,
            count=self.version + 1,
            read=None if read_version is None else self._version(read_version),
        )
        self._become(self.version + 1, out)

    def collect(self, gradient: Floats, factor: float) -> None:
        """Add `factor` times a gradient to the buffer."""
        self._own_slots()
        self._slots[-1] += gradient if factor == 1 else np.float32(factor) * gradient
        self.buffered += 1

    def apply_buffer(self, size: int, rate: float) -> None:
        """Make the next version from the buffer, divided by `size`, and empty it."""
        self._own_slots()
        self.apply(self._slots[-1] / np.float32(size), rate)
        self._slots[-1].fill(0)
        self.buffered = 0

    def apply_together(self, gradients: Sequence[Floats], rate: float) -> list[float] | None:
        """Make as many versions as there are gradients; only the last can be read.

        Allowed only if `sums`. Returns the squared norm of each gradient. If the guard refuses one
        of them, returns None and changes nothing.
        """
        assert self._weights is not None, "a push is examined before it is applied"
        out = self._buffers.take()
        squares = self._one_pass.apply(self._spec.rule, self._weights, gradients, out, rate)
        for square in squares:
            if not square <= self._most_squares:  # true for NaN, too
                return None
        self._become(self.version + len(gradients), out)
        return squares

    def copy(self) -> tuple[Floats, dict[str, Floats]]:
        """Weights and slots of one version, in host memory; the arrays will not change later.

        Drop them when done: until then the shard has to write into other arrays.
        """
        weights = self.host_weights()
        arrays = dict(zip(self._spec.slot_names, self._slots, strict=True))
        arrays |= zip(_past(len(self._past)), self._past, strict=True)
        if not self._here:
            arrays = {name: backends.copied(array, HOST) for name, array in arrays.items()}
        return weights, arrays

    @property
    def prepared(self) -> bool:
        """Whether the next push has no slots to copy first."""
        return not self._slots or self._moved == self.size or unshared(self._slots)

    def prepare(self) -> None:
        """Copy one piece of the slots ahead of the next push; only while not `prepared`."""
        self._copy_slots(_PIECE)

    def restore(
        self, version: int, weights: Floats, slots: dict[str, Floats], buffered: int = 0
    ) -> None:
        """Take over the version and the arrays that another store's `copy` returned."""
        out = self._buffers.take()
        backends.copy(weights, out)
        names = self._spec.slot_names
        self._slots = [backends.copied(slots[name], self._place) for name in names]
        self._spare, self._moved = [], 0
        self._weights = None
        self._become(version, out)
        self._past.clear()
        past = (name for name in _past(self._spec.rule.versions) if name in slots)
        self._past.extend(backends.copied(slots[name], self._place) for name in past)
        self.buffered = buffered

    def is_at(self, weights: Floats, slots: dict[str, Floats]) -> bool:
        """Whether it holds exactly these arrays, bit for bit; equal NaNs count as equal."""
        if self.empty:
            return False
        held, held_slots = self.copy()
        if held_slots.keys() != slots.keys():
            return False
        pairs = [(held, weights), *((held_slots[name], slots[name]) for name in held_slots)]
        return all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in pairs)

    def read(
        self, names: Sequence[str], frames: Sequence[Buffer]
    ) -> tuple[SavedProgress, Floats, dict[str, Floats]]:
        """Parse an Install's state for `restore`; without `names` all slots begin at zero.

        `frames` are an encoded SavedProgress, the weights, and one slot per name. Raises BadInput
        and BadMessage.
        """
        number, rule = self._spec.shard, self._spec.rule
        wanted = list(self._spec.slot_names)
        past = _past(rule.versions)
        own = [name for name in names if name not in past]
        if names and sorted(own) != sorted(wanted):
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

    def _version(self, number: int) -> Floats:
        """The weights of a version, or the oldest kept if it is older than the rule needs."""
        age = min(self.version - number, len(self._past))
        return self._past[age - 1] if age else self.weights()

    def _own_slots(self) -> None:
        """Prepare the slots for a change in place."""
        if not unshared(self._slots):  # a reader holds them
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
        # from then on only this store refers to it.
        if not self._moved and not (self._spare and unshared(self._spare)):
            self._spare = [self._place.empty((self.size,), np.float32) for _ in self._slots]
        part = slice(self._moved, min(self._moved + most, self.size))
        for slot, spare in zip(self._slots, self._spare, strict=True):
            backends.copy(slot[part], spare[part])
        self._moved = part.stop

    def _become(self, version: int, weights: Floats) -> None:
        if self._past.maxlen and self._weights is not None:
            self._past.appendleft(self._weights)
        self.version, self._weights, self._read = version, weights, None


def _past(versions: int) -> list[str]:
    """The names of the arrays that hold the last versions before the present one."""
    return [f"past.{age}" for age in range(1, versions + 1)]
