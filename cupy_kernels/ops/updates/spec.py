"""Rows of `updates.cu` and `gradient_guard.cu`: update rules over the arena, norm and guard.

The references use a rule's formula from `reference`, and add its decay, multipliers and the
guard's verdict. Adam's bias correction is already in the rate (`shards.rules` puts it there), so
its formula is called with a large step, for which the correction is 1.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import (
    Kernel,
    Parameter,
    Sizes,
    Tolerance,
    changes,
    one_block,
    over,
    reads,
    scalar,
    writes,
)
from cupy_kernels.ops.updates import reference as formulas
from cupy_kernels.ops.updates.reference import Doubles

HYPER = np.dtype(
    [
        (name, np.float32)
        for name in (
            "rate",
            "decay",
            "keep",
            "take",
            "keep2",
            "take2",
            "delta",
            "strength",
            "unscale",
            "clip",
        )
    ]
    + [("l1", np.uint32), ("unused", np.uint32)],
    align=True,
)
"""The struct Hyper of arena.cuh."""

MULTIPLIERS = np.dtype([("rate", np.float32), ("decay", np.float32)], align=True)
VERDICT = np.dtype(
    [("norm", np.float32), ("scale", np.float32), ("skip", np.uint32), ("skips", np.uint32)],
    align=True,
)

CHUNK = 64
"""Floats that share one group."""

CONSTANTS: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "momentum": ("keep",),
    "nesterov": ("keep", "take"),
    "adagrad": ("delta",),
    "rmsprop": ("keep", "take", "delta"),
    "adadelta": ("keep", "take", "delta"),
    "adam": ("keep", "take", "keep2", "take2", "delta"),
    "adamw": ("keep", "take", "keep2", "take2", "delta", "strength"),
    "delayed_nesterov": ("keep", "take", "strength"),
    "mla": ("keep", "take"),
    "heloco": ("keep", "take", "keep2", "take2"),
    "dc_asgd": ("strength",),
    "dc_asgd_adaptive": ("keep", "take", "strength", "delta"),
}
"""The fields of Hyper for a rule's constants, in the order of its formula in cpu.py."""

Formula = Callable[[Doubles, Doubles, tuple[Doubles, ...], Any], tuple[Doubles, tuple[Any, ...]]]


def _sgd(w: Doubles, g: Doubles, slots: Any, p: Any) -> Any:
    return formulas.sgd(w, g, slots, p["rates"], 1)


def _momentum(w: Doubles, g: Doubles, slots: Any, p: Any) -> Any:
    return formulas.momentum(w, g, slots, p["rates"], 1, momentum=p["keep"])


def _nesterov(w: Doubles, g: Doubles, slots: Any, p: Any) -> Any:
    return formulas.nesterov(w, g, slots, p["rates"], 1, momentum=p["keep"])


def _adagrad(w: Doubles, g: Doubles, slots: Any, p: Any) -> Any:
    return formulas.adagrad(w, g, slots, p["rates"], 1, delta=p["delta"])


def _rmsprop(w: Doubles, g: Doubles, slots: Any, p: Any) -> Any:
    return formulas.rmsprop(w, g, slots, p["rates"], 1, decay_rate=p["keep"], delta=p["delta"])


def _adadelta(w: Doubles, g: Doubles, slots: Any, p: Any) -> Any:
    return formulas.adadelta(w, g, slots, p["rates"], 1, momentum=p["keep"], delta=p["delta"])


def _adam(w: Doubles, g: Doubles, slots: Any, p: Any) -> Any:
    shares = {"beta1": p["keep"], "beta2": p["keep2"]}
    return formulas.adam(w, g, slots, p["rates"], 10**9, **shares, delta=p["delta"])


def _adamw(w: Doubles, g: Doubles, slots: Any, p: Any) -> Any:
    new, after = _adam(w, g, slots, p)
    return new - p["rates"] * p["strength"] * w, after


def _delayed_nesterov(w: Doubles, g: Doubles, slots: Any, p: Any) -> Any:
    n = round(1 / p["take"])
    count = n if p["strength"] else n + 1
    return formulas.delayed_nesterov(w, g, slots, p["rates"], count, momentum=p["keep"], n=n)


def _mla(w: Doubles, g: Doubles, slots: Any, p: Any) -> Any:
    return formulas.mla(w, g, slots, p["rates"], 1, momentum=p["keep"])


def _heloco(w: Doubles, g: Doubles, slots: Any, p: Any) -> Any:
    corrected = p["keep2"] * g + p["take2"] * slots[0]
    return formulas.heloco(w, corrected, slots, p["rates"], 1, momentum=p["keep"])


def _dc_asgd(w: Doubles, g: Doubles, slots: Any, p: Any) -> Any:
    return formulas.dc_asgd(w, g, slots, p["rates"], 1, strength=p["strength"])


def _dc_asgd_adaptive(w: Doubles, g: Doubles, slots: Any, p: Any) -> Any:
    numbers = {"mean": p["keep"], "strength": p["strength"], "delta": p["delta"]}
    return formulas.dc_asgd_adaptive(w, g, slots, p["rates"], 1, **numbers)


def _reference(formula: Formula, slots: tuple[str, ...]) -> Callable[..., dict[str, Any]]:
    def evaluate(
        w: Doubles,
        g: Doubles,
        groups: Any,
        multipliers: Any,
        hyper: Any,
        verdict: Any,
        n: int,
        **arrays: Any,
    ) -> dict[str, Any]:
        old = tuple(arrays[name][:n] for name in slots)
        if verdict is not None and verdict["skip"][0]:
            return {"out": w, **dict(zip(slots, old, strict=True))}
        p = {name: float(hyper[name][0]) for name in HYPER.names or ()}
        chunks = np.arange(n) // CHUNK
        group = np.zeros(n, np.int64) if groups is None else groups[chunks].astype(np.int64)
        p["rates"] = p["rate"] * multipliers["rate"][group].astype(np.float64)
        scale = 1.0 if verdict is None else float(verdict["scale"][0])
        decays = p["decay"] * multipliers["decay"][group].astype(np.float64)
        penalty = np.sign(w) if p["l1"] else w
        new, after = formula(w, scale * g + decays * penalty, old, p)
        return {"out": new, **dict(zip(slots, after, strict=True))}

    return evaluate


def _chunks(sizes: Sizes) -> int:
    return -(-sizes["n"] // CHUNK)


def _rule(name: str, formula: Formula, slots: tuple[str, ...], bytes_each: float) -> Kernel:
    def arena(role: Callable[..., Parameter], name: str) -> Parameter:
        return role(name, "n", align=16)

    return Kernel(
        f"update_{name}",
        "updates.cu",
        (
            arena(reads, "w"),
            arena(reads, "g"),
            *(arena(changes, slot) for slot in slots),
            arena(writes, "out"),
            reads("groups", _chunks, "u2", optional=True),
            reads("multipliers", "1", MULTIPLIERS),
            reads("hyper", "1", HYPER),
            reads("verdict", "1", VERDICT, optional=True),
            scalar("n"),
        ),
        over("n", per_thread=4),
        _reference(formula, slots),
        bytes_each,
        Tolerance(2e-6, 1e-6),
        in_place=(("w", "out"),),
    )


def _elastic(x: Doubles, center: Doubles, hyper: Any, **_: Any) -> dict[str, Any]:
    d = float(hyper["strength"][0]) * (x - center)
    return {"x": x - d, "center": center + d}


def _divide(x: Doubles, by: float, n: int) -> dict[str, Any]:
    return {"x": x[:n] / by}


def partials(n: int) -> int:
    """The number of partial sums that `square_sums` writes for n floats."""
    blocks: int = over("n", per_thread=4).grid({"n": n})[0]
    return max(blocks, 1)


def _square_sums(x: Doubles, n: int, **_: Any) -> dict[str, Any]:
    """Each block's partial sum, in the order of its loop: groups of four floats, then the rest."""
    count = partials(n)
    owner = np.arange(n) // 4 // 256 % count
    owner[n // 4 * 4 :] = 0
    return {"partials": np.bincount(owner, x[:n] ** 2, count)}


def _check_norm(
    partials: Doubles, hyper: Any, verdict: Any, count: int, **_: Any
) -> dict[str, Any]:
    unscale, clip = (float(hyper[name][0]) for name in ("unscale", "clip"))
    norm = unscale * np.sqrt(partials[:count].sum())
    skip = not np.isfinite(np.float32(norm))
    clipped = unscale * (clip / norm if 0 < clip < norm else 1)
    return {
        "verdict": {
            "norm": norm,
            "scale": 0.0 if skip else clipped,
            "skip": int(skip),
            "skips": int(verdict["skips"][0]) + skip,
        }
    }


def _apply_verdict(x: Doubles, verdict: Any, **_: Any) -> dict[str, Any]:
    scale = float(verdict["scale"][0])
    return {"y": np.zeros_like(x) if verdict["skip"][0] else scale * x}


ROWS = (
    _rule("sgd", _sgd, (), 12),
    _rule("momentum", _momentum, ("history",), 20),
    _rule("nesterov", _nesterov, ("history",), 20),
    _rule("adagrad", _adagrad, ("square_sum",), 20),
    _rule("rmsprop", _rmsprop, ("square_mean",), 20),
    _rule("adadelta", _adadelta, ("square_mean", "step_mean"), 28),
    _rule("adam", _adam, ("mean", "square_mean"), 28),
    _rule("adamw", _adamw, ("mean", "square_mean"), 28),
    _rule("delayed_nesterov", _delayed_nesterov, ("momentum", "sum"), 28),
    _rule("mla", _mla, ("momentum",), 20),
    _rule("heloco", _heloco, ("momentum",), 20),
    _rule("dc_asgd", _dc_asgd, ("backup",), 20),
    _rule("dc_asgd_adaptive", _dc_asgd_adaptive, ("backup", "square_mean"), 28),
    Kernel(
        "elastic_average",
        "updates.cu",
        (
            changes("x", "n", align=16),
            changes("center", "n", align=16),
            reads("hyper", "1", HYPER),
            scalar("n"),
        ),
        over("n", per_thread=4),
        _elastic,
        bytes_each=16,
    ),
    Kernel(
        "divide",
        "updates.cu",
        (changes("x", "n"), scalar("by", "f4"), scalar("n")),
        over("n"),
        _divide,
        bytes_each=8,
    ),
    Kernel(
        "square_sums",
        "gradient_guard.cu",
        (
            reads("x", "n", align=16),
            writes("partials", lambda sizes: partials(sizes["n"])),
            scalar("n"),
        ),
        over("n", per_thread=4),
        _square_sums,
        bytes_each=4,
    ),
    Kernel(
        "check_norm",
        "gradient_guard.cu",
        (
            reads("partials", "count"),
            reads("hyper", "1", HYPER),
            changes("verdict", "1", VERDICT),
            scalar("count"),
        ),
        one_block(),
        _check_norm,
        bytes_each=4,
    ),
    Kernel(
        "apply_verdict",
        "gradient_guard.cu",
        (reads("x", "n"), writes("y", "n"), reads("verdict", "1", VERDICT), scalar("n")),
        over("n"),
        _apply_verdict,
        bytes_each=8,
        tolerance=Tolerance(1e-6, 0.0),
        in_place=(("x", "y"),),
    ),
)
