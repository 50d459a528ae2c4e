"""scikit-learn estimators that train on parameter servers in this process.

    from worker.sklearn import DownpourClassifier

    model = make_pipeline(StandardScaler(), DownpourClassifier(workers=2, strategy="easgd:tau=10"))
    model.fit(X, y).score(X_test, y_test)

They are linear models, or networks of fully connected layers with ReLU between them. The workers
are threads that share the rows; the shards are threads, too. Rows are dense, or sparse matrices of
SciPy, which stay sparse. Of few features, their minibatches are filled in to be centred. Of many, a
step computes with the non-zero values alone, and the weights of the features are the rows of a
sparse table: what the steps have changed them by. Nothing then has the size of all features.
Importing this module loads scikit-learn.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from itertools import pairwise, takewhile
from numbers import Integral
from threading import Barrier, Event
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

import ps
from shards import argument_checks
from shards.extras import missing
from worker.strategies import Strategy, strategy_of
from worker.training import own_loop
from worker.training.layers import (
    FeatureRows,
    Floats,
    backward,
    cross_entropy,
    dense_rule,
    forward,
    softmax,
)
from worker.training.model import Batch

try:
    from scipy import sparse
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.class_weight import compute_sample_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.sparsefuncs import mean_variance_axis
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError:
    raise missing("worker.sklearn", "scikit-learn", "sklearn") from None

__all__ = ["DownpourClassifier", "DownpourRegressor"]

_VALUES = 1 << 20  # of a part of sparse rows that is filled in to predict
_MAX_CENTRED = 1 << 16  # features of sparse rows; centred, a row has no zeros left
_READ_ROWS = 1 << 16  # of a sparse table, in one read
_NET = "net"
_FEATURES = "features"

Layers = list[dict[str, Any]]


class _Downpour(BaseEstimator):  # type: ignore[misc]  # scikit-learn is not checked
    """Base of both estimators: the network, and its training."""

    def __init__(
        self,
        *,
        hidden: int | Sequence[int] = (),
        workers: int = 2,
        shards: int = 1,
        strategy: Strategy | str = "downpour",
        staleness: float | None = None,
        rule: Any = "sgd",
        rate: float = 0.1,
        decay: float = 1e-4,
        batch_size: int = 32,
        epochs: int = 20,
        random_state: Any = None,
    ) -> None:
        self.hidden = hidden
        self.workers = workers
        self.shards = shards
        self.strategy = strategy
        self.staleness = staleness
        self.rule = rule
        self.rate = rate
        self.decay = decay
        self.batch_size = batch_size
        self.epochs = epochs
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _validate(self, X: Any, **options: Any) -> Any:
        """The rows as float64, sparse ones in rows, and `y` if `options` has it."""
        _check_frame(X)
        try:
            return validate_data(self, X, dtype=np.float64, accept_sparse="csr", **options)
        except ValueError as error:
            if not str(error).startswith("Input X contains NaN"):
                raise
            remedy = "fill it in, as by sklearn.impute.SimpleImputer"
            raise ValueError(f"Input X contains NaN: {remedy}") from None

    def _begin(self, X: Any, outputs: int) -> None:
        """Random first weights, and the mean and the scale of each feature."""
        dice = check_random_state(self.random_state)
        self._is_centred = not sparse.issparse(X) or X.shape[1] <= _MAX_CENTRED
        if not self._is_centred:
            self._scales = _find_scales(X)
        elif sparse.issparse(X):
            self._mean, variances = mean_variance_axis(X, 0)
            self._scale = np.sqrt(variances)
        else:
            self._mean, self._scale = X.mean(0), X.std(0)
        if self._is_centred:
            self._scale[self._scale < np.finfo(np.float32).eps] = 1.0
        sizes = [X.shape[1], *_layer_sizes(self.hidden), outputs]
        # By feature, so that the first weights of some are known without those of all.
        deviation, seed = 1 / np.sqrt(sizes[0]), int(dice.randint(2**31 - 1))
        is_linear = not self._is_centred and len(sizes) == 2
        self._first_values = ps.Zeros() if is_linear else ps.Normal(float(deviation)), seed
        self.layers_: Layers = [
            {
                "w": (dice.standard_normal((before, after)) / np.sqrt(before)).astype(np.float32),
                "b": np.zeros(after, np.float32),
            }
            for before, after in pairwise(sizes[1:])
        ]
        features = np.arange(sizes[0] if self._is_centred else 0)
        first: Any = self._draw_weights(features, sizes[1])
        if not self._is_centred:
            first = FeatureRows(features, first)
        self.layers_.insert(0, {"w": first, "b": np.zeros(sizes[1], np.float32)})
        self.steps_ = 0

    def _draw_weights(self, features: NDArray[np.int64], outputs: int) -> Floats:
        """The first weights (features, outputs) of some features."""
        values, seed = self._first_values
        return values.make_rows(features.astype(np.uint64), outputs, seed)

    def _weights_of(self, features: NDArray[np.int64]) -> Floats:
        """The present weights of some features, before the steps under way."""
        rows: FeatureRows = self.layers_[0]["w"]
        weights = self._draw_weights(features, rows.rows.shape[1])
        return rows.take(features, weights)

    def _train(self, X: Any, targets: Floats, weights: NDArray[Any], epochs: int) -> None:
        """Continue from the present weights for some epochs; `weights` are those of the rows.

        Their mean over all rows is made 1, so that they do not change the rate.
        """
        X = self._as_trained(X)
        counted = np.flatnonzero(weights)
        if not len(counted):
            raise ValueError("sample_weight: expected a weight above 0, got none")
        # Centred sparse rows are filled in and standardised by minibatch.
        is_filled_in = sparse.issparse(X) and self._is_centred
        has_rows = sparse.issparse(X) and not self._is_centred
        inputs = X[counted] if is_filled_in else self._standardise(X[counted]).astype(np.float32)
        targets = targets[counted]
        shares = (weights[counted] / weights[counted].mean()).astype(np.float32)
        rows = len(counted)
        workers = min(argument_checks.whole("workers", self.workers, 1), rows)
        size = argument_checks.whole("batch_size", self.batch_size, 1)
        epochs = argument_checks.whole("epochs", epochs, 1)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1)) + self.steps_
        how: dict[str, Any] = {
            "strategy": _divide_pushes(self.strategy, workers),
            "workers": workers,
        }
        bound: dict[str, Any] = {} if self.staleness is None else {"staleness": self.staleness}
        registered = Barrier(workers)  # so that the first synchronous round has all workers
        interrupted = Event()

        def take_steps(number: int) -> int:
            indices = range(number, rows, workers)
            columns = {"x": inputs, "target": targets, "share": shares}
            batches = _batches(columns, indices, size, epochs, seed + number, registered)
            batches = takewhile(lambda _: not interrupted.is_set(), batches)
            if is_filled_in:
                batches = map(self._densify, batches)
            steps = epochs * -(-len(indices) // size)
            try:
                if has_rows:
                    own_loop.check_row_strategy(job, how["strategy"], workers)
                    return self._take_row_steps(job, f"w{number}", batches)
                return own_loop.loop(
                    job, f"w{number}", self._gradient, batches, steps=steps, seed=number, **how
                ).steps
            except BaseException:
                registered.abort()
                raise

        with (
            own_loop.start(
                self._tables(has_rows), on="threads", shards=self.shards, **bound, **how
            ) as job,
            ThreadPoolExecutor(workers, "worker") as pool,
        ):
            futures = [pool.submit(take_steps, number) for number in range(workers)]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
                self.steps_ += sum(future.result() for future in futures)
            except KeyboardInterrupt:
                interrupted.set()
                wait(futures)
                self.steps_ += sum(future.result() for future in futures if not future.exception())
                self.layers_ = self._read_layers(job, inputs)
                raise
            self.layers_ = self._read_layers(job, inputs)

    def _tables(self, has_rows: bool) -> ps.Dense | ps.Tables:
        """The layers as one table; with rows the first layer's weights are in a sparse one."""
        how: dict[str, Any] = {"rule": self.rule, "rate": self.rate}
        if not has_rows:
            return ps.Dense.like(self.layers_, decay=self.decay, **how)
        first, *rest = self.layers_
        of_net = {**how, "rule": dense_rule(self.rule), "decay": self.decay}
        dense = ps.Dense.like([{"b": first["b"]}, *rest], **of_net)
        # Their decay is part of the gradient, because the rows are differences of weights.
        rows = ps.Sparse(len(first["b"]), init=ps.Zeros(), **how)
        return ps.Tables({_NET: dense, _FEATURES: rows})

    def _take_row_steps(self, job: ps.Job, name: str, batches: Iterator[Batch]) -> int:
        """Take a step for each batch of sparse rows, over the features that it has."""
        decay = np.float32(argument_checks.number("decay", self.decay, least=0))
        steps = 0
        with job.worker(name) as me:
            for batch in batches:
                X, share = cast(Any, batch["x"]), batch["share"]
                features, columns = np.unique(X.indices, return_inverse=True)
                ids = features.astype(np.int64)
                with me.step(samples=len(share), gather={_FEATURES: ids}) as step:
                    first, *rest = step.pull(_NET)
                    present = self._weights_of(ids) + step.rows(_FEATURES)
                    packed = sparse.csr_array(
                        (X.data, columns.reshape(-1), X.indptr), (len(share), len(features))
                    )
                    layers = [{"w": present, **first}, *rest]
                    step.loss, gradient = self._gradient(layers, {**batch, "x": packed})
                    step.push(_NET, [{"b": gradient[0]["b"]}, *gradient[1:]])
                    step.scatter(_FEATURES, gradient[0]["w"] + decay * present)
                steps += 1
        return steps

    def _read_layers(self, job: ps.Job, inputs: Any) -> Layers:
        """The layers as the shards have them."""
        if not job.tables.sparse:
            return cast(Layers, job.read())
        features = np.unique(inputs.indices).astype(np.int64)
        weights = self._weights_of(features)
        with job.reader() as reader:
            first, *rest = reader.pull(_NET)
            for begin in range(0, len(features), _READ_ROWS):
                part = slice(begin, begin + _READ_ROWS)
                weights[part] += reader.gather(_FEATURES, features[part])
        return [{"w": self.layers_[0]["w"].merge(features, weights), **first}, *rest]

    def _as_trained(self, X: Any) -> Any:
        """The rows, sparse if the weights are rows by feature."""
        return X if self._is_centred or sparse.issparse(X) else sparse.csr_array(X)

    def _densify(self, batch: Batch) -> Batch:
        """A minibatch of sparse rows as one of dense rows."""
        return {**batch, "x": self._standardise(batch["x"]).astype(np.float32)}

    def _standardise(self, X: Any) -> Any:
        """Rows in the scale of training, in float64; dense, unless they are sparse and stay so."""
        if not sparse.issparse(X):
            return (X - self._mean) / self._scale
        if self._is_centred:
            return (X.toarray() - self._mean) / self._scale
        scaled = X.copy()
        ones = np.ones((len(X.indices), 1))
        scaled.data /= self._scales.take(X.indices, ones)[:, 0]
        return scaled

    def _scores(self, X: Any) -> Floats:
        check_is_fitted(self, "layers_")
        checked = self._as_trained(self._validate(X, reset=False))
        if not self._is_centred:
            packed, layers = self._pack(checked)
            return cast(Floats, forward(layers, packed)[-1])
        rows, features = checked.shape
        size = max(1, _VALUES // features) if sparse.issparse(checked) else rows
        # In float64, so that a row's value does not depend on the other rows.
        return np.concatenate(
            [
                forward(self.layers_, self._standardise(checked[first : first + size]))[-1]
                for first in range(0, rows, size)
            ]
        )

    def _pack(self, X: Any) -> tuple[Any, Layers]:
        """Sparse rows, standardised, over the features that they have; and the layers for these.

        A feature that was never trained counts as zero.
        """
        scaled = self._standardise(X)
        features, columns = np.unique(X.indices, return_inverse=True)
        first, *rest = self.layers_
        zeros = np.zeros((len(features), len(first["b"])), np.float32)
        packed = sparse.csr_array(
            (scaled.data, columns.reshape(-1), X.indptr), (X.shape[0], len(features))
        )
        return packed, [{**first, "w": first["w"].take(features, zeros)}, *rest]

    def _gradient(self, layers: Layers, batch: Batch) -> tuple[float, Layers]:
        values = forward(layers, batch["x"])
        losses, change = self._loss(values[-1], batch["target"])
        change *= batch["share"][:, None] / np.float32(len(change))
        return float((losses * batch["share"]).mean()), backward(layers, values, change)

    def _loss(self, scores: Floats, targets: Floats) -> tuple[Floats, Floats]:
        """Each row's loss, and its gradient at the scores."""
        raise NotImplementedError


class DownpourClassifier(ClassifierMixin, _Downpour):  # type: ignore[misc]
    """A classifier: logistic regression, or a network with layers of the sizes `hidden`.

    `workers` threads train on equal parts of the rows, with `strategy` (docs/how-to/strategies.md)
    and the bound `staleness`; None is the strategy's own. `rule`, `rate` and `decay` are those of
    `ps.Dense.like`. Features are standardised by the rows of the first call of `fit` or
    `partial_fit`, sparse ones as well. Sparse rows of more than 65,536 features are only scaled:
    they may have millions, and strategies with local steps are then refused. `class_weight` is
    None, a weight for each class, or "balanced". Ctrl-C raises KeyboardInterrupt, and leaves the
    weights of that moment in `layers_`. An asynchronous strategy with several workers gives
    slightly different weights each time, whatever `random_state`; `strategy="bsp"` repeats them.

    Fitted: `classes_`, `layers_`, `steps_` of all workers, `n_features_in_`.
    """

    def __init__(
        self,
        *,
        hidden: int | Sequence[int] = (),
        workers: int = 2,
        shards: int = 1,
        strategy: Strategy | str = "downpour",
        staleness: float | None = None,
        rule: Any = "sgd",
        rate: float = 0.1,
        decay: float = 1e-4,
        batch_size: int = 32,
        epochs: int = 20,
        class_weight: Mapping[Any, float] | str | None = None,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            hidden=hidden,
            workers=workers,
            shards=shards,
            strategy=strategy,
            staleness=staleness,
            rule=rule,
            rate=rate,
            decay=decay,
            batch_size=batch_size,
            epochs=epochs,
            random_state=random_state,
        )
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "DownpourClassifier":
        """Train from random weights for `epochs` passes over the rows."""
        X, y = self._validate(X, y=y)
        check_classification_targets(y)
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise ValueError("fit: expected two classes or more in y, got 1 class")
        weights = _row_weights(sample_weight, X) * compute_sample_weight(self.class_weight, y)
        self._begin(X, len(self.classes_))
        self._train(X, self._targets(y), weights, self.epochs)
        return self

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> "DownpourClassifier":
        """Train for one more pass; the first call needs all `classes`, unless y has them all."""
        first = not hasattr(self, "layers_")
        X, y = self._validate(X, y=y, reset=first)
        check_classification_targets(y)
        if isinstance(self.class_weight, str):
            raise ValueError(
                f"partial_fit: class_weight: expected a weight for each class, got"
                f" {self.class_weight!r}, for which all rows would be needed"
            )
        weights = _row_weights(sample_weight, X) * compute_sample_weight(self.class_weight, y)
        if first:
            self.classes_ = np.unique(y if classes is None else classes)
            self._begin(X, len(self.classes_))
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(f"partial_fit: expected labels in {self.classes_}, got {unknown[0]}")
        self._train(X, self._targets(y), weights, 1)
        return self

    def decision_function(self, X: Any) -> Floats:
        """Each class's score, (rows, classes); for two, the second's minus the first's, (rows,)."""
        scores = self._scores(X)
        return scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Any) -> Floats:
        """Each class's probability, (rows, classes)."""
        return softmax(self._scores(X))

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable class of each row."""
        indices = self._scores(X).argmax(1)
        return cast(NDArray[Any], self.classes_[indices])

    def _targets(self, y: NDArray[Any]) -> Floats:
        return cast(Floats, (y[:, None] == self.classes_).astype(np.float32))

    def _loss(self, scores: Floats, targets: Floats) -> tuple[Floats, Floats]:
        return cross_entropy(scores, targets)


class DownpourRegressor(RegressorMixin, _Downpour):  # type: ignore[misc]
    """A regressor of least squares, linear or a network; options as `DownpourClassifier`.

    `y` is (rows,) or (rows, outputs). It is standardised, too.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "DownpourRegressor":
        """Train from random weights for `epochs` passes over the rows."""
        X, y = self._check_rows(X, y, first=True)
        self._train(X, self._targets(y), _row_weights(sample_weight, X), self.epochs)
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> "DownpourRegressor":
        """Train for one more pass over these rows."""
        X, y = self._check_rows(X, y, first=not hasattr(self, "layers_"))
        self._train(X, self._targets(y), _row_weights(sample_weight, X), 1)
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """The value of each row, of the shape that `y` had."""
        values = self._scores(X) * self._y_scale + self._y_mean
        return cast(NDArray[Any], values[:, 0] if self._flat else values)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _check_rows(self, X: Any, y: Any, *, first: bool) -> tuple[Any, NDArray[Any]]:
        X, y = self._validate(X, y=y, multi_output=True, y_numeric=True, reset=first)
        y = np.asarray(y, np.float64)
        if first:
            self._flat = y.ndim == 1
            columns = y.reshape(len(y), -1)
            self._y_mean, self._y_scale = columns.mean(0), columns.std(0)
            self._y_scale[self._y_scale < np.finfo(np.float32).eps] = 1.0
            self._begin(X, columns.shape[1])
        return X, y

    def _targets(self, y: NDArray[Any]) -> Floats:
        columns = y.reshape(len(y), -1)
        return cast(Floats, ((columns - self._y_mean) / self._y_scale).astype(np.float32))

    def _loss(self, scores: Floats, targets: Floats) -> tuple[Floats, Floats]:
        error = scores - targets
        return cast(Floats, (error**2).sum(1) / 2), error


def _layer_sizes(hidden: object) -> list[int]:
    """The sizes of the hidden layers, from one number or several; raises BadInput."""
    sizes = [hidden] if isinstance(hidden, Integral) else hidden
    checked = argument_checks.iterable("hidden", sizes, "sizes of layers, whole numbers from 1")
    return [argument_checks.whole("hidden", size, 1) for size in checked]


def _divide_pushes(strategy: Strategy | str, workers: int) -> Strategy:
    """The strategy, with the division of each push by the workers stated.

    A strategy that divides by itself warns of it in every fit; here the default rate is meant so.
    """
    chosen = strategy_of("strategy", strategy)
    if getattr(chosen, "scale", 1.0) is None:
        return msgspec.structs.replace(chosen, scale=1 / workers)
    return chosen


def _row_weights(sample_weight: Any, X: Any) -> NDArray[Any]:
    """A weight of 0 or more for each row; 1 for all by default."""
    return cast(
        NDArray[Any],
        _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True),
    )


def _check_frame(X: Any) -> None:
    """Raise ValueError, which names the column, for one of a data frame that holds no numbers."""
    if not (hasattr(X, "iloc") and hasattr(X, "columns")):
        return
    for index, (name, kind) in enumerate(zip(X.columns, X.dtypes, strict=True)):
        if kind.kind in "biuf":
            continue
        remedy = "encode it, as by sklearn.preprocessing.OneHotEncoder, or leave it out"
        if kind.kind in "mM":
            remedy = "convert it to a number, or leave it out"
        else:
            try:
                X.iloc[:, index].to_numpy(np.float64)
                continue
            except (TypeError, ValueError):
                pass
        raise ValueError(f"column {name}: expected numbers, got {kind}: {remedy}")


def _find_scales(X: Any) -> FeatureRows:
    """The standard deviation of each feature of sparse rows that has a value; 1 for constants."""
    features, columns = np.unique(X.indices, return_inverse=True)
    rows, counts = X.shape[0], np.bincount(columns, minlength=len(features))
    means = np.bincount(columns, X.data, len(features)) / rows
    squares = np.bincount(columns, np.square(X.data - means[columns]), len(features))
    scales = np.sqrt((squares + (rows - counts) * np.square(means)) / rows)
    scales[scales < np.finfo(np.float32).eps] = 1.0
    return FeatureRows(features.astype(np.int64), scales[:, None])


def _batches(
    columns: Mapping[str, Any],
    indices: range,
    size: int,
    epochs: int,
    seed: int,
    registered: Barrier,
) -> Iterator[Batch]:
    """A worker's rows, shuffled each epoch; the worker is registered when it asks for the first."""
    registered.wait()
    dice, rows = np.random.default_rng(seed), np.array(indices)
    for _ in range(epochs):
        dice.shuffle(rows)
        for begin in range(0, len(rows), size):
            part = rows[begin : begin + size]
            yield {name: values[part] for name, values in columns.items()}
