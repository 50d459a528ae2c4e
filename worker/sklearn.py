"""scikit-learn estimators that train on parameter servers in this process.

    from worker.sklearn import DownpourClassifier

    model = make_pipeline(StandardScaler(), DownpourClassifier(workers=2, strategy="easgd:tau=10"))
    model.fit(X, y).score(X_test, y_test)

They are linear models, or networks of fully connected layers with ReLU between them. The workers
are threads that share the rows; the shards are threads, too. Importing this module loads
scikit-learn.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from itertools import pairwise, takewhile
from threading import Barrier, Event
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

import ps
from shards import argument_checks
from shards.extras import missing
from worker import own_loop
from worker.model import Batch
from worker.strategies import Strategy

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:
    raise missing("worker.sklearn", "scikit-learn", "sklearn") from None

__all__ = ["DownpourClassifier", "DownpourRegressor"]

Floats = NDArray[np.float32]
Layers = list[dict[str, Floats]]


class _Downpour(BaseEstimator):  # type: ignore[misc]  # scikit-learn is not checked
    """What both estimators share: the network, and its training."""

    def __init__(
        self,
        *,
        hidden: Sequence[int] = (),
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

    def _begin(self, X: NDArray[Any], outputs: int) -> None:
        """Random first weights, and the scale of each feature, by which it is divided."""
        dice = check_random_state(self.random_state)
        self._mean = X.mean(0)
        self._scale = X.std(0)
        self._scale[self._scale < np.finfo(np.float32).eps] = 1.0
        sizes = [X.shape[1], *self.hidden, outputs]
        self.layers_: Layers = [
            {
                "w": (dice.standard_normal((before, after)) / np.sqrt(before)).astype(np.float32),
                "b": np.zeros(after, np.float32),
            }
            for before, after in pairwise(sizes)
        ]
        self.steps_ = 0

    def _train(self, X: NDArray[Any], targets: Floats, epochs: int) -> None:
        """Continue from the present weights for some epochs."""
        inputs = ((X - self._mean) / self._scale).astype(np.float32)
        workers = min(argument_checks.whole("workers", self.workers, 1), len(inputs))
        size = argument_checks.whole("batch_size", self.batch_size, 1)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1)) + self.steps_
        table = ps.Dense.like(self.layers_, rule=self.rule, rate=self.rate, decay=self.decay)
        how: dict[str, Any] = {"strategy": self.strategy, "workers": workers}
        bound: dict[str, Any] = {} if self.staleness is None else {"staleness": self.staleness}
        registered = Barrier(workers)  # so that the first synchronous round has all workers
        interrupted = Event()

        def take_steps(number: int) -> int:
            own = range(number, len(inputs), workers)
            batches = _batches(inputs, targets, own, size, epochs, seed + number, registered)
            batches = takewhile(lambda _: not interrupted.is_set(), batches)
            steps = epochs * -(-len(own) // size)
            try:
                return own_loop.loop(
                    job, f"w{number}", self._gradient, batches, steps=steps, seed=number, **how
                ).steps
            except BaseException:
                registered.abort()
                raise

        with (
            own_loop.start(table, on="threads", shards=self.shards, **bound, **how) as job,
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
                self.layers_ = cast(Layers, job.read())
                raise
            self.layers_ = cast(Layers, job.read())

    def _scores(self, X: NDArray[Any]) -> Floats:
        check_is_fitted(self, "layers_")
        checked = validate_data(self, X, reset=False, dtype=np.float64)
        # In float64, so that a row's value does not depend on the other rows.
        return _forward(self.layers_, (checked - self._mean) / self._scale)[-1]

    def _gradient(self, layers: Layers, batch: Batch) -> tuple[float, Layers]:
        values = _forward(layers, batch["x"])
        loss, change = self._loss(values[-1], batch["target"])
        change /= np.float32(len(change))
        gradients: Layers = []
        for layer, before in zip(reversed(layers), reversed(values[:-1]), strict=True):
            gradients.append({"w": before.T @ change, "b": change.sum(0)})
            change = (change @ layer["w"].T) * (before > 0)
        return loss, gradients[::-1]

    def _loss(self, scores: Floats, targets: Floats) -> tuple[float, Floats]:
        """The mean loss of a batch, and each row's gradient at the scores."""
        raise NotImplementedError


class DownpourClassifier(ClassifierMixin, _Downpour):  # type: ignore[misc]
    """A classifier: logistic regression, or a network with layers of the sizes `hidden`.

    `workers` threads train on equal parts of the rows, with `strategy` (docs/how-to/strategies.md)
    and the bound `staleness`; None is the strategy's own. `rule`, `rate` and `decay` are those of
    `ps.Dense.like`. Features are standardised by the rows of the first call of `fit` or
    `partial_fit`. Ctrl-C raises KeyboardInterrupt, and leaves the weights of that moment in
    `layers_`. An asynchronous strategy with several workers gives slightly different weights
    each time, whatever `random_state`; `strategy="bsp"` repeats them.

    Fitted: `classes_`, `layers_`, `steps_` of all workers, `n_features_in_`.
    """

    def fit(self, X: Any, y: Any) -> "DownpourClassifier":
        """Train from random weights for `epochs` passes over the rows."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise ValueError("fit: expected two classes or more in y, got 1 class")
        self._begin(X, len(self.classes_))
        self._train(X, self._targets(y), self.epochs)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> "DownpourClassifier":
        """Train for one more pass; the first call needs all `classes`, unless y has them all."""
        first = not hasattr(self, "layers_")
        X, y = validate_data(self, X, y, dtype=np.float64, reset=first)
        check_classification_targets(y)
        if first:
            self.classes_ = np.unique(y if classes is None else classes)
            self._begin(X, len(self.classes_))
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(f"partial_fit: expected labels in {self.classes_}, got {unknown[0]}")
        self._train(X, self._targets(y), 1)
        return self

    def decision_function(self, X: Any) -> Floats:
        """Each class's score, (rows, classes); for two, the second's minus the first's, (rows,)."""
        scores = self._scores(X)
        return scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Any) -> Floats:
        """Each class's probability, (rows, classes)."""
        return _softmax(self._scores(X))

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable class of each row."""
        found = self._scores(X).argmax(1)
        return cast(NDArray[Any], self.classes_[found])

    def _targets(self, y: NDArray[Any]) -> Floats:
        return cast(Floats, (y[:, None] == self.classes_).astype(np.float32))

    def _loss(self, scores: Floats, targets: Floats) -> tuple[float, Floats]:
        chances = _softmax(scores)
        loss = -np.log(np.maximum((chances * targets).sum(1), 1e-30)).mean()
        return float(loss), chances - targets


class DownpourRegressor(RegressorMixin, _Downpour):  # type: ignore[misc]
    """A regressor of least squares, linear or a network; options as `DownpourClassifier`.

    `y` is (rows,) or (rows, outputs). It is standardised, too.
    """

    def fit(self, X: Any, y: Any) -> "DownpourRegressor":
        """Train from random weights for `epochs` passes over the rows."""
        X, y = self._checked(X, y, first=True)
        self._train(X, self._targets(y), self.epochs)
        return self

    def partial_fit(self, X: Any, y: Any) -> "DownpourRegressor":
        """Train for one more pass over these rows."""
        X, y = self._checked(X, y, first=not hasattr(self, "layers_"))
        self._train(X, self._targets(y), 1)
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """The value of each row, of the shape that `y` had."""
        values = self._scores(X) * self._y_scale + self._y_mean
        return cast(NDArray[Any], values[:, 0] if self._flat else values)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _checked(self, X: Any, y: Any, *, first: bool) -> tuple[NDArray[Any], NDArray[Any]]:
        X, y = validate_data(
            self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, reset=first
        )
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

    def _loss(self, scores: Floats, targets: Floats) -> tuple[float, Floats]:
        error = scores - targets
        return float((error**2).sum(1).mean() / 2), error


def _forward(layers: Layers, inputs: Floats) -> list[Floats]:
    """The inputs, what each hidden layer makes of them, and the scores."""
    values = [inputs]
    for number, layer in enumerate(layers, 1):
        outputs = values[-1] @ layer["w"] + layer["b"]
        values.append(np.maximum(outputs, 0) if number < len(layers) else outputs)
    return values


def _softmax(scores: Floats) -> Floats:
    raised = np.exp(scores - scores.max(1, keepdims=True))
    return cast(Floats, raised / raised.sum(1, keepdims=True))


def _batches(
    inputs: Floats,
    targets: Floats,
    own: range,
    size: int,
    epochs: int,
    seed: int,
    registered: Barrier,
) -> Iterator[Batch]:
    """A worker's rows, shuffled each epoch; the worker is registered when it asks for the first."""
    registered.wait()
    dice, rows = np.random.default_rng(seed), np.array(own)
    for _ in range(epochs):
        dice.shuffle(rows)
        for begin in range(0, len(rows), size):
            part = rows[begin : begin + size]
            yield {"x": inputs[part], "target": targets[part]}
