"""Charts as SVG text, for a page without scripts: lines, and bars side by side.

Each series has a dash pattern of its own as well as a colour, so that a print without colour can be
read.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _HEIGHT = 460, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 18, 10, 34
_COLOURS = ("#2a6fbb", "#c2410c", "#15803d", "#7c3aed", "#b45309", "#0e7490", "#be185d", "#4b5563")
_DASHES = ("", "6 3", "2 2", "8 3 2 3", "12 4", "4 2 1 2", "1 3", "10 2 2 2 2 2")
MAX_POINTS = 200
_WIDE = 3
"""A range with ends further apart than by this factor has a logarithmic axis."""


class Series(NamedTuple):
    """A named line or set of bars: x and y of each point."""

    name: str
    points: list[tuple[float, float]]


def lines(series: Sequence[Series], x: str, y: str) -> str:
    """A chart of lines; points that are not finite are left out.

    The lines of a training fall steeply at first, and their ends are what a reader compares. So
    values above all of the later half of the lines are cut off, and a wide range has a logarithmic
    axis.
    """
    lines_drawn = [
        line._replace(points=[p for p in _thin_out(line.points) if all(map(math.isfinite, p))])
        for line in series
    ]
    frame = _Frame(
        [p for line in lines_drawn for p in line.points],
        top=_top([line.points for line in lines_drawn]),
    )
    body = [frame.clip_start]
    for number, line in enumerate(lines_drawn):
        path = " ".join(f"{frame.x(a):.1f},{frame.y(b):.1f}" for a, b in line.points)
        body.append(f'<polyline points="{path}" fill="none" {_stroke(number)}/>')
    body.append("</svg>")
    return _chart(frame, body, series, x, f"{y}, logarithmic" if frame.logarithmic else y)


def _top(lines: Sequence[Sequence[tuple[float, float]]]) -> float | None:
    """The largest value in the later half of any line; None if no line has points."""
    later = [y for points in lines for _, y in points[len(points) // 2 :]]
    return max(later, default=None)


def bars(series: Sequence[Series], x: str, y: str) -> str:
    """A chart of steps: for each series the height at every whole number."""
    frame = _Frame([p for line in series for p in line.points], zero=True)
    body = []
    for number, line in enumerate(series):
        corners = [(edge, height) for at, height in line.points for edge in (at - 0.5, at + 0.5)]
        path = " ".join(f"{frame.x(a):.1f},{frame.y(b):.1f}" for a, b in corners)
        body.append(f'<polyline points="{path}" fill="none" {_stroke(number)}/>')
    return _chart(frame, body, series, x, y)


class _Frame:
    """The range of both axes, and where a value is on the page."""

    def __init__(
        self, points: Sequence[tuple[float, float]], zero: bool = False, top: float | None = None
    ) -> None:
        xs, ys = [a for a, _ in points] or [0.0], [b for _, b in points] or [0.0]
        self.left, self.right = min(xs), max(*xs, min(xs) + 1e-9)
        self.low = 0.0 if zero else min(ys)
        self.high = max(max(ys) if top is None else top, self.low + 1e-9)
        self.logarithmic = top is not None and 0 < _WIDE * self.low < self.high

    def x(self, value: float) -> float:
        share = (value - self.left) / (self.right - self.left)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    @property
    def clip_start(self) -> str:
        """The start of a picture in the picture, with the same coordinates, inside the axes."""
        width, height = _WIDTH - _LEFT - _RIGHT + 2, _HEIGHT - _TOP - _BOTTOM + 2
        area = f"{_LEFT - 1} {_TOP - 1} {width} {height}"
        return (
            f'<svg x="{_LEFT - 1}" y="{_TOP - 1}" width="{width}" height="{height}"'
            f' viewBox="{area}">'
        )

    @property
    def levels(self) -> list[float]:
        """The values of y with a line across the chart."""
        if not self.logarithmic:
            return ticks(self.low, self.high)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        values = (times * 10.0**power for power in powers for times in (1, 2, 5))
        return [value for value in values if self.low <= value <= self.high]


def _chart(frame: _Frame, body: list[str], series: Sequence[Series], x: str, y: str) -> str:
    grid = [
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{frame.y(at):.1f}"'
        f' y2="{frame.y(at):.1f}" stroke="#e4e7eb"/>'
        f'<text x="{_LEFT - 4}" y="{frame.y(at) + 3:.1f}" text-anchor="end">{at:g}</text>'
        for at in frame.levels
    ]
    grid += [
        f'<text x="{frame.x(at):.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{at:g}</text>'
        for at in ticks(frame.left, frame.right)
    ]
    key = "".join(
        f'<span><svg width="34" height="8"><line x1="0" x2="34" y1="4" y2="4" {_stroke(n)}/></svg>'
        f" {escape(line.name)}</span> "
        for n, line in enumerate(series)
    )
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
        f' aria-label="{escape(y)} over {escape(x)}">{"".join(grid)}{"".join(body)}'
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(x)}</text>'
        f'<text x="12" y="{_HEIGHT / 2}" text-anchor="middle"'
        f' transform="rotate(-90 12 {_HEIGHT / 2})">{escape(y)}</text></svg>'
        f"<figcaption>{key}</figcaption></figure>"
    )


def ticks(low: float, high: float) -> list[float]:
    """Round values within a range, three to six of them: 1, 2 or 5 times a power of 10 apart."""
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    apart = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
    first = math.ceil(low / apart)
    return [round(n * apart, 12) for n in range(first, math.floor(high / apart) + 1)]


def _stroke(number: int) -> str:
    dash = _DASHES[(number + number // len(_COLOURS)) % len(_DASHES)]
    pattern = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="{_COLOURS[number % len(_COLOURS)]}" stroke-width="1.6"{pattern}'


def _thin_out(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MAX_POINTS of the points, the last one among them."""
    every = math.ceil(len(points) / MAX_POINTS)
    return points[::-1][:: max(1, every)][::-1]
