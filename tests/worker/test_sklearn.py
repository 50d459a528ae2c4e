"""`worker.sklearn`: estimators as scikit-learn knows them, trained on parameter servers."""

import signal
import tracemalloc
from threading import get_ident
from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("sklearn", reason="needs the extra `sklearn`")

from scipy import sparse
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.datasets import make_classification, make_moons
from sklearn.ensemble import AdaBoostClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import check_class_weight_classifiers, check_estimator

from shards.errors import BadInput
from worker.sklearn import DownpourClassifier, DownpourRegressor

STOCHASTIC = "minibatches of repeated rows are others, as for SGDClassifier"
EXPECTED = {
    "check_sample_weight_equivalence_on_dense_data": STOCHASTIC,
    "check_sample_weight_equivalence_on_sparse_data": STOCHASTIC,
    "check_class_weight_classifiers": "needs more epochs; it is tried below",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("estimator", [DownpourClassifier, DownpourRegressor])
def test_the_checks_of_estimators_pass(estimator: Any) -> None:
    """All that apply, with a strategy that repeats its result."""
    found = check_estimator(
        estimator(strategy="bsp", random_state=1),
        on_fail=None,
        on_skip=None,
        expected_failed_checks=EXPECTED,
    )
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


@pytest.mark.filterwarnings("ignore")
def test_class_weights_move_the_classes() -> None:
    """The check of scikit-learn passes with as many epochs as its own SGD is given."""
    model = DownpourClassifier(strategy="bsp", random_state=1, epochs=400)
    check_class_weight_classifiers("DownpourClassifier", model)
    with pytest.raises(ValueError, match="partial_fit: class_weight: expected a weight for each"):
        DownpourClassifier(class_weight="balanced").partial_fit([[1.0], [2.0]], [0, 1])


def mixed_frame(rows: int = 300) -> tuple[Any, Any]:
    """Numbers, booleans, whole numbers that may be missing, and text; the text decides."""
    dice = np.random.default_rng(3)
    colours = dice.choice(["red", "green", "blue"], rows)
    frame = pd.DataFrame(
        {
            "size": dice.standard_normal(rows),
            "big": dice.random(rows) > 0.5,
            "count": pd.array(dice.integers(0, 9, rows), dtype="Int64"),
            "colour": pd.Categorical(colours),
        }
    )
    return frame, (colours == "red").astype(int)


def test_sparse_rows_of_an_encoder() -> None:
    """A one-hot encoder's sparse output is taken, and fits as its dense output does."""
    frame, y = mixed_frame()
    scores = []
    for dense in (False, True):
        encoder = OneHotEncoder(sparse_output=not dense)
        model = make_pipeline(
            ColumnTransformer([("colour", encoder, ["colour"])], sparse_threshold=1.0),
            DownpourClassifier(strategy="bsp", random_state=1),
        ).fit(frame, y)
        scores.append(model.decision_function(frame))
        assert model.score(frame, y) == 1.0
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4)


def test_sparse_rows_stay_sparse() -> None:
    """A fit and a prediction need a fraction of the memory of the rows as a dense array."""
    rows, features = 600, 20_000
    X = sparse.random_array((rows, features), density=1e-3, rng=np.random.default_rng(1))
    y = np.arange(rows) % 2
    model = DownpourClassifier(epochs=1, workers=1, batch_size=20, strategy="bsp", random_state=1)
    tracemalloc.start()
    model.fit(X, y).predict(X)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < rows * features * 8 / 2


def draw_zeros(_model: Any, features: Any, outputs: int) -> Any:
    return np.zeros((len(features), outputs), np.float32)


@pytest.mark.parametrize("hidden", [(), (8,)])
def test_sparse_rows_of_many_features(
    hidden: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps over the features of a minibatch are those over all of them: the weights are equal.

    The features have the mean 0, so that centring changes nothing. Without decay, for that of a
    feature is applied only where a minibatch has it.
    """
    monkeypatch.setattr("worker.sklearn._MAX_CENTRED", 10)
    if not hidden:  # a linear model begins at zero, but of rows that are filled in
        monkeypatch.setattr(DownpourClassifier, "_draw_weights", draw_zeros)
    half = sparse.random_array((120, 30), density=0.5, rng=np.random.default_rng(1))
    X = sparse.csr_array(sparse.vstack([half, -half]))
    y = (X[:, [0]].toarray() > X[:, [1]].toarray())[:, 0].astype(int)
    options: dict[str, Any] = {"hidden": hidden, "decay": 0.0, "epochs": 5, "random_state": 1}
    models = [DownpourClassifier(workers=1, strategy="bsp", **options) for _ in range(2)]
    for model, rows in zip(models, (X, X.toarray()), strict=True):
        model.fit(rows, y).partial_fit(rows, y)
    (first, *rest), (first_of_dense, *rest_of_dense) = (model.layers_ for model in models)
    assert first["w"].features.tolist() == [*range(30)]
    np.testing.assert_allclose(first["w"].rows, first_of_dense["w"], atol=1e-5)
    for layer, dense in zip(
        [{"b": first["b"]}, *rest], [first_of_dense, *rest_of_dense], strict=True
    ):
        for name, array in layer.items():
            np.testing.assert_allclose(array, dense[name], atol=1e-5)
    scores = models[0].decision_function(X)
    np.testing.assert_allclose(scores, models[1].decision_function(X.toarray()), atol=1e-4)
    np.testing.assert_allclose(scores, models[0].decision_function(X.toarray()), atol=1e-6)


def test_two_billion_features() -> None:
    """Two asynchronous workers learn text of a hash space that no minibatch need be filled to."""
    dice, features = np.random.default_rng(1), 2**31 - 1
    words = dice.integers(0, features, 200)
    drawn = dice.integers(0, 200, (400, 12))
    y = np.where((drawn < 100).sum(1) > 6, "even", "odd")
    X = sparse.csr_matrix(
        (np.ones(4800), words[drawn].ravel(), np.arange(0, 4801, 12)), (400, features)
    )
    for rule in ("ftrl", "row_adagrad", "adagrad"):
        model = DownpourClassifier(rule=rule, epochs=10, random_state=1)
        assert model.fit(X, y).score(X, y) > 0.95
    assert len(model.layers_[0]["w"].features) == len(np.unique(words))
    unseen = sparse.csr_matrix(([1.0, 1.0], ([0, 1], [words.min() - 1, 7])), (2, features))
    scores = model.decision_function(unseen)
    biases = model.layers_[0]["b"]
    np.testing.assert_allclose(scores, biases[1] - biases[0], rtol=1e-6)
    assert set(model.predict(X[:20])) <= {"even", "odd"}
    heights = DownpourRegressor(rule="adagrad", epochs=10, random_state=1)
    assert heights.fit(X, (drawn < 100).sum(1)).score(X, (drawn < 100).sum(1)) > 0.7
    with pytest.raises(BadInput, match="table features: expected a strategy that works with rows"):
        clone(model).set_params(strategy="easgd").fit(X, y)
    with pytest.raises(BadInput, match="strategy downpour: expected a push at each step"):
        clone(model).set_params(strategy="downpour:n_push=3").fit(X, y)


def test_a_frame_of_several_types() -> None:
    """Numbers of any kind are taken; a column of text or of times is named, with the remedy."""
    frame, y = mixed_frame()
    model = DownpourClassifier(strategy="bsp", random_state=1)
    model.fit(frame.drop(columns="colour"), y)
    assert list(model.feature_names_in_) == ["size", "big", "count"]
    with pytest.raises(ValueError, match=r"^column colour: expected numbers, got category: encode"):
        model.fit(frame, y)
    times = frame[["size"]].assign(at=pd.Timestamp("2020-01-01"))
    with pytest.raises(ValueError, match=r"^column at: expected numbers, got datetime64.*convert"):
        model.fit(times, y)
    with pytest.raises(ValueError, match=r"^Input X contains NaN: fill it in, as by .*Imputer$"):
        model.fit(frame[["size"]].where(frame["size"] > 0), y)


def test_weights_of_rows() -> None:
    """Rows of weight 0 do not count, and heavier rows count more; all of one weight change none."""
    X = np.linspace(-1, 1, 200).reshape(-1, 1)
    y = np.where(np.arange(200) % 2, 3.0, 1.0)  # the mean of two clouds, whatever x
    model = DownpourRegressor(strategy="bsp", random_state=1, epochs=40)
    odd = (np.arange(200) % 2).astype(float)
    assert model.fit(X, y, sample_weight=odd).predict(X) == pytest.approx(3.0, abs=0.1)
    heavier = model.fit(X, y, sample_weight=1 + 2 * odd).predict(X)
    assert heavier.mean() == pytest.approx(2.5, abs=0.1)
    plain = model.fit(X, y).predict(X)
    np.testing.assert_allclose(model.fit(X, y, sample_weight=np.full(200, 7.0)).predict(X), plain)
    for wrong, message in (
        (-odd, "Negative values"),
        (0 * odd, "at least one non-zero"),
        ([1], "shape"),
    ):
        with pytest.raises(ValueError, match=message):
            model.fit(X, y, sample_weight=wrong)


def test_weights_pass_through_meta_estimators() -> None:
    """A pipeline takes them by the step's name, and boosting and bagging give their own."""
    X, y = make_classification(120, 5, n_redundant=0, class_sep=2.0, random_state=4)
    model = DownpourClassifier(strategy="bsp", epochs=5, random_state=1)
    weights = np.where(y == 0, 1.0, 0.01)
    pipe = make_pipeline(StandardScaler(), model)
    scores = pipe.fit(X, y, downpourclassifier__sample_weight=weights).decision_function(X)
    scaled = StandardScaler().fit_transform(X)
    np.testing.assert_array_equal(
        scores, clone(model).fit(scaled, y, weights).decision_function(scaled)
    )
    assert scores.mean() < clone(model).fit(scaled, y).decision_function(scaled).mean() - 0.1
    boosted = AdaBoostClassifier(model, n_estimators=2, random_state=1).fit(X, y)
    assert boosted.score(X, y) > 0.8


def test_hidden_is_a_number_or_several() -> None:
    X, y = make_moons(40, random_state=3)
    choices: list[Any] = [8, np.int64(8), [8], (8,)]
    for hidden in choices:
        model = DownpourClassifier(hidden=hidden, epochs=1).fit(X, y)
        assert [layer["w"].shape for layer in model.layers_] == [(2, 8), (8, 2)]


def test_a_fit_does_not_warn_of_its_default_rate(caplog: pytest.LogCaptureFixture) -> None:
    """The rate is meant for the sum of the workers' pushes, so no fit says that it divides them."""
    X, y = make_moons(40, random_state=3)
    DownpourClassifier(epochs=1).fit(X, y)
    assert "divided" not in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": 0}, "hidden: expected"),
        ({"hidden": "64"}, "hidden: expected sizes of layers, whole numbers from 1, got"),
        ({"hidden": None}, "hidden: expected sizes of layers, whole numbers from 1, got"),
        ({"hidden": [4, 0.5]}, "hidden: expected"),
        ({"workers": 0}, "workers: expected"),
        ({"batch_size": 0.5}, "batch_size: expected"),
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
        ({"epochs": 0}, "epochs: expected at least 1, got 0"),
        ({"epochs": -1}, "epochs: expected at least 1, got -1"),
        ({"epochs": 1.5}, "epochs: expected a whole number, got 1.5"),
        ({"epochs": None}, "epochs: expected a whole number, got None"),
        ({"epochs": True}, "epochs: expected a whole number, got True"),
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
