"""The interface between the worker loop and a model.

The loop holds a flat arena of weights, which came from the shards and is never written, and an
arena for the gradient. A model computes the second from the first and a batch. Caffe networks are
in `worker.caffe`; an adapter for another library is one file with one class of this interface.

A model is built again inside each worker's process, so its description must be plain values that
can be sent there (a network's text, a shape), never the model itself.

A model that can compute on a GPU has a method `on`, which returns an equal model there. That model
can begin a step before the previous one is done.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shards import argument_checks
from shards.errors import BadInput
from shards.tables import DenseTable

if TYPE_CHECKING:
    from worker.training.device import Device

Batch = Mapping[str, NDArray[Any]]
"""Columns by name, arrays with the batch as leading axis: "data" (n, c, h, w), "label" (n,)."""


class Differentiable(Protocol):
    """A loss as a function of weights and a batch, and its gradient."""

    def gradient(
        self,
        weights: NDArray[np.float32],
        batch: Batch,
        out: NDArray[np.float32],
        *,
        step: int,
        seed: int,
    ) -> float:
        """Return the batch's loss at `weights` and write its gradient into every float of `out`.

        Both arenas are float32 of the table's size; padding becomes zero. Random numbers (dropout)
        depend on `step` and `seed` alone, so that a repeated step gives the same gradient.
        """
        ...


class Model(Differentiable, Protocol):
    """A model that knows its parameters and their first values."""

    @property
    def table(self) -> DenseTable:
        """The parameters: their names, shapes and places in the arena."""
        ...

    def initial(self, seed: int) -> NDArray[np.float32]:
        """A new arena of initial weights; equal seeds give equal weights."""
        ...


@runtime_checkable
class Ahead(Model, Protocol):
    """A model that computes asynchronously on a device: a step begins while the previous one runs.

    `gradient` is `begin` and `finish`.
    """

    @property
    def device(self) -> "Device":
        """The device that it computes on."""
        ...

    def allocate(self, size: int) -> NDArray[np.float32]:
        """Zeroed memory for the arenas passed to it, such that its device copies asynchronously."""
        ...

    def begin(
        self,
        weights: NDArray[np.float32],
        batch: Batch,
        out: NDArray[np.float32],
        *,
        step: int,
        seed: int,
    ) -> None:
        """Begin what `gradient` does. At most two steps may be under way.

        Neither arena may change before the step is finished; the caller need not keep references.
        """
        ...

    def finish(self) -> float:
        """Wait for the oldest step begun, until its gradient is in its arena; return the loss."""
        ...


@runtime_checkable
class Movable(Model, Protocol):
    """A model that can compute on a device."""

    def on(self, device: "Device") -> Ahead:
        """An equal model on `device`: the same table, start and gradients, up to rounding."""
        ...


def build_model(make: object) -> Model:
    """The model that `make` builds; raises BadInput naming what it lacks of the interface."""
    if not callable(make):
        name = type(make).__name__
        raise BadInput(
            "model",
            expected=(
                "a function without arguments that builds the model, such as "
                f"functools.partial({name}, ...)"
            ),
            got=f"an object of class {name}",
        )
    return check_model(_call_without_arguments(make))


def check_model(model: Any) -> Model:
    """Return the model if it has the members of `Model`; raises BadInput for what it lacks."""
    name = type(model).__name__
    table = getattr(model, "table", None)
    if not isinstance(table, DenseTable):
        got = "none" if table is None else f"one of class {type(table).__name__}"
        raise BadInput(f"model {name}", expected="an attribute `table`, a ps.DenseTable", got=got)
    _check_method(model, "initial", "seed")
    _check_method(model, "gradient", "weights", "batch", "out", step=0, seed=0)
    checked: Model = model
    return checked


def _call_without_arguments(make: Callable[..., Any]) -> Any:
    """Build a model with `make`; raises BadInput if it needs arguments."""
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        name = getattr(make, "__name__", type(make).__name__)
        raise BadInput(
            "model",
            expected=(
                "a function without arguments that builds the model, such as "
                f"functools.partial({name}, ...)"
            ),
            got=f"{name}: {error}",
        ) from None
    except ValueError:
        pass  # A compiled function may have no signature.
    return make()


def check_start(model: Model, start: object) -> NDArray[np.float32]:
    """The result of the model's `initial`; raises BadInput unless it is an arena of the table."""
    size = model.table.size
    if isinstance(start, np.ndarray) and start.shape == (size,) and start.dtype == np.float32:
        return start
    got = type(start).__name__
    if isinstance(start, np.ndarray):
        got = f"an array of shape {start.shape} of {start.dtype}"
    raise BadInput(
        f"model {type(model).__name__}",
        expected=f"`initial` to return an arena of {size} float32, as `table.empty()` gives it",
        got=got,
    )


def check_loss(model: Differentiable, loss: Any) -> float:
    """The result of the model's `gradient` as a float; raises BadInput unless it is a number."""
    label = f"model {type(model).__name__}: the loss that `gradient` returns"
    return argument_checks.loss_of(label, loss)


def _check_method(model: Model, name: str, *positional: str, **named: int) -> None:
    """Raise BadInput unless the model has this method and it takes these arguments."""
    method = getattr(model, name, None)
    shown = ", ".join([*positional, *(["*"] if named else []), *named])
    expected = f"model {type(model).__name__}: expected a method `{name}({shown})`"
    if not callable(method):
        raise BadInput(f"{expected}, got none")
    try:
        inspect.signature(method).bind(*positional, **named)
    except TypeError as error:
        raise BadInput(f"{expected}, got one with other parameters: {error}") from None
    except ValueError:
        pass  # A compiled method may have no signature.
