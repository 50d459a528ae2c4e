"""Recurrent layers over sequences (time, batch, ...): RNN and LSTM.

The second bottom, `cont` (time, batch), is 0 where a sequence begins: the state before it does not
count. A third bottom (batch, ...) is an input of every step. Each batch continues from the last
state of the batch before, as in Caffe, so a sequence may be longer than a batch; each worker has a
state of its own. The first batch, and one of another size, starts from zeros. With expose_hidden
the first state is a bottom (1, batch, outputs), and the last one a top. As in Caffe, a gradient of
the last state is ignored: none travels from one batch to the one before.
"""

from abc import abstractmethod
from collections.abc import Mapping
from math import prod
from typing import ClassVar

from cupy_kernels import backends
from cupy_kernels.ops import activation, channels, inner_product, recurrent
from cupy_kernels.ops.activation.functions import Tanh
from cupy_kernels.types import AnyArray, Array
from worker.caffe.layer import (
    Arrays,
    Gradients,
    Layer,
    NeedsGrad,
    Shape,
    StepKey,
    SupportedFields,
    as_stored,
    caffe_shape,
    flat,
)


class _Recurrent(Layer):
    """Base of the recurrent layers: their blobs, and steps through time and back.

    A step's gates are x W^T + b, computed for all steps at once, plus the state times its matrix.
    """

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "recurrent_param": frozenset({
            "num_output", "weight_filler", "bias_filler", "debug_info", "expose_hidden",
        })
    }  # fmt: skip
    BOTTOMS = range(2, 6)
    TOPS = range(1, 4)
    LABELS = frozenset({1})
    GATES: ClassVar[int]
    STATES: ClassVar[int]

    def set_up(self) -> tuple[Shape, ...]:
        param = self.spec.recurrent_param
        self._outputs, exposed = param.num_output, param.expose_hidden
        states = self.STATES if exposed else 0
        self._static = len(self.bottoms) - 2 - states == 1
        if self._outputs < 1:
            raise self.bad("expected a num_output of at least 1")
        if len(self.bottoms) - 2 - states not in {0, 1} or len(self.spec.top) != 1 + states:
            raise self.bad(
                f"expected {2 + states} or {3 + states} bottoms and {1 + states} tops, got"
                f" {len(self.bottoms)} and {len(self.spec.top)}"
            )
        x, cont = self.bottoms[:2]
        if len(x) < 2 or cont != x[:2]:
            raise self.bad(
                f"expected a bottom (time, batch, ...) and its cont (time, batch), got"
                f" {self.describe_bottom(0)} and {self.describe_bottom(1)}"
            )
        state = (1, x[1], self._outputs)
        self._first = 2 + self._static
        for number in range(self._first, self._first + states):
            if self.bottoms[number] != state:
                raise self.bad(
                    f"expected a state of shape {state}, got {self.describe_bottom(number)}"
                )
        wide = self.GATES * self._outputs
        self._matrix = 2 + self._static
        self._exposed = states > 0
        self._carried: tuple[Array, ...] = ()
        self.add_parameter((wide, prod(x[2:])), param.weight_filler)
        self.add_parameter((wide,), param.bias_filler)
        if self._static:
            if self.bottoms[2][:1] != x[1:2]:
                raise self.bad(f"expected {x[1]} rows, got {self.describe_bottom(2)}")
            self.add_parameter((wide, prod(self.bottoms[2][1:])), param.weight_filler)
        self.add_parameter((wide, self._outputs), param.weight_filler)
        self.add_output_parameters()
        self.reset()
        return ((x[0], x[1], self._outputs), *(state,) * states)

    def add_output_parameters(self) -> None:  # an LSTM has none
        """Declare the tensors between the state and the top."""

    def begin(self) -> None:  # an RNN has none
        """Take the memory of a sequence that only this type of layer has."""

    @abstractmethod
    def step(self, time: int, products: Array | None, before: Array | None) -> None:
        """Compute the hidden units of one step, from the previous ones and their product."""

    @abstractmethod
    def step_back(self, time: int, dhidden: Array, dproducts: Array | None, counted: Array) -> None:
        """Write the gradients by the gates of one step, and these times cont into `counted`."""

    @abstractmethod
    def states(self) -> tuple[Array, ...]:
        """The state after the last step."""

    @abstractmethod
    def dstates(self, dproducts: Array) -> tuple[Array, ...]:
        """The gradient by the state before the first step."""

    def output(self, weights: Arrays) -> Array:
        """The top for the hidden units of all steps."""
        return self._hidden

    def output_back(self, dy: Array, weights: Arrays, out: Gradients) -> Array:
        """The gradient by the hidden units of all steps; writes those of its tensors."""
        return dy

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        self._x_shape, self._cont = caffe_shape(bottoms[0]), bottoms[1]
        time, batch = self._x_shape[:2]
        self._x = flat(bottoms[0], 2, self.work, "x")
        gates = self.product(self._x, weights[0], weights[1], "input").reshape(time, -1)
        if self._static:
            self._still = flat(bottoms[2], 1, self.work, "still")
            still = self.product(self._still, weights[2], None, "static").reshape(-1)
            gates = channels.scale(gates, None, still, self.works["gates"])
        self._gates = gates.reshape(time, batch, -1)
        sequence = (time, batch, self._outputs)
        self._hidden, self._counted = (
            self.work.take(role, sequence, self._x) for role in ("hidden", "counted")
        )
        self._state = self.work.take("state", sequence[1:], self._x)
        exposed = [bottom[0] for bottom in bottoms[self._first :]]
        self._initial = exposed or self._carry_state((batch, self._outputs))
        self.begin()
        before: Array = self._initial[0]
        for t in range(time):
            products = self.product(before, weights[self._matrix], None, "state")
            self.step(t, products, before)
            before = self._state
        last = self.states()
        if exposed:
            return (self.output(weights), *(self._last(n, state) for n, state in enumerate(last)))
        for state, carried in zip(last, self._carried, strict=True):
            backends.copy(state, carried)
        return (self.output(weights),)

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        dy, matrix = gradients[0], weights[self._matrix]
        if dy is None:  # only the last state was used
            for gradient in out:
                if gradient is not None:
                    gradient.fill(0.0)
            return [None] * len(needs_grad)
        dhidden = self.output_back(dy, weights, out).reshape(self._hidden.shape)
        self._dgates = self.work.take("dgates", self._gates.shape, dy)
        counted = self.work.take("dgates counted", self._gates.shape[1:], dy)
        dproducts: Array | None = None
        for t in reversed(range(len(dhidden))):
            self.step_back(t, dhidden[t], dproducts, counted)
            if t or self._exposed:
                dproducts = self.product_back(counted, self._state, matrix, (), "state")
        rows = self._dgates.reshape(len(self._x), -1)
        before = self._counted.reshape(len(rows), -1)
        self.product_back(rows, before, matrix, (out[self._matrix],), "matrix", needs_dx=False)
        dx = self.product_back(rows, self._x, weights[0], out[:2], "input", needs_dx=needs_grad[0])
        dbottoms = [
            None if dx is None else as_stored(dx.reshape(self._x_shape), self.work, "bottom")
        ]
        dbottoms.append(None)
        if self._static:
            dbottoms.append(self._static_back(weights, out, needs_grad[2]))
        if self._exposed:
            assert dproducts is not None
            dbottoms += [d.reshape(1, *d.shape) for d in self.dstates(dproducts)]
        return dbottoms

    def product(self, x: Array, weight: Array, bias: Array | None, role: str) -> Array:
        """x W^T + b, in memory of this role."""
        return inner_product.forward(x, weight, bias, self.works[role], self.context.precision)

    def product_back(
        self,
        dy: Array,
        x: Array,
        weight: Array,
        out: Gradients,
        role: str,
        *,
        needs_dx: bool = True,
    ) -> Array | None:
        """The gradient by x, if wanted; writes those by weight and bias into `out`."""
        dweight, dbias = (*out, None, None)[:2]
        work, precision = self.works[role], self.context.precision
        dx: Array | None = inner_product.backward(
            dy, x, weight, dweight, dbias, work, precision, needs_dx=needs_dx
        )
        return dx

    def _static_back(self, weights: Arrays, out: Gradients, needs_dx: bool) -> AnyArray | None:
        """The gradient by the third bottom; its part of the gates is the same in every step."""
        batch, gates = self._gates.shape[1:]
        steps = self._dgates.reshape(len(self._gates), -1)
        sums = self.work.take("static sums", (batch * gates,), steps)
        channels.scale_backward(steps, steps, None, None, sums, self.works["static"])
        dy = sums.reshape(batch, gates)
        dx = self.product_back(dy, self._still, weights[2], out[2:3], "static", needs_dx=needs_dx)
        if dx is None:
            return None
        shape = (batch, *self.bottoms[2][1:])
        return as_stored(dx.reshape(shape), self.work, "static bottom")

    def reset(self) -> None:
        for state in self._carried:
            state.fill(0.0)

    def _carry_state(self, shape: Shape) -> list[Array]:
        """The state that the batch before ended with; zeros if it had another size, or was none.

        Forward and backward read a copy, because the last state of this batch replaces it. All
        memory stays in place, so that a captured step continues as well.
        """
        if not self._carried or self._carried[0].shape != shape:
            self._carried = tuple(
                self.work.zeros(f"carried{n}", shape, self._x) for n in range(self.STATES)
            )
        copies = [self.work.take(f"given{n}", shape, self._x) for n in range(self.STATES)]
        for carried, copy in zip(self._carried, copies, strict=True):
            backends.copy(carried, copy)
        return copies

    def _last(self, number: int, state: Array) -> AnyArray:
        """A copy of a last state (1, batch, outputs), in memory of its own."""
        copy = self.work.take(f"last{number}", (1, *state.shape), state)
        backends.copy(state.reshape(copy.shape), copy)
        return copy


class LSTM(_Recurrent):
    """Long short-term memory (Hochreiter and Schmidhuber 1997), with the gates i, f, o and g.

    c = f * c + i * g and h = o * tanh(c). Tensors: the input's matrix and bias, the matrix of the
    third bottom if there is one, and the matrix of h.
    """

    GATES = 4
    STATES = 2

    def begin(self) -> None:
        self._cells = self.work.take("cells", self._hidden.shape, self._hidden)

    def step(self, time: int, products: Array | None, before: Array | None) -> None:
        recurrent.lstm_step(
            self._gates[time],
            products,
            self._cont[time],
            before,
            self._cells_before(time),
            self._cells[time],
            self._hidden[time],
            self._counted[time],
            self._state,
        )

    def step_back(self, time: int, dhidden: Array, dproducts: Array | None, counted: Array) -> None:
        if time == len(self._hidden) - 1:
            self._dcells = self.work.zeros("dcells", self._state.shape, dhidden)
        recurrent.lstm_step_backward(
            dhidden,
            dproducts,
            self._dcells,
            self._gates[time],
            self._cells[time],
            self._cells_before(time),
            self._cont[time],
            self._dgates[time],
            counted,
        )

    def states(self) -> tuple[Array, ...]:
        return self._state, self._cells[-1]

    def dstates(self, dproducts: Array) -> tuple[Array, ...]:
        return dproducts, self._dcells

    def _cells_before(self, time: int) -> Array:
        before: Array = self._cells[time - 1] if time else self._initial[1]
        return before


class RNN(_Recurrent):
    """h = tanh(x W^T + b + h U^T), and the top is tanh(h V^T + c).

    Tensors: W and b, the matrix of the third bottom if there is one, U, V and c.
    """

    GATES = 1
    STATES = 1

    def add_output_parameters(self) -> None:
        param = self.spec.recurrent_param
        self.add_parameter((self._outputs, self._outputs), param.weight_filler)
        self.add_parameter((self._outputs,), param.bias_filler)

    def step(self, time: int, products: Array | None, before: Array | None) -> None:
        written = self._hidden[time], self._counted[time], self._state
        recurrent.rnn_step(self._gates[time], products, self._cont[time], before, *written)

    def step_back(self, time: int, dhidden: Array, dproducts: Array | None, counted: Array) -> None:
        known = dproducts, self._hidden[time], self._cont[time]
        recurrent.rnn_step_backward(dhidden, *known, self._dgates[time], counted)

    def states(self) -> tuple[Array, ...]:
        return (self._state,)

    def dstates(self, dproducts: Array) -> tuple[Array, ...]:
        return (dproducts,)

    def output(self, weights: Arrays) -> Array:
        rows = self._hidden.reshape(-1, self._outputs)
        self._sums = self.product(rows, weights[-2], weights[-1], "output")
        self._top = activation.forward(self._sums, Tanh(), self.works["top"])
        return self._top.reshape(self._hidden.shape)

    def output_back(self, dy: Array, weights: Arrays, out: Gradients) -> Array:
        dtop, rows = dy.reshape(self._top.shape), self._hidden.reshape(-1, self._outputs)
        dsums = activation.backward(dtop, self._sums, self._top, Tanh(), self.works["top"])
        dhidden = self.product_back(dsums, rows, weights[-2], out[-2:], "output")
        assert dhidden is not None
        return dhidden


ROWS: Mapping[str, type[Layer]] = {"RNN": RNN, "LSTM": LSTM}
