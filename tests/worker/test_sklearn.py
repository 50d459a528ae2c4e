"""`worker.sklearn`: estimators as scikit-learn knows them, trained on parameter servers."""

import signal
from threading import get_ident
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="needs the extra `sklearn`")

from sklearn.base import clone
from sklearn.datasets import make_classification, make_moons
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from shards.errors import BadInput
from worker.sklearn import DownpourClassifier, DownpourRegressor


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("estimator", [DownpourClassifier, DownpourRegressor])
def test_the_checks_of_estimators_pass(estimator: Any) -> None:
    """All that apply, with a strategy that repeats its result."""
    found = check_estimator(estimator(strategy="bsp", random_state=1), on_fail=None, on_skip=None)
    assert [
        (one["check_name"], one["exception"]) for one in found if one["status"] == "failed"
    ] == []
    assert sum(one["status"] == "passed" for one in found) >= 50


@pytest.mark.parametrize("strategy", ["downpour", "easgd:tau=5"])
def test_asynchronous_workers_learn_as_a_plain_fit(strategy: str) -> None:
    """Two workers are within a few points of scikit-learn's own logistic regression."""
    rows = make_classification(600, 10, n_informative=6, class_sep=1.5, random_state=2)
    plain = LogisticRegression().fit(*rows).score(*rows)
    model = make_pipeline(StandardScaler(), DownpourClassifier(strategy=strategy, random_state=1))
    assert model.fit(*rows).score(*rows) > plain - 0.05


def test_a_network_learns_what_is_not_linear() -> None:
    rows = make_moons(400, noise=0.1, random_state=3)
    linear = DownpourClassifier(random_state=1).fit(*rows)
    deep = DownpourClassifier(
        hidden=(16,), rate=0.5, epochs=60, strategy="bsp", random_state=1
    ).fit(*rows)
    assert deep.score(*rows) > max(0.95, linear.score(*rows))
    assert deep.predict_proba(rows[0]).shape == (400, 2)


def test_partial_fits_continue() -> None:
    """Each pass improves the fit; the classes are those of the first call."""
    X, y = make_classification(300, 5, n_redundant=0, class_sep=2.0, random_state=4)
    model = DownpourClassifier(strategy="bsp", random_state=1)
    for _ in range(10):
        model.partial_fit(X, y, classes=[0, 1, 2])
    assert model.score(X, y) > 0.85
    assert model.steps_ == 2 * 10 * 5
    with pytest.raises(ValueError, match=r"partial_fit: expected labels in \[0 1 2\], got 3"):
        model.partial_fit(X, y + 2)


def test_a_search_clones_and_sets_parameters() -> None:
    X, y = make_classification(200, 5, n_redundant=0, class_sep=2.0, random_state=4)
    search = GridSearchCV(
        DownpourClassifier(epochs=5, strategy="bsp", random_state=1), {"rate": [1e-6, 0.3]}, cv=2
    )
    assert search.fit(X, y).best_params_ == {"rate": 0.3}
    assert clone(search.best_estimator_).get_params()["epochs"] == 5


def test_several_outputs_are_fitted() -> None:
    dice = np.random.default_rng(1)
    X = dice.standard_normal((200, 3))
    Y = X @ dice.standard_normal((3, 2)) + [100.0, -50.0]
    model = DownpourRegressor(strategy="bsp", random_state=1).fit(X, Y)
    assert model.predict(X).shape == (200, 2)
    assert model.score(X, Y) > 0.95


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers: expected"),
        ({"batch_size": 0.5}, "batch_size: expected"),
        ({"strategy": "nothing"}, "strategy: expected downpour, bsp"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    X, y = make_classification(40, 5, random_state=4)
    with pytest.raises(BadInput, match=message):
        DownpourClassifier(**options).fit(X, y)


def test_ctrl_c_ends_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises KeyboardInterrupt at once, and the weights are those of that moment."""
    main, steps = get_ident(), iter(range(10**9))
    gradient = DownpourClassifier._gradient

    def pressing(self: Any, *arguments: Any) -> Any:
        if next(steps) == 20:
            signal.pthread_kill(main, signal.SIGINT)
        return gradient(self, *arguments)

    monkeypatch.setattr(DownpourClassifier, "_gradient", pressing)
    model = DownpourClassifier(epochs=1_000_000, random_state=1)
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            model.fit(*make_classification(100, 5, random_state=2))
    finally:
        signal.signal(signal.SIGINT, former)
    assert 0 < model.steps_ < 1_000_000
    assert any(layer["b"].any() for layer in model.layers_)
