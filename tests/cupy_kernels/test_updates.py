"""The update loops against float64, against NumPy and against themselves cut in pieces."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_kernels import compilation
from cupy_kernels.ops import updates
from cupy_kernels.ops.updates import Floats, Runs
from cupy_kernels.ops.updates import cpu as update_loops
from cupy_kernels.ops.updates.reference import REFERENCES, add_decay
from tests.support.update_arguments import HYPER, ROOTLESS, RULES, SLOTS, constants, normal, run_of

SEED = 20120


def updated(rule: str, size: int, runs: Runs, *, times: int = 3, seed: int = SEED) -> list[Floats]:
    """Weights and slots of a random arena after a few updates; outputs start as -7."""
    weights = normal(size, seed)
    slots = tuple(np.zeros(size, np.float32) for _ in range(SLOTS.get(rule, 1)))
    for number in range(times):
        out = np.full(size, -7.0, np.float32)
        gradient = normal(size, seed + 1 + number)
        updates.apply(rule, weights, gradient, slots, out, runs, constants(rule))
        weights = out
    return [weights, *slots]


@pytest.mark.parametrize("l1", [False, True])
@pytest.mark.parametrize("size", [1, 3, 7, 64, 1000, 8191, 20_011])
@pytest.mark.parametrize("rule", RULES)
def test_loop_follows_the_float64_reference(rule: str, size: int, l1: bool) -> None:
    """Over odd sizes, with both kinds of decay, a loop is the reference to float32 rounding."""
    rate, decay = (0.1, 0.01)
    got = updated(rule, size, run_of(size, rate, decay, l1=l1))
    weights = normal(size, SEED).astype(np.float64)
    slots = tuple(np.zeros(size) for _ in got[1:])
    for count in range(1, 4):
        gradient = add_decay(normal(size, SEED + count).astype(np.float64), weights, decay, l1)
        scale, hyper = rate, dict(HYPER[rule])
        if rule in ("adam", "adamw"):  # the caller corrects the rate; undo the reference's here
            correction = np.sqrt(1 - hyper["beta2"] ** count) / (1 - hyper["beta1"] ** count)
            scale /= correction
            if rule == "adamw":
                hyper["weight_decay"] *= correction
        weights, slots = REFERENCES[rule](weights, gradient, slots, scale, count, **hyper)
    for ours, reference in zip(got, (weights, *slots), strict=True):
        np.testing.assert_allclose(ours, reference, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("l1", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_numba_and_numpy_give_the_same_bits(
    rule: str, l1: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler contracts nothing and reorders nothing: both engines agree bit for bit."""
    pytest.importorskip("numba")
    for decay in (0.0, 0.05):
        runs = run_of(30_001, 0.1, decay, l1=l1)
        compiled = updated(rule, 30_001, runs)
        with monkeypatch.context() as patch:
            patch.setattr(update_loops, "COMPILED", False)
            plain = updated(rule, 30_001, runs)
        assert [a.tobytes() for a in compiled] == [a.tobytes() for a in plain]


def test_a_product_is_rounded_before_it_is_subtracted() -> None:
    """w - rate*g is two roundings, never one fused multiply-add."""
    rate, gradient = np.float32(1 + 2**-12), np.full(64, 1 + 2**-12, np.float32)
    weights, out = np.ones(64, np.float32), np.empty(64, np.float32)
    updates.apply("sgd", weights, gradient, (), out, run_of(64, float(rate)), ())
    product = np.float32(1 + 2**-11)  # the exact 1 + 2^-11 + 2^-24 rounds to even
    assert out.tolist() == [float(np.float32(1) - product)] * 64
    fused = np.float32(1 - (1 + 2**-11 + 2**-24))
    assert out[0] != fused


@settings(max_examples=60)
@given(
    rule=st.sampled_from(RULES),
    cuts=st.lists(st.integers(1, 2999), max_size=6),
    decay=st.sampled_from([0.0, 0.02]),
)
def test_cutting_the_arena_changes_no_bit(rule: str, cuts: list[int], decay: float) -> None:
    """An arena updated in pieces, whatever the cuts, equals the arena updated whole."""
    size, edges = 3000, [0, *sorted(set(cuts)), 3000]
    whole = updated(rule, size, run_of(size, 0.1, decay), times=1)
    pieces: list[list[Floats]] = []
    for low, high in pairwise(edges):
        out = np.full(high - low, np.nan, np.float32)
        slots = tuple(np.zeros(high - low, np.float32) for _ in whole[1:])
        weights, gradient = normal(size, SEED)[low:high], normal(size, SEED + 1)[low:high]
        runs = run_of(high - low, 0.1, decay)
        updates.apply(rule, weights, gradient, slots, out, runs, constants(rule))
        pieces.append([out, *slots])
    joined = [np.concatenate(parts) for parts in zip(*pieces, strict=True)]
    assert [a.tobytes() for a in joined] == [a.tobytes() for a in whole]


@pytest.mark.parametrize("engine", ["numba", "numpy"])
@pytest.mark.parametrize("rule", RULES)
def test_runs_have_their_own_rate_and_nothing_else_is_touched(
    rule: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run uses its own rate and decay; floats between runs are not changed."""
    if engine == "numpy":
        monkeypatch.setattr(update_loops, "COMPILED", False)
    bounds = np.array([[3, 400], [448, 449], [512, 997]], np.int64)
    rates, decays = np.array([0.1, 0.2, 0.0], np.float32), np.array([0, 0.01, 0.02], np.float32)
    gaps = (slice(0, 3), slice(400, 448), slice(449, 512), slice(997, 1000))
    got = updated(rule, 1000, Runs(bounds, rates, decays, False), times=2)
    for gap in gaps:
        assert (got[0][gap] == -7).all()
        assert not any(slot[gap].any() for slot in got[1:])
    for (low, high), rate, decay in zip(bounds, rates, decays, strict=True):
        alone = updated(rule, 1000, run_of(1000, rate, decay), times=2)
        for ours, expected in zip(got, alone, strict=True):
            assert ours[low:high].tobytes() == expected[low:high].tobytes()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poison_in_a_gradient_reaches_the_weights(rule: str, poison: float) -> None:
    """No flag lets the compiler assume finite values: NaN and infinity come through, alone."""
    weights, gradient = normal(100, SEED), normal(100, SEED + 1)
    gradient[[0, 37, 99]] = poison
    out = np.zeros(100, np.float32)
    slots = tuple(np.zeros(100, np.float32) for _ in range(SLOTS.get(rule, 1)))
    updates.apply(rule, weights, gradient, slots, out, run_of(100), constants(rule))
    spoiled = ~np.isfinite(np.stack([out, *slots])).all(axis=0)
    assert np.flatnonzero(spoiled).tolist() == [0, 37, 99]


def test_a_read_only_unaligned_gradient_is_taken_as_it_is() -> None:
    """A gradient may be a view into a received frame: read-only, at any byte offset."""
    gradient, weights = normal(50, SEED), normal(50, SEED + 1)
    frame = np.frombuffer(b"\x01" + gradient.tobytes(), np.float32, offset=1)
    out = np.empty(50, np.float32)
    updates.apply("sgd", weights, frame, (), out, run_of(50), ())
    assert np.array_equal(out, weights - np.float32(0.1) * gradient)


def scalar_loops() -> list[str]:
    """The rules whose loop, compiled here, works on one float at a time."""
    import numba

    floats = numba.float32[::1]
    frozen = numba.types.Array(numba.float32, 1, "C", readonly=True)
    runs = numba.types.NamedTuple((numba.int64[:, ::1], floats, floats, numba.types.boolean), Runs)
    found = []
    for rule in RULES:
        slots = numba.types.UniTuple(floats, SLOTS.get(rule, 1))
        arguments = numba.types.UniTuple(numba.float32, len(constants(rule)))
        fresh = numba.njit(compilation.plain(update_loops.UPDATES[rule].loop), error_model="numpy")
        fresh.compile((frozen, frozen, slots, floats, runs, arguments))
        (code,) = fresh.inspect_llvm().values()
        # The compiler may add a negated product in place of subtracting it, as the processor suits.
        wide = r"f(?:sub|add) <\d+ x float>" if rule in ROOTLESS else r"sqrt\.v\d+f32"
        if not re.search(wide, code):
            found.append(rule)
    return found


@pytest.mark.usefixtures("compiled_start")
def test_loops_are_vectorised() -> None:
    """A loop works on several floats an instruction: its rate depends on it tenfold.

    A process of its own compiles them, because what a process has compiled before may change what
    the compiler makes of a loop.
    """
    pytest.importorskip("numba")
    code = "from tests.cupy_kernels.test_updates import scalar_loops; print(scalar_loops())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("size", [0, 1, 63, 8192, 8193, 100_003])
def test_squared_norm_is_the_sum_of_squares(size: int) -> None:
    """The norm's square agrees with float64 over odd sizes."""
    values = normal(size, SEED)
    expected = float(np.sum(values.astype(np.float64) ** 2))
    assert updates.squared_norm(values) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 8191, 8192, 20_000])
def test_squared_norm_shows_one_bad_value(poison: float, place: int) -> None:
    """One NaN or infinity among many values makes the norm not finite."""
    values = normal(20_001, SEED)
    values[place] = poison
    assert not np.isfinite(updates.squared_norm(values))


@pytest.mark.parametrize("engine", ["numba", "numpy"])
@pytest.mark.parametrize("size", [0, 1, 8191, 8193, 100_003])
def test_sgd_measured_is_the_update_and_the_norm(
    size: int, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as the update alone, the norm of both runs to six digits, no float besides."""
    if engine == "numpy":
        monkeypatch.setattr(update_loops, "COMPILED", False)
    weights, gradient = normal(size, SEED), normal(size, SEED + 1)
    cut, last = size // 3, size - size // 7
    bounds = np.array([[0, cut], [cut, last]], np.int64)
    runs = Runs(bounds, np.array([0.1, 0.02], np.float32), np.zeros(2, np.float32), False)
    outs = [np.full(size, -7, np.float32) for _ in range(2)]
    updates.apply("sgd", weights, gradient, (), outs[0], runs, ())
    squares = updates.sgd_measured(weights, gradient, outs[1], runs)
    assert outs[0].tobytes() == outs[1].tobytes()
    expected = float(np.sum(gradient[:last].astype(np.float64) ** 2))
    assert squares == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 8191, 8192, 20_000])
def test_sgd_measured_shows_one_bad_value(poison: float, place: int) -> None:
    """One NaN or infinity among many values makes its norm not finite either."""
    values = normal(20_001, SEED)
    values[place] = poison
    squares = updates.sgd_measured(values, values, np.empty_like(values), run_of(20_001))
    assert not np.isfinite(squares)


def test_sgd_measured_is_vectorised() -> None:
    """Its sum and its update both: one float after another, it would be slower than two passes."""
    numba = pytest.importorskip("numba")
    floats = numba.float32[::1]
    frozen = numba.types.Array(numba.float32, 1, "C", readonly=True)
    loop = compilation.plain(update_loops.sgd_measured)
    fresh = numba.njit(loop, error_model="numpy", fastmath=update_loops.ANY_ORDER)
    fresh.compile((floats, frozen, floats, numba.int64[:, ::1], floats))
    (code,) = fresh.inspect_llvm().values()
    assert re.search(r"fsub .*<\d+ x float>", code)
    assert re.search(r"fadd .*<\d+ x float>", code)


DIGEST_SCRIPT = """
import sys
import time
sys.modules["numba"] = None  # as if it were not installed
from hashlib import sha256
from cupy_kernels.ops import updates
from tests.support.update_arguments import RULES, run_of
from tests.cupy_kernels.test_updates import updated
assert updates.engine() == "numpy"
digest = sha256()
for rule in RULES:
    for array in updated(rule, 9001, run_of(9001, 0.1, 0.01)):
        digest.update(array.tobytes())
print(digest.hexdigest())
"""


def child(script: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_updates_work_without_numba() -> None:
    """A base install, which has no numba, computes the same bits."""
    digest = sha256()
    for rule in RULES:
        for array in updated(rule, 9001, run_of(9001, 0.1, 0.01)):
            digest.update(array.tobytes())
    assert child(DIGEST_SCRIPT) == digest.hexdigest()


def test_importing_the_rules_loads_no_numba() -> None:
    """numba, a second's import, is loaded by the first update and not before."""
    loaded = "import sys, shards.rules, cupy_kernels.ops.updates; print('numba' in sys.modules)"
    assert child(loaded) == "False"


def test_loops_are_cached_when_they_have_been_compiled(tmp_path: Path) -> None:
    """A file of loops is cached once one of them has run, and no longer after the file changed."""
    source = tmp_path / "some_loops.py"
    source.write_text(
        "from cupy_kernels.compilation import compile_loop\n"
        "@compile_loop\n"
        "def double(x):\n"
        "    return x + x\n"
    )
    spec = importlib.util.spec_from_file_location("some_loops", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not compilation.is_cached(module.double)
    assert module.double(2.0) == 4.0
    assert compilation.is_cached(module.double)
    later = time.time() + 60
    os.utime(source, (later, later))
    assert not compilation.is_cached(module.double)


def test_rows_wait_for_their_own_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start with rows compiles first also where only the loops over rows are not cached."""
    files: list[str] = []

    def is_cached(function: Any) -> bool:
        files.append(Path(compilation.plain(function).__code__.co_filename).parent.name)
        return files[-1] != "rows"

    monkeypatch.setattr(compilation, "is_cached", is_cached)
    monkeypatch.setattr("cupy_kernels.ops.rows.loops.is_cached", is_cached)
    assert not updates.compiles_first(net=True)
    assert updates.compiles_first(net=True, rows=True)
    assert set(files) == {"updates", "convolution", "rows"}
