"""A shard's parameters: the weights of its tables, their slots, and their version.

Everything that changes them is here and in the parts of the tables (table_part.py): applying one
push or several in one pass, and restoring a whole state. The weights of all dense tables are one
array. The next version is written into another that nobody reads (buffer_pool.py), so the present
one can be served, copied and saved meanwhile. Rows of sparse tables change in place; a push of rows
alone makes a version with the same array. A push changes all its tables or none: nothing but the
next version is written before the guard has accepted every gradient.

Weights and slots are in the memory of a backend: the process's own, or that of a device, about
which this file knows only how to move an array there and back. A device's version is copied to the
host once, when it is first requested.

Some rules need the weights that a late gradient was computed from. Versions are immutable, so the
last few are kept by reference. They are part of the state: a shard that is restored or replayed
makes the same bits.

Left to others: accepting and acknowledging a push (worker_requests.py), checking it
(push_checks.py), its rates (updates.py), and sending a version (pull_replies.py).
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_kernels import backends
from cupy_kernels.backends import HOST, Backend
from shards.buffer_pool import Buffers, allocator
from shards.dense_part import DensePart
from shards.errors import BadInput, Retry
from shards.reports import Reports
from shards.shard_state import Arrays, SavedProgress, array_name, of_table, past_names
from shards.sparse_part import SparsePart
from shards.spec import ShardSpec
from shards.table_part import TablePart

Floats = NDArray[np.float32]

Gradients = Mapping[str, Any]
"""The checked gradient of each table in a push: an array, or the rows of a sparse table."""


_IS_PREPARED = attrgetter("is_prepared")


class ParameterStore:
    """One shard's weights and slots; empty until `restore` provides them.

    Weights are flat float32 of `size`: the shard's keys of the arena. `parts` are the tables of
    which these keys hold a section, in the arena's order, and all sparse tables.
    """

    def __init__(
        self, spec: ShardSpec, buffers: Callable[[int], Buffers], backend: Backend
    ) -> None:
        """Start without weights.

        `buffers` makes the host buffers that weights are sent from, given their size in floats;
        `backend` holds weights and slots in its memory.
        """
        self.size = len(spec.keys)
        self.version = 0
        tables = {table_spec.table.name: table_spec for table_spec in spec.tables}
        self.parts: dict[str, TablePart] = {
            section.table: DensePart(spec, tables[section.table], section, backend)
            for section in spec.layout.sections(spec.keys)
        }
        self._dense = frozenset(self.parts)
        self.parts |= {
            table.name: SparsePart(spec, tables[table.name]) for table in spec.layout.sparse
        }
        self._growing = [part for part in self.parts.values() if isinstance(part, SparsePart)]
        self.grows = bool(self._growing)
        self.runs = all(part.runs for part in self.parts.values())
        self._copying = [part for part in self.parts.values() if part.copies]
        self._shard = spec.shard
        self._on_host = backend == HOST
        self._weights: Floats | None = None
        # Messages refer to these without a copy, perhaps from memory that workers share.
        self._readable = buffers(self.size)
        self._buffers = self._readable if self._on_host else Buffers(self.size, allocator(backend))
        self._read: Floats | None = None
        self.buffered = 0  # pushes in the buffer
        versions = max((part.spec.rule.versions for part in self.parts.values()), default=0)
        self._past: deque[Floats] = deque(maxlen=versions)  # the newest version first
        self._backend = backend

    @property
    def empty(self) -> bool:
        """True if nothing has been installed yet."""
        return self._weights is None

    def weights(self) -> Floats:
        """The present version, which is not overwritten while referenced; raises Retry if none."""
        if self._weights is None:
            raise Retry(
                f"shard {self._shard} has no weights yet: give all shards theirs by"
                " AdminClient.install"
            )
        return self._weights

    def host_weights(self) -> Floats:
        """The present version in host memory; a device's is copied once for all requests."""
        if self._on_host and self._weights is not None:
            return self._weights
        weights = self.weights()
        if self._read is None:
            self._read = self._readable.take()
            backends.copy(weights, self._read)
        return self._read

    def apply(
        self,
        pushes: Sequence[Gradients],
        rates: Mapping[str, float],
        *,
        scale: float = 1.0,
        read_version: int | None = None,
        guarded: bool = True,
    ) -> list[float] | None:
        """Make as many versions as there are pushes, at `scale` times the rate of each table.

        Only the last version can be read. Several pushes are allowed only if all tables take
        `runs`. `read_version` is the version that the only push was computed from (None: the
        present one). Returns the squared norm of each push. If the guard refuses one of them,
        returns None and changes nothing.
        """
        assert self._weights is not None, "a push is examined before it is applied"
        present = out = self._weights
        if not all(map(self._dense.isdisjoint, pushes)):
            out = self._buffers.take()
            assert out is not present, "a version must not be overwritten"
        read = self._version(read_version) if self._past and read_version is not None else None
        squares = [0.0] * len(pushes)
        waiting: list[tuple[TablePart, list[NDArray[Any]], float]] = []
        for name, part in self.parts.items():
            pushed, gradients = [], []
            for number, push in enumerate(pushes):  # a loop: it runs at every push
                if name in push:
                    pushed.append(number)
                    gradients.append(push[name])
            if not gradients:
                if out is not present:
                    # The buffer holds some older version, so what does not change is copied, too.
                    part.keep(present, out)
                continue
            if part.sums:
                part_squares = part.apply(present, gradients, out, rates[name] * scale, read)
            else:  # its arrays change in place, so all tables are measured before it is applied
                part_squares = [part.measure(gradient) for gradient in gradients]
                waiting.append((part, gradients, rates[name] * scale))
            most = part.max_squares
            for number, square in zip(pushed, part_squares, strict=True):
                # The half-written `out` is dropped, and no slot has changed yet: the push leaves no
                # trace.
                if guarded and not square <= most:  # true for NaN, too
                    return None
                squares[number] += square
        for part, gradients, rate in waiting:
            part.apply(present, gradients, out, rate, read)
        # Only now: a rule corrects its bias by the count of the updates before this one.
        for push in pushes:
            for name in push:
                self.parts[name].count += 1
        self._become(self.version + len(pushes), out)
        return squares

    def count_rows(self) -> dict[str, int]:
        """The number of stored rows of each sparse table."""
        return {part.table.name: part.rows for part in self._growing}

    def check_room(self, pushes: Sequence[Gradients]) -> None:
        """Raise Full unless sparse tables have room for the new rows of all these pushes."""
        for part in self._growing:
            name = part.spec.table.name
            part.check_room([push[name] for push in pushes if name in push])

    def mean(self, pushes: Sequence[Gradients]) -> Gradients:
        """The mean of each table over a round of pushes."""
        return {
            name: part.mean([push[name] for push in pushes if name in push], len(pushes))
            for name, part in self.parts.items()
            if any(name in push for push in pushes)
        }

    def collect(self, gradients: Gradients, factor: float) -> None:
        """Add `factor` times a push to the buffer."""
        for name, gradient in gradients.items():
            self.parts[name].collect(gradient, factor)
        self.buffered += 1

    def apply_buffer(self, size: int, rates: Mapping[str, float]) -> None:
        """Make the next version from the buffer, divided by `size`, and empty it.

        A table that no push in the buffer includes stays as it is.
        """
        gradients = {
            name: part.take_buffer(size) for name, part in self.parts.items() if part.buffered
        }
        # Each push was measured as it came; the guard's limit is for one push, not for their mean.
        self.apply([gradients], rates, guarded=False)
        self.buffered = 0

    def collect_report(
        self, table: str, report: Floats, weight: float, norms: dict[str, float]
    ) -> None:
        """Add a report of this weight on a table, and to `norms` its weighted norms by tensor."""
        self.parts[table].collect_report(report, weight, norms)
        self.buffered += 1

    def take_reports(self, table: str, reports: Reports) -> Gradients:
        """The average of the reports on a table, as a push of it alone; none are left."""
        part = self.parts[table]
        self.buffered -= part.buffered
        return {table: part.take_reports(reports.weight, reports.norms)}

    def measure(self, gradients: Gradients) -> float:
        """The squared norm of a push; raises BadInput if the guard of a table refuses its part."""
        squares = 0.0
        for name, gradient in gradients.items():
            part = self.parts[name]
            square = part.measure(gradient)
            if not square <= part.max_squares:
                finite = part.is_finite(gradient)
                raise BadInput(f"table {name} {part.spec.guard.describe(square, finite=finite)}")
            squares += square
        return squares

    def copy(self) -> Arrays:
        """The arrays of one version, in host memory; they will not change later.

        Drop them when done: until then the shard has to write into other arrays.
        """
        # A tuple, because the deque moves on with the next push.
        weights, past = self.host_weights(), tuple(self._past)
        return {
            array_name(name, slot): array
            for name, part in self.parts.items()
            for slot, array in part.export(weights, past).items()
        }

    def check_state(self, arrays: Arrays) -> None:
        """Raise BadInput unless `restore` can take over these arrays."""
        known = 0
        for name, part in self.parts.items():
            part_arrays = of_table(arrays, name)
            part.check_state(part_arrays)
            known += len(part_arrays)
        # An array of an unknown table would otherwise be dropped without a word.
        if known != len(arrays):
            names = ", ".join(self.parts)
            raise BadInput("state", expected=f"arrays of the tables {names}", got=", ".join(arrays))

    def restore(self, saved: SavedProgress, arrays: Arrays) -> None:
        """Take over the arrays that another store's `copy` returned, and their counts.

        Slots that are missing begin at zero.
        """
        out, tables = self._buffers.take(), {name: of_table(arrays, name) for name in self.parts}
        most = self._past.maxlen or 0
        past_count = max(
            (len(part_arrays.keys() & past_names(most)) for part_arrays in tables.values()),
            default=0,
        )
        past = [self._backend.empty((self.size,), np.float32) for _ in range(past_count)]
        for name, part in self.parts.items():
            part.restore(tables[name], out, past)
            part.count = saved.updates.get(name, 0)
            part.buffered = saved.collected.get(name, 0)
        # The former weights are no past version of the restored state, and `_become` must not keep
        # them.
        self._weights = None
        self._become(saved.version, out)
        self._past.clear()
        self._past.extend(past)
        self.buffered = saved.buffered

    def is_at(self, arrays: Arrays) -> bool:
        """Return whether it holds exactly these arrays, bit for bit; equal NaNs count as equal."""
        if self.empty:
            return False
        present = self.copy()
        return present.keys() == arrays.keys() and all(
            np.array_equal(present[name].view(np.uint8), arrays[name].view(np.uint8))
            for name in present
        )

    @property
    def is_prepared(self) -> bool:
        """True if the next push has nothing to copy first."""
        return all(map(_IS_PREPARED, self._copying))  # no generator: it is asked at every turn

    def prepare(self) -> None:
        """Do a part of the work that the next push would wait for; only if not `is_prepared`."""
        next(part for part in self._copying if not part.is_prepared).prepare()

    def _version(self, number: int) -> Floats:
        """The weights of a version, or the oldest kept if it is older than the rules need."""
        age = min(self.version - number, len(self._past))
        return self._past[age - 1] if age else self.weights()

    def _become(self, version: int, weights: Floats) -> None:
        if self._past.maxlen and self._weights is not None:
            # By reference: a version never changes, so it costs no copy.
            self._past.appendleft(self._weights)
        if weights is not self._weights:  # else the host's copy is still of these weights
            self._read = None
        self.version, self._weights = version, weights
