"""Layers that compute one function of each element: a row of `_FUNCTIONS` each; and PReLU.

A row has the fields that the type honours, and a function that reads them.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from math import log
from typing import ClassVar, NamedTuple

from cupy_kernels.ops import activation
from cupy_kernels.ops.activation import functions as activation_functions
from cupy_kernels.ops.activation.functions import Function
from cupy_kernels.types import Array
from worker.caffe.layer import (
    Arrays,
    Gradients,
    Layer,
    NeedsGrad,
    Shape,
    StepKey,
    SupportedFields,
    Unary,
    by_channel,
    caffe_shape,
    from_channel,
)


class Elementwise(Unary):
    """A function of each element."""

    def set_up(self) -> tuple[Shape, ...]:
        self.function = self.function_of()
        return super().set_up()

    @abstractmethod
    def function_of(self) -> Function:
        """The function that the layer's entry describes."""

    def apply(self, x: Array, step_key: StepKey) -> Array:
        self._x = x
        self._y = activation.forward(x, self.function, self.work)
        return self._y

    def differentiate(self, dy: Array) -> Array | None:
        if isinstance(self.function, activation_functions.Threshold):
            return None  # its derivative is zero
        return activation.backward(dy, self._x, self._y, self.function, self.work)


class ReLU(Elementwise):
    """x above 0, negative_slope * x elsewhere."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "relu_param": frozenset({"negative_slope", "engine"})
    }
    _done = _over = False

    def function_of(self) -> Function:
        return activation_functions.Relu(self.spec.relu_param.negative_slope)

    def fuse_into(self, before: Layer) -> bool:
        self._done = self.function == activation_functions.Relu() and before.fuse_relu()
        self._over = before.OVERWRITABLE
        return self._done

    def apply(self, x: Array, step_key: StepKey) -> Array:
        if self.function != activation_functions.Relu():
            return super().apply(x, step_key)
        y = x if self._done else activation.relu(x, 0.0, self.work, over=self._over)
        self._x = self._y = y  # its gradient can be computed from its output
        return y


class PReLU(Layer):
    """x above 0, slope * x elsewhere, with a slope that is learnt: one per channel, or one."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "prelu_param": frozenset({"filler", "channel_shared"})
    }

    def set_up(self) -> tuple[Shape, ...]:
        param, (bottom,) = self.spec.prelu_param, self.bottoms
        self.axis(1, bottom)
        filler = param.filler
        if not param.HasField("filler"):
            filler.type, filler.value = "constant", 0.25
        self.add_parameter(() if param.channel_shared else (bottom[1],), filler)
        return (bottom,)

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        self._shape = caffe_shape(bottoms[0])
        self._x = by_channel(bottoms[0], 1, 1, self.work, "x")
        y = activation.prelu(self._x, weights[0].reshape(-1), self.work)
        return (from_channel(y, self._shape, 1, 1, self.work, "top"),)

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        assert gradients[0] is not None
        dx = activation.prelu_backward(
            by_channel(gradients[0], 1, 1, self.work, "dy"),
            self._x,
            weights[0].reshape(-1),
            None if out[0] is None else out[0].reshape(-1),
            self.work,
        )
        return [from_channel(dx, self._shape, 1, 1, self.work, "bottom") if needs_grad[0] else None]


def _log_of_base(layer: Layer, base: float) -> float:
    """The natural logarithm of a base; -1 stands for e."""
    if base != -1 and (base <= 0 or base == 1):
        raise layer.bad(f"expected a base above 0 other than 1, or -1 for e, got {base:g}")
    return 1.0 if base == -1 else log(base)


def _exp(layer: Layer) -> Function:
    param = layer.spec.exp_param
    factor = _log_of_base(layer, param.base)
    return activation_functions.Exp(factor * param.scale, factor * param.shift)


def _log(layer: Layer) -> Function:
    param = layer.spec.log_param
    return activation_functions.Log(param.scale, param.shift, 1 / _log_of_base(layer, param.base))


def _power(layer: Layer) -> Function:
    param = layer.spec.power_param
    return activation_functions.Power(param.power, param.scale, param.shift)


def _clip(layer: Layer) -> Function:
    param = layer.spec.clip_param
    if param.min > param.max:
        raise layer.bad(f"expected a min of at most max, got {param.min:g} and {param.max:g}")
    return activation_functions.Clip(param.min, param.max)


class _Row(NamedTuple):
    description: str
    fields: SupportedFields
    function_of: Callable[[Layer], Function]


def _own(message: str, *fields: str) -> SupportedFields:
    return {message: frozenset(fields)}


_FUNCTIONS = {
    "AbsVal": _Row("The absolute value.", {}, lambda _: activation_functions.Abs()),
    "BNLL": _Row("log(1 + e^x).", {}, lambda _: activation_functions.Bnll()),
    "Clip": _Row("x limited to [min, max].", _own("clip_param", "min", "max"), _clip),
    "ELU": _Row(
        "x above 0, alpha * (e^x - 1) elsewhere.",
        _own("elu_param", "alpha"),
        lambda layer: activation_functions.Elu(layer.spec.elu_param.alpha),
    ),
    "Exp": _Row(
        "base^(shift + scale * x); a base of -1 stands for e.",
        _own("exp_param", "base", "scale", "shift"),
        _exp,
    ),
    "Log": _Row(
        "The logarithm of shift + scale * x; a base of -1 stands for e.",
        _own("log_param", "base", "scale", "shift"),
        _log,
    ),
    "Power": _Row(
        "(shift + scale * x)^power.", _own("power_param", "power", "scale", "shift"), _power
    ),
    "Sigmoid": _Row(
        "1 / (1 + e^-x).", _own("sigmoid_param", "engine"), lambda _: activation_functions.Sigmoid()
    ),
    "Swish": _Row(
        "x / (1 + e^(-beta * x)).",
        _own("swish_param", "beta"),
        lambda layer: activation_functions.Swish(layer.spec.swish_param.beta),
    ),
    "TanH": _Row(
        "The hyperbolic tangent.",
        _own("tanh_param", "engine"),
        lambda _: activation_functions.Tanh(),
    ),
    "Threshold": _Row(
        "1 above the threshold, 0 elsewhere; it has no gradient.",
        _own("threshold_param", "threshold"),
        lambda layer: activation_functions.Threshold(layer.spec.threshold_param.threshold),
    ),
}


def _class(name: str, row: _Row) -> type[Layer]:
    members = {"SUPPORTED_FIELDS": row.fields, "function_of": row.function_of}
    return type(
        name, (Elementwise,), {"__doc__": row.description, "__module__": __name__, **members}
    )


ROWS: Mapping[str, type[Layer]] = {
    "ReLU": ReLU,
    "PReLU": PReLU,
    **{name: _class(name, row) for name, row in _FUNCTIONS.items()},
}
