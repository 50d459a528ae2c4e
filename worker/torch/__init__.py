"""PyTorch: an ordinary training loop on parameter servers, with any strategy.

    def train(args, ctx):
        model = Net()
        opt = worker.torch.wrap(model, None, ctx)
        for batch in ctx.batches(64, epochs=3):
            f(model, batch).backward()
            opt.step()
            opt.zero_grad()

    trained = worker.run(df, train, params=worker.torch.params(Net(), rate=0.1), strategy="asp")
    worker.torch.load(model, trained.params)

The parameters of a wrapped model are views of one flat array, into which pulled weights are copied.
Each `step` gives its gradient to the worker's strategy and brings the next weights
(framework_loop.py).

The rows of a model's `Embedding` layers come with the ids that each step gathers (row_steps.py).

PyTorch is imported when a function of this module is called.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import ps
from ps.reader import MissingRows
from shards import argument_checks
from shards.errors import BadInput
from shards.extras import missing
from shards.tables import Layout, TensorSpec
from worker.data.parameters_file import write_file
from worker.job.framework_loop import (
    LoopSteps,
    LoopWorker,
    check_takes_optimizer,
    join_job,
    make_adapter,
)
from worker.job.row_steps import RowSteps, RowWorker, join_rows, make_row_adapter
from worker.strategies import Strategy
from worker.torch.fragments import cut_model
from worker.torch.onnx import check_exporter, export_model
from worker.training.context import Context

if TYPE_CHECKING:
    from worker.torch.embeddings import Embedding, EmbeddingBag

__all__ = [
    "DistributedOptimizer",
    "Embedding",
    "EmbeddingBag",
    "attach",
    "export_onnx",
    "fragments",
    "join",
    "load",
    "params",
    "tables",
    "wrap",
]

Floats = NDArray[np.float32]

_LAYERS = ("Embedding", "EmbeddingBag")
_MODEL_WITH_ROWS = "a model with worker.torch.Embedding layers"
_NET = "net"


def __getattr__(name: str) -> Any:
    if name in _LAYERS:
        return getattr(import_module("worker.torch.embeddings"), name)
    raise AttributeError(f"module worker.torch has no attribute {name}")


def params(model: Any, **settings: Any) -> ps.Dense:
    """The table of a `torch.nn.Module`: its parameters and buffers, with their present values.

    `settings` are those of `ps.Dense.like`, such as `rule` and `rate`. Names are those of the
    `state_dict`. Of the buffers, those of float32 that a `state_dict` saves are kept on the shards,
    such as BatchNorm's running means; counters and masks stay with each worker. Parameters that
    require no gradient are never changed. Raises BadInput for parameters that are not float32, and
    for those of lazy layers that have seen no batch.
    """
    trained, buffers = _tensors("params", model)
    return _describe(trained, buffers, [*trained, *buffers], settings)


def fragments(model: Any, count: int, **settings: Any) -> ps.Tables:
    """The parameters and buffers of a model as `count` tables of about equal size.

    Strategies such as `decoupled_diloco` exchange each by itself. No tensor is cut. The weights of
    `nn.Embedding` layers, and of heads tied to them, have a table `embeddings` of their own, unless
    `count` is 1. `settings` are those of `params`, for all tables. Raises BadInput as `params`
    does, and for more tables than tensors.
    """
    count = argument_checks.whole("fragments: count", count, 1)
    trained, buffers = _tensors("fragments", model)
    sizes = {name: tensor.numel() for name, tensor in {**trained, **buffers}.items()}
    multipliers = settings.pop("multipliers", None) or {}
    _check_names("fragments: multipliers", {}, {**trained, **buffers}, set(multipliers))
    return ps.Tables(
        {
            table: _describe(
                trained,
                buffers,
                names,
                {**settings, "multipliers": {n: multipliers[n] for n in names if n in multipliers}},
            )
            for table, names in cut_model(sizes, _embedding_names(model), count).items()
        }
    )


def _describe(
    trained: dict[str, Any], buffers: dict[str, Any], names: list[str], settings: dict[str, Any]
) -> ps.Dense:
    """The table of these tensors."""
    tensors = {**trained, **buffers}
    frozen = {n: (0.0, 0.0) for n in names if n in trained and not trained[n].requires_grad}
    return ps.Dense.like(
        {name: tensors[name].detach().cpu().clone() for name in names},
        **{
            **settings,
            "multipliers": {**frozen, **(settings.get("multipliers") or {})},
            "buffers": tuple(name for name in names if name in buffers),
        },
    )


def tables(model: Any, **settings: Any) -> ps.Tables:
    """The tables of a model with `Embedding` layers: `net`, and those that the layers name.

    `net` has the parameters and buffers, as `params` describes them with these `settings`; a model
    without any has no such table. Raises BadInput as `params` does, and where two layers describe
    a table differently.
    """
    dense: dict[str, ps.Dense | ps.Sparse] = {}
    trained, buffers = _tensors("tables", model)
    if trained or buffers:
        dense[_NET] = params(model, **settings)
    elif settings:
        expected = "no settings, for the model has no parameters beside its rows"
        raise BadInput("tables", expected=expected, got=", ".join(settings))
    layers = _layers("tables", model)
    if _NET in layers:
        got = f"{_NET}, which the parameters have"
        raise BadInput(f"tables: {layers[_NET][0].label}", expected="another table", got=got)
    return ps.Tables({**dense, **{name: of_table[0].sparse for name, of_table in layers.items()}})


def attach(model: Any, reader: Any, *, missing: str = "init") -> Any:
    """Let the `Embedding` layers of a model read their rows through a reader; returns the model.

    `reader` is a `ps.Reader`, or another object that gathers rows as one does. A forward pass
    outside a step then reads the rows of its ids, pushes nothing, and makes a round trip a layer.
    `missing` is that of `ps.Reader.gather`. The other parameters stay as they are:
    `load(model, reader.pull("net"))` brings them. Raises BadInput for another `missing`.
    """
    if not callable(getattr(reader, "gather", None)):
        raise argument_checks.wrong("attach: reader", "a ps.Reader", reader)
    policy = argument_checks.choice("attach: missing", missing, MissingRows)
    rows = _embeddings().ReaderRows(reader, policy)
    for layers in _layers("attach", model).values():
        for layer in layers:
            layer.reader_rows = rows
    return model


def load(model: Any, values: Any) -> Any:
    """Copy trained parameters, such as `trained.params`, into a model; returns the model.

    `values` are tensors or arrays by name, or several tables of them. Buffers that they lack keep
    their values. Raises BadInput for an unknown name, a missing parameter, and another shape.
    """
    torch = _torch()
    if values and all(isinstance(value, Mapping) for value in values.values()):
        values = {name: value for table in values.values() for name, value in table.items()}
    trained, buffers = _tensors("load", model)
    tensors = {**trained, **buffers}
    _check_names("load", trained, tensors, set(values))
    for name, value in values.items():
        if tuple(value.shape) != tuple(tensors[name].shape):
            expected, got = tuple(tensors[name].shape), tuple(value.shape)
            raise BadInput(f"load: {name}", expected=f"shape {expected}", got=got)
    with torch.no_grad():
        for name, value in values.items():
            tensors[name].copy_(torch.as_tensor(value))
    return model


def export_onnx(
    model: Any, inputs: Any, path: str | Path, *, values: Any = None, **options: Any
) -> str | Path:
    """Write a model as an ONNX file, which other runtimes predict with; returns the path or URI.

    `inputs` is an example of what the model is called with, rows first: a tensor or an array, or a
    tuple of several. Its values do not matter; the file takes any number of rows. `values` are
    trained parameters, such as `trained.params`, which are copied into the model first. The model
    is exported in evaluation mode, so dropout is off and BatchNorm uses its running means; its own
    mode stays as it is. `options` are further ones of `torch.onnx.export`, such as `input_names`
    and `opset_version`. Needs the extra `onnx`. Raises BadInput for a model that cannot be
    exported, GiveUp where the file cannot be written.
    """
    torch = _torch()
    check_exporter()
    argument_checks.instance("export_onnx: model", model, torch.nn.Module, "a torch.nn.Module")
    if values is not None:
        load(model, values)
    examples = inputs if isinstance(inputs, tuple) else (inputs,)
    write_file("export_onnx: path", path, ".onnx", lambda: export_model(model, examples, options))
    return path


def wrap(model: Any, optimizer: Any, ctx: Context) -> "DistributedOptimizer":
    """Train a `torch.nn.Module` as the worker of `worker.run` that `ctx` describes.

    The model takes the shards' weights at once, so call this once, before the loop. With
    `optimizer` None each strategy takes its usual steps. A `torch.optim.Optimizer` over the model's
    parameters takes the local steps of a strategy that has such steps, as `local_sgd`, `easgd` and
    `diloco`; its state stays with the worker and is lost with it. Raises BadInput for an optimiser
    with a strategy that pushes gradients, because there the shards update by the table's rule.

    A model with `Embedding` layers takes strategies that work with rows, and no optimiser; each
    step begins with the optimiser's `gather`.
    """
    if _layers("wrap", model):
        return make_row_adapter(partial(_EmbeddingOptimizer, model, optimizer), ctx)
    return make_adapter(partial(DistributedOptimizer, model, optimizer), ctx)


def join(
    job: ps.Job, name: str, model: Any, optimizer: Any = None, **options: Any
) -> AbstractContextManager["DistributedOptimizer"]:
    """Train a model as worker `name` of a job of `ps.start` or `worker.start`, without Spark.

    `model` and `optimizer` are those of `wrap`; `options` are those of `worker.loop`: `steps`, here
    without end by default, `strategy`, `workers`, `incarnation`, `prefetch`, and those of
    `ps.Job.worker`. The loop's first batch is that of step `client.step` of the worker, which is 0
    unless `incarnation` continues an earlier one. Leaving the block without an error pushes what a
    window still holds.
    """
    if _layers("wrap", model):
        return join_rows(partial(_EmbeddingOptimizer, model, optimizer), job, name, **options)
    return join_job(partial(DistributedOptimizer, model, optimizer), job, name, **options)


class DistributedOptimizer:
    """Takes the steps of a model's worker; made by `wrap` and `join`. Not for use by two threads.

    Between two steps the model has the weights for the next gradient.
    """

    def __init__(self, model: Any, optimizer: Any, me: LoopWorker) -> None:
        _check_optimizer(optimizer, model, me.plan.strategy)
        self.model = model
        self.optimizer = optimizer
        self.client = me.client
        self._job = me.job
        self._arena = _Arena(model, me.layout)
        optimized = None if optimizer is None else self._step_optimizer
        self._steps = LoopSteps(me, show=self._arena.show, optimized=optimized)

    @property
    def lost(self) -> str:
        """The state that a restarted worker continues without, in words; empty if none."""
        return self._steps.lost

    def gather(self, ids: Mapping[str, Any]) -> None:
        """Begin a step of a model with `Embedding` layers: bring the weights, and rows by id.

        `ids` has, by table, all ids that the forward passes of the step read: int64 tensors or
        arrays of any shape, or a list of several; those of padding need no row. Waits at the
        staleness bound. Raises BadInput for a model without such layers, for what is no id, and
        before `step` has ended the last one.
        """
        raise BadInput("gather", expected=_MODEL_WITH_ROWS, got="none")

    def prefetch(self, ids: Mapping[str, Any]) -> None:
        """Request now what the `gather` of a coming step with these ids will bring.

        The first call is for the next step, a further one for the step after the last that was
        requested; the answers travel while this process computes. A step of other ids reads again.
        A step that is requested n steps early may miss n more pushes, of this worker's, too; the
        staleness bound holds. Raises BadInput as `gather` does, and for more than 64 steps.
        """
        raise BadInput("prefetch", expected=_MODEL_WITH_ROWS, got="none")

    def step(self, *, loss: Any = 0.0, samples: int | None = None) -> None:
        """Take one step with the gradients in the parameters' `grad`, and bring the next weights.

        A model with `Embedding` layers gets the next weights from `gather`.

        Waits at the staleness bound. `loss` is for the records: a number or a tensor of one, of
        which the value is read. `samples` is the number of rows of the step; None: those that `ctx`
        has read since the last one. Raises BadInput after the last step of the job's `max_iter`.
        """
        # An optimiser reads the gradients itself; the array is then room for the contribution.
        weights, gradient = self._steps.begin()
        if self.optimizer is None:
            gradients = self._arena.gradients(weights)
            for table in self._arena.layout.tables:
                named = {spec.name: gradients[spec.name] for spec in table.tensors}
                self._job.views.write(table.name, named, gradient)
        self._steps.take(gradient, loss, samples)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the parameters, or set them to zero."""
        self.model.zero_grad(set_to_none)

    def finish(self) -> None:
        """Push what a window still holds and wait until all pushes are applied; no step follows.

        The end of the function of `worker.run`, or of the block of `join`, does this.
        """
        self._steps.finish()

    def _step_optimizer(self) -> Floats:
        """The weights after a step of the optimiser, in the arena of the model."""
        self.optimizer.step()
        return self._arena.read()


class _EmbeddingOptimizer(DistributedOptimizer):
    """Takes the steps of a model with `Embedding` layers."""

    def __init__(self, model: Any, optimizer: Any, me: RowWorker) -> None:
        _check_optimizer(optimizer, model, me.strategy)
        self.model = model
        self.optimizer = optimizer
        self.client = me.client
        self._row_steps = RowSteps(me)
        self._layers = _layers("wrap", model)
        _check_row_tables(self._layers, me.job)
        table = self._row_steps.table
        if table is None:
            _check_names("wrap: the job's tables", _tensors("wrap", model)[0], {}, set())
        self._net = None if table is None else _Arena(model, Layout((table,)))
        if self._net is not None:
            self._net.show(self._row_steps.pull())
        self._weights = np.empty(0, np.float32)
        self._padding = {name: layers[0].padding_idx for name, layers in self._layers.items()}
        self._step_rows: dict[str, Any] = {}

    @property
    def lost(self) -> str:
        return self._row_steps.lost

    def prefetch(self, ids: object) -> None:
        self._row_steps.prefetch(self._distinct_ids("prefetch", ids))

    def _distinct_ids(self, label: str, ids: object) -> dict[str, Any]:
        """The ids that need rows, by table; raises BadInput."""
        if not isinstance(ids, Mapping):
            raise argument_checks.wrong(label, "a dict of ids by table", ids)
        return {
            name: _embeddings().distinct_ids(f"{label}: {name}", value, self._padding.get(name))
            for name, value in ids.items()
        }

    def gather(self, ids: object) -> None:
        embeddings, device, padding = _embeddings(), self._device, self._padding
        distinct = self._distinct_ids("gather", ids)
        self._weights = self._row_steps.begin(distinct)
        if self._net is not None:
            self._net.show(self._weights)
        self._step_rows = {
            name: embeddings.TableRows(
                of_table, self._row_steps.rows(name), padding=padding.get(name), device=device
            )
            for name, of_table in distinct.items()
        }
        for rows in self._step_rows.values():
            rows.tensor.requires_grad_()
        self._show_rows(self._step_rows)

    def step(self, *, loss: Any = 0.0, samples: int | None = None) -> None:
        gradients = {} if self._net is None else self._net.gradients(self._weights)
        rows = {name: rows.gradient for name, rows in self._step_rows.items()}
        self._row_steps.take(
            gradients,
            {name: gradient for name, gradient in rows.items() if gradient is not None},
            loss=loss,
            samples=samples,
        )
        self._show_rows(None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for rows in self._step_rows.values():
            rows.tensor.grad = None

    def finish(self) -> None:
        self._show_rows(None)
        self._row_steps.finish()

    @property
    def _device(self) -> Any:
        parameter = next(self.model.parameters(), None)
        return "cpu" if parameter is None else parameter.device

    def _show_rows(self, rows: Any) -> None:
        """Give the layers the rows of a step, or None after it."""
        self._step_rows = rows or {}
        for layers in self._layers.values():
            for layer in layers:
                layer.step_rows = rows


class _Arena:
    """One flat array of the tables' size that the model's parameters and buffers are views of."""

    def __init__(self, model: Any, layout: Layout) -> None:
        self.layout = layout
        torch = _torch()
        trained, buffers = _tensors("wrap", model)
        tensors = {**trained, **buffers}
        _check_names(
            "wrap: the job's table",
            trained,
            tensors,
            {spec.name for table in layout.tables for spec in table.tensors},
        )
        devices = {tensor.device for tensor in tensors.values()}
        if len(devices) != 1:
            named = ", ".join(sorted(map(str, devices)))
            raise BadInput("wrap: model", expected="one device", got=named)
        self._host = layout.empty()
        self._on_device = torch.from_numpy(self._host).to(*devices)  # on the CPU the same memory
        self._trained = trained
        self._buffers: dict[str, tuple[Any, str, Any]] = {}
        self._slices: dict[str, tuple[slice, tuple[int, ...]]] = {}
        modules = dict(model.named_modules())
        for spec, start in _places(layout):
            if tuple(tensors[spec.name].shape) != spec.shape:
                got = tuple(tensors[spec.name].shape)
                raise BadInput(f"wrap: {spec.name}", expected=f"shape {spec.shape}", got=got)
            if spec.buffer != (spec.name in buffers):
                raise BadInput(
                    f"wrap: {spec.name}",
                    expected=(
                        "a buffer of the model to be one of the table: "
                        "worker.torch.params describes it"
                    ),
                )
            extent = slice(start, start + spec.size)
            view = self._on_device[extent].view(spec.shape)
            if spec.buffer:
                path, _, attribute = spec.name.rpartition(".")
                self._slices[spec.name] = (extent, spec.shape)
                self._buffers[spec.name] = modules[path], attribute, view
            else:
                trained[spec.name].data = view
        self._attach()

    def show(self, weights: Floats) -> None:
        """Give the model these weights."""
        if weights is not self._host:
            np.copyto(self._host, weights)
        if self._on_device.device.type != "cpu":
            self._on_device.copy_(_torch().from_numpy(self._host))
        self._attach()

    def read(self) -> Floats:
        """The model's weights and buffers: memory that they are in, or are copied to."""
        self._gather()
        if self._on_device.device.type != "cpu":
            self._host[:] = self._on_device.cpu().numpy()
        return self._host

    def gradients(self, weights: Floats) -> dict[str, Any]:
        """The gradients by name; of buffers what they lost since the model was given `weights`."""
        gradients = {name: parameter.grad for name, parameter in self._trained.items()}
        if self._buffers:
            now = self.read()
            for name, (extent, shape) in self._slices.items():
                gradients[name] = (weights[extent] - now[extent]).reshape(shape)
        return gradients

    def _attach(self) -> None:
        """Make the buffers views."""
        for module, attribute, view in self._buffers.values():
            module._buffers[attribute] = view

    def _gather(self) -> None:
        """Copy buffers that the model has replaced by assignment."""
        with _torch().no_grad():
            for module, attribute, view in self._buffers.values():
                if module._buffers[attribute] is not view:
                    view.copy_(module._buffers[attribute])


def _embedding_names(model: Any) -> list[str]:
    """The weights of `nn.Embedding` layers, by their names in the model.

    A head that is tied to one has the same parameter, which the model may name after the head.
    """
    layer_kind = _torch().nn.Embedding
    weights = {id(layer.weight) for layer in model.modules() if isinstance(layer, layer_kind)}
    return [name for name, tensor in model.named_parameters() if id(tensor) in weights]


def _places(layout: Layout) -> list[tuple[TensorSpec, int]]:
    """Each tensor, and where it begins in the arena."""
    return [
        (spec, layout.section(table.name).start + offset)
        for table in layout.tables
        for spec, offset in zip(table.tensors, table.offsets, strict=True)
    ]


def lazy_names(model: Any) -> list[str]:
    """The tensors of a model that have no shape yet: lazy layers take it from their first batch."""
    is_lazy = _torch().nn.parameter.is_lazy
    tensors = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in tensors if is_lazy(tensor)]


def _tensors(label: str, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of a model by name, and the buffers that workers share."""
    torch = _torch()
    argument_checks.instance(f"{label}: model", model, torch.nn.Module, "a torch.nn.Module")
    if lazy := lazy_names(model):
        raise BadInput(
            f"{label}: {lazy[0]}",
            expected="a parameter with a shape",
            got="one of a lazy layer: call the model on one batch first, as model(batch)",
        )
    trained = dict(model.named_parameters())
    for name, parameter in trained.items():
        if parameter.dtype != torch.float32:
            raise BadInput(
                f"{label}: {name}",
                expected="a parameter of float32",
                got=parameter.dtype,
                hint="autocast computes in shorter types",
            )
    saved = model.state_dict(keep_vars=True)
    buffers = {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in saved and buffer.dtype == torch.float32
    }
    return trained, buffers


def _check_names(
    label: str, trained: dict[str, Any], tensors: dict[str, Any], names: set[str]
) -> None:
    """Raise BadInput unless all parameters are given, and nothing that the model does not have."""
    missing, unknown = sorted(trained.keys() - names), sorted(names - tensors.keys())
    if missing:
        raise BadInput(label, expected=f"the parameter {missing[0]} of the model", got="none")
    if unknown:
        raise BadInput(label, expected="tensors of the model", got=unknown[0])


def _embeddings() -> Any:
    """The module of the layers, which loads PyTorch."""
    _torch()
    return import_module("worker.torch.embeddings")


def _layers(label: str, model: Any) -> dict[str, list[Any]]:
    """The layers of a model over sparse tables, by table."""
    torch = _torch()
    argument_checks.instance(f"{label}: model", model, torch.nn.Module, "a torch.nn.Module")
    layers: dict[str, list[Any]] = _embeddings().layers_of(label, model)
    return layers


def _check_row_tables(layers: dict[str, list[Any]], job: ps.Job) -> None:
    """Raise BadInput unless the job has the table of each layer."""
    sparse = job.tables.sparse
    for table, (layer, *_) in layers.items():
        if table not in sparse:
            expected = f"a sparse table {table} in the job: worker.torch.tables describes it"
            raise BadInput(f"wrap: {layer.label}", expected=expected, got=", ".join(job.tables))
        if sparse[table].dim != layer.embedding_dim:
            expected = f"rows of {sparse[table].dim} floats, as the job has"
            raise BadInput(f"wrap: {layer.label}", expected=expected, got=layer.embedding_dim)


def _check_optimizer(optimizer: Any, model: Any, strategy: Strategy) -> None:
    if optimizer is None:
        return
    torch = _torch()
    expected = "a torch.optim.Optimizer or None"
    argument_checks.instance("wrap: optimizer", optimizer, torch.optim.Optimizer, expected)
    check_takes_optimizer("wrap", optimizer, strategy, "worker.torch.params")
    of_model = {id(parameter) for parameter in model.parameters()}
    if any(
        id(parameter) not in of_model
        for group in optimizer.param_groups
        for parameter in group["params"]
    ):
        raise BadInput("wrap: optimizer", expected="parameters of the model", got="others")


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise missing("worker.torch", "PyTorch", "torch") from None
    return torch
