"""The shapes of the literature, each judged by rules that were written before the first run.

A new one is a function from a `Bench` to checks, in a file here, and an entry in `SHAPES`.
"""

from deploy.experiments.shapes import (
    asynchrony,
    averages,
    delays,
    failures,
    fragments,
    local_updates,
    momentum,
    speed,
    uneven_data,
    waiting,
    windows,
)
from deploy.experiments.shapes.base import Shape
from shards.errors import BadInput

SHAPES: dict[int, Shape] = {
    shape.number: shape
    for shape in (
        asynchrony.SOFTSYNC,
        waiting.BOUNDS,
        waiting.IDLE,
        windows.SPARKNET,
        windows.ELASTIC,
        asynchrony.COMPENSATION,
        local_updates.SHAPE,
        momentum.SHAPE,
        waiting.BACKUPS,
        speed.SHAPE,
        asynchrony.TOO_HIGH_A_RATE,
        delays.SHAPE,
        asynchrony.ONE_UPDATE_LATE,
        averages.SHAPE,
        fragments.OVERLAP,
        fragments.QUORUM,
        failures.SHAPE,
        uneven_data.SHAPE,
    )
}


def shape_numbered(number: int) -> Shape:
    """A shape; raises BadInput for a number that none has."""
    if number not in SHAPES:
        raise BadInput("shape", expected=f"one of 1 to {max(SHAPES)}", got=number)
    return SHAPES[number]
