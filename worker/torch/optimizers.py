"""The optimisers of `worker.torch`, which take the steps of a user's loop.

That of a model with `Embedding` layers also brings the rows of each step (row_steps.py).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ps
from shards import argument_checks
from shards.errors import BadInput
from shards.tables import Layout
from worker.job.framework_loop import LoopSteps, LoopWorker, check_takes_optimizer
from worker.job.row_steps import RowSteps, RowWorker
from worker.strategies import Strategy
from worker.torch.arena import Arena
from worker.torch.local_optimizer import TorchOptimizer
from worker.torch.model_tensors import (
    check_names,
    find_row_layers,
    load_layers,
    load_torch,
    tensors_of,
)

Floats = NDArray[np.float32]

_MODEL_WITH_ROWS = "a model with worker.torch.Embedding layers"


class DistributedOptimizer:
    """Takes the steps of a model's worker; made by `wrap` and `join`. Not for use by two threads.

    Between two steps the model has the weights for the next gradient.
    """

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, me: LoopWorker) -> None:
        check_optimizer(optimizer, model, me.plan.strategy)
        check_scheduler(scheduler, optimizer)
        self.model = model
        self.optimizer = optimizer
        self.client = me.client
        self._job = me.job
        self._arena = Arena(model, me.layout)
        local = (
            None if optimizer is None else TorchOptimizer(optimizer, model, self._arena, scheduler)
        )
        self._steps = LoopSteps(me, show=self._arena.show, optimizer=local)

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


class EmbeddingOptimizer(DistributedOptimizer):
    """Takes the steps of a model with `Embedding` layers."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, me: RowWorker) -> None:
        check_optimizer(optimizer, model, me.strategy)
        check_scheduler(scheduler, optimizer)
        self.model = model
        self.optimizer = optimizer
        self.client = me.client
        self._row_steps = RowSteps(me)
        self._layers = find_row_layers("wrap", model)
        _check_row_tables(self._layers, me.job)
        table = self._row_steps.table
        if table is None:
            check_names("wrap: the job's tables", tensors_of("wrap", model)[0], {}, set())
        self._net = None if table is None else Arena(model, Layout((table,)))
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
            name: load_layers().distinct_ids(f"{label}: {name}", value, self._padding.get(name))
            for name, value in ids.items()
        }

    def gather(self, ids: object) -> None:
        embeddings, device, padding = load_layers(), self._device, self._padding
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


def check_optimizer(optimizer: Any, model: Any, strategy: Strategy) -> None:
    if optimizer is None:
        return
    torch = load_torch()
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


def check_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Raise BadInput unless it can step with the optimiser."""
    if scheduler is None:
        return
    if optimizer is None:
        raise argument_checks.wrong("wrap: scheduler", "None without an optimizer", scheduler)
    schedulers = load_torch().optim.lr_scheduler
    expected = "a torch.optim.lr_scheduler.LRScheduler or None"
    argument_checks.instance("wrap: scheduler", scheduler, schedulers.LRScheduler, expected)
    if isinstance(scheduler, schedulers.ReduceLROnPlateau):
        expected = "a scheduler that steps without a metric; step this one yourself"
        raise BadInput("wrap: scheduler", expected=expected, got="ReduceLROnPlateau")
    if scheduler.optimizer is not optimizer:
        raise BadInput("wrap: scheduler", expected="one of this optimizer", got="another one's")
