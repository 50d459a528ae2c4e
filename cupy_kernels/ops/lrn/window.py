"""The window and the constants of a local response normalisation."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Lrn:
    """A local response normalisation over `size` (odd) channels, or size x size pixels."""

    size: int = 5
    alpha: float = 1.0
    beta: float = 0.75
    k: float = 1.0
