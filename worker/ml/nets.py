"""The networks of `worker.ml`: a description that can be sent and saved, and what it builds.

A `NetSpec` holds plain values: the import path of a module of torch or flax, or of a NumPy model,
a Caffe net, or "linear". `build` makes the network, in the driver and once in each of Spark's
Python processes. Inputs are arrays by name, rows first; a network with one input has it as
`features`. Vectors stay sparse for a network whose first weights are rows by the index of a value.
"""

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

import ps
import worker.jax
import worker.torch
from shards.errors import BadInput
from worker.caffe.model import CaffeModel
from worker.caffe.net import Description
from worker.caffe.phases import Phase
from worker.caffe.solver import Solver
from worker.data.column_values import as_numbers
from worker.data.columns import ColumnKind, ColumnSpec
from worker.ml.linear import FEATURES, LABEL, LINEAR, FitSettings, LinearNet, Rows
from worker.torch.model_tensors import lazy_names
from worker.training.context import Context

Floats = NDArray[np.float32]
Inputs = Mapping[str, Any]

WIDTH = "<width>"
"""A value in `modelArgs` that stands for the number of values in a row of the features."""
_METHODS = ("params", "gradient", "outputs")


class NetSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A network in plain values: the import path of one with its `args`, or a Caffe net.

    `output` is the blob of the Caffe net that it predicts from. `inputs` are the shapes of a row of
    each input, by which a module of torch with lazy layers is completed. Inputs in `sparse` are
    `SparseVectors`.
    """

    model: str
    args: dict[str, Any] = {}
    inputs: dict[str, tuple[int, ...]] = {}
    sparse: tuple[str, ...] = ()
    caffe: Description | None = None
    output: str = ""


class LoadedNet(Protocol):
    """A network that predicts, with parameters of its own."""

    def load(self, params: Mapping[str, Floats], rows: Rows) -> None:
        """Take trained parameters, by name, and read rows by id, which only some networks have."""
        ...

    def outputs(self, inputs: Inputs, layers: Sequence[str]) -> list[NDArray[Any]]:
        """The network's output, (rows, outputs) or (rows,), then that of each named layer."""
        ...


class TrainableNet(LoadedNet, Protocol):
    """A network that can be trained by `worker.run`."""

    def params(self, settings: Mapping[str, Any]) -> ps.Dense | ps.Tables:
        """The tables of its parameters, with their first values, and the settings rule and rate.

        Of several, one at most is dense.
        """
        ...

    def train(self, fit: FitSettings, ctx: Context) -> None:
        """Train as the worker of `ctx`."""
        ...


def width_of(name: str) -> str:
    """A value in `modelArgs` that stands for the number of values in a row of the input `name`."""
    return f"<width of {name}>"


def fill_in_widths(
    args: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """`modelArgs` with numbers in place of `WIDTH` and `width_of`; raises BadInput.

    `shapes` are those of a row of each input.
    """
    widths = {width_of(name): prod(shape) for name, shape in shapes.items()}
    if len(shapes) == 1:
        widths[WIDTH] = prod(*shapes.values())
    for name, value in args.items():
        if isinstance(value, str) and value.startswith("<width") and value not in widths:
            raise BadInput(
                f"modelArgs: {name}",
                expected=f"{' or '.join(map(repr, widths))}, the width of an input",
                got=f"{value!r}",
            )
    return {
        name: widths.get(value, value) if isinstance(value, str) else value
        for name, value in args.items()
    }


def build(spec: NetSpec, seed: int = 1) -> LoadedNet:
    """The network; raises BadInput for a model that does not import or is of no known kind."""
    return build_imported(spec, seed) if spec.caffe is None else CaffeNet(spec.caffe, spec.output)


def build_imported(spec: NetSpec, seed: int) -> TrainableNet:
    """The network at an import path, or the linear one, its first parameters drawn from `seed`."""
    if spec.model == LINEAR:
        return LinearNet(spec.args, spec.sparse, seed)
    make = _import(spec.model)
    is_torch = any(kind.__module__.startswith("torch.") for kind in getattr(make, "__mro__", ()))
    if is_torch or not isinstance(make, type):
        _seed_torch(seed)
    try:
        network = make(**spec.args, **_random_streams(make, spec.args, seed))
    except Exception as error:
        raise BadInput(f"model {spec.model}: {_line(error)}") from error
    if any(kind.__module__.startswith("torch.") for kind in type(network).__mro__):
        return TorchNet(spec.model, network, spec.inputs)
    if any(kind.__module__.startswith("flax.nnx.") for kind in type(network).__mro__):
        return FlaxNet(spec.model, network)
    lacks = [name for name in _METHODS if not callable(getattr(network, name, None))]
    if lacks:
        raise BadInput(
            f"model {spec.model}",
            expected=(
                "a torch.nn.Module, an nnx.Module of flax, or an object with "
                f"the methods {', '.join(_METHODS)}"
            ),
            got=f"{type(network).__name__} without {lacks[0]}",
        )
    return NumpyNet(spec.model, network, seed)


def train_net(task: tuple[NetSpec, FitSettings], ctx: Context) -> None:
    """Train the network in each task of `worker.run`."""
    spec, fit = task
    build_imported(spec, fit.seed).train(fit, ctx)


def by_name(described: ps.Dense | ps.Tables, params: Any) -> dict[str, Floats]:
    """The arrays of parameters in their structure, by the names of their table."""
    if isinstance(described, ps.Tables):
        for dense in described.dense.values():
            return by_name(dense, params)
        return {}
    dense = described
    table = dense.table("net")
    views = table.views(table.empty())
    dense.structure.write(params, views)
    return views


class NumpyNet:
    """An object with three methods, over arrays of NumPy or what converts to them, such as JAX's.

    `params(seed)` are the first parameters, arrays in any structure that `ps.Dense` takes.
    `gradient(params, batch)` is the loss and its gradient; a batch is the inputs by name, and
    `label`. `outputs(params, inputs)` is an array (rows, outputs), or a dict of them by layer, the
    output under `output`.
    """

    def __init__(self, name: str, model: Any, seed: int) -> None:
        self._name = name
        self._model = model
        self._params: Any = model.params(seed)

    def params(self, settings: Mapping[str, Any]) -> ps.Dense:
        return ps.Dense.like(self._params, **settings)

    def train(self, fit: FitSettings, ctx: Context) -> None:
        def gradient(params: Any, batch: Inputs) -> tuple[Any, Any]:
            loss, gradients = self._model.gradient(params, _as_numbers(batch))
            return loss, gradients

        ctx.loop(gradient, fit.batch_size, epochs=fit.epochs)

    def load(self, params: Mapping[str, Floats], _rows: Rows) -> None:
        self._params = ps.Dense.like(self._params).structure.build(params)

    def outputs(self, inputs: Inputs, layers: Sequence[str]) -> list[NDArray[Any]]:
        outputs = self._model.outputs(self._params, inputs)
        by_name = outputs if isinstance(outputs, Mapping) else {"output": outputs}
        for name in ("output", *layers):
            if name not in by_name:
                raise _no_layer(self._name, name, by_name)
        return [np.asarray(by_name[name]) for name in ("output", *layers)]


class TorchNet:
    """A `torch.nn.Module`: one input is its argument, several are keyword arguments.

    Its loss is the cross-entropy of classes, or the mean squared error. Lazy layers, which take
    their shape from the first rows that they see, are completed with `inputs`.
    """

    def __init__(self, name: str, module: Any, inputs: Mapping[str, tuple[int, ...]]) -> None:
        self._name = name
        self._module = module
        if inputs and lazy_names(module):
            zeros = {
                input_name: np.zeros((2, *shape), np.float32)
                for input_name, shape in inputs.items()
            }
            self.outputs(zeros, [])

    def params(self, settings: Mapping[str, Any]) -> ps.Dense:
        return worker.torch.params(self._module, **settings)

    def train(self, fit: FitSettings, ctx: Context) -> None:
        import torch

        self._module.train()
        steps = worker.torch.wrap(self._module, None, ctx)
        for batch in ctx.batches(fit.batch_size, epochs=fit.epochs):
            label = torch.from_numpy(batch[LABEL])
            inputs = _as_numbers({name: batch[name] for name in batch if name != LABEL})
            output = self._apply_module(inputs)
            if fit.classifies:
                loss = torch.nn.functional.cross_entropy(output, label.long())
            else:
                loss = torch.nn.functional.mse_loss(output.reshape(label.shape), label)
            loss.backward()
            steps.step(loss=loss)
            steps.zero_grad()

    def load(self, params: Mapping[str, Floats], _rows: Rows) -> None:
        worker.torch.load(self._module, params)

    def outputs(self, inputs: Inputs, layers: Sequence[str]) -> list[NDArray[Any]]:
        import torch

        self._module.eval()
        modules = dict(self._module.named_modules())
        seen: dict[str, Any] = {}
        hooks = []
        for name in layers:
            if name not in modules:
                raise _no_layer(self._name, name, [layer for layer in modules if layer])
            keep = _keeper(seen, name)
            hooks.append(modules[name].register_forward_hook(keep))
        try:
            with torch.inference_mode():
                output = self._apply_module(inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return [output.numpy(), *(seen[name].numpy() for name in layers)]

    def _apply_module(self, inputs: Inputs) -> Any:
        import torch

        tensors = {name: torch.from_numpy(values) for name, values in inputs.items()}
        if set(tensors) == {FEATURES}:
            return self._module(tensors[FEATURES])
        return self._module(**tensors)


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
            state_path = ".".join(map(str, next(iter(nnx.to_flat_state(others)))[0]))
            raise BadInput(
                f"model {name}",
                expected="a module with parameters as its only state",
                got=state_path,
            )

    def params(self, settings: Mapping[str, Any]) -> ps.Dense:
        """The table of the parameters."""
        return worker.jax.params(self._params, **settings)

    def train(self, fit: FitSettings, ctx: Context) -> None:
        """Train as the worker of `ctx`."""
        import jax

        def loss(params: Any, inputs: Any, label: Any) -> Any:
            output = self._apply_module(params, inputs)
            if not fit.classifies:
                return ((output.reshape(label.shape) - label) ** 2).mean()
            log_probabilities = jax.nn.log_softmax(output.reshape(len(label), -1))
            return -jax.numpy.take_along_axis(log_probabilities, label[:, None], 1).mean()

        step = jax.jit(jax.value_and_grad(loss))
        steps = worker.jax.wrap(self._params, None, ctx)
        for batch in ctx.batches(fit.batch_size, epochs=fit.epochs):
            inputs = _as_numbers({name: batch[name] for name in batch if name != LABEL})
            value, gradients = step(steps.params, inputs, batch[LABEL])
            steps.step(gradients, loss=value)

    def load(self, params: Mapping[str, Floats], _rows: Rows) -> None:
        """Take trained parameters, by name."""
        self._params = worker.jax.load(self._params, dict(params))

    def outputs(self, inputs: Inputs, layers: Sequence[str]) -> list[NDArray[Any]]:
        """The output; no layers, because a function of JAX keeps none."""
        if layers:
            raise BadInput(f"model {self._name}", expected="no layers of a flax module as columns")
        return [np.asarray(self._apply_module(self._params, dict(inputs)))]

    def _apply_module(self, params: Any, inputs: Any) -> Any:
        module = self._merge(self._graph, params, self._rest)
        return module(inputs[FEATURES]) if set(inputs) == {FEATURES} else module(**inputs)


class CaffeNet:
    """A Caffe net in its test phase; it is trained by `worker.train`."""

    def __init__(self, description: Description, output: str) -> None:
        self._model = CaffeModel(description)
        self._output = output
        self._weights = self._model.table.empty()

    def load(self, params: Mapping[str, Floats], _rows: Rows) -> None:
        for name, view in self._model.table.views(self._weights).items():
            if name in params:
                view[:] = params[name]

    def outputs(self, inputs: Inputs, layers: Sequence[str]) -> list[NDArray[Any]]:
        (column,) = inputs_of(self._model)
        for name in layers:
            if name not in self._model.net.blobs:
                raise _no_layer(self._model.net.description.file, name, self._model.net.blobs)
        (values,) = inputs.values()
        batch = {column.name: values.reshape(-1, *column.shape) if column.shape else values}
        blobs = self._model.forward(self._weights, batch, [self._output, *layers])
        return [np.asarray(blobs[name]) for name in (self._output, *layers)]


def caffe_spec(path: str | Path, solver: Solver) -> NetSpec:
    """The net of a solver that was fitted to its data, in its test phase.

    It predicts from what the first loss of the net reads. Raises BadInput for a net without a loss,
    or with several inputs.
    """
    description = replace(solver.train, phase=Phase.TEST)
    trained, tested = CaffeModel(solver.train), CaffeModel(description)
    losses = [node.layer.spec for node in trained.net.nodes if "Loss" in node.layer.spec.type]
    if not losses or losses[0].bottom[0] not in tested.net.blobs:
        raise BadInput(path, expected="a loss over a blob that the test phase has", got="none")
    if len(inputs_of(tested)) != 1:
        raise BadInput(path, expected="a net with one input besides labels")
    return NetSpec(str(path), caffe=description, output=losses[0].bottom[0])


def inputs_of(model: CaffeModel) -> list[ColumnSpec]:
    """The columns that a Caffe net reads, labels left out."""
    return [column for column in model.net.column_specs if column.kind is not ColumnKind.LABEL]


def _import(path: str) -> Any:
    """Import the object that a path `module:name` names; raises BadInput."""
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise BadInput(
            f"model {path!r}", expected="an import path, such as nets:Net, or a solver's .prototxt"
        )
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"model {path}: cannot be imported: {error}") from None
    except Exception as error:
        raise BadInput(f"model {path}: cannot be imported: {_line(error)}") from error


def _as_numbers(batch: Inputs) -> dict[str, NDArray[Any]]:
    """A minibatch in which raw pixels, which are bytes, are arrays of uint8."""
    return {name: as_numbers(values, f"input {name}") for name, values in batch.items()}


def _random_streams(make: Any, args: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The argument `rngs` of a module of flax, which plain values cannot be."""
    is_flax = any(kind.__module__.startswith("flax.nnx.") for kind in getattr(make, "__mro__", ()))
    if not is_flax or "rngs" in args or "rngs" not in inspect.signature(make.__init__).parameters:
        return {}
    from flax import nnx

    return {"rngs": nnx.Rngs(seed)}


def _seed_torch(seed: int) -> None:
    """Seed the first values of a torch module, if there is torch."""
    try:
        import torch
    except ImportError:
        return
    torch.manual_seed(seed)


def _keeper(seen: dict[str, Any], name: str) -> Any:
    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        seen[name] = output

    return keep


def _no_layer(model: str, name: str, known: Any) -> BadInput:
    return BadInput(f"model {model}", expected=f"layers among {', '.join(known)}", got=name)


def _line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
