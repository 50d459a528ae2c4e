"""Recurrent layers over sequences (time, batch, ...): RNN and LSTM. They have no kernels.

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

import numpy as np

from cupy_kernels.types import AnyArray
from worker.caffe.layer import Arrays, Gradients, HostLayer, Layer, Shape, StepKey, Takes

State = list[AnyArray]


class _Recurrent(HostLayer):
    """What both layers have in common: their blobs, and steps through time and back.

    A step's input is x W^T + b for all steps at once, plus the state times its own matrix.
    """

    SUPPORTED_FIELDS: ClassVar[Takes] = {
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
                f" {self.described(0)} and {self.described(1)}"
            )
        state = (1, x[1], self._outputs)
        self._first = 2 + self._static
        for number in range(self._first, self._first + states):
            if self.bottoms[number] != state:
                raise self.bad(f"expected a state of shape {state}, got {self.described(number)}")
        wide = self.GATES * self._outputs
        self.add_parameter((wide, prod(x[2:])), param.weight_filler)
        self.add_parameter((wide,), param.bias_filler)
        if self._static:
            if self.bottoms[2][:1] != x[1:2]:
                raise self.bad(f"expected {x[1]} rows, got {self.described(2)}")
            self.add_parameter((wide, prod(self.bottoms[2][1:])), param.weight_filler)
        self.add_parameter((wide, self._outputs), param.weight_filler)
        self.add_output_parameters()
        self.reset()
        return ((x[0], x[1], self._outputs), *(state,) * states)

    def add_output_parameters(self) -> None:  # an LSTM has none
        """Declare the tensors between the state and the top."""

    @abstractmethod
    def step(self, gates: AnyArray, state: State, cont: AnyArray) -> State:
        """The next state, hidden units first, and note what `step_back` needs."""

    @abstractmethod
    def step_back(self, time: int, dstate: State, cont: AnyArray) -> tuple[AnyArray, State]:
        """The gradients by the gates and by the previous state, apart from the gates' own."""

    @abstractmethod
    def output(self, hidden: AnyArray, weights: Arrays) -> AnyArray:
        """The top for the hidden units of all steps."""

    @abstractmethod
    def output_back(self, dy: AnyArray, weights: Arrays, out: Gradients) -> AnyArray:
        """The gradient by the hidden units of all steps; writes those of its tensors."""

    def reset(self) -> None:
        self._kept: State = []

    def _begin(self, batch: int) -> State:
        """The state before the first step of a batch, where no bottoms give it."""
        if self._kept and len(self._kept[0]) == batch:
            return self._kept
        return [np.zeros((batch, self._outputs), np.float32)] * self.STATES

    def compute(self, bottoms: Arrays, weights: Arrays, moment: StepKey) -> Arrays:
        x, cont = bottoms[:2]
        time, batch = x.shape[:2]
        self._x, self._cont = x.reshape(time, batch, -1), cont.reshape(time, batch, 1)
        self._recurrent = 3 if self._static else 2
        gates = self._x @ weights[0].T + weights[1]
        if self._static:
            self._still = bottoms[2].reshape(batch, -1)
            gates = gates + self._still @ weights[2].T
        given = [b[0] for b in bottoms[self._first :]]
        state = given or self._begin(batch)
        self._steps: list[tuple[AnyArray, ...]] = []
        self._before, hidden = [], []
        for t in range(time):
            before = self._cont[t] * state[0]
            self._before.append(before)
            state = self.step(gates[t] + before @ weights[self._recurrent].T, state, self._cont[t])
            hidden.append(state[0])
        self._kept, self._hidden = state, np.stack(hidden)
        last = [s[None] for s in state] if given else []
        return (self.output(self._hidden, weights), *last)

    def gradients(self, dtops: Gradients, weights: Arrays, out: Gradients) -> Gradients:
        time, batch, _ = self._x.shape
        w = weights[self._recurrent]
        dhidden = np.zeros_like(self._hidden)
        if dtops[0] is not None:
            dhidden = self.output_back(dtops[0], weights, out)
        dstate = [np.zeros((batch, self._outputs), np.float32) for _ in range(self.STATES)]
        dgates = np.empty((time, batch, len(w)), np.float32)
        for t in reversed(range(time)):
            dstate[0] = dstate[0] + dhidden[t]
            dgates[t], dstate = self.step_back(t, dstate, self._cont[t])
            dstate[0] = dstate[0] + self._cont[t] * (dgates[t] @ w)
        rows = dgates.reshape(-1, len(w))
        terms: dict[int, AnyArray] = {
            0: rows.T @ self._x.reshape(len(rows), -1),
            1: rows.sum(axis=0),
            self._recurrent: rows.T @ np.stack(self._before).reshape(len(rows), -1),
        }
        found: list[AnyArray | None] = [(dgates @ weights[0]).reshape(self._shape(0)), None]
        if self._static:
            still = dgates.sum(axis=0)
            terms[2] = still.T @ self._still
            found.append((still @ weights[2]).reshape(self._shape(2)))
        for index, term in terms.items():
            target = out[index]
            if target is not None:
                target[...] = term
        exposed = len(self.bottoms) > self._first
        return [*found, *([d[None] for d in dstate] if exposed else [])]

    def _shape(self, bottom: int) -> Shape:
        """A bottom's shape with the time and batch of the latest forward pass."""
        time, batch, _ = self._x.shape
        return (time, batch, *self.bottoms[0][2:]) if bottom == 0 else (batch, *self.bottoms[2][1:])


class LSTM(_Recurrent):
    """Long short-term memory (Hochreiter and Schmidhuber 1997), with the gates i, f, o and g.

    c = f * c + i * g and h = o * tanh(c). Tensors: the input's matrix and bias, the matrix of the
    third bottom if there is one, and the matrix of h.
    """

    GATES = 4
    STATES = 2

    def step(self, gates: AnyArray, state: State, cont: AnyArray) -> State:
        i, f, o, g = np.split(gates, 4, axis=1)
        i, f, o, g = _sigmoid(i), cont * _sigmoid(f), _sigmoid(o), np.tanh(g)
        c = f * state[1] + i * g
        squashed = np.tanh(c)
        self._steps.append((i, f, o, g, state[1], squashed))
        return [o * squashed, c]

    def step_back(self, time: int, dstate: State, cont: AnyArray) -> tuple[AnyArray, State]:
        i, f, o, g, before, squashed = self._steps[time]
        dh, dc = dstate
        dc = dc + dh * o * (1 - squashed**2)
        # f includes cont, which is 0 or 1: where it is 0, this is 0, too.
        parts = (
            dc * g * i * (1 - i),
            dc * before * f * (1 - f) * (cont != 0),
            dh * squashed * o * (1 - o),
            dc * i * (1 - g**2),
        )
        return np.concatenate(parts, axis=1), [np.zeros_like(dh), dc * f]

    def output(self, hidden: AnyArray, weights: Arrays) -> AnyArray:
        return hidden

    def output_back(self, dy: AnyArray, weights: Arrays, out: Gradients) -> AnyArray:
        return dy


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

    def step(self, gates: AnyArray, state: State, cont: AnyArray) -> State:
        h = np.tanh(gates)
        self._steps.append((h,))
        return [h]

    def step_back(self, time: int, dstate: State, cont: AnyArray) -> tuple[AnyArray, State]:
        return dstate[0] * (1 - self._steps[time][0] ** 2), [np.zeros_like(dstate[0])]

    def output(self, hidden: AnyArray, weights: Arrays) -> AnyArray:
        self._top = np.asarray(np.tanh(hidden @ weights[-2].T + weights[-1]))
        return self._top

    def output_back(self, dy: AnyArray, weights: Arrays, out: Gradients) -> AnyArray:
        before = dy * (1 - self._top**2)
        rows, hidden = (a.reshape(-1, self._outputs) for a in (before, self._hidden))
        for target, term in ((out[-2], rows.T @ hidden), (out[-1], rows.sum(axis=0))):
            if target is not None:
                target[...] = term
        dhidden: AnyArray = before @ weights[-2]
        return dhidden


def _sigmoid(x: AnyArray) -> AnyArray:
    return np.asarray(np.exp(-np.logaddexp(0, -x)))


ROWS: Mapping[str, type[Layer]] = {"RNN": RNN, "LSTM": LSTM}
