"""A module of flax's nnx as a network of `worker.ml`; JAX and flax are imported with one."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ps
import worker.jax
from shards.errors import BadInput
from worker.context import Context
from worker.ml.nets import FEATURES, LABEL, FitSettings, Floats, Inputs


class FlaxNet:
    """An `nnx.Module`: one input is its argument, several are keyword arguments.

    Its loss is the cross-entropy of classes, or the mean squared error. Only its `nnx.Param` are
    trained; random streams, as of dropout, are the same in each step. Raises BadInput for a module
    with other state of floats, such as the statistics of BatchNorm.
    """

    def __init__(self, name: str, module: Any) -> None:
        from flax import nnx

        self._name = name
        self._merge = nnx.merge
        self._graph, self._params, others, self._rest = nnx.split(
            module, nnx.Param, (nnx.BatchStat, nnx.Cache, nnx.Intermediate), ...
        )
        if others:
            kept = ".".join(map(str, next(iter(nnx.to_flat_state(others)))[0]))
            raise BadInput(
                f"model {name}: expected a module whose state is parameters alone, got {kept}"
            )

    def params(self, settings: Mapping[str, Any]) -> ps.Dense:
        """The table of the parameters."""
        return worker.jax.params(self._params, **settings)

    def train(self, fit: FitSettings, ctx: Context) -> None:
        """Train as the worker of `ctx`."""
        import jax

        def loss(params: Any, inputs: Any, label: Any) -> Any:
            output = self._called(params, inputs)
            if not fit.classifies:
                return ((output.reshape(label.shape) - label) ** 2).mean()
            found = jax.nn.log_softmax(output.reshape(len(label), -1))
            return -jax.numpy.take_along_axis(found, label[:, None], 1).mean()

        step = jax.jit(jax.value_and_grad(loss))
        steps = worker.jax.wrap(self._params, None, ctx)
        for batch in ctx.batches(fit.batch_size, epochs=fit.epochs):
            inputs = {name: batch[name] for name in batch if name != LABEL}
            value, gradients = step(steps.params, inputs, batch[LABEL])
            steps.step(gradients, loss=value)

    def load(self, params: Mapping[str, Floats]) -> None:
        """Take trained parameters, by name."""
        self._params = worker.jax.load(self._params, dict(params))

    def outputs(self, inputs: Inputs, layers: Sequence[str]) -> list[NDArray[Any]]:
        """The output; no layers, because a function of JAX keeps none."""
        if layers:
            raise BadInput(f"model {self._name}: expected no layers of a flax module as columns")
        return [np.asarray(self._called(self._params, dict(inputs)))]

    def _called(self, params: Any, inputs: Any) -> Any:
        module = self._merge(self._graph, params, self._rest)
        return module(inputs[FEATURES]) if set(inputs) == {FEATURES} else module(**inputs)
