"""Softmax, cross-entropy and accuracy against their references."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_kernels.ops import softmax
from cupy_kernels.ops.softmax import reference
from cupy_kernels.workspace import Workspace

SIZES = st.tuples(st.integers(1, 9), st.integers(1, 12))


@given(SIZES, st.integers(0, 99), st.sampled_from([1.0, 30.0, 300.0]))
@settings(max_examples=40)
def test_softmax_equals_the_reference(size: tuple[int, int], seed: int, scale: float) -> None:
    """Probabilities and gradients, for scores far apart as well."""
    rng, work = np.random.default_rng(seed), Workspace()
    x = (scale * rng.standard_normal(size)).astype(np.float32)
    dy = rng.standard_normal(size, np.float32)
    p = softmax.softmax(x, work)
    expected = reference.softmax(x.astype(np.float64))
    np.testing.assert_allclose(p, expected, rtol=1e-4, atol=1e-7)
    dx = softmax.softmax_backward(dy, p, work)
    wide = reference.softmax_backward(dy.astype(np.float64), expected)
    np.testing.assert_allclose(dx, wide, rtol=1e-3, atol=1e-5)


@given(SIZES, st.integers(0, 99), st.booleans())
@settings(max_examples=40)
def test_cross_entropy_equals_the_reference(
    size: tuple[int, int], seed: int, ignoring: bool
) -> None:
    """Loss and gradient, with and without an ignored label."""
    rng, work = np.random.default_rng(seed), Workspace()
    x, labels = rng.standard_normal(size, np.float32), rng.integers(0, size[1], size[0])
    ignored = int(labels[0]) if ignoring else None
    loss, kept = softmax.cross_entropy(x, labels, ignored, 3, work)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(
        loss, reference.cross_entropy(wide, labels, ignored, 3), rtol=1e-5, atol=1e-6
    )
    dx = softmax.cross_entropy_backward(kept, 1.0, work)
    expected = reference.cross_entropy_backward(wide, labels, ignored, 3)
    np.testing.assert_allclose(dx, expected, rtol=1e-4, atol=1e-6)


def test_a_vanished_probability_costs_no_infinity() -> None:
    """-log p is taken at float32's smallest normal number at the least, as Caffe does."""
    x = np.array([[0.0, 500.0]], np.float32)
    loss, _ = softmax.cross_entropy(x, np.array([0]), None, 1, Workspace())
    np.testing.assert_allclose(loss, -np.log(np.finfo(np.float32).tiny))


@given(SIZES, st.integers(0, 99), st.integers(1, 12))
@settings(max_examples=40)
def test_accuracy_equals_the_reference(size: tuple[int, int], seed: int, top_k: int) -> None:
    """The share of hits, among scores with many ties, for any top_k."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 3, size).astype(np.float32)
    labels = rng.integers(0, size[1], size[0])
    top_k = min(top_k, size[1])
    share = softmax.accuracy(scores, labels, None, top_k, Workspace())
    expected = reference.accuracy(scores.astype(np.float64), labels, None, top_k)
    np.testing.assert_allclose(share, expected, rtol=1e-6)


def test_a_tie_counts_against_the_true_class() -> None:
    """Two classes share the best score: neither is right at top 1, both are at top 2."""
    scores = np.array([[1.0, 1.0, 0.0]] * 2, np.float32)
    labels = np.array([0, 1])
    assert softmax.accuracy(scores, labels, None, 1, Workspace()) == 0
    assert softmax.accuracy(scores, labels, None, 2, Workspace()) == 1
