"""The interface of every strategy, and the local state that it works on.

A strategy is a frozen struct of its options. It holds no state: what a worker keeps between steps
is in `Local`, as named arrays and counters, so that it can be saved. It names two halves that
belong together: what a worker does (the methods below, which the step machine calls), and what the
shards do (`server`).

    pull        when `fetches(step)`: on_pull(local, pulled)
    each step   the gradient at `local.weights`: local_step(local, gradient, rate)
    push        when `pushes(step)`: contribution(local)

An array that a worker pushes is a *contribution*: a gradient, or the difference between the weights
that a window started from and those that it ended with. Both point uphill: the shard subtracts.
"""

from collections.abc import Callable, Collection, Iterable
from math import gcd
from typing import Any, ClassVar, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from shards import argument_checks
from shards.aggregation import Buffer, Each, ServerHalf
from shards.errors import BadInput
from shards.messages import MAX_STEPS
from shards.named_fields import NamedFields
from shards.rules import SGD, Decay, DecayKind, Momentum, Nesterov, Rule
from shards.tables import RateRun

USUAL = "usual"  # in place of a staleness bound: the one that suits the strategy

Floats = NDArray[np.float32]


class Fragment(msgspec.Struct, array_like=True):
    """The exchange of one dense table.

    `versions` are those of the pull that brought it, since when it has been trained for `window`
    steps on `tokens` samples. `requested` is the clock for which it is requested, None if it is
    not, and `waited` counts the steps since.
    """

    versions: tuple[int, ...] = ()
    window: int = 0
    tokens: int = 0
    requested: int | None = None
    waited: int = 0


class Local(msgspec.Struct):
    """The state of one worker between steps; arrays are flat float32 of the table's size.

    The next gradient is computed at `weights`: those that were `pulled` last, which nobody may
    write to, or the worker's own. `slots` are the strategy's own arrays by name. `gradient` is the
    newest one; its content is the strategy's to change.

    `steps` and `samples` count what has not been pushed yet, and `loss` is the sum of its losses;
    `count` is the number of all local steps. `fetched` are the versions of `pulled`, one per shard,
    and `versions` those from which the oldest step not pushed yet was computed.

    `segments` and `decay` are the table's multipliers and the weight decay, for `descend`. With an
    `optimizer` of the user's own, that one takes the step from `weights`, and returns where it led:
    an array of its own, which it changes again at the next step.

    Of a model in fragments `pulled` holds each as it was received last, and `weights` are always
    the worker's own.
    """

    weights: Floats
    pulled: Floats
    fetched: tuple[int, ...]
    versions: tuple[int, ...] = ()
    slots: dict[str, Floats] = {}
    gradient: Floats | None = None
    steps: int = 0
    samples: int = 0
    loss: float = 0.0
    count: int = 0
    segments: tuple[RateRun, ...] = ()
    decay: Decay = Decay()
    optimizer: Callable[[], Floats] | None = None
    fragments: list[Fragment] = []
    _buffers: list[Floats] = []
    _multipliers: Floats | None = None

    def settle(self) -> None:
        """Begin to count from zero: everything so far has been pushed.

        The newest gradient may be the array that was pushed. Kept, it could not be recycled when
        the push is acknowledged, and the next gradient would need memory of its own.
        """
        self.steps, self.samples, self.loss = 0, 0, 0.0
        self.gradient = None

    def slot(self, name: str) -> Floats:
        """The array `name` of the strategy's own, which begins at zero."""
        if name not in self.slots:
            self.slots[name] = np.zeros_like(self.pulled)
        return self.slots[name]

    def descend(self, rule: Rule, gradient: Floats, rate: float) -> None:
        """Take one step of `rule` on the worker's own weights; its slots are kept here.

        Weight decay and the tensors' multipliers are those of a shard.
        """
        if self.optimizer is not None:
            self.weights = self.optimizer()
            return
        out = self.own()
        rule.apply(
            self.weights,
            gradient,
            tuple(self.slot(name) for name in rule.slot_names),
            out,
            self.segments,
            rate=rate,
            decay=self.decay,
            count=self.count,
        )
        self.weights = out

    def own(self) -> Floats:
        """An array of the worker's own that `weights` is not in, with arbitrary content."""
        for buffer in self._buffers:
            if buffer is not self.weights:
                return buffer
        self._buffers.append(np.empty_like(self.pulled))
        return self._buffers[-1]

    def add_decay(self, gradient: Floats) -> None:
        """Add the weight decay at `weights` to a gradient, in place."""
        if self.decay.weight:
            for run in self.segments:
                if not run.buffer:
                    w = self.weights[run.keys]
                    penalty = np.sign(w) if self.decay.kind is DecayKind.L1 else w
                    gradient[run.keys] += np.float32(self.decay.weight * run.decay_mult) * penalty

    @property
    def multipliers(self) -> Floats:
        """The `lr_mult` of each float of the table; 0 in padding and in buffers.

        It is made when it is first asked for, because it takes as much memory as the weights and
        few strategies need it.
        """
        if self._multipliers is None:
            self._multipliers = rate_multipliers(self.segments, self.pulled.size)
        return self._multipliers

    @property
    def buffers(self) -> list[slice]:
        """The places of the tensors that are not trained: a gradient has what to subtract."""
        return [run.keys for run in self.segments if run.buffer]

    # --- saving -----------------------------------------------------------------------------------

    def save(self) -> tuple[dict[str, Floats], dict[str, Any]]:
        """The arrays by name, copied, and the counters: all that `restore` needs."""
        arrays = {"weights": self.weights, "pulled": self.pulled, **self.slots}
        counters = {name: getattr(self, name) for name in _COUNTERS}
        counters["fragments"] = msgspec.to_builtins(self.fragments)
        return {name: array.copy() for name, array in arrays.items()}, counters

    @classmethod
    def restore(cls, arrays: dict[str, Floats], counters: dict[str, Any]) -> "Local":
        """The state that `save` returned."""
        slots = {name: array for name, array in arrays.items() if name not in _ARRAYS}
        fragments = msgspec.convert(counters.get("fragments", []), list[Fragment])
        counters = {**counters, "fragments": fragments}
        return cls(arrays["weights"], arrays["pulled"], slots=slots, **counters)

    def between_windows(self, keeps: Collection[str]) -> "Local":
        """This state without the window under way: only the slots that outlive a push.

        Nothing counts as fetched, so a strategy that steps from the shards' weights pulls first.
        """
        slots = {name: array for name, array in self.slots.items() if name in keeps}
        return Local(self.weights, self.pulled, (), slots=slots, count=self.count)


def rate_multipliers(segments: Iterable[RateRun], size: int) -> Floats:
    """The `lr_mult` of each float of a table of `size`; 0 outside the segments and in buffers."""
    multipliers = np.zeros(size, np.float32)
    for run in segments:
        if not run.buffer:
            multipliers[run.keys] = run.lr_mult
    return multipliers


_ARRAYS = ("weights", "pulled")
_COUNTERS = ("fetched", "versions", "steps", "samples", "loss", "count")


class Base(msgspec.Struct, frozen=True, tag_field="strategy", kw_only=True, metaclass=NamedFields):
    """The questions that the step machine and a job ask a strategy.

    Steps count from 0 over the worker's whole plan.
    """

    synchronous: ClassVar[bool] = False
    """Whether the workers move in step, at bound 0."""
    usual_bound: ClassVar[int | None] = 4
    """The staleness bound of a job that names none; `suitable_bound` heeds the options, too."""
    windowed: ClassVar[bool] = False
    """Whether the clock counts windows: a push raises it by 1, whatever the number of its steps."""
    exchanges: ClassVar[bool] = False
    """Whether weights are pulled right before each push; `fetches` then matters only at first."""
    takes_optimizer: ClassVar[bool] = False
    """Whether its local steps are those of a rule, which an optimiser can take the place of."""
    fragmented: ClassVar[bool] = False
    """True if each dense table is pushed and pulled by itself, so that there may be several."""
    keeps: ClassVar[tuple[str, ...]] = ()
    """The slots that outlive a push, which a worker loses when it is restarted."""
    keeps_moments: ClassVar[bool] = False
    """True if these are the moments of its local steps, which another worker's may stand for."""

    # --- the job's questions ----------------------------------------------------------------------

    def for_shards(self, workers: int, *, prefetch: bool) -> ServerHalf:
        """All that the shards are to know of this strategy: their half, and what may change.

        An operator may change the staleness bound, and the rate if the shards alone apply it.
        """
        return msgspec.structs.replace(
            self.server(workers),
            least_bound=self.least_allowed(prefetch),
            local_rate=self.windowed or self.fetch_period > 1,
        )

    def least_allowed(self, prefetch: bool) -> int | None:
        """The smallest bound that `check` accepts; None if it accepts no bound at all."""
        return 0 if self.synchronous else self.least_bound() + prefetch

    def check(self, bound: int | None, prefetch: bool) -> None:
        """Raise BadInput for a combination that would deadlock or is not defined."""
        if self.synchronous:
            if bound != 0:
                raise BadInput(
                    f"strategy {self.name}",
                    expected="staleness bound 0",
                    got="no bound" if bound is None else bound,
                )
            if prefetch:
                raise BadInput(f"strategy {self.name}", expected="no prefetch", got="prefetch")
            return
        if prefetch and (self.windowed or self.fetch_period > 1):
            raise BadInput(
                "prefetch",
                expected="a strategy that pulls before every step",
                got=f"{self.name}, which pulls every {self.fetch_period} steps",
            )
        push, fetch = self.push_period, self.fetch_period
        least = self.least_bound() + prefetch
        if bound is not None and bound < least:
            raise BadInput(
                f"staleness bound: pushing every {push} steps"
                f"{f' and fetching every {fetch}' if fetch > 1 else ''}"
                f"{' with prefetch' if prefetch else ''} needs at least {least}, got {bound}"
            )

    def check_fragments(self, count: int) -> None:
        """Raise BadInput if the strategy cannot exchange this number of dense tables."""

    def suitable_bound(self, prefetch: bool = False) -> int | None:
        """The staleness bound of a job that names none: the usual one, unless its options, such as
        a long `n_push`, need a larger one.
        """
        if self.usual_bound is None or self.synchronous:
            return self.usual_bound
        return max(self.usual_bound, self.least_bound() + prefetch)

    def least_bound(self) -> int:
        """The smallest bound at which no worker waits for itself; a prefetch needs one more."""
        if self.windowed:
            return 0
        # The shards' clock of the slowest worker lags its steps by those that it has not pushed,
        # and a fetch requests the clock of the last step that its weights will serve.
        push, fetch = self.push_period, self.fetch_period
        return push - gcd(push, fetch) + fetch - 1

    def for_workers(self, workers: int) -> Self:
        """This strategy with the defaults filled in that depend on the number of workers.

        Raises BadInput for options that diverge with so large a number.
        """
        return self

    def for_worker(self, name: str) -> Self:
        """This strategy as one worker follows it."""
        return self

    def server(self, workers: int) -> ServerHalf:
        """The rule and rate by which the shards apply the pushes of this number of workers."""
        return ServerHalf()

    def notices(self, workers: int, rule: Rule) -> tuple[str, ...]:
        """The changes to the job's settings for this number of workers, and their reasons.

        `rule` is the job's own.
        """
        half = self.server(workers)
        job_rule, used = _name(rule), _name(half.rule or (SGD() if half.deltas else rule))
        if job_rule == used:
            return ()
        how = "each worker keeps its own rate and steps, and " if half.deltas else ""
        at = f" at rate {half.rate:g}" if half.rate is not None else ""
        text = (
            f"strategy {self.name}: {how}the shards apply what is pushed by rule {used}{at},"
            f" not by the job's rule {job_rule}"
        )
        return (text,)

    @property
    def own_rate(self) -> bool:
        """True if its local steps have a rate among its options, and not the job's."""
        return False

    @property
    def name(self) -> str:
        """The name by which the registry and the command line know it."""
        return str(self.__struct_config__.tag)

    def buffer_share(self, workers: int) -> float:
        """The share of its own changes to buffers, such as running means, that a worker pushes.

        In a window each worker takes a buffer nearly all the way to the present batches' value. So
        where the shards add up the pushes of several workers, each counts for a part of the way:
        all of them would go W times as far, and diverge.
        """
        if self.exchanges or max(self.push_period, self.fetch_period) == 1:
            return 1.0
        match self.server(workers).merge:
            case Each():
                return 1 / workers
            case Buffer(size=size):
                return min(1.0, size / workers)
        return 1.0

    @property
    def warm_up(self) -> int:
        """Steps that one worker takes alone before the others join."""
        return 0

    # --- the step machine's questions -------------------------------------------------------------

    @property
    def push_period(self) -> int:
        """Steps between two pushes."""
        return 1

    @property
    def fetch_period(self) -> int:
        """Steps between two fetches."""
        return 1

    @property
    def plain(self) -> bool:
        """True if every step is just a fetch, one gradient and its push."""
        return False

    def fetches(self, step: int) -> bool:
        """Return whether new weights are pulled before `step`."""
        return step % self.fetch_period == 0

    def pushes(self, step: int) -> bool:
        """Return whether a contribution is pushed after `step`."""
        return (step + 1) % self.push_period == 0

    def on_pull(self, local: Local, pulled: Floats) -> None:
        """Take new weights, which nobody may write to; at first they are in `local` already."""
        local.weights = pulled

    def local_step(self, local: Local, gradient: Floats, rate: float) -> None:
        """Learn from a gradient at `local.weights`; `local` may keep or change the array.

        `rate` times `local.multipliers` is the learning rate of each float of the table; 0 in
        buffers, from which the gradient is subtracted as it is. By default the gradients since the
        last push are added up.
        """
        total = local.slots.get("sum") if local.steps else None
        local.slots["sum"] = gradient if total is None else np.add(total, gradient, total)

    def contribution(self, local: Local) -> Floats:
        """Return the array to push; it must not change afterwards."""
        return local.slots.pop("sum")


class Asynchronous(Base, frozen=True, kw_only=True):
    """The base of strategies in which the shards apply each gradient of a worker as it arrives.

    W workers take W steps where one takes one. A rate that was tuned for one worker is then too
    high: with momentum 0.9 and five workers, accuracy falls to that of a guess (mxnet#5287). So
    each push counts with `scale` times the job's rate, by default 1/W, and a notice says so.
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        if self.scale is not None:
            check_options(self, scale=positive)

    def server(self, workers: int) -> ServerHalf:
        return ServerHalf(scale=1 / workers if self.scale is None else self.scale)

    def notices(self, workers: int, rule: Rule) -> tuple[str, ...]:
        texts = super().notices(workers, rule)
        if workers == 1:
            return texts
        if isinstance(self.server(workers).rule or rule, Momentum | Nesterov):
            text = (
                f"strategy {self.name}: asynchronous workers act as momentum, which that of rule"
                f" {_name(rule)} adds to; if the loss grows, lower one of them"
            )
            texts = (*texts, text)
        return texts if self.scale is not None else (explain_scale(self, workers), *texts)


class Windowed(Base, frozen=True, kw_only=True):
    """The base of strategies that take a window of local steps and push how far these went.

    At the start of a window the worker's weights x are those of the shards, w. The contribution is
    w - x, and the shards move by it against no other rate than the strategy's own.
    """

    windowed: ClassVar[bool] = True
    takes_optimizer: ClassVar[bool] = True

    @property
    def push_period(self) -> int:
        return self.window_steps

    @property
    def fetch_period(self) -> int:
        return self.window_steps

    @property
    def window_steps(self) -> int:
        """The number of local steps in a window."""
        raise NotImplementedError

    def inner_rule(self) -> Rule:
        """The rule of the local steps."""
        return SGD()

    def local_step(self, local: Local, gradient: Floats, rate: float) -> None:
        local.descend(self.inner_rule(), gradient, rate)

    def contribution(self, local: Local) -> Floats:
        return np.subtract(local.pulled, local.weights, local.gradient)


def explain_scale(strategy: Base, workers: int) -> str:
    """The notice that each push counts with a W-th of the rate, and the option that changes it."""
    return (
        f"strategy {strategy.name}: the rate of each push is divided by {workers}, the number of"
        " workers, because their pushes add up and a rate tuned for one worker may diverge;"
        f" {strategy.name}:scale=1 keeps it as it is"
    )


def _name(rule: Rule) -> str:
    return str(rule.__struct_config__.tag)


def check_options(strategy: Base, **checks: Callable[[str, object], object]) -> None:
    """Convert and check the fields of a strategy by name; raises BadInput naming both."""
    for field, check in checks.items():
        value = check(f"strategy {strategy.name}: {field}", getattr(strategy, field))
        msgspec.structs.force_setattr(strategy, field, value)


def at_least(least: int) -> Callable[[str, object], int]:
    """A check for a whole number."""
    return lambda label, value: argument_checks.whole(label, value, least)


def window_steps(label: str, value: object) -> int:
    """Check a number of steps that are pushed together."""
    return argument_checks.whole(label, value, 1, MAX_STEPS)


def positive(label: str, value: object) -> float:
    """A check for a finite number above 0."""
    number = argument_checks.number(label, value, expected="more than 0")
    if not number > 0:
        raise argument_checks.wrong(label, "more than 0", value)
    return number


def share(label: str, value: object) -> float:
    """A check for a number in [0, 1)."""
    number = argument_checks.number(label, value, expected="[0, 1)")
    if not 0 <= number < 1:
        raise argument_checks.wrong(label, "[0, 1)", value)
    return number
