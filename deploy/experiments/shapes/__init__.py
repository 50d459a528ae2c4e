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
    second_asynchrony,
    second_waiting,
    second_windows,
    speed,
    uneven_data,
    waiting,
    windows,
)
from deploy.experiments.shapes.base import Judge, Registration, Shape
from shards.errors import BadInput

_LATER: dict[int, list[tuple[Judge, range]]] = {
    1: [(second_asynchrony.softsync, second_asynchrony.SEEDS)],
    2: [(second_waiting.bounds, second_waiting.SEEDS)],
    3: [(second_waiting.idling, second_waiting.SEEDS)],
    4: [(second_windows.sparknet, second_windows.SEEDS)],
    5: [(windows.elastic, second_windows.SEEDS)],
    6: [
        (second_asynchrony.compensation, second_asynchrony.SEEDS),
        (second_asynchrony.compensation_at_the_limit, second_asynchrony.THIRD_SEEDS),
    ],
    7: [(local_updates.judge_tuned, local_updates.SECOND_SEEDS)],
    8: [(second_windows.momentum, second_windows.SEEDS)],
    9: [(second_waiting.backups, second_waiting.SEEDS)],
    10: [(second_windows.speed, second_windows.SEEDS)],
    11: [(second_asynchrony.too_high_a_rate, second_asynchrony.SEEDS)],
    12: [
        (second_windows.delays, second_windows.SEEDS),
        (second_windows.longer_delays, second_windows.THIRD_SEEDS),
    ],
    13: [(second_asynchrony.one_update_late, second_asynchrony.LATE_SEEDS)],
    14: [(averages.judge_orthogonal, averages.SECOND_SEEDS)],
}
_COMMIT = ("aa14fd84", "2026-11-28T01:33:23+00:00")
"""The commit that registered most of them, and its time."""
_LATER_COMMIT = ("17037266", "2026-11-30T06:06:18+00:00")
_OTHER_COMMITS = {
    "6.3": _LATER_COMMIT,
    "7.2": _LATER_COMMIT,
    "12.3": _LATER_COMMIT,
    "14.2": ("67ce2c6b", "2026-11-28T15:43:09+00:00"),
}


def _with_later(shape: Shape) -> Shape:
    later = [
        Registration(number, judge, seeds, *_OTHER_COMMITS.get(f"{shape.number}.{number}", _COMMIT))
        for number, (judge, seeds) in enumerate(_LATER.get(shape.number, []), start=2)
    ]
    return shape._replace(later=tuple(later))


SHAPES: dict[int, Shape] = {
    shape.number: _with_later(shape)
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
