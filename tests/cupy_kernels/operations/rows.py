"""Operations on the rows of matrices: sums, the largest values, mean-variance normalisation."""

from typing import Any

import numpy as np

from cupy_kernels.ops import mvn, reduction
from cupy_kernels.ops.reduction.spec import Term
from tests.cupy_kernels.operations import Operation, Results, There, Works, draw, wide

TERMS: dict[Term, tuple[Any, Any]] = {
    Term.VALUES: (lambda x: x, np.ones_like),
    Term.MAGNITUDES: (np.abs, np.sign),
    Term.SQUARES: (np.square, lambda x: 2 * x),
}


def operations(dice: np.random.Generator) -> list[Operation]:
    return [
        *(reduce(dice, term, *size) for term in Term for size in ((5, 33), (1, 3000))),
        largest(dice),
        *(normalise(dice, epsilon) for epsilon in (None, 0.01)),
    ]


def reduce(dice: np.random.Generator, term: Term, rows: int, width: int) -> Operation:
    x, dy = draw(dice, rows, width), draw(dice, rows)
    function, slope = TERMS[term]

    def run(there: There, works: Works) -> Results:
        a = there(x)
        return {
            "sums": reduction.row_sums(a, term, 0.5, works["a"]),
            "dx": reduction.row_sums_backward(there(dy), a, term, 0.5, works["a"]),
        }

    expected = {
        "sums": 0.5 * function(wide(x)).sum(axis=1),
        "dx": 0.5 * wide(dy)[:, None] * slope(wide(x)),
    }
    return Operation(f"sums of {term.name} {rows}x{width}", run, expected, 1e-5, 1e-4)


def largest(dice: np.random.Generator) -> Operation:
    x = dice.permutation(60).astype(np.float32).reshape(3, 20)
    x[0, 4] = x[0].max()
    order = [sorted(range(20), key=lambda j: (-row[j], -j))[:4] for row in x]

    def run(there: There, works: Works) -> Results:
        places, values = reduction.row_largest(there(x), 4, works["a"])
        return {"places": places, "values": values}

    expected = {"places": order, "values": np.take_along_axis(x, np.array(order), axis=1)}
    return Operation("largest of a row", run, expected, 0, 0)


def normalise(dice: np.random.Generator, epsilon: float | None) -> Operation:
    x, dy = 3 + 2 * draw(dice, 4, 50), draw(dice, 4, 50)
    x[3] = 2  # no variance
    centred = wide(x) - wide(x).mean(axis=1, keepdims=True)
    deviation = np.sqrt(np.square(centred).mean(axis=1, keepdims=True))
    over = 1 if epsilon is None else deviation + epsilon
    y = centred / over
    dx = (wide(dy) - wide(dy).mean(axis=1, keepdims=True)) / over
    if epsilon is not None:
        dx -= y * (dy * y).mean(axis=1, keepdims=True) / np.where(deviation > 0, deviation, 1)

    def run(there: There, works: Works) -> Results:
        y, kept = mvn.forward(there(x), epsilon, works["a"])
        return {"y": y, "dx": mvn.backward(there(dy), kept, epsilon, works["a"])}

    return Operation(f"mvn {epsilon}", run, {"y": y, "dx": dx})
