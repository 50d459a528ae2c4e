"""Cases of `updates.cu` and `gradient_guard.cu`."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import Role
from cupy_kernels.ops.updates import spec as updates
from cupy_kernels.ops.updates.spec import HYPER, MULTIPLIERS, VERDICT
from cupy_kernels.registry import KERNELS
from tests.support.kernel_check import Case

SIZES = (0, 3, 64, 257, 1002)
RULES = [name for name in KERNELS if name.startswith("update_")]


def hyper(**values: Any) -> Any:
    """One Hyper with the values given and ordinary ones elsewhere."""
    usual = {"rate": 0.1, "keep": 0.9, "keep2": 0.99, "delta": 1e-3, "strength": 0.5, "unscale": 1}
    found = np.zeros(1, HYPER)
    for name, value in (usual | values).items():
        found[name] = value
    found["take"], found["take2"] = 1 - found["keep"], 1 - found["keep2"]
    return found


def hyper_of(rule: str, **values: Any) -> Any:
    """As above; Nesterov's `take` is 1 + mu, and delayed Nesterov's a half."""
    found = hyper(**values)
    if rule == "update_nesterov":
        found["take"] = 1 + found["keep"]
    if rule == "update_delayed_nesterov":
        found["take"] = 0.5
    return found


def verdict(*, scale: float = 1.0, skip: bool = False, skips: int = 0) -> Any:
    return np.array([(0.0, scale, skip, skips)], VERDICT)


def arena(rule: str, n: int, seed: int) -> dict[str, Any]:
    """Random weights and gradient; slots that are squares, so that roots of them are real."""
    generator = np.random.default_rng(seed)
    arrays = {}
    for parameter in KERNELS[rule].arrays:
        if parameter.dtype == np.float32:
            values = generator.standard_normal(n, np.float32)
            slot = parameter.role is Role.CHANGED and parameter.name != "backup"
            arrays[parameter.name] = values**2 if slot else values
    return arrays


def cases() -> Iterator[Case]:
    for rule in RULES:
        for n in SIZES:
            yield update(rule, n, f"size {n}", grid=(2, 1, 1))
        groups = np.array([1, 0, 2, 1, 1], np.uint16)
        multipliers = np.array([(1, 1), (0.5, 0), (2, 3)], MULTIPLIERS)
        parts = {"groups": groups, "multipliers": multipliers}
        yield update(rule, 311, "groups", hyper=hyper_of(rule, decay=0.02), **parts)
        yield update(rule, 311, "l1", hyper=hyper_of(rule, decay=0.02, l1=1), **parts)
        yield update(rule, 99, "scaled", verdict=verdict(scale=0.25))
        if rule == "update_delayed_nesterov":
            yield update(rule, 99, "not yet", hyper=hyper_of(rule, strength=0))
        yield update(rule, 99, "skipped", verdict=verdict(scale=0, skip=True))
    yield from other_cases()


def update(rule: str, n: int, label: str, grid: Any = None, **values: Any) -> Case:
    usual = {
        "groups": None,
        "multipliers": np.ones(1, MULTIPLIERS),
        "hyper": hyper_of(rule),
        "verdict": None,
        "n": n,
    }
    return Case(rule, usual | arena(rule, n, n) | values, grid=grid, label=label)


def other_cases() -> Iterator[Case]:
    generator = np.random.default_rng(5)
    for n in SIZES:
        x, y = generator.standard_normal((2, n), np.float32)
        yield Case("elastic_average", {"x": x, "center": y, "hyper": hyper(), "n": n})
        yield Case("divide", {"x": x, "by": 3.0, "n": n})
        count = updates.partials(n)
        sums = np.empty(count, np.float32)
        yield Case("square_sums", {"x": x, "partials": sums, "n": n})
        for v in (verdict(scale=0.3), verdict(skip=True)):
            yield Case("apply_verdict", {"x": x, "y": y, "verdict": v, "n": n})
    large = generator.standard_normal(5000, np.float32)
    sums = np.empty(updates.partials(5000), np.float32)
    yield Case("square_sums", {"x": large, "partials": sums, "n": 5000}, label="blocks")
    for bad in (np.nan, np.inf):
        spoilt = large[:4099].copy()
        spoilt[4098] = bad
        sums = np.empty(updates.partials(4099), np.float32)
        yield Case("square_sums", {"x": spoilt, "partials": sums, "n": 4099}, label=f"{bad}")
    for count in (1, 255, 1056):
        partials = generator.random(count, np.float32)
        for h in (hyper(), hyper(clip=2.0), hyper(clip=1e6), hyper(clip=0.5, unscale=0.125)):
            yield judged(partials, h)
        for bad in (np.nan, np.inf):
            partials = partials.copy()
            partials[-1] = bad
            yield judged(partials, hyper(clip=1.0))


def judged(partials: Any, numbers: Any) -> Case:
    arguments = {"partials": partials, "hyper": numbers, "verdict": verdict(skips=3)}
    return Case("check_norm", {**arguments, "count": len(partials)})
