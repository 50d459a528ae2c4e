"""Rows of `recurrent.cu`: one step in time of LSTM and RNN layers, and its gradient."""

from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import Kernel, Tolerance, changes, over, reads, scalar, writes
from cupy_kernels.types import Wide


def _sigmoid(x: Wide) -> Wide:
    return np.asarray(1 / (1 + np.exp(-x)))


def _carry(cont: Wide, values: Wide | None, width: int) -> Any:
    """cont * values by row of this width, as a matrix; 0 without values."""
    return 0 if values is None else cont[:, None] * values.reshape(len(cont), width)


def _lstm_forward(
    gates: Wide,
    products: Wide | None,
    cont: Wide,
    before: Wide | None,
    cells_before: Wide | None,
    batch: int,
    outputs: int,
    **_: Any,
) -> dict[str, Any]:
    wide = 4 * outputs
    sums = gates.reshape(batch, wide) + _carry(cont, products, wide)
    i, f, o, g = sums.reshape(batch, 4, outputs).transpose(1, 0, 2)
    i, f, o, g = _sigmoid(i), _sigmoid(f), _sigmoid(o), np.tanh(g)
    cells = f * _carry(cont, cells_before, outputs) + i * g
    hidden = o * np.tanh(cells)
    counted = np.zeros((batch, outputs)) + _carry(cont, before, outputs)
    active = np.stack((i, f, o, g), axis=1)
    states = {"hidden": hidden, "state": hidden, "counted": counted}
    return {"gates": active, "cells": cells, **states}


def _lstm_backward(
    dhidden: Wide,
    dproducts: Wide | None,
    dcells: Wide,
    gates: Wide,
    cells: Wide,
    cells_before: Wide | None,
    cont: Wide,
    batch: int,
    outputs: int,
    **_: Any,
) -> dict[str, Any]:
    i, f, o, g = gates.reshape(batch, 4, outputs).transpose(1, 0, 2)
    squashed, shape = np.tanh(cells.reshape(batch, outputs)), (batch, outputs)
    dh = (dhidden + (0 if dproducts is None else dproducts)).reshape(shape)
    dc = dcells.reshape(shape) + dh * o * (1 - squashed**2)
    past = _carry(cont, cells_before, outputs)
    parts = dc * g * i * (1 - i), dc * past * f * (1 - f), dh * squashed * o * (1 - o)
    dgates = np.concatenate((*parts, dc * i * (1 - g**2)), axis=1)
    counted = cont[:, None] * dgates
    return {"dgates": dgates, "dgates_counted": counted, "dcells": dc * f * cont[:, None]}


def _rnn_forward(
    inputs: Wide, products: Wide | None, cont: Wide, before: Wide | None, **shape: Any
) -> dict[str, Any]:
    outputs = shape["outputs"]
    hidden = np.tanh(inputs.reshape(len(cont), outputs) + _carry(cont, products, outputs))
    counted = 0 * hidden + _carry(cont, before, outputs)
    return {"hidden": hidden, "state": hidden, "counted": counted}


def _rnn_backward(
    dhidden: Wide, dproducts: Wide | None, hidden: Wide, cont: Wide, outputs: int, **_: Any
) -> dict[str, Any]:
    dh = dhidden + (0 if dproducts is None else dproducts)
    dgates = (dh * (1 - hidden**2)).reshape(-1)
    return {"dgates": dgates, "dgates_counted": np.repeat(cont, outputs) * dgates}


_STATE, _GATES = "batch*outputs", "4*batch*outputs"
_SIZES = scalar("batch"), scalar("outputs")
_CLOSE = Tolerance(5e-6, 2e-6)

ROWS = (
    Kernel(
        "lstm_forward",
        "recurrent.cu",
        (
            changes("gates", _GATES),
            reads("products", _GATES, optional=True),
            reads("cont", "batch"),
            reads("before", _STATE, optional=True),
            reads("cells_before", _STATE, optional=True),
            writes("cells", _STATE),
            writes("hidden", _STATE),
            writes("counted", _STATE),
            writes("state", _STATE),
            *_SIZES,
        ),
        over(_STATE),
        _lstm_forward,
        bytes_each=72,
        tolerance=_CLOSE,
        in_place=(("before", "state"),),
    ),
    Kernel(
        "lstm_backward",
        "recurrent.cu",
        (
            reads("dhidden", _STATE),
            reads("dproducts", _STATE, optional=True),
            changes("dcells", _STATE),
            reads("gates", _GATES),
            reads("cells", _STATE),
            reads("cells_before", _STATE, optional=True),
            reads("cont", "batch"),
            writes("dgates", _GATES),
            writes("dgates_counted", _GATES),
            *_SIZES,
        ),
        over(_STATE),
        _lstm_backward,
        bytes_each=72,
        tolerance=_CLOSE,
    ),
    Kernel(
        "rnn_forward",
        "recurrent.cu",
        (
            reads("inputs", _STATE),
            reads("products", _STATE, optional=True),
            reads("cont", "batch"),
            reads("before", _STATE, optional=True),
            writes("hidden", _STATE),
            writes("counted", _STATE),
            writes("state", _STATE),
            *_SIZES,
        ),
        over(_STATE),
        _rnn_forward,
        bytes_each=24,
        tolerance=_CLOSE,
        in_place=(("before", "state"),),
    ),
    Kernel(
        "rnn_backward",
        "recurrent.cu",
        (
            reads("dhidden", _STATE),
            reads("dproducts", _STATE, optional=True),
            reads("hidden", _STATE),
            reads("cont", "batch"),
            writes("dgates", _STATE),
            writes("dgates_counted", _STATE),
            *_SIZES,
        ),
        over(_STATE),
        _rnn_backward,
        bytes_each=20,
        tolerance=_CLOSE,
    ),
)
