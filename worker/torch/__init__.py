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

from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ps
from ps.reader import MissingRows
from shards import argument_checks
from shards.errors import BadInput
from worker.data.parameters_file import write_file
from worker.job.framework_loop import join_job, make_adapter
from worker.job.row_steps import join_rows, make_row_adapter
from worker.torch.model_tensors import (
    check_names,
    embedding_names,
    find_row_layers,
    load_layers,
    load_torch,
    tensors_of,
)
from worker.torch.onnx import check_exporter, export_model
from worker.torch.optimizers import DistributedOptimizer, EmbeddingOptimizer
from worker.training.context import Context
from worker.training.model_cut import describe_fragments, join_tables

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

_LAYERS = ("Embedding", "EmbeddingBag")
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
    trained, buffers = tensors_of("params", model)
    return _describe(trained, buffers, [*trained, *buffers], settings)


def fragments(model: Any, count: int, **settings: Any) -> ps.Tables:
    """The parameters and buffers of a model as `count` tables of about equal size.

    Strategies such as `decoupled_diloco` exchange each by itself. No tensor is cut. The weights of
    `nn.Embedding` layers, and of heads tied to them, have a table `embeddings` of their own, unless
    `count` is 1. `settings` are those of `params`, for all tables. Raises BadInput as `params`
    does, and for more tables than tensors.
    """
    trained, buffers = tensors_of("fragments", model)
    return describe_fragments(
        {name: tensor.numel() for name, tensor in {**trained, **buffers}.items()},
        embedding_names(model),
        count,
        settings,
        partial(_describe, trained, buffers),
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
    trained, buffers = tensors_of("tables", model)
    if trained or buffers:
        dense[_NET] = params(model, **settings)
    elif settings:
        expected = "no settings, for the model has no parameters beside its rows"
        raise BadInput("tables", expected=expected, got=", ".join(settings))
    layers = find_row_layers("tables", model)
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
    rows = load_layers().ReaderRows(reader, policy)
    for layers in find_row_layers("attach", model).values():
        for layer in layers:
            layer.reader_rows = rows
    return model


def load(model: Any, values: Any) -> Any:
    """Copy trained parameters, such as `trained.params`, into a model; returns the model.

    `values` are tensors or arrays by name, or several tables of them. Buffers that they lack keep
    their values. Raises BadInput for an unknown name, a missing parameter, and another shape.
    """
    torch = load_torch()
    values = join_tables(values)
    trained, buffers = tensors_of("load", model)
    tensors = {**trained, **buffers}
    check_names("load", trained, tensors, set(values))
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
    torch = load_torch()
    check_exporter()
    argument_checks.instance("export_onnx: model", model, torch.nn.Module, "a torch.nn.Module")
    if values is not None:
        load(model, values)
    examples = inputs if isinstance(inputs, tuple) else (inputs,)
    write_file("export_onnx: path", path, ".onnx", lambda: export_model(model, examples, options))
    return path


def wrap(
    model: Any, optimizer: Any, ctx: Context, *, scheduler: Any = None
) -> "DistributedOptimizer":
    """Train a `torch.nn.Module` as the worker of `worker.run` that `ctx` describes.

    The model takes the shards' weights at once, so call this once, before the loop. With
    `optimizer` None each strategy takes its usual steps. A `torch.optim.Optimizer` over the model's
    parameters takes the local steps of a strategy that has such steps, as `local_sgd`, `easgd` and
    `diloco`; its state is saved with the worker's. Raises BadInput for an optimiser
    with a strategy that pushes gradients, because there the shards update by the table's rule.
    A `scheduler` of `torch.optim.lr_scheduler` over the optimiser steps with it, and its state is
    saved, too; one that you step yourself starts afresh in a restarted worker.

    A model with `Embedding` layers takes strategies that work with rows, and no optimiser; each
    step begins with the optimiser's `gather`.
    """
    if find_row_layers("wrap", model):
        return make_row_adapter(partial(EmbeddingOptimizer, model, optimizer, scheduler), ctx)
    return make_adapter(partial(DistributedOptimizer, model, optimizer, scheduler), ctx)


def join(
    job: ps.Job,
    name: str,
    model: Any,
    optimizer: Any = None,
    *,
    scheduler: Any = None,
    **options: Any,
) -> AbstractContextManager[DistributedOptimizer]:
    """Train a model as worker `name` of a job of `ps.start` or `worker.start`, without Spark.

    `model`, `optimizer` and `scheduler` are those of `wrap`; `options` are those of `worker.loop`:
    `steps`, here without end by default, `strategy`, `workers`, `incarnation`, `prefetch`, and
    those of `ps.Job.worker`. The loop's first batch is that of step `client.step` of the worker,
    which is 0 unless `incarnation` continues an earlier one. Leaving the block without an error
    pushes what a window still holds.
    """
    if find_row_layers("wrap", model):
        make_rows = partial(EmbeddingOptimizer, model, optimizer, scheduler)
        return join_rows(make_rows, job, name, **options)
    make = partial(DistributedOptimizer, model, optimizer, scheduler)
    return join_job(make, job, name, **options)
