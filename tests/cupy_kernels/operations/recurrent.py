"""Steps of LSTM and RNN layers, against the references of their kernels' rows."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupy_kernels.ops import recurrent
from cupy_kernels.registry import KERNELS
from tests.cupy_kernels.operations import (
    Operation,
    Results,
    There,
    Works,
    draw,
    unwritten,
    wide,
)

CONT = np.array([1, 0, 1, 1], np.float32)
SIZES: dict[str, Any] = {"batch": 4, "outputs": 5}
STATE, GATES = (4, 5), (4, 20)


def operations(dice: np.random.Generator) -> list[Operation]:
    return [make(dice, inner) for make in (lstm, rnn) for inner in (True, False)]


def expected(kernel: str, arrays: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Results:
    """What a kernel's reference gives, in the shapes of the operation."""
    flat = {name: None if x is None else wide(x.reshape(-1)) for name, x in arrays.items()}
    found = KERNELS[kernel].reference(**flat, **SIZES)
    return {name: np.reshape(found[name], shape) for name, shape in shapes.items()}


def lstm(dice: np.random.Generator, inner: bool) -> Operation:
    names = "products", "before", "cells_before"
    past = [draw(dice, *shape) if inner else None for shape in (GATES, STATE, STATE)]
    gates, dhidden, dcells = draw(dice, *GATES), draw(dice, *STATE), draw(dice, *STATE)
    dproducts = draw(dice, *STATE) if inner else None
    arrays = {"gates": gates, "cont": CONT, **dict(zip(names, past, strict=True))}
    kept = {"gates": GATES, "cells": STATE}
    shapes = kept | dict.fromkeys(("hidden", "counted", "state"), STATE)
    forward = expected("lstm_forward", arrays, shapes)
    known = {"cells_before": past[2], "cont": CONT} | {name: forward[name] for name in kept}
    given = {"dhidden": dhidden, "dproducts": dproducts, "dcells": dcells}
    shapes = {"dgates": GATES, "dgates_counted": GATES, "dcells": STATE}

    def run(there: There, works: Works) -> Results:
        def placed(array: Any) -> Any:
            return None if array is None else there(array)

        active, cont, last = there(gates), there(CONT), placed(past[2])
        written = [there(unwritten(dhidden)) for _ in range(4)]
        cells, hidden, counted, state = written
        recurrent.lstm_step(active, placed(past[0]), cont, placed(past[1]), last, *written)
        back, both = there(dcells), [there(unwritten(gates)) for _ in range(2)]
        forward = active, cells, last, cont
        recurrent.lstm_step_backward(there(dhidden), placed(dproducts), back, *forward, *both)
        found = {"gates": active, "cells": cells, "hidden": hidden, "counted": counted}
        return {
            **found,
            "state": state,
            "dgates": both[0],
            "dgates_counted": both[1],
            "dcells": back,
        }

    backward = expected("lstm_backward", {**given, **known}, shapes)
    return Operation(f"lstm, {inner=}", run, {**forward, **backward})


def rnn(dice: np.random.Generator, inner: bool) -> Operation:
    products, before = (draw(dice, *STATE) if inner else None for _ in range(2))
    inputs, dhidden = draw(dice, *STATE), draw(dice, *STATE)
    arrays = {"inputs": inputs, "products": products, "cont": CONT, "before": before}
    shapes = dict.fromkeys(("hidden", "counted", "state"), STATE)
    forward = expected("rnn_forward", arrays, shapes)
    given = {"dhidden": dhidden, "dproducts": before, "hidden": forward["hidden"], "cont": CONT}

    def run(there: There, works: Works) -> Results:
        def placed(array: Any) -> Any:
            return None if array is None else there(array)

        written, cont = [there(unwritten(inputs)) for _ in range(3)], there(CONT)
        recurrent.rnn_step(there(inputs), placed(products), cont, placed(before), *written)
        both = [there(unwritten(inputs)) for _ in range(2)]
        known = placed(before), written[0], cont
        recurrent.rnn_step_backward(there(dhidden), *known, *both)
        names = "hidden", "counted", "state", "dgates", "dgates_counted"
        return dict(zip(names, (*written, *both), strict=True))

    shapes = dict.fromkeys(("dgates", "dgates_counted"), STATE)
    return Operation(f"rnn, {inner=}", run, forward | expected("rnn_backward", given, shapes))
