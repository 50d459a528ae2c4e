"""Charts as SVG text, for a page without scripts or as files: lines with bands, and bars.

Each series has a dash pattern of its own as well as a colour, so that a print without colour can be
read.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _HEIGHT = 460, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 18, 10, 34
_KEY_ROW = 15  # the height of a name in the key of a file
_COLOURS = ("#2a6fbb", "#c2410c", "#15803d", "#7c3aed", "#b45309", "#0e7490", "#be185d", "#4b5563")
_DASHES = ("", "6 3", "2 2", "8 3 2 3", "12 4", "4 2 1 2", "1 3", "10 2 2 2 2 2")
MAX_POINTS = 200
_WIDE = 2
"""A range with ends further apart than by this factor has a logarithmic axis."""
_DECADES = 100
"""A logarithmic axis that is wider than this factor has lines at powers of ten alone."""

Point = tuple[float, float]


class Series(NamedTuple):
    """A named line or set of bars: x and y of each point, and for each the ends of its band."""

    name: str
    points: Sequence[Point]
    band: Sequence[Point] = ()


class Chart(NamedTuple):
    """A picture without its key, and the names in the key."""

    picture: str
    names: list[str]
    title: str

    @property
    def html(self) -> str:
        """A figure of a page, with the key below the picture."""
        key = "".join(
            f'<span><svg width="34" height="8">{_key_line(number, 4)}</svg> {escape(name)}</span> '
            for number, name in enumerate(self.names)
        )
        return (
            f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
            f' aria-label="{escape(self.title)}">{self.picture}</svg>'
            f"<figcaption>{key}</figcaption></figure>"
        )

    @property
    def file(self) -> str:
        """An SVG file, with the key in the picture."""
        height = _HEIGHT + _KEY_ROW * len(self.names) + 6
        key = "".join(
            f'<g transform="translate({_LEFT} {_HEIGHT + _KEY_ROW * number})">'
            f'{_key_line(number, 8)}<text x="40" y="11">{escape(name)}</text></g>'
            for number, name in enumerate(self.names)
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
            f' width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="10">'
            f'<title>{escape(self.title)}</title><rect width="100%" height="100%" fill="#fff"/>'
            f"{self.picture}{key}</svg>\n"
        )


def lines(series: Sequence[Series], x: str, y: str) -> Chart:
    """A chart of lines, each in its band; points that are not finite are left out.

    The lines of a training fall steeply at first, and their ends are what a reader compares. So
    values above all that follow the first quarter of the lines are cut off, and a wide range has a
    logarithmic axis.
    """
    lines_drawn = [_thin_out(line) for line in series]
    frame = _Frame([point for line in lines_drawn for point in _corners(line)], _top(lines_drawn))
    body = [frame.clip_start]
    for number, line in enumerate(lines_drawn):
        if line.band:
            body.append(f'<polygon points="{_path(frame, _outline(line))}" {_fill(number)}/>')
    for number, line in enumerate(lines_drawn):
        path = _path(frame, line.points)
        body.append(f'<polyline points="{path}" fill="none" {_stroke(number)}/>')
    body.append("</svg>")
    return _chart(frame, body, series, x, f"{y}, logarithmic" if frame.logarithmic else y)


def bars(series: Sequence[Series], x: str, y: str) -> Chart:
    """A chart of steps: for each series the height at every whole number."""
    frame = _Frame([point for line in series for point in line.points], zero=True)
    body = []
    for number, line in enumerate(series):
        corners = [(edge, height) for at, height in line.points for edge in (at - 0.5, at + 0.5)]
        body.append(f'<polyline points="{_path(frame, corners)}" fill="none" {_stroke(number)}/>')
    return _chart(frame, body, series, x, y)


def _corners(line: Series) -> list[Point]:
    """The points of a line and of its band, in the order of x."""
    at = [x for x, _ in line.points]
    return [*line.points, *((x, y) for x, ends in zip(at, line.band, strict=False) for y in ends)]


def _outline(line: Series) -> list[Point]:
    """The upper ends of a band from left to right, and the lower ones back."""
    at = [x for x, _ in line.points]
    highs = [(x, high) for x, (_, high) in zip(at, line.band, strict=True)]
    lows = [(x, low) for x, (low, _) in zip(at, line.band, strict=True)]
    return highs + lows[::-1]


def _top(series: Sequence[Series]) -> float | None:
    """The largest value of any line or band after its first quarter; None if none has points."""
    later = [
        y
        for line in series
        for y in (
            *(y for _, y in line.points[len(line.points) // 4 :]),
            *(high for _, high in line.band[len(line.band) // 4 :]),
        )
    ]
    return max(later, default=None)


class _Frame:
    """The range of both axes, and where a value is on the page."""

    def __init__(
        self, points: Sequence[Point], top: float | None = None, *, zero: bool = False
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
        if not self.logarithmic or self.high < 5 * self.low:
            return ticks(self.low, self.high)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        times = (1, 2, 5) if self.high < _DECADES * self.low else (1,)
        values = (factor * 10.0**power for power in powers for factor in times)
        return [value for value in values if self.low <= value <= self.high]


def _chart(frame: _Frame, body: list[str], series: Sequence[Series], x: str, y: str) -> Chart:
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
    picture = (
        f"{''.join(grid)}{''.join(body)}"
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(x)}</text>'
        f'<text x="12" y="{_HEIGHT / 2}" text-anchor="middle"'
        f' transform="rotate(-90 12 {_HEIGHT / 2})">{escape(y)}</text>'
    )
    return Chart(picture, [line.name for line in series], f"{y} over {x}")


def ticks(low: float, high: float) -> list[float]:
    """Round values within a range, three to six of them: 1, 2 or 5 times a power of 10 apart."""
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    apart = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
    first = math.ceil(low / apart)
    return [round(n * apart, 12) for n in range(first, math.floor(high / apart) + 1)]


def _path(frame: _Frame, points: Sequence[Point]) -> str:
    return " ".join(f"{frame.x(a):.1f},{frame.y(b):.1f}" for a, b in points)


def _stroke(number: int) -> str:
    dash = _DASHES[(number + number // len(_COLOURS)) % len(_DASHES)]
    pattern = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="{_COLOURS[number % len(_COLOURS)]}" stroke-width="1.6"{pattern}'


def _fill(number: int) -> str:
    return f'fill="{_COLOURS[number % len(_COLOURS)]}" fill-opacity="0.13"'


def _key_line(number: int, y: int) -> str:
    return f'<line x1="0" x2="34" y1="{y}" y2="{y}" {_stroke(number)}/>'


def _thin_out(line: Series) -> Series:
    """At most MAX_POINTS finite points of a line with their band, the last one among them."""
    every = max(1, math.ceil(len(line.points) / MAX_POINTS))
    chosen = [
        at
        for at in range(len(line.points))[::-1][::every][::-1]
        if all(map(math.isfinite, (*line.points[at], *(line.band[at] if line.band else ()))))
    ]
    band = [line.band[at] for at in chosen] if line.band else []
    return line._replace(points=[line.points[at] for at in chosen], band=band)
