"""The base of the strategies that exchange a model in fragments, each at its own time.

A fragment is a dense table. A worker steps on weights of its own, and waits for an exchange only if
the next one of the same fragment comes before its end:

    after step s, if (s + 1) % h == p * h // P:   push D = anchor - x of fragment p, request it
    `overlap` steps later, or when it has come:   anchor = new;  x = alpha * x + (1 - alpha) * new

The anchor is the fragment as the worker received it last. So at most a P-th of the model travels at
once, at even intervals (Streaming DiLoCo, arXiv 2501.18512). The shards merge the reports on a
fragment once a quorum of workers has sent theirs (aggregation.py).
"""

from typing import ClassVar

from shards import argument_checks
from shards.aggregation import Average, Quorum, ServerHalf
from shards.errors import BadInput
from shards.plurals import format_count
from shards.rules import Nesterov
from worker.strategies.base import at_least, check_options
from worker.strategies.outer_momentum import PacedWindows

EMBEDDINGS = "embeddings"
"""The table of embeddings and of a head tied to them, whose reports are averaged by the mean: few
of their rows move in a window, and not the same ones in each worker."""


class Fragments(PacedWindows, frozen=True, kw_only=True):
    """Exchange each dense table every `h` steps, `overlap` steps behind the training.

    With an overlap of 0 it waits for each answer. A worker's weights move by 1 - `alpha` of the way
    to those that it receives. `average` is that
    of the reports: `radial` keeps the length of their mean. Further options are those of DiLoCo.
    """

    h: int = 100
    overlap: int = 2
    alpha: float = 0.5
    average: Average = Average.RADIAL

    fragmented: ClassVar[bool] = True
    usual_bound: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(
            self, overlap=at_least(0), alpha=argument_checks.number_to_1, average=_average
        )
        if self.overlap >= self.h:
            raise BadInput(
                f"strategy {self.name}: overlap",
                expected=f"fewer than h = {self.h} steps",
                got=self.overlap,
            )

    @property
    def least_steps(self) -> int:
        return self.overlap + 1

    def check(self, bound: int | None, prefetch: bool) -> None:
        super().check(bound, prefetch)
        if bound is not None:
            raise BadInput(f"strategy {self.name}", expected="no staleness bound", got=bound)

    def least_allowed(self, prefetch: bool) -> int | None:
        return None

    def check_fragments(self, count: int) -> None:
        if count > self.h:
            raise BadInput(
                f"strategy {self.name}: h",
                expected=f"at least 1 step for each of {format_count(count, 'dense table')}",
                got=self.h,
            )

    def quorum(self, workers: int) -> Quorum:
        """The merge of the reports of this number of workers."""
        raise NotImplementedError

    def server(self, workers: int) -> ServerHalf:
        rule = Nesterov(self.momentum)
        return ServerHalf(merge=self.quorum(workers), rule=rule, rate=self.outer_lr)


def fragment_after(step: int, period: int, fragments: int) -> int | None:
    """The number of the fragment that is exchanged after `step`, counted from 0; None if none is.

    With at most `period` fragments no two are exchanged after one step.
    """
    for fragment in range(fragments):
        if (step + 1) % period == fragment * period // fragments:
            return fragment
    return None


def _average(label: str, value: object) -> Average:
    return argument_checks.choice(label, value, Average)
