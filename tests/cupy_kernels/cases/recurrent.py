"""Cases of `recurrent.cu`: sequences that begin and that continue, first and last steps."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.support.kernel_check import Case


def cases() -> Iterator[Case]:
    generator = np.random.default_rng(113)
    for batch, outputs in ((0, 3), (1, 1), (5, 7), (3, 40)):
        cont = (np.arange(batch) % 3 != 1).astype(np.float32)
        sizes = {"cont": cont, "batch": batch, "outputs": outputs}
        for inner in (False, True):
            yield from lstm(generator, sizes, batch * outputs, inner)
            yield from rnn(generator, sizes, batch * outputs, inner)


def lstm(
    generator: np.random.Generator, sizes: dict[str, Any], n: int, inner: bool
) -> Iterator[Case]:
    """A step with a state before it and a step after it, or without either."""
    gates, products, dgates = 2 * generator.standard_normal((3, 4 * n), np.float32)
    before, cells_before, cells, dhidden, dproducts = generator.standard_normal((5, n), np.float32)
    past = {"before": before, "products": products} if inner else {}
    written = {"cells": cells, "hidden": cells, "counted": cells, "state": cells}
    state = {"cells_before": cells_before if inner else None}
    yield Case("lstm_forward", {"gates": gates, **past, **state, **written, **sizes})
    active = generator.random(4 * n, np.float32)
    given = {"dhidden": dhidden, "dcells": before, "dproducts": dproducts if inner else None}
    arrays = {"gates": active, "cells": cells, "dgates": dgates, "dgates_counted": dgates, **state}
    yield Case("lstm_backward", {**given, **arrays, **sizes}, grid=(1, 1, 1))


def rnn(
    generator: np.random.Generator, sizes: dict[str, Any], n: int, inner: bool
) -> Iterator[Case]:
    inputs, products, before, hidden, dhidden = generator.standard_normal((5, n), np.float32)
    past = {"before": before, "products": products} if inner else {}
    written = {"hidden": hidden, "counted": hidden, "state": hidden}
    yield Case("rnn_forward", {"inputs": inputs, **past, **written, **sizes})
    given = {"dhidden": dhidden, "dproducts": products if inner else None}
    arrays = {"hidden": np.tanh(hidden), "dgates": hidden, "dgates_counted": hidden}
    yield Case("rnn_backward", {**given, **arrays, **sizes}, grid=(1, 1, 1))
