"""Keras 3: a callback that trains a compiled model on parameter servers, on any backend of Keras.

    def train(args, ctx):
        model = compiled()
        batches = ((batch["x"], batch["y"]) for batch in ctx.batches(64, epochs=3))
        model.fit(batches, callbacks=[worker.keras.callback(ctx)])

    trained = worker.run(df, train, params=worker.keras.params(compiled()), strategy="easgd:tau=10")
    worker.keras.load(model, trained.params)

`fit` takes the local steps with the model's own optimiser, so the strategy is one that has local
steps. After each the callback gives the weights to the strategy, and gives the model those that the
strategy returns (framework_loop.py).

Keras is imported when a function of this module is called.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ps
from shards import argument_checks
from shards.errors import BadInput
from shards.extras import missing
from worker.job.framework_loop import LoopSteps, LoopWorker, check_takes_optimizer, worker_of
from worker.training.context import Context
from worker.training.model_cut import describe_fragments, join_tables
from worker.training.optimizer_state import OptimizerState, TensorForm, pack, unpack

__all__ = ["callback", "fragments", "load", "params"]

Floats = NDArray[np.float32]


def params(model: Any, **settings: Any) -> ps.Dense:
    """The table of a built Keras model: its float32 variables, with their present values.

    A variable is named by its place in `model.weights` and its own name, as `0.kernel`.

    Of the variables that are not trained, those of float32 are buffers, such as the statistics of
    BatchNorm; counters and seeds stay with each worker. `settings` are those of `ps.Dense.like`.
    """
    return _describe(_variables("params", model), settings)


def fragments(model: Any, count: int, **settings: Any) -> ps.Tables:
    """The variables of a built model as `count` tables of about equal size.

    Strategies such as `decoupled_diloco` exchange each by itself. No variable is cut. Those of
    `Embedding` layers have a table of their own, unless `count` is 1. `settings` are those of
    `params`, for all tables. Raises BadInput as `params` does, and for more tables than variables.
    """
    variables = _variables("fragments", model)
    layer_kind = _keras().layers.Embedding
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, layer_kind)]
    ids = {id(variable) for layer in layers for variable in layer.weights}
    return describe_fragments(
        {name: int(np.prod(variable.shape)) for name, variable in variables.items()},
        [name for name, variable in variables.items() if id(variable) in ids],
        count,
        settings,
        lambda names, own: _describe({name: variables[name] for name in names}, own),
    )


def _describe(variables: dict[str, Any], settings: Mapping[str, Any]) -> ps.Dense:
    """The table of these variables."""
    values = {name: _array(variable) for name, variable in variables.items()}
    buffers = tuple(name for name, variable in variables.items() if not variable.trainable)
    return ps.Dense.like(values, buffers=buffers, **settings)


def load(model: Any, values: Any) -> Any:
    """Copy trained variables, such as `trained.params`, into a model; returns the model.

    `values` are arrays by name, or several tables of them. Raises BadInput for an unknown name, a
    missing variable, and another shape.
    """
    variables = _variables("load", model)
    argument_checks.instance("load: values", values, dict, "a dict of arrays by name")
    values = join_tables(values)
    _check_names("load", variables, values)
    for name, variable in variables.items():
        if values[name].shape != tuple(variable.shape):
            expected, got = tuple(variable.shape), values[name].shape
            raise BadInput(f"load: {name}", expected=f"shape {expected}", got=got)
        variable.assign(values[name])
    return model


def callback(ctx: Context) -> Any:
    """The callback for one call of `fit` in the function of `worker.run` that `ctx` describes.

    The model takes the shards' weights when training begins. `fit` ends after the last step of the
    job's `max_iter`. Raises BadInput for a strategy that pushes gradients, which Keras keeps.
    """
    base: Any = _keras().callbacks.Callback
    me = worker_of("callback", ctx)
    check_takes_optimizer("callback", _Fit(), me.plan.strategy, "worker.jax or worker.torch")

    class DistributedFit(base):  # type: ignore[misc]  # Keras is not checked
        """Gives the weights of each step to the strategy."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.variables = _Variables(self.model, me)
            optimizer = _FitOptimizer(self.model, self.variables)
            self.steps = LoopSteps(me, show=self.variables.show, optimizer=optimizer)
            ctx.lost = self.steps.lost
            ctx.at_end(self.steps.finish)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            _, gradient = self.steps.begin()
            self.steps.take(gradient, (logs or {}).get("loss", 0.0), None)
            if self.steps.is_done:
                self.model.stop_training = True

    return DistributedFit()


class _Fit:
    """Stands for the optimiser of `fit` in an error."""


class _Variables:
    """The variables of a model as an arena."""

    def __init__(self, model: Any, me: LoopWorker) -> None:
        self._model = model
        self._layout = me.layout
        self._variables = _variables("fit", model)
        names = {spec.name for table in me.layout.tables for spec in table.tensors}
        _check_names("fit: the job's table", self._variables, names)
        self._host = me.layout.empty()

    def show(self, weights: Floats) -> None:
        """Give the model these weights, unless it has them."""
        if weights is self._host:
            return
        self.sync()
        for name, view in join_tables(self._layout.views(weights)).items():
            self._variables[name].assign(view)

    def read(self) -> Floats:
        """The model's weights, in memory of this worker's."""
        self.sync()
        for name, view in join_tables(self._layout.views(self._host)).items():
            np.copyto(view, _array(self._variables[name]))
        return self._host

    def sync(self) -> None:
        """On JAX, `fit` keeps the weights outside of the variables until it is asked for them."""
        if hasattr(self._model, "jax_state_sync"):
            self._model.jax_state_sync()


class _FitOptimizer:
    """The optimiser of a model, with which `fit` takes the local steps.

    A variable of its state is named by its place among them: Keras puts the numbers of layers,
    which count all models of a process, into its name.
    """

    def __init__(self, model: Any, variables: _Variables) -> None:
        self._model = model
        self._weights = variables

    def step(self) -> Floats:
        """The weights after a step of `fit`."""
        return self._weights.read()

    def begin(self, saved: OptimizerState | None) -> None:
        """Continue with `saved`; raises BadInput if it is of another optimiser.

        Another worker's rate is not taken.
        """
        optimizer = self._model.optimizer
        if not optimizer.built:
            optimizer.build(self._model.trainable_variables)
        if saved is None:
            return
        saved.check(self.save())
        for name, variable in self._number_variables().items():
            if not (saved.worker and variable is optimizer._learning_rate):
                form = saved.forms[name]
                dtype = np.dtype(form.dtype)
                variable.assign(unpack(name, saved.arrays[name], dtype, form.shape))

    def save(self) -> OptimizerState:
        """The present state; its arrays are copies."""
        self._weights.sync()
        arrays = {name: _array(variable) for name, variable in self._number_variables().items()}
        return OptimizerState(
            type(self._model.optimizer).__name__,
            {name: TensorForm(str(array.dtype), array.shape) for name, array in arrays.items()},
            {name: pack(array) for name, array in arrays.items()},
        )

    def _number_variables(self) -> dict[str, Any]:
        return {str(n): variable for n, variable in enumerate(self._model.optimizer.variables)}


def _variables(label: str, model: Any) -> dict[str, Any]:
    """The float32 variables of a model by name; raises BadInput for a model that is not built."""
    keras = _keras()
    argument_checks.instance(f"{label}: model", model, keras.Model, "a keras.Model")
    for variable in model.trainable_variables:
        if variable.dtype != "float32":
            raise BadInput(
                f"{label}: {variable.path}", expected="a variable of float32", got=variable.dtype
            )
    # Not by path: Keras numbers the layers of all models in a process.
    by_name = {
        f"{index}.{variable.name}": variable
        for index, variable in enumerate(model.weights)
        if variable.dtype == "float32"
    }
    if not by_name:
        raise BadInput(label, expected="a model that is built, with variables", got="none")
    return by_name


def _check_names(label: str, variables: dict[str, Any], names: Any) -> None:
    """Raise BadInput unless exactly the variables of the model are given."""
    missing, unknown = sorted(variables.keys() - set(names)), sorted(set(names) - variables.keys())
    if missing:
        raise BadInput(label, expected=f"the variable {missing[0]} of the model", got="none")
    if unknown:
        raise BadInput(label, expected="variables of the model", got=unknown[0])


def _array(variable: Any) -> Floats:
    """A variable's value; on the CPU it is not copied."""
    array: Floats = np.asarray(_keras().ops.convert_to_numpy(variable.value))
    return array


def _keras() -> Any:
    try:
        import keras
    except ImportError:
        raise missing("worker.keras", "Keras 3", "keras") from None
    return keras
