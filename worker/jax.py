"""JAX: a loop over pytrees on parameter servers, with any strategy.

    def train(args, ctx):
        opt = worker.jax.wrap(init(), None, ctx)
        step = jax.jit(jax.value_and_grad(loss))
        for batch in ctx.batches(64, epochs=3):
            value, grads = step(opt.params, batch["x"], batch["y"])
            opt.step(grads, loss=value)

    trained = worker.run(df, train, params=worker.jax.params(init(), rate=0.1), strategy="asp")
    params = worker.jax.load(init(), trained.params)

`opt.params` are arrays of JAX on its default device. On the CPU those that were pulled are the
memory in which they arrived, because JAX never writes to an array; a strategy's own weights are
copied. Each `step` gives its gradient to the worker's strategy and brings the next weights
(framework_loop.py).

JAX is imported when a function of this module is called.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ps
from ps.client import Client
from ps.pytree import Structure
from ps.table_views import TableViews
from shards import argument_checks
from shards.errors import BadInput
from shards.extras import missing
from shards.tables import Layout
from worker.job.framework_loop import (
    LoopSteps,
    LoopWorker,
    check_takes_optimizer,
    join_job,
    make_adapter,
)
from worker.strategies import Strategy
from worker.training.context import Context
from worker.training.model_cut import describe_fragments, join_tables
from worker.training.optimizer_state import OptimizerState, TensorForm, pack, unpack

__all__ = ["DistributedParams", "fragments", "join", "load", "params", "wrap"]

Floats = NDArray[np.float32]


def params(tree: Any, **settings: Any) -> ps.Dense:
    """The table of a pytree of float32 arrays, with their present values.

    An array is named by its path in the tree, joined by dots, as `Dense_0.kernel`. `settings` are
    those of `ps.Dense.like`, such as `rule` and `rate`. Raises BadInput for arrays of another type.
    """
    values = {name: np.asarray(array) for name, array in _name_arrays("params", tree).items()}
    return ps.Dense.like(values, **settings)


def fragments(
    tree: Any, count: int, *, embeddings: Collection[str] = (), **settings: Any
) -> ps.Tables:
    """The arrays of a pytree as `count` tables of about equal size.

    Strategies such as `decoupled_diloco` exchange each by itself. No array is cut. Those named in
    `embeddings`, such as `Embed_0.embedding`, and heads tied to them, have a table of their own,
    unless `count` is 1. `settings` are those of `params`, for all tables. Raises BadInput as
    `params` does, and for more tables than arrays.
    """
    named = _name_arrays("fragments", tree)
    if isinstance(embeddings, str):
        raise argument_checks.wrong("fragments: embeddings", "names of arrays", embeddings)
    return describe_fragments(
        {name: array.size for name, array in named.items()},
        embeddings,
        count,
        settings,
        lambda names, own: ps.Dense.like({n: np.asarray(named[n]) for n in names}, **own),
    )


def load(tree: Any, values: Any) -> Any:
    """The pytree with trained values, such as `trained.params`, in place of its arrays.

    `values` are arrays by name, or several tables of them. Raises BadInput for an unknown name, a
    missing array, and another shape.
    """
    jax = _jax()
    named = _name_arrays("load", tree)
    argument_checks.instance("load: values", values, dict, "a dict of arrays by name")
    values = join_tables(values)
    _check_names("load", named, values)
    for name, array in named.items():
        if values[name].shape != array.shape:
            raise BadInput(f"load: {name}", expected=f"shape {array.shape}", got=values[name].shape)
    leaves = [jax.numpy.array(values[name]) for name in named]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), leaves)


def wrap(tree: Any, optimizer: Any, ctx: Context) -> "DistributedParams":
    """Train a pytree as the worker of `worker.run` that `ctx` describes.

    `tree` gives the structure; its values are replaced by the shards' weights. With `optimizer`
    None each strategy takes its usual steps. An optimiser with Optax's `init` and `update` takes
    the local steps of a strategy that has such steps, as `local_sgd`, `easgd` and `diloco`; its
    state is saved with the worker's. Raises BadInput for an optimiser with a
    strategy that pushes gradients, because there the shards update by the table's rule.
    """
    return make_adapter(partial(DistributedParams, tree, optimizer), ctx)


def join(
    job: ps.Job, name: str, tree: Any, optimizer: Any = None, **options: Any
) -> AbstractContextManager["DistributedParams"]:
    """Train a pytree as worker `name` of a job of `ps.start` or `worker.start`, without Spark.

    `tree` and `optimizer` are those of `wrap`; `options` are those of `worker.loop`: `steps`, here
    without end by default, `strategy`, `workers`, `incarnation`, `prefetch`, and those of
    `ps.Job.worker`. The loop's first batch is that of step `client.step` of the worker, which is 0
    unless `incarnation` continues an earlier one. Leaving the block without an error pushes what a
    window still holds.
    """
    return join_job(partial(DistributedParams, tree, optimizer), job, name, **options)


class DistributedParams:
    """The weights of a worker's loop, and its steps; made by `wrap` and `join`.

    `params` is a pytree of JAX's arrays: the weights for the next gradient. Not for use by two
    threads.
    """

    params: Any

    def __init__(self, tree: Any, optimizer: Any, me: LoopWorker) -> None:
        jax = _jax()
        named = _name_arrays("wrap", tree)
        specs = [spec for table in me.layout.tables for spec in table.tensors]
        _check_names("wrap: the job's table", named, {spec.name for spec in specs})
        for spec in specs:
            if named[spec.name].shape != spec.shape:
                got = named[spec.name].shape
                raise BadInput(f"wrap: {spec.name}", expected=f"shape {spec.shape}", got=got)
        self.client: Client = me.client
        self._jax = jax
        self._names = list(named)
        self._structure = jax.tree_util.tree_structure(tree)
        self._names_by_table = {
            table.name: [spec.name for spec in table.tensors] for table in me.layout.tables
        }
        self._views = TableViews(
            {
                table.name: (
                    table,
                    Structure("wrap", {n: named[n] for n in self._names_by_table[table.name]}),
                )
                for table in me.layout.tables
            }
        )
        self._optimizer: _TreeOptimizer | None = None
        if optimizer is not None:
            _check_optimizer(optimizer, me.plan.strategy)
            self._optimizer = _TreeOptimizer(self, optimizer, me.layout)
        self._steps = LoopSteps(me, show=self._show, optimizer=self._optimizer)

    @property
    def lost(self) -> str:
        """The state that a restarted worker continues without, in words; empty if none."""
        return self._steps.lost

    def step(self, gradients: Any, *, loss: Any = 0.0, samples: int | None = None) -> None:
        """Take one step with the gradients, a pytree as `params`, and bring the next weights.

        Waits at the staleness bound. `loss` is for the records: a number or an array of one, of
        which the value is read. `samples` is the number of rows of the step; None: those that `ctx`
        has read since the last one. Raises BadInput for another tree, and after the last step of
        the job's `max_iter`.
        """
        _, gradient = self._steps.begin()
        if self._jax.tree_util.tree_structure(gradients) != self._structure:
            raise BadInput("step: gradients", expected="a pytree with the structure of `params`")
        if self._optimizer is None:
            self.write(gradients, gradient)
        else:
            self._optimizer.gradients = gradients
        self._steps.take(gradient, loss, samples)

    def finish(self) -> None:
        """Push what a window still holds and wait until all pushes are applied; no step follows.

        The end of the function of `worker.run`, or of the block of `join`, does this.
        """
        self._steps.finish()

    def _show(self, weights: Floats) -> None:
        """Make these weights the parameters.

        Pulled weights are read-only and stay as they are while an array refers to them. So they are
        not copied where JAX can use their memory; `device_put` does copy to a GPU, and from memory
        that is not aligned. The strategy's own weights change in place.
        """
        views = {}
        for table in self._names_by_table:
            views.update(self._views.views(table, weights))
        to_array = self._jax.numpy.array if weights.flags.writeable else self._jax.device_put
        leaves = [to_array(views[name]) for name in self._names]
        self.params = self._jax.tree_util.tree_unflatten(self._structure, leaves)

    def write(self, tree: Any, arena: Floats) -> None:
        """Write the arrays of a tree into an arena, and zeros into its padding; raises BadInput."""
        leaves = self._jax.tree_util.tree_leaves(tree)
        named = dict(zip(self._names, leaves, strict=True))
        for table, names in self._names_by_table.items():
            self._views.write(table, {name: named[name] for name in names}, arena)


class _TreeOptimizer:
    """An optimiser as Optax's, which takes the local steps of a worker's parameters.

    An array of its state is named by its path there.
    """

    def __init__(self, target: DistributedParams, optimizer: Any, layout: Layout) -> None:
        self.gradients: Any = None
        self._jax = _jax()
        self._target = target
        self._optimizer = optimizer
        self._update = self._jax.jit(_make_update(optimizer, self._jax))
        self._state: Any = None
        self._host = layout.empty()

    def step(self) -> Floats:
        """The weights after a step with `gradients`, in an arena of this worker's."""
        target = self._target
        target.params, self._state = self._update(self.gradients, self._state, target.params)
        self.gradients = None
        target.write(target.params, self._host)
        return self._host

    def begin(self, saved: OptimizerState | None) -> None:
        """Make a fresh state, or continue with `saved`; raises BadInput if it does not fit."""
        self._state = self._optimizer.init(self._target.params)
        if saved is None:
            return
        saved.check(self.save())
        named, structure = self._leaves()
        leaves = [
            self._jax.numpy.asarray(
                unpack(name, saved.arrays[name], np.dtype(form.dtype), form.shape)
            )
            if (form := saved.forms.get(name)) is not None
            else leaf
            for name, leaf in named
        ]
        self._state = self._jax.tree_util.tree_unflatten(structure, leaves)

    def save(self) -> OptimizerState:
        """The present state; its arrays are copies."""
        named, _ = self._leaves()
        # A random key of JAX's has no dtype of NumPy's, and stays with the worker.
        arrays = {
            name: np.asarray(leaf)
            for name, leaf in named
            if isinstance(getattr(leaf, "dtype", None), np.dtype)
        }
        return OptimizerState(
            "Optax",
            {name: TensorForm(str(array.dtype), array.shape) for name, array in arrays.items()},
            {name: pack(array) for name, array in arrays.items()},
        )

    def _leaves(self) -> tuple[list[tuple[str, Any]], Any]:
        """The leaves of the state by their paths, and its structure."""
        paths, structure = self._jax.tree_util.tree_flatten_with_path(self._state)
        return [(self._jax.tree_util.keystr(path), leaf) for path, leaf in paths], structure


def _make_update(optimizer: Any, jax: Any) -> Any:
    """A function from gradients, state and parameters to the next parameters and state."""

    def update(gradients: Any, state: Any, tree: Any) -> tuple[Any, Any]:
        changes, state = optimizer.update(gradients, state, tree)
        return jax.tree_util.tree_map(lambda array, change: array + change, tree, changes), state

    return update


def _name_arrays(label: str, tree: Any) -> dict[str, Any]:
    """The arrays of a pytree by their paths, in the order of its leaves; raises BadInput."""
    jax = _jax()
    arrays: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "value"
        dtype = getattr(leaf, "dtype", None)
        if dtype != np.float32:
            got = type(leaf).__name__ if dtype is None else f"one of {dtype}"
            raise BadInput(f"{label}: {name}", expected="an array of float32", got=got)
        if name in arrays:
            raise BadInput(
                f"{label}: {name}", expected="one array of this name in the tree", got="two"
            )
        arrays[name] = leaf
    if not arrays:
        raise BadInput(label, expected="a pytree of arrays", got="none")
    return arrays


def _check_names(label: str, named: dict[str, Any], names: Any) -> None:
    """Raise BadInput unless exactly the arrays of the tree are given."""
    missing, unknown = sorted(named.keys() - set(names)), sorted(set(names) - named.keys())
    if missing:
        raise BadInput(label, expected=f"the array {missing[0]} of the tree", got="none")
    if unknown:
        raise BadInput(label, expected="arrays of the tree", got=unknown[0])


def _check_optimizer(optimizer: Any, strategy: Strategy) -> None:
    if not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
        raise argument_checks.wrong(
            "wrap: optimizer", "None, or one with Optax's init and update", optimizer
        )
    check_takes_optimizer("wrap", optimizer, strategy, "worker.jax.params")


def _jax() -> Any:
    try:
        import jax
    except ImportError:
        raise missing("worker.jax", "JAX", "jax") from None
    return jax
