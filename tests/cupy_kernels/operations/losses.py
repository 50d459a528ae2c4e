"""Losses other than that of softmax, against the references of their kernels' rows."""

from typing import Any

import numpy as np

from cupy_kernels.ops import losses
from cupy_kernels.ops.losses.spec import ClassRule
from cupy_kernels.ops.softmax import reference
from cupy_kernels.ops.softmax.spec import NOTHING_IGNORED
from cupy_kernels.registry import KERNELS
from tests.cupy_kernels.operations import Operation, Results, There, Works, draw, wide


def operations(dice: np.random.Generator) -> list[Operation]:
    divisors = ((None, None), (1, None), (1, 7.0))
    return [
        *(by_class(dice, rule) for rule in ClassRule),
        *(infogain(dice, *numbers) for numbers in divisors),
        *(sigmoid(dice, *numbers) for numbers in divisors),
        *(contrast(dice, legacy) for legacy in (False, True)),
    ]


def by_class(dice: np.random.Generator, rule: ClassRule) -> Operation:
    x, labels = draw(dice, 9, 5), dice.integers(0, 5, 9)
    if rule is ClassRule.LOGARITHM:
        x = np.abs(x)
    sizes: dict[str, Any] = {"rule": int(rule), "factor": 1 / 9, "rows": 9, "k": 5}
    found = KERNELS["class_loss"].reference(x=wide(x), labels=labels, **sizes)

    def run(there: There, works: Works) -> Results:
        loss, dx = losses.by_class(there(x), there(labels), rule, works["a"])
        return {"loss": loss, "dx": dx}

    return Operation(rule.name, run, {"loss": found["losses"].mean(), "dx": found["dx"]})


def infogain(dice: np.random.Generator, ignored: int | None, divisor: float | None) -> Operation:
    p = reference.softmax(wide(draw(dice, 8, 4))).astype(np.float32)
    matrix, labels = draw(dice, 4, 4), np.arange(8) % 4
    by = divisor or np.count_nonzero(labels != ignored)
    found = KERNELS["infogain_loss"].reference(
        p=wide(p),
        labels=labels,
        matrix=wide(matrix),
        scale=[1 / by],
        ignored=NOTHING_IGNORED if ignored is None else ignored,
        rows=8,
        k=4,
    )

    def run(there: There, works: Works) -> Results:
        rule = ignored, divisor, works["a"]
        loss, dx = losses.infogain(there(p), there(labels), there(matrix), *rule)
        return {"loss": loss, "dx": dx}

    expected = {"loss": found["losses"].sum() / by, "dx": found["dx"]}
    return Operation(f"infogain {ignored} {divisor}", run, expected)


def sigmoid(dice: np.random.Generator, ignored: int | None, divisor: float | None) -> Operation:
    x, targets = 3 * draw(dice, 4, 600), dice.integers(0, 3, (4, 600)).astype(np.float32) / 2
    by = divisor or np.count_nonzero(targets != ignored)
    found = KERNELS["sigmoid_loss"].reference(
        x=wide(x), targets=wide(targets), scale=[1 / by], ignored=np.nan if ignored is None else 1
    )

    def run(there: There, works: Works) -> Results:
        rule = ignored, divisor, works["a"]
        loss, each, dx = losses.sigmoid_cross_entropy(there(x), there(targets), *rule)
        return {"loss": loss, "losses": each, "dx": dx}

    expected = {**found, "loss": found["losses"].sum() / by}
    return Operation(f"sigmoid cross-entropy {ignored} {divisor}", run, expected)


def contrast(dice: np.random.Generator, legacy: bool) -> Operation:
    a, b, similar = draw(dice, 6, 3), draw(dice, 6, 3), np.arange(6, dtype=np.float32) % 2
    sizes = {"rows": 6, "width": 3}
    numbers: dict[str, Any] = {"margin": 2.5, "legacy": int(legacy), "factor": 1 / 6, **sizes}
    found = KERNELS["contrastive_loss"].reference(a=wide(a), b=wide(b), similar=similar, **numbers)

    def run(there: There, works: Works) -> Results:
        rule = there(similar), 2.5, legacy, works["a"]
        loss, da = losses.contrastive(there(a), there(b), *rule)
        return {"loss": loss, "da": da}

    expected = {"loss": found["losses"].mean() / 2, "da": found["da"]}
    return Operation(f"contrastive legacy {legacy}", run, expected)
