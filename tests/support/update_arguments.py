"""Arguments for the update loops: hyperparameters, runs and seeded arrays."""

import numpy as np

from cupy_kernels.ops.updates import Floats, Runs

HYPER: dict[str, dict[str, float]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9},
    "adagrad": {"delta": 1e-6},
    "rmsprop": {"decay_rate": 0.95, "delta": 1e-6},
    "adadelta": {"momentum": 0.95, "delta": 1e-6},
    "adam": {"beta1": 0.9, "beta2": 0.99, "delta": 1e-6},
    "adamw": {"beta1": 0.9, "beta2": 0.99, "delta": 1e-6, "weight_decay": 0.02},
    "delayed_nesterov": {"momentum": 0.9, "n": 1},
    "mla": {"momentum": 0.9},
    "heloco": {"momentum": 0.9},
    "dc_asgd": {"strength": 0.5},
    "dc_asgd_adaptive": {"mean": 0.95, "strength": 0.5, "delta": 1e-3},
}


SLOTS = {
    "sgd": 0,
    "adadelta": 2,
    "adam": 2,
    "adamw": 2,
    "delayed_nesterov": 2,
    "dc_asgd_adaptive": 2,
}
RULES = sorted(HYPER)
ROOTLESS = {"sgd", "momentum", "nesterov", "delayed_nesterov", "mla", "heloco", "dc_asgd"}
"""The rules without a square root."""


def constants(rule: str) -> tuple[np.float32, ...]:
    """The formula's trailing float32 arguments, as shards/rules.py derives them."""
    hyper = {name: np.float32(value) for name, value in HYPER[rule].items()}
    match rule:
        case "nesterov":
            return (hyper["momentum"], 1 + hyper["momentum"])
        case "rmsprop" | "adadelta" | "adam":
            *shares, delta = hyper.values()
            return (*(part for share in shares for part in (share, 1 - share)), delta)
        case "adamw":
            return (*constants("adam"), hyper["weight_decay"])
        case "delayed_nesterov":
            return (hyper["momentum"], 1 / hyper["n"], np.float32(1))
        case "heloco":  # of a gradient that is not to be corrected
            return (*constants("mla"), np.float32(1), np.float32(0))
        case "mla":
            return (hyper["momentum"], 1 - hyper["momentum"])
        case "dc_asgd_adaptive":
            return (hyper["mean"], 1 - hyper["mean"], hyper["strength"], hyper["delta"])
        case _:
            return tuple(hyper.values())


def run_of(size: int, rate: float = 0.1, decay: float = 0.0, *, l1: bool = False) -> Runs:
    """One run over the whole of an arena."""
    bounds = np.array([[0, size]], np.int64)
    return Runs(bounds, np.full(1, rate, np.float32), np.full(1, decay, np.float32), l1)


def normal(size: int, seed: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(size, np.float32)
