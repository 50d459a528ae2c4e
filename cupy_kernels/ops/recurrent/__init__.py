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

from cupy_kernels.backends import HostOperation
from cupy_kernels.ops.recurrent import cpu, gpu

lstm_step = HostOperation(cpu.lstm_step).with_kernels(gpu.lstm_step)
lstm_step_backward = HostOperation(cpu.lstm_step_backward).with_kernels(gpu.lstm_step_backward)
rnn_step = HostOperation(cpu.rnn_step).with_kernels(gpu.rnn_step)
rnn_step_backward = HostOperation(cpu.rnn_step_backward).with_kernels(gpu.rnn_step_backward)
