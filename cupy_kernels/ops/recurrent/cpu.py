"""One step in time of LSTM and RNN layers on the host."""

import numpy as np

from cupy_kernels.types import AnyArray, Array


def lstm_step(
    gates: Array,
    products: Array | None,
    cont: Array,
    before: Array | None,
    cells_before: Array | None,
    cells: Array,
    hidden: Array,
    counted: Array,
    state: Array,
) -> None:
    """Write the cells and the hidden units; activate the gates in place."""
    if products is not None:
        gates += _carry(cont, products)
    i, f, o, g = np.split(gates, 4, axis=1)
    for gate in (i, f, o):
        np.exp(-np.logaddexp(0, -gate), out=gate)
    np.tanh(g, out=g)
    np.multiply(i, g, out=cells)
    cells += f * _carry(cont, cells_before)
    np.multiply(o, np.tanh(cells), out=hidden)
    counted[...] = _carry(cont, before)
    state[...] = hidden


def lstm_step_backward(
    dhidden: Array,
    dproducts: Array | None,
    dcells: Array,
    gates: Array,
    cells: Array,
    cells_before: Array | None,
    cont: Array,
    dgates: Array,
    dgates_counted: Array,
) -> None:
    """Write the gates' gradients; replace dcells by the gradient by the previous cells."""
    i, f, o, g = np.split(gates, 4, axis=1)
    di, df, do, dg = np.split(dgates, 4, axis=1)
    dh, squashed = dhidden if dproducts is None else dhidden + dproducts, np.tanh(cells)
    dc = dcells + dh * o * (1 - squashed**2)
    np.multiply(dc, g * i * (1 - i), out=di)
    np.multiply(dc, _carry(cont, cells_before) * f * (1 - f), out=df)
    np.multiply(dh, squashed * o * (1 - o), out=do)
    np.multiply(dc, i * (1 - g**2), out=dg)
    dgates_counted[...] = _carry(cont, dgates)
    dcells[...] = _carry(cont, dc * f)


def rnn_step(
    inputs: Array,
    products: Array | None,
    cont: Array,
    before: Array | None,
    hidden: Array,
    counted: Array,
    state: Array,
) -> None:
    """Write the hidden units."""
    np.tanh(inputs + _carry(cont, products), out=hidden)
    counted[...] = _carry(cont, before)
    state[...] = hidden


def rnn_step_backward(
    dhidden: Array,
    dproducts: Array | None,
    hidden: Array,
    cont: Array,
    dgates: Array,
    dgates_counted: Array,
) -> None:
    """Write the gates' gradients."""
    dh = dhidden if dproducts is None else dhidden + dproducts
    np.multiply(dh, 1 - hidden**2, out=dgates)
    dgates_counted[...] = _carry(cont, dgates)


def _carry(cont: Array, values: AnyArray | None) -> AnyArray:
    """cont * values by row; 0 without values."""
    return np.zeros((), np.float32) if values is None else cont[:, None] * values
