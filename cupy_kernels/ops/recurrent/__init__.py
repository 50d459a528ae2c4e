"""One step in time of LSTM and RNN layers; the matrix products between the steps are the caller's.

All arrays are (batch, outputs). Those of an LSTM's gates are (batch, 4 * outputs): a row has its
input gates, forget gates, output gates and candidates. `cont` (batch,) is 0 where a sequence
begins, and 1 elsewhere. `products` is the previous hidden units times their matrix. Both it and the
previous state may be None, for zeros. A step writes its hidden units into `hidden`, and into
`state`, which the next step's product reads; and into `counted` cont * the previous hidden units,
the second factor of the gradient by their matrix.

    LSTM: c = f * cont * c_before + i * g;  h = o * tanh(c)
    RNN: h = tanh(inputs + cont * products)

A backward step gets `dproducts`, the gradient by its hidden units that the following step's product
gave, or None. It writes dgates, and into `dgates_counted` cont * dgates, for this step's product.
"""

from cupy_kernels.backends import pick
from cupy_kernels.ops.recurrent import cpu, gpu
from cupy_kernels.types import Array


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
    body = pick(gates, cpu.lstm_step, gpu.lstm_step)
    body(gates, products, cont, before, cells_before, cells, hidden, counted, state)


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
    body = pick(gates, cpu.lstm_step_backward, gpu.lstm_step_backward)
    known = gates, cells, cells_before, cont
    body(dhidden, dproducts, dcells, *known, dgates, dgates_counted)


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
    body = pick(inputs, cpu.rnn_step, gpu.rnn_step)
    body(inputs, products, cont, before, hidden, counted, state)


def rnn_step_backward(
    dhidden: Array,
    dproducts: Array | None,
    hidden: Array,
    cont: Array,
    dgates: Array,
    dgates_counted: Array,
) -> None:
    """Write the gates' gradients."""
    body = pick(hidden, cpu.rnn_step_backward, gpu.rnn_step_backward)
    body(dhidden, dproducts, hidden, cont, dgates, dgates_counted)
