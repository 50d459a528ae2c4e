"""The rule HeLoCo against float64, and the three ways in which it treats a delta."""

from math import sqrt
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupy_kernels.ops.updates import cpu as update_loops
from cupy_kernels.ops.updates.heloco import Correction
from shards.errors import BadInput
from shards.rules import Decay, Floats, HeLoCo
from shards.tables import DenseTable, KeyRange, TensorSpec, segments

Doubles = NDArray[np.float64]
TABLE = DenseTable(
    "net",
    (
        TensorSpec("long", (9001,)),
        TensorSpec("wide", (30, 20), lr_mult=2.0, decay_mult=0.5),
        TensorSpec("one", ()),
        TensorSpec("mean", (7,), buffer=True),
        TensorSpec("last", (65,)),
    ),
)
PIECES = segments(TABLE, KeyRange(0, TABLE.size))


def random(seed: int) -> Floats:
    """An arena with random tensors and zeros between them."""
    dice, arena = np.random.default_rng(seed), TABLE.empty()
    for view in TABLE.views(arena).values():
        view[...] = dice.standard_normal(view.shape, np.float32)
    return arena


def correct(d: Doubles, m: Doubles, rule: HeLoCo) -> Doubles:
    """G, as the paper writes it."""
    size, speed = float(np.linalg.norm(d)), float(np.linalg.norm(m))
    if size == 0 or speed == 0:
        return d
    u, v = d / size, m / speed
    c, conf = float(u @ v), size / (size + rule.kappa * speed)
    if c >= rule.c_ok:
        return d
    if c < 0:
        opposed: Doubles = c * size * v
        return d - min(rule.k_s * -c * conf, rule.beta_max) * opposed
    turn = min(rule.k_d * (1 - c) * conf, 1)
    turned: Doubles = (1 - turn) * u + turn * v
    return turned * size / float(np.linalg.norm(turned))


def follow(rule: HeLoCo, deltas: list[Floats], decay: float) -> tuple[Floats, Floats]:
    """The weights and the momentum after these deltas."""
    weights, momentum = random(1), TABLE.empty()
    for count, delta in enumerate(deltas, 1):
        out = np.full_like(weights, np.nan)
        numbers: dict[str, Any] = {"rate": 0.3, "decay": Decay(decay), "count": count}
        rule.apply(weights, delta, (momentum,), out, PIECES, **numbers)
        weights = out
    return weights, momentum


def expect(rule: HeLoCo, deltas: list[Floats], decay: float) -> tuple[Doubles, Doubles]:
    """As `follow`, tensor by tensor in float64."""
    arena, slot = random(1).astype(np.float64), np.zeros(TABLE.size)
    for tensor, start in zip(TABLE.tensors, TABLE.offsets, strict=True):
        w, m = arena[start : start + tensor.size], slot[start : start + tensor.size]
        for delta in deltas:
            d = delta[start : start + tensor.size].astype(np.float64)
            if tensor.buffer:
                w -= d
                continue
            g = correct(d + decay * tensor.decay_mult * w, m, rule)
            m[...] = rule.momentum * m + (1 - rule.momentum) * g
            w -= 0.3 * tensor.lr_mult * (g + rule.momentum * m)
    return arena, slot


@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize(
    "rule",
    [
        HeLoCo(),
        HeLoCo(c_ok=0.0),
        HeLoCo(c_ok=1.0, k_d=9.0),
        HeLoCo(momentum=0.0),
        HeLoCo(k_s=9.0, beta_max=0.5, kappa=0.1),
    ],
    ids=str,
)
def test_it_follows_float64(rule: HeLoCo, decay: float) -> None:
    """Several tensors, of which some have no delta or as yet no momentum, and a buffer."""
    deltas = [random(seed) for seed in range(2, 8)]
    deltas[0] = TABLE.empty()  # neither a delta nor a momentum
    TABLE.views(deltas[3])["wide"][...] = 0
    deltas[4] = -deltas[2]
    for got, expected in zip(follow(rule, deltas, decay), expect(rule, deltas, decay), strict=True):
        np.testing.assert_allclose(got, expected, rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_numba_and_numpy_give_the_same_bits(decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The correction is computed once for both engines, and the step rounds alike."""
    pytest.importorskip("numba")
    deltas = [random(seed) for seed in range(2, 6)]
    compiled = follow(HeLoCo(), deltas, decay)
    monkeypatch.setattr(update_loops, "COMPILED", False)
    for got, expected in zip(follow(HeLoCo(), deltas, decay), compiled, strict=True):
        assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("cosine", "options"),
    [(0.9, {}), (0.5, {}), (0.3, {}), (0.0, {}), (0.0, {"k_d": 99.0}), (-0.4, {}), (-1.0, {})],
)
def test_what_becomes_of_a_delta(cosine: float, options: dict[str, float]) -> None:
    """Along the momentum it stays; across, it turns towards it and keeps its length; against, a
    part of what opposes it goes, and never more than all."""
    rule, m = HeLoCo(**options), np.array([2.0, 0.0])
    d = np.array([cosine, sqrt(1 - cosine**2)])
    g = correct(d, m, rule)
    if cosine >= 0.5:
        assert g is d
    elif cosine >= 0:
        assert np.linalg.norm(g) == pytest.approx(1)
        assert cosine < g[0] <= 1
    else:
        assert cosine < g[0] <= 0
        assert g[1] == d[1]
    table = DenseTable("two", (TensorSpec("w", (2,)),))
    arrays = [np.pad(array, (0, 254)).astype(np.float32) for array in (d, m)]
    out = np.empty(256, np.float32)
    pieces = segments(table, KeyRange(0, 256))
    still = np.zeros(256, np.float32)
    rule.apply(still, arrays[0], (arrays[1],), out, pieces, rate=1.0, decay=Decay(), count=1)
    np.testing.assert_allclose(arrays[1][:2], 0.9 * m + 0.1 * g, rtol=1e-6)
    np.testing.assert_allclose(out[:2], -(g + 0.9 * (0.9 * m + 0.1 * g)), rtol=1e-6)


@pytest.mark.parametrize("field", ["c_ok", "beta_max", "k_s", "k_d", "kappa"])
def test_a_senseless_constant_is_refused(field: str) -> None:
    """A share is at most 1, and nothing is below 0."""
    with pytest.raises(BadInput, match=f"^update rule heloco: {field}: expected .*, got -1$"):
        HeLoCo(**{field: -1.0})
    if field in ("c_ok", "beta_max"):
        with pytest.raises(BadInput, match=rf"{field}: expected \[0, 1\], got 2$"):
            HeLoCo(**{field: 2.0})


def test_a_momentum_of_denormals_has_no_direction() -> None:
    """Its share would overflow, and infinity times zero is NaN in the weights."""
    assert Correction(0.5, 1.0, 0.5, 1.0, 1.0).shares(1.0, 0.0, 1e-84) == (1.0, 0.0)
