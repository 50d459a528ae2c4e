"""The interface of a shard's part of a table, for any kind of table.

A shard holds a part of some of the job's tables. It judges, applies, logs and acknowledges a push
as one (worker_requests.py, updates.py). Only checking frames, applying a gradient, and encoding
and saving what the part holds depend on the kind of table: they are behind this protocol, with one
implementation for each kind: dense_part.py and sparse_part.py.

The weights of all dense parts are one array, because a version of a shard is immutable and is
served as a whole (parameters.py). `weights` below is that array at the present version, and `out`
the next one. The rows of a sparse table change in place, and a part of rows ignores both.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shards.messages import AskedPart, Part, PulledPart
from shards.shard_state import Arrays
from shards.spec import TableSpec
from shards.wire_format import Buffer

Floats = NDArray[np.float32]


class TablePart(Protocol):
    """One shard's part of one table; `count` is the number of its updates, `buffered` that of the
    pushes in its buffer. Its guard refuses a squared norm that is not up to `max_squares`.

    `sums`: `apply` returns the gradients' squared norms and changes nothing but `out`. Otherwise
    they have been measured before. `runs`: it takes any number of gradients, otherwise one.
    `copies`: it may have work for `prepare`. `dense`: its weights are in the shard's array.
    `push_frames` and `ask_frames` are the frames of a part in a push, and in a pull.
    """

    spec: TableSpec
    count: int
    buffered: int
    copies: bool
    dense: bool
    sums: bool
    runs: bool
    max_squares: float
    push_frames: int
    ask_frames: int

    @property
    def is_prepared(self) -> bool:
        """True if `prepare` has nothing left to do before the next push."""

    def prepare(self) -> None:
        """Do a small part of the work that the next push would otherwise wait for."""

    # --- pushes and pulls -----------------------------------------------------------------------

    def check(self, label: str, part: Part, frames: Sequence[Buffer]) -> Any:
        """Decode one part of the push `label`; raises BadMessage and changes nothing."""

    def check_room(self, gradients: Sequence[Any]) -> None:
        """Raise Full unless the part can apply all these gradients, and change nothing."""

    def measure(self, gradient: Any) -> float:
        """The squared norm of a checked gradient."""

    def is_finite(self, gradient: Any) -> bool:
        """Return whether each value of a gradient is finite."""

    def mean(self, gradients: Sequence[Any], pushes: int) -> Any:
        """The mean gradient of a round of `pushes`, of which some may leave this part out."""

    def apply(
        self,
        weights: Floats,
        gradients: Sequence[Any],
        out: Floats,
        rate: float,
        read: Floats | None,
    ) -> list[float]:
        """Update this part by checked gradients, in their order; its weights go into `out`.

        `read` is the version that the gradient was computed from (None: the present one).
        """

    def collect(self, gradient: Any, factor: float) -> None:
        """Add `factor` times a gradient to the buffer."""

    def take_buffer(self, size: int) -> Any:
        """The buffer divided by `size`, as a gradient; the buffer is then empty."""

    def collect_report(self, report: Any, weight: float, norms: dict[str, float]) -> None:
        """Add a report of this weight to the buffer, and to `norms` its weighted norms by tensor.

        Only of a dense table.
        """

    def take_reports(self, weight: float, norms: Mapping[str, float]) -> Any:
        """The average of the reports in the buffer, whose weights add up to `weight`; empties it.

        Only of a dense table.
        """

    def keep(self, weights: Floats, out: Floats) -> None:
        """Copy this part's weights to the next version, which does not change them."""

    def check_ask(self, ask: AskedPart, frames: Sequence[Buffer]) -> None:
        """Raise BadMessage or BadInput if the part cannot be read as `ask` says."""

    def read(
        self,
        weights: Floats,
        version: int,
        ask: AskedPart,
        frames: Sequence[Buffer],
        worker: str,
    ) -> tuple[PulledPart, tuple[NDArray[Any], ...]]:
        """The answer for `worker`; `weights` are those of `version`, in host memory."""

    def forget(self, worker: str) -> None:
        """Answer the worker's next pull of changes with whole weights."""

    # --- state ----------------------------------------------------------------------------------

    def export(self, weights: Floats, past: Sequence[Floats]) -> Arrays:
        """Everything it holds, in host memory, as arrays that will not change later.

        `past` are the versions before the present one, the newest first.
        """

    def check_state(self, arrays: Arrays) -> None:
        """Raise BadInput unless `restore` can take over these arrays."""

    def restore(self, arrays: Arrays, out: Floats, past: Sequence[Floats]) -> None:
        """Take over what another part's `export` returned; missing slots begin at zero.

        The weights go into `out`, earlier versions into `past`.
        """
