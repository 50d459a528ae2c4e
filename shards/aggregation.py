"""The server's half of a strategy: how a shard weighs pushes, merges them, and applies the result.

Each choice is a value, so that it travels in a shard's spec and in its log. A strategy of
`worker/strategies/` names all of them together, because they are only right together: a shard that
takes the mean of deltas must not scale each of them by its staleness as well.

- *Weighing.* A weighing maps the staleness t of a push to a factor on its rate. `WEIGHINGS` is the
  registry; `constant` is the usual one. A `StaleLimit` scales or drops what is too stale.
- *Merging.* `Each` applies every push as it arrives. `Round` collects one push of each worker and
  applies their mean; with `backups` it does not wait for the slowest, and drops what they send too
  late (Chen et al. 2016). `Buffer` adds up pushes and applies them `size` at a time
  (Nguyen et al. 2022). `Quorum` merges the reports on one table, a fragment of the model, once
  enough learners have sent theirs (Decoupled DiLoCo, arXiv 2604.21428).
- *Applying.* An update rule (rules.py), at a rate.
"""

from collections.abc import Callable
from enum import StrEnum
from math import sqrt
from typing import cast

import msgspec
from msgspec import structs

from shards import argument_checks
from shards.errors import BadInput
from shards.rules import SGD, Decay, Rule
from shards.schedules import Fixed, Schedule

Weighing = Callable[[int], float]
"""The factor on the rate of a push of staleness t >= 0."""

CONSTANT = "constant"
_MAX_DIGITS = 19

WEIGHINGS: dict[str, Weighing] = {
    CONSTANT: lambda _: 1.0,
    "inverse": lambda t: 1 / max(1, t),
    "inverse_plus_one": lambda t: 1 / (t + 1),
    "inverse_root": lambda t: 1 / sqrt(1 + t),
}
"""The factors on the rate, by name: 1; 1/max(1, t); 1/(t + 1); 1/sqrt(1 + t)."""


def weighing_of(argument: str, value: object) -> str:
    """The name of a weighing; raises BadInput naming `argument` and the known ones."""
    if isinstance(value, str) and value in WEIGHINGS:
        return value
    raise argument_checks.wrong(argument, ", ".join(WEIGHINGS), value)


class StaleLimit(msgspec.Struct, frozen=True):
    """The treatment of a push of a staleness above `after`, which the staleness bound let pass.

    Its rate is multiplied by `after` / staleness; or, with `drop`, it counts as its worker's and
    changes no weights. Dropping biases training against the data of slow workers. The bound limits
    steps between workers; this limits the updates of a shard between a read and a push from it.
    """

    after: int
    drop: bool = False

    def __post_init__(self) -> None:
        structs.force_setattr(
            self, "after", argument_checks.whole("on_stale: after", self.after, 1)
        )

    def drops(self, staleness: int) -> bool:
        """Return whether a push of this staleness is dropped."""
        return self.drop and staleness > self.after

    def factor(self, staleness: int) -> float:
        """The factor on the rate of a push that is not dropped."""
        return min(1.0, self.after / max(1, staleness))


def stale_limit_of(argument: str, value: object) -> StaleLimit | None:
    """The limit in `wait` (none: only the bound holds), `scale:AFTER` or `drop:AFTER`."""
    if isinstance(value, StaleLimit | None):
        return value
    action, _, after = value.partition(":") if isinstance(value, str) else ("", "", "")
    if action == "wait" and not after:
        return None
    # Python's `int` takes quadratic time for a long text, and this one may come from another
    # process.
    digits = after.isascii() and after.isdecimal() and len(after) < _MAX_DIGITS
    if action not in ("scale", "drop") or not digits or not int(after):
        expected = "wait, scale:AFTER or drop:AFTER, with AFTER of at least 1 update"
        raise argument_checks.wrong(argument, expected, value)
    return StaleLimit(int(after), drop=action == "drop")


class _Merging(msgspec.Struct, frozen=True, tag_field="merge"):
    """The base of the ways to merge pushes."""


class Each(_Merging, frozen=True, tag="each"):
    """Apply every push by itself, as it arrives; each makes a version of the shard."""


class Round(_Merging, frozen=True, tag="round"):
    """Apply the mean of one push of each worker, without the slowest `backups` of them.

    A round makes one version. A push that comes too late for its round is acknowledged as dropped.
    Raises BadInput for a number of `backups` below 0.
    """

    backups: int = 0

    def __post_init__(self) -> None:
        structs.force_setattr(self, "backups", argument_checks.whole("backups", self.backups, 0))


class Buffer(_Merging, frozen=True, tag="buffer"):
    """Apply the sum of `size` weighted pushes, divided by `size`, as one version.

    Raises BadInput for a `size` below 1. Each push counts for 1/`size` of an update, however many
    are applied together: when the last worker leaves, those in the buffer are.
    """

    size: int

    def __post_init__(self) -> None:
        structs.force_setattr(self, "size", argument_checks.whole("buffer: size", self.size, 1))


class Average(StrEnum):
    """The average of reports D of weights w: sum w D / sum w; or, a tensor at a time, the weighted
    mean of their norms along the mean of their directions, which keeps its norm when directions
    differ.
    """

    MEAN = "mean"
    RADIAL = "radial"


class Quorum(_Merging, frozen=True, tag="quorum"):
    """Merge the reports on one table once `size` workers have sent theirs, as one version.

    A push is a report on the only table in it: the difference between that table's weights as the
    worker received them last and its own. It weighs tokens^2 / window steps (messages.py). After
    the quorum more reports may come while nobody needs the merged table: a worker that takes
    `overlap` steps before it needs the answer leaves `grace` times that time.
    When all active workers have reported nobody is waited for; with `size` None all have to.
    Reports are averaged as `average` says, those on the tables in `mean_tables` by the mean.

    A report from weights that another merge has replaced is late: it is acknowledged as dropped.
    Raises BadInput for a `size` below 1, an `overlap` below 0, and a `grace` outside [0, 1].
    """

    size: int | None = 1
    overlap: int = 1
    grace: float = 0.5
    average: Average = Average.MEAN
    mean_tables: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.size is not None:
            structs.force_setattr(self, "size", argument_checks.whole("quorum: size", self.size, 1))
        overlap = argument_checks.whole("quorum: overlap", self.overlap, 0)
        structs.force_setattr(self, "overlap", overlap)
        grace = argument_checks.number_to_1("quorum: grace", self.grace)
        structs.force_setattr(self, "grace", grace)
        average = argument_checks.choice("quorum: average", self.average, Average)
        structs.force_setattr(self, "average", average)

    def average_of(self, table: str) -> Average:
        """The average of the reports on a table."""
        return Average.MEAN if table in self.mean_tables else self.average


Merge = Each | Round | Buffer | Quorum

EACH, ROUND = Each(), Round()

BUFFER = "buffer"
"""The name of a shard's array with the sum of the pushes that it has yet to apply."""

DIRECTIONS = "directions"
"""The name of a shard's array with the sum of the directions of reports, a tensor at a time."""

_MERGES: dict[str, Merge] = {"each": EACH, "round": ROUND}


def merge_of(argument: str, value: object) -> Merge:
    """The way to merge pushes: a value, or the name of one without options. Raises BadInput."""
    if isinstance(value, _Merging):
        return cast(Merge, value)
    if isinstance(value, str) and value in _MERGES:
        return _MERGES[value]
    raise argument_checks.wrong(
        argument, f"{', '.join(_MERGES)}, or a value such as Buffer(10)", value
    )


class ServerHalf(msgspec.Struct, frozen=True, kw_only=True):
    """The choices that a strategy makes for the shards.

    `scale` multiplies the rate of every push. With `rate` the pushes are differences of weights, in
    which the workers have applied their own rates, the tensors' multipliers and the weight decay;
    the shard applies them at that fixed rate, without any of these. Without it they are gradients,
    and the job's schedule holds. `rule` is None for the job's own. `stale`, the
    user's choice, limits the staleness of single pushes, which those of a round do not have.
    `least_bound`, `local_rate` and `rate_factor` are those of a ShardSpec.
    """

    merge: Merge = EACH
    weigh: str = CONSTANT
    scale: float = 1.0
    rate: float | None = None
    rule: Rule | None = None
    stale: StaleLimit | None = None
    least_bound: int | None = 0
    local_rate: bool = False
    rate_factor: float = 1.0

    def __post_init__(self) -> None:
        weighing_of("weigh", self.weigh)
        for name in ("scale", "rate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BadInput(name, expected="more than 0", got=value)
        # A push of a round has no staleness of its own: all of them are computed from one version.
        if self.stale is not None and isinstance(self.merge, Round | Quorum):
            raise BadInput("on_stale", expected="wait for a strategy in rounds", got="a limit")

    @property
    def deltas(self) -> bool:
        """True if pushes are differences of weights."""
        return self.rate is not None

    def check_rows(self, table: str) -> None:
        """Raise BadInput if the strategy cannot work with the rows of a sparse table."""
        faults = {
            "a buffer": isinstance(self.merge, Buffer | Quorum),
            "differences of weights": self.deltas,
            "steps on weights of a worker's own": self.local_rate,
            "a rule without rows": self.rule is not None and not self.rule.rows,
        }
        for fault in [text for text, is_true in faults.items() if is_true]:
            raise BadInput(
                f"table {table}",
                expected="a strategy that works with rows: asp, ssp, bsp, stale_rate or downpour",
                got=f"one with {fault}",
            )

    def settings(self, rule: Rule, rate: Schedule, decay: Decay) -> tuple[Rule, Schedule, Decay]:
        """The rule, rate and decay that the shards apply to a table with these of the user.

        The strategy may bring a rule of its own. Where pushes are differences of weights, the rate
        and decay are the workers' to apply, and the shards have the strategy's fixed rate.
        """
        if self.rate is None:
            return self.rule or rule, rate, decay
        return self.rule or SGD(), Fixed(base_rate=self.rate), Decay()
