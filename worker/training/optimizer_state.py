"""The state of an optimiser of the user's own, such as Adam's moments, as a file holds it.

Each framework names its tensors and restores them; here they are bytes by name, with dtype and
shape. They travel with what a strategy keeps in a worker's own state (worker_state.py).
"""

from collections.abc import Mapping
from math import prod
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from shards.errors import BadInput

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

PREFIX = "optimizer/"
"""The beginning of the names of its arrays among a worker's."""
KEY = "optimizer"


class TensorForm(msgspec.Struct, frozen=True):
    """The dtype, by its framework's name, and the shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


class OptimizerState(msgspec.Struct, frozen=True):
    """The state of an optimiser of class `kind`: the bytes of tensors by name, and other values.

    `values` can be written as JSON. `worker` is the worker that it is taken from, if it is another.
    """

    kind: str
    forms: dict[str, TensorForm]
    arrays: Mapping[str, Bytes] = {}
    values: dict[str, Any] = {}
    worker: str = ""

    def check(self, present: "OptimizerState") -> None:
        """Raise BadInput unless this is a state for the optimiser that has the one in `present`."""
        for field in ("kind", "forms"):
            expected, got = getattr(present, field), getattr(self, field)
            if expected != got:
                what = _difference(expected, got) if field == "forms" else (expected, got)
                raise BadInput("its state", expected=what[0], got=what[1])


class LocalOptimizer(Protocol):
    """An optimiser that takes the local steps of a worker's strategy."""

    def step(self) -> Floats:
        """Take a step; returns the weights, in an arena that the next step changes."""
        ...

    def begin(self, saved: OptimizerState | None) -> None:
        """Make the state for the first weights, which have been shown: a fresh one, or `saved`.

        Raises BadInput if it does not fit; the state is then a fresh one.
        """
        ...

    def save(self) -> OptimizerState:
        """The present state; its arrays are copies."""
        ...


def pack(array: NDArray[Any]) -> Bytes:
    """The bytes of an array, copied."""
    return np.frombuffer(array.tobytes(), np.uint8)


def unpack(name: str, content: Bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """The array of these bytes, copied; raises BadInput naming it for another number of them."""
    if content.nbytes != dtype.itemsize * prod(shape):
        raise BadInput(
            f"its state: {name}",
            expected=f"{prod(shape)} of {dtype}",
            got=f"{content.nbytes} bytes",
        )
    return np.frombuffer(content.tobytes(), dtype).reshape(shape).copy()


def write_values(state: OptimizerState) -> dict[str, Any]:
    """What a worker's state has of it beside arrays."""
    described = {"kind": state.kind, "forms": state.forms, "values": state.values}
    plain: dict[str, Any] = msgspec.to_builtins({KEY: described})
    return plain


def read_state(arrays: Mapping[str, Any], values: Mapping[str, Any]) -> OptimizerState | None:
    """The optimiser's part of a worker's state; None if it has none.

    Raises BadInput if it cannot be read.
    """
    described = values.get(KEY)
    if described is None:
        return None
    content = {
        name.removeprefix(PREFIX): array
        for name, array in arrays.items()
        if name.startswith(PREFIX)
    }
    try:
        state = msgspec.convert(described, OptimizerState)
    except msgspec.ValidationError as error:
        raise BadInput("its state", expected="that of an optimizer", got=error) from None
    if set(content) != set(state.forms):
        raise BadInput("its state", expected="an array for each tensor", got="others")
    return msgspec.structs.replace(state, arrays=content)


def _difference(
    expected: dict[str, TensorForm], got: dict[str, TensorForm]
) -> tuple[object, object]:
    """The first difference of two states, in words."""
    for name in sorted({*expected, *got}):
        if expected.get(name) != got.get(name):
            return _describe(name, expected.get(name)), _describe(name, got.get(name))
    return expected, got


def _describe(name: str, form: TensorForm | None) -> str:
    return f"no {name}" if form is None else f"{name} {form.dtype}{list(form.shape)}"
