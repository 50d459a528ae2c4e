"""Operations at a network's end: inner product, softmax, its loss, accuracy."""

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.ops import inner_product, softmax
from cupy_kernels.ops.inner_product import reference as inner_product_reference
from cupy_kernels.ops.softmax import reference as softmax_reference
from tests.cupy_kernels.operations import Operation, Results, There, Works, draw, unwritten, wide


def operations(dice: np.random.Generator) -> list[Operation]:
    return [
        multiply(dice, transposed=False),
        multiply(dice, transposed=True),
        probabilities(dice),
        *(
            loss(dice, *numbers)
            for numbers in ((9, 10, None, 9.0), (9, 4, 2, None), (3, 1030, None, 1.0))
        ),
        *(accuracy(dice, *numbers) for numbers in ((None, 1), (1, 2))),
    ]


def multiply(dice: np.random.Generator, *, transposed: bool) -> Operation:
    x, weight, bias, dy = draw(dice, 7, 33), draw(dice, 5, 33), draw(dice, 5), draw(dice, 7, 5)
    stored = weight.T.copy() if transposed else weight
    dx, dw, db = inner_product_reference.inner_product_backward(wide(dy), wide(x), wide(weight))

    def run(there: There, works: Works) -> Results:
        a, b, gradient = there(x), there(stored), there(dy)
        dw, db = there(unwritten(stored)), there(unwritten(bias))
        if transposed:
            b, dw = b.T, dw.T
        y = inner_product.forward(a, b, there(bias), works["a"])
        dx = inner_product.backward(gradient, a, b, dw, db, works["a"], needs_dx=True)
        cut = inner_product.forward(a, b, there(bias), works["b"], relu=True)
        return {"y": y, "dx": dx, "dw": dw, "db": db, "relu": cut}

    y = inner_product_reference.inner_product(wide(x), wide(weight), wide(bias))
    name = f"inner product{' transposed' if transposed else ''}"
    expected = {"y": y, "dx": dx, "dw": dw, "db": db, "relu": np.maximum(y, 0)}
    return Operation(name, run, expected, 2e-5, 5e-5)


def probabilities(dice: np.random.Generator) -> Operation:
    x, dy = 5 * draw(dice, 2, 3, 11), draw(dice, 2, 3, 11)
    p = softmax_reference.softmax(wide(x))

    def run(there: There, works: Works) -> Results:
        p = softmax.softmax(there(x), works["a"])
        return {"p": p, "dx": softmax.softmax_backward(there(dy), p, works["a"])}

    return Operation(
        "softmax", run, {"p": p, "dx": softmax_reference.softmax_backward(wide(dy), p)}
    )


def loss(
    dice: np.random.Generator, rows: int, k: int, ignored: int | None, divisor: float | None
) -> Operation:
    x, labels = 3 * draw(dice, rows, k), dice.integers(0, k, rows)
    number = float(np.count_nonzero(labels != ignored)) if divisor is None else divisor
    back = softmax_reference.cross_entropy_backward(wide(x), labels, ignored, number)

    def run(there: There, works: Works) -> Results:
        a, came = there(x), there(labels.astype(np.float32))
        whole = softmax.whole_labels(came, k, ignored, works["a"])
        value, kept = softmax.cross_entropy(a, whole, ignored, divisor, works["a"])
        return {"loss": value, "dx": softmax.cross_entropy_backward(kept, 0.5, works["a"])}

    expected = {
        "loss": softmax_reference.cross_entropy(wide(x), labels, ignored, number),
        "dx": 0.5 * back,
    }
    return Operation(f"cross-entropy {rows}x{k}", run, expected)


def accuracy(dice: np.random.Generator, ignored: int | None, top_k: int) -> Operation:
    scores = dice.integers(0, 4, (23, 5)).astype(np.float32)
    labels = dice.integers(0, 5, 23)

    def share(rows: NDArray[np.bool_]) -> float:
        return softmax_reference.accuracy(wide(scores[rows]), labels[rows], ignored, top_k)

    def run(there: There, works: Works) -> Results:
        rule = (there(scores), there(labels), ignored, top_k, works["a"])
        return {"share": softmax.accuracy(*rule), "each": softmax.class_accuracies(*rule)}

    each = [share(labels == label) for label in range(5)]
    return Operation(f"accuracy top {top_k}", run, {"share": share(labels >= 0), "each": each})
