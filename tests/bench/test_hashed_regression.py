"""The regression of the experiments over hashed features learns as it says."""

from collections import defaultdict
from functools import partial
from math import exp, sqrt

import numpy as np
import pyarrow as pa
import pytest

import worker
from tests.bench.hashed_regression import (
    Samples,
    Settings,
    area_under_curve,
    hash_features,
    log_loss,
    train,
)

FIELDS = ("day", "city", "kind")


def draw_samples(count: int) -> Samples:
    """People of three fields, whose label mostly follows from two of them."""
    dice = np.random.default_rng(7)
    day, city, kind = (dice.integers(0, top, count) for top in (7, 5, 3))
    labels = (((day + city) % 2 == 0) ^ (dice.random(count) < 0.1)).astype(np.float32)
    names = pa.array([f"city {number}" for number in city])
    return Samples(pa.table([day, names, kind], names=FIELDS), labels)


def predict_in_turn(ids: list[list[int]], labels: list[float], rate: float) -> list[float]:
    """The chances of FTRL with beta 1 and l2 1, as its paper has them: a sample at a time."""
    z: dict[int, float] = defaultdict(float)
    squares: dict[int, float] = defaultdict(float)
    chances = []
    for features, label in zip(ids, labels, strict=True):
        weights = {f: -z[f] / ((1 + sqrt(squares[f])) / rate + 1) for f in features}
        chances.append(1 / (1 + exp(-sum(weights.values()))))
        gradient = chances[-1] - label
        for feature, weight in weights.items():
            grown = sqrt(squares[feature] + gradient**2)
            z[feature] += gradient - (grown - sqrt(squares[feature])) / rate * weight
            squares[feature] += gradient**2
    return chances


def test_one_process_learns_as_the_paper_says() -> None:
    """Each sample is predicted by what the samples before it have taught, one after another."""
    samples = draw_samples(200)
    outcome = train(1, partial(draw_samples, 200), Settings(degree=2, batch=1, rate=0.1))
    ids = hash_features(samples.fields, 2)
    expected = predict_in_turn(ids.tolist(), samples.labels.tolist(), 0.1)
    assert outcome.chances == pytest.approx(expected, abs=1e-4)
    assert outcome.figures["rows"] == len(np.unique(ids))


def test_workers_predict_every_sample_before_it_is_learnt() -> None:
    """Two workers share the batches; the first predicts without a weight."""
    outcome = train(2, partial(draw_samples, 50), Settings(degree=1, batch=8, rate=0.1))
    assert len(outcome.chances) == 50
    assert (outcome.chances[:16].reshape(2, 8) == 0.5).all(axis=1).any()
    assert 0 < outcome.chances.min() < outcome.chances.max() < 1
    assert (outcome.chances[16:] != 0.5).all()


def test_features_are_fields_and_their_sets() -> None:
    """Three fields have three pairs and one triple; an id is that of the set's name and values."""
    fields = draw_samples(10).fields
    assert [hash_features(fields, degree).shape[1] for degree in (1, 2, 3)] == [3, 6, 7]
    pair = worker.hashed("day-kind", fields["day"], fields["kind"])
    assert (hash_features(fields, 2)[:, 4] == pair).all()


def test_figures_of_predictions() -> None:
    """Known values: sure and right, half and half, and equal chances."""
    labels = np.array([0, 0, 1, 1], np.float32)
    assert log_loss(labels, np.full(4, 0.5)) == pytest.approx(np.log(2))
    assert area_under_curve(labels, np.array([0.1, 0.2, 0.3, 0.4])) == 1
    assert area_under_curve(labels, np.array([0.4, 0.2, 0.2, 0.4])) == 0.5
