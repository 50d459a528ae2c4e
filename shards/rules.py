"""Update rules: how a shard applies a gradient; each rule is a value.

A rule is a frozen struct of its hyperparameters. It holds no state: its slots (a momentum, a sum of
squares) are arrays that the shard keeps next to the weights, starts at zero, and passes in. New
weights are written into a separate buffer, because the version they are computed from may be on its
way to a worker; slots, which nobody else reads, are updated in place.

All formulas are Caffe's. For a tensor with multipliers `lr_mult` and `decay_mult`

    g <- g + decay * decay_mult * w        L2; sign(w) in place of w for L1; nothing for 0
    w <- w - step(g, slots) * rate * lr_mult

and for a buffer w <- w - g, in float32, each operation rounded once, so that a shard equals a
serial NumPy loop bit for bit. A new rule needs its formula in cupy_kernels/ops/updates/cpu.py and
one class here.

Some rules also update the rows of a sparse table, each row with slots of its own: `rows` says so.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar, cast, get_args

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from cupy_kernels import backends
from cupy_kernels.backends import HOST, Backend, backend_of
from cupy_kernels.ops import rows, updates
from cupy_kernels.types import RowUpdate
from shards import argument_checks
from shards.buffer_pool import allocator
from shards.errors import BadInput
from shards.named_fields import NamedFields
from shards.rule_checks import check_positive, check_range, check_share, field_of
from shards.run_plans import cover_gaps, plan_runs
from shards.tables import META_WORDS, RateRun

Floats = NDArray[np.float32]
SectionArrays = tuple[Floats, Floats, tuple[Floats, ...], Floats]
"""The weights, the gradient, the slots and the next weights of a section."""

MAX_VERSIONS = 64
"""The most past versions that a shard keeps for a rule."""

_OF_DECAY = "a number of at least 0"


class DecayKind(StrEnum):
    """The penalty on the weights: the sum of squares (L2) or of absolute values (L1)."""

    L1 = "L1"
    L2 = "L2"


class Decay(msgspec.Struct, frozen=True, metaclass=NamedFields):
    """Weight decay: `weight` times the weights (L2) or their signs (L1) is added to a gradient.

    Raises BadInput for a weight below 0, at which the weights would grow without end.
    """

    weight: float = 0.0
    kind: DecayKind = DecayKind.L2

    def __post_init__(self) -> None:
        weight = argument_checks.number("decay: weight", self.weight, least=0, expected=_OF_DECAY)
        structs.force_setattr(self, "weight", weight)
        kind = argument_checks.choice("decay: kind", self.kind, DecayKind)
        structs.force_setattr(self, "kind", kind)


class UpdateRule(msgspec.Struct, frozen=True, tag_field="rule", metaclass=NamedFields):
    """The base of all rules, with the interface that a shard calls."""

    slot_names: ClassVar[tuple[str, ...]] = ()
    additive: ClassVar[bool] = False
    """True if, without decay, updates by two gradients equal one update by their sum."""
    versions: ClassVar[int] = 0
    """How many past versions the rule needs, to find the weights of a late gradient."""
    dense: ClassVar[bool] = True
    """True if it updates dense tables."""
    rows: ClassVar[bool] = False
    """True if it updates the rows of sparse tables."""
    whole_tensors: ClassVar[bool] = False
    """True if the update of one float depends on all of its tensor, which no shard may then cut."""

    def apply(
        self,
        weights: Floats,
        gradient: Floats,
        slots: tuple[Floats, ...],
        out: Floats,
        segments: Sequence[RateRun],
        *,
        rate: float,
        decay: Decay,
        count: int,
        read: Floats | None = None,
    ) -> None:
        """Write the updated weights into `out` and advance `slots` in place.

        All arrays are flat, contiguous, float32, of one size and on one backend; `slots` has one
        array per name in `slot_names`, and `out` overlaps no other array. Every float of `out` is
        written: those outside `segments` are copied, and buffers become `weights - gradient`.
        `segments` ascend and are disjoint. `count` is this update's number, from 1. `read` are the
        weights that the gradient was computed from (None: `weights`); only a rule with `versions`
        reads them.
        """
        assert count >= 1, f"updates count from 1, got {count}"
        assert len(slots) == len(self.slot_names), f"expected slots {self.slot_names}"
        for array in (weights, gradient, *slots):
            assert array.dtype == out.dtype == np.float32
            assert array.shape == out.shape == (out.size,)
            assert not np.may_share_memory(array, out), "a version must not be overwritten"
        # A tuple, because the plan is cached by it.
        factor, l1 = self.scale(rate, count), decay.kind is DecayKind.L1
        plan = plan_runs(tuple(segments), out.size, factor, decay.weight, l1)
        if self.versions:
            # The formula writes into this slot, so it is given a copy.
            slots = (
                backends.copy_to(weights if read is None else read, backend_of(weights)),
                *slots,
            )
        self.update_runs((weights, gradient, slots, out), plan.runs, count)
        for gap in plan.gaps:
            # `out` is a recycled buffer: what no rule writes has to be copied, or an old version
            # would show.
            out[gap] = weights[gap]
        for buffer in plan.buffers:
            # A buffer holds statistics and no parameters: neither rate nor decay nor slots apply to
            # it.
            out[buffer] = weights[buffer] - gradient[buffer]

    def update_runs(self, arrays: SectionArrays, runs: updates.Runs, count: int) -> None:
        """Apply the formula to the runs of these arrays; see `apply`."""
        name = str(self.__struct_config__.tag)
        updates.apply(name, *arrays, runs, self.constants_at(count))

    def apply_rows(
        self,
        slab: Floats,
        meta: NDArray[np.uint32],
        slots: NDArray[np.int64],
        gradient: Floats,
        *,
        rate: float,
        decay: Decay,
    ) -> None:
        """Update rows in place by their gradient, float32 (n, dim); see `updates.apply_rows`.

        `slots` are distinct rows of the `slab`.
        """
        assert self.rows, f"rule {self.__struct_config__.tag} has no rows"
        l1, name = decay.kind is DecayKind.L1, str(self.__struct_config__.tag)
        weight, constants = np.float32(decay.weight), self.row_constants()
        update = RowUpdate(name, float(rate), weight, l1, constants)
        # Not the slab's own width: it is padded to whole lines of memory.
        width = gradient.shape[1] * (1 + len(self.slot_names))
        updates.apply_rows(update, slab, meta, slots, gradient, width)

    def row_constants(self) -> tuple[Any, ...]:
        """The constants of an update of rows, in the order in which its loop takes them."""
        return self.constants()

    def prepare_rows(self) -> None:
        """Load what an update of rows needs before the first one arrives; it takes a second."""
        rows.prepare()
        # Of rows as narrow as can be: compiled loops do not depend on sizes.
        slab = np.zeros((1, 1 + len(self.slot_names)), np.float32)
        meta, slots = np.zeros((1, META_WORDS), np.uint32), np.zeros(1, np.int64)
        updates.squared_norm(slab[0])
        self.apply_rows(slab, meta, slots, slab[:, :1].copy(), rate=0.0, decay=Decay())

    def prepare(self, backend: Backend = HOST) -> None:
        """Compile the rule before the first gradient arrives; it takes a second or two.

        Raises BadInput if `backend` is a device for which the rule has no kernel.
        """
        name = str(self.__struct_config__.tag)
        if not updates.runs_on(backend, name):
            raise BadInput(
                f"update rule {name}", expected="one with a CUDA kernel, to run on a GPU"
            )
        zeros = allocator(backend)
        blank, out, *slots = (zeros(1) for _ in range(2 + len(self.slot_names)))
        whole = (RateRun(0, 1, 1.0, 1.0),)
        updates.squared_norm(updates.mean([blank, blank]))  # these precede the rule in a push
        self.apply(blank, blank, tuple(slots), out, whole, rate=0.0, decay=Decay(), count=1)

    def scale(self, rate: float, count: int) -> float:
        """The rate of update number `count`, from 1; a rule with a bias correction changes it."""
        return rate

    def constants(self) -> tuple[np.float32, ...]:
        """The rule's constants, in the order in which its formula takes them."""
        return ()

    def constants_at(self, count: int) -> tuple[np.float32, ...]:
        """The constants of update number `count`, from 1, for a rule in which they change."""
        return self.constants()


class SGD(UpdateRule, frozen=True, tag="sgd"):
    """w -= rate*g. It keeps no slots: a shard holds the weights alone."""

    additive: ClassVar[bool] = True
    rows: ClassVar[bool] = True

    def prepare(self, backend: Backend = HOST) -> None:
        super().prepare(backend)
        if backend == HOST:
            blank, out = np.zeros((2, 1), np.float32)
            runs = cover_gaps((RateRun(0, 1, 1.0, 1.0),), 1, 0.0)
            updates.sgd_measured(blank, blank, out, runs)


class Momentum(UpdateRule, frozen=True, tag="momentum"):
    """h = momentum*h + rate*g; w -= h. The rate is inside the momentum, as in Caffe.

    One slot, h. Raises BadInput unless 0 <= `momentum` < 1.
    """

    slot_names: ClassVar[tuple[str, ...]] = ("history",)
    rows: ClassVar[bool] = True
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_share(self, "momentum")

    def constants(self) -> tuple[np.float32, ...]:
        return (np.float32(self.momentum),)


class Nesterov(UpdateRule, frozen=True, tag="nesterov"):
    """h' = momentum*h + rate*g; w -= (1 + momentum)*h' - momentum*h.

    One slot, h. Raises BadInput unless 0 <= `momentum` < 1.
    """

    slot_names: ClassVar[tuple[str, ...]] = ("history",)
    rows: ClassVar[bool] = True
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_share(self, "momentum")

    def constants(self) -> tuple[np.float32, ...]:
        mu = np.float32(self.momentum)
        return (mu, np.float32(1) + mu)


class Adagrad(UpdateRule, frozen=True, tag="adagrad"):
    """h += g^2; w -= rate * g / (sqrt(h) + delta). Downpour SGD's rule (Dean et al. 2012).

    One slot, h. Raises BadInput unless `delta` is above 0 in float32.
    """

    slot_names: ClassVar[tuple[str, ...]] = ("square_sum",)
    rows: ClassVar[bool] = True
    delta: float = 1e-8

    def __post_init__(self) -> None:
        check_positive(self)

    def constants(self) -> tuple[np.float32, ...]:
        return (np.float32(self.delta),)


class RowAdagrad(UpdateRule, frozen=True, tag="row_adagrad"):
    """h += mean of g^2 over the row; w -= rate / (sqrt(h) + delta) * g. For sparse tables.

    One number h a row, in place of one a float. Raises BadInput unless `delta` is above 0 in
    float32.
    """

    dense: ClassVar[bool] = False
    rows: ClassVar[bool] = True
    delta: float = 1e-8

    def __post_init__(self) -> None:
        check_positive(self)

    def constants(self) -> tuple[np.float32, ...]:
        return (np.float32(self.delta),)


class RMSProp(UpdateRule, frozen=True, tag="rmsprop"):
    """h = decay_rate*h + (1 - decay_rate)*g^2; w -= rate * g / (sqrt(h) + delta).

    One slot, h. Raises BadInput unless 0 <= `decay_rate` < 1 and `delta` is above 0 in
    float32.
    """

    slot_names: ClassVar[tuple[str, ...]] = ("square_mean",)
    decay_rate: float = 0.99
    delta: float = 1e-8

    def __post_init__(self) -> None:
        check_share(self, "decay_rate")
        check_positive(self)

    def constants(self) -> tuple[np.float32, ...]:
        return (*_keep_and_take(self.decay_rate), np.float32(self.delta))


class AdaDelta(UpdateRule, frozen=True, tag="adadelta"):
    """Steps scaled by the ratio of their own mean square to the gradient's (Zeiler 2012).

    h = momentum*h + (1 - momentum)*g^2; step = g * sqrt((d + delta) / (h + delta));
    d = momentum*d + (1 - momentum)*step^2; w -= rate*step.
    """

    slot_names: ClassVar[tuple[str, ...]] = ("square_mean", "step_mean")
    momentum: float = 0.95
    delta: float = 1e-6

    def __post_init__(self) -> None:
        check_share(self, "momentum")
        check_positive(self)

    def constants(self) -> tuple[np.float32, ...]:
        return (*_keep_and_take(self.momentum), np.float32(self.delta))


class Adam(UpdateRule, frozen=True, tag="adam"):
    """Means of g and g^2, corrected for their start at zero (Kingma and Ba 2015).

    m = beta1*m + (1 - beta1)*g; v = beta2*v + (1 - beta2)*g^2; with t the `count`
    w -= rate * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + delta). In a sparse table t is
    the row's own number of updates.
    """

    slot_names: ClassVar[tuple[str, ...]] = ("mean", "square_mean")
    rows: ClassVar[bool] = True
    beta1: float = 0.9
    beta2: float = 0.999
    delta: float = 1e-8

    def __post_init__(self) -> None:
        check_share(self, "beta1")
        check_share(self, "beta2")
        check_positive(self)

    def scale(self, rate: float, count: int) -> float:
        return float(rate * np.sqrt(1 - self.beta2**count) / (1 - self.beta1**count))

    def constants(self) -> tuple[np.float32, ...]:
        return (
            *_keep_and_take(self.beta1),
            *_keep_and_take(self.beta2),
            np.float32(self.delta),
        )

    def row_constants(self) -> tuple[Any, ...]:
        return self.beta1, self.beta2, *self.constants()


class AdamW(Adam, frozen=True, tag="adamw"):
    """Adam with a decay of the weights that is not part of the gradient (Loshchilov, Hutter 2019).

    With c = sqrt(1 - beta2^t) / (1 - beta1^t), Adam's m and v and t the `count`
    w -= rate * (c * m / (sqrt(v) + delta) + weight_decay * w).
    """

    rows: ClassVar[bool] = False
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "weight_decay")

    def constants_at(self, count: int) -> tuple[np.float32, ...]:
        # The loop multiplies all of it by rate * c.
        return (*self.constants(), np.float32(self.weight_decay / self.scale(1.0, count)))


class FTRL(UpdateRule, frozen=True, tag="ftrl"):
    """Follow the regularised leader (McMahan et al. 2013): weights that l1 keeps at zero.

    n' = n + g^2; z += rate*g - (sqrt(n') - sqrt(n))*w;
    w = -sign(z) * max(0, |z| - rate*l1) / (beta + sqrt(n') + rate*l2). z is the paper's, times the
    rate, so that a rate may change. z begins at -beta*w: without l1 and l2 this is Adagrad with
    delta = beta. For sparse tables; usually with `ps.Zeros()`.
    """

    slot_names: ClassVar[tuple[str, ...]] = ("z", "square_sum")
    dense: ClassVar[bool] = False
    rows: ClassVar[bool] = True
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "beta")
        for field in ("l1", "l2"):
            check_range(self, field)

    def constants(self) -> tuple[np.float32, ...]:
        return np.float32(self.beta), np.float32(self.l1), np.float32(self.l2)


class DelayedNesterov(UpdateRule, frozen=True, tag="delayed_nesterov"):
    """Each gradient at once, and the momentum of their mean at every n-th (Liu et al. 2024).

    w -= rate * g / n; s += g; at each n-th update m = momentum*m + s/n; w -= rate*momentum*m; s = 0
    (arXiv 2401.09135).
    """

    slot_names: ClassVar[tuple[str, ...]] = ("momentum", "sum")
    momentum: float = 0.9
    n: int = 1

    def __post_init__(self) -> None:
        check_share(self, "momentum")
        structs.force_setattr(self, "n", argument_checks.whole(field_of(self, "n"), self.n, 1))

    def constants_at(self, count: int) -> tuple[np.float32, ...]:
        last = count % self.n == 0
        return np.float32(self.momentum), np.float32(1 / self.n), np.float32(last)


class MomentumLookAhead(UpdateRule, frozen=True, tag="mla"):
    """Each gradient at once, and the step that the momentum would take next.

    w -= rate * (momentum*m + g); m = momentum*m + (1 - momentum)*g (MCDC at ICLR 2025, OpenReview
    4O8nzTkHPI). One slot, m. Raises BadInput unless 0 <= `momentum` < 1.
    """

    slot_names: ClassVar[tuple[str, ...]] = ("momentum",)
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_share(self, "momentum")

    def constants(self) -> tuple[np.float32, ...]:
        return _keep_and_take(self.momentum)


class HeLoCo(UpdateRule, frozen=True, tag="heloco"):
    """Each delta at once, its direction corrected by the momentum's (arXiv 2606.00271).

    For each tensor, with delta D, momentum m, c = cos(D, m) and conf = |D| / (|D| + kappa*|m|)

        c >= c_ok        G = D
        0 <= c < c_ok    u = (1 - l)*D/|D| + l*m/|m|,  l = min(k_d * (1 - c) * conf, 1);
                         G = |D|*u/|u|
        c < 0            G = D - b*c*|D|*m/|m|,  b = min(-k_s * c * conf, beta_max)
        m = momentum*m + (1 - momentum)*G;  w -= rate * (G + momentum*m)

    Where D or m is zero, G is D. The paper's weight for a delay is 1. The form is the paper's; the
    five constants are ours: a delta within 60 degrees of the momentum is left as it is, a delta and
    a momentum of one length have half the confidence, a right angle then closes by a fourth, and no
    more than the whole of an opposing part is taken away. One slot, m. Raises BadInput for a
    `momentum` outside [0, 1), a `c_ok` or `beta_max` outside [0, 1], and others below 0.
    """

    slot_names: ClassVar[tuple[str, ...]] = ("momentum",)
    whole_tensors: ClassVar[bool] = True
    momentum: float = 0.9
    c_ok: float = 0.5
    k_s: float = 1.0
    k_d: float = 0.5
    beta_max: float = 1.0
    kappa: float = 1.0

    def __post_init__(self) -> None:
        check_share(self, "momentum")
        for field in ("c_ok", "beta_max"):
            check_range(self, field, 1)
        for field in ("k_s", "k_d", "kappa"):
            check_range(self, field)

    def constants(self) -> tuple[np.float32, ...]:
        return _keep_and_take(self.momentum)

    def update_runs(self, arrays: SectionArrays, runs: updates.Runs, count: int) -> None:
        weights, gradient, (momentum,), out = arrays
        fields = self.c_ok, self.k_s, self.k_d, self.beta_max, self.kappa
        updates.apply_heloco(weights, gradient, momentum, out, runs, self.constants(), fields)


class DelayCompensation(UpdateRule, frozen=True, tag="dc_asgd"):
    """w -= rate * (g + strength * g * g * (w - w_read)) (Zheng et al. 2017).

    w_read are the weights that g was computed from, if they are among the last `versions`, else the
    oldest of these.
    """

    strength: float = 0.04
    versions: int = 8  # type: ignore[misc]  # here it is an option

    def __post_init__(self) -> None:
        _demand_versions(self)

    def constants(self) -> tuple[np.float32, ...]:
        return (np.float32(self.strength),)


class AdaptiveDelayCompensation(UpdateRule, frozen=True, tag="dc_asgd_adaptive"):
    """Delay compensation of a strength that falls with the gradient's size (ibid.).

    v = mean*v + (1 - mean)*g^2; its strength is strength / sqrt(v + delta).
    """

    slot_names: ClassVar[tuple[str, ...]] = ("square_mean",)
    strength: float = 2.0
    mean: float = 0.95
    versions: int = 8  # type: ignore[misc]  # here it is an option
    delta: float = 1e-7

    def __post_init__(self) -> None:
        _demand_versions(self)
        check_share(self, "mean")
        check_positive(self)

    def constants(self) -> tuple[np.float32, ...]:
        return (*_keep_and_take(self.mean), np.float32(self.strength), np.float32(self.delta))


Rule = (
    SGD
    | Momentum
    | Nesterov
    | Adagrad
    | RowAdagrad
    | RMSProp
    | AdaDelta
    | Adam
    | AdamW
    | FTRL
    | DelayedNesterov
    | MomentumLookAhead
    | HeLoCo
    | DelayCompensation
    | AdaptiveDelayCompensation
)

_BY_NAME: dict[str, type[Rule]] = {str(rule.__struct_config__.tag): rule for rule in get_args(Rule)}
RULES = {name: rule for name, rule in _BY_NAME.items() if rule.dense}
"""The rules of dense tables, by name."""
ROW_RULES = {name: rule for name, rule in _BY_NAME.items() if rule.rows}
"""The rules of sparse tables, by name."""


def rule_of(argument: str, value: object) -> Rule:
    """A dense table's rule, given as itself or by name with default values; raises BadInput."""
    expected = f"{', '.join(RULES)}, or a rule such as Adam()"
    rule = _find_rule(argument, value, RULES, expected)
    if not rule.dense:
        raise argument_checks.wrong(argument, f"a rule of dense tables: {expected}", value)
    return rule


def row_rule_of(argument: str, value: object) -> Rule:
    """A sparse table's rule, given as `rule_of` has it; raises BadInput."""
    expected = f"{', '.join(ROW_RULES)}, or a rule such as RowAdagrad()"
    rule = _find_rule(argument, value, ROW_RULES, expected)
    if not rule.rows:
        raise argument_checks.wrong(argument, f"a rule of sparse tables: {expected}", value)
    return rule


def _find_rule(
    argument: str, value: object, rules: Mapping[str, type[Rule]], expected: str
) -> Rule:
    if isinstance(value, UpdateRule):  # the project's, or defined by the user
        return cast(Rule, value)
    if isinstance(value, str) and value.lower() in rules:
        return rules[value.lower()]()
    raise argument_checks.wrong(argument, expected, value)


def decay_of(argument: str, value: object) -> Decay:
    """A weight decay, given as itself or as a number for L2; raises BadInput."""
    if isinstance(value, Decay):
        return value
    return Decay(
        argument_checks.number(argument, value, least=0, expected=f"{_OF_DECAY}, or a Decay")
    )


def _keep_and_take(share: float) -> tuple[np.float32, np.float32]:
    keep = np.float32(share)
    return keep, np.float32(1) - keep


def _demand_versions(rule: DelayCompensation | AdaptiveDelayCompensation) -> None:
    versions = argument_checks.whole(field_of(rule, "versions"), rule.versions, 1, MAX_VERSIONS)
    structs.force_setattr(rule, "versions", versions)
    check_range(rule, "strength")
