"""The shapes of the literature, each judged by rules that were written before the first run.

A new one is a function from a `Bench` to checks, in a file here, and an entry in `SHAPES`.
"""

from deploy.experiments.shapes import asynchrony, momentum, speed, waiting, windows
from deploy.experiments.shapes.base import Shape
from shards.errors import BadInput

SHAPES: dict[int, Shape] = {
    shape.number: shape
    for shape in (
        asynchrony.SOFTSYNC,
        waiting.BOUNDS,
        windows.SPARKNET,
        windows.ELASTIC,
        asynchrony.COMPENSATION,
        momentum.SHAPE,
        waiting.BACKUPS,
        speed.SHAPE,
        asynchrony.TOO_HIGH_A_RATE,
        asynchrony.ONE_UPDATE_LATE,
    )
}

MISSING = {
    3: "it needs the workload l1, whose data set, Adult, is not packaged",
    7: "it needs the workload charlm, for which no text is packaged",
    12: "it needs delays drawn for each update, which the simulator does not inject",
}


def shape_numbered(number: int) -> Shape:
    """A shape; raises BadInput for one that cannot be run, with the reason."""
    if number in MISSING:
        raise BadInput(f"shape {number} is missing: {MISSING[number]}")
    if number not in SHAPES:
        known = ", ".join(map(str, sorted(SHAPES)))
        raise BadInput(f"shape: expected one of {known}, got {number}")
    return SHAPES[number]
