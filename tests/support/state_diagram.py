"""Draws docs/images/job-states.svg from the table of transitions: run this module to write it."""

from math import hypot

from deploy.service.states import TERMINAL, TRANSITIONS, JobState
from tests.support.doc_pages import DOCS

PICTURE = DOCS / "images" / "job-states.svg"
_WIDTH, _HEIGHT = 112, 30
_PLACES = {
    JobState.QUEUED: (70, 130), JobState.CHECKING: (220, 130), JobState.STARTING: (370, 130),
    JobState.RUNNING: (530, 130), JobState.DEGRADED: (690, 130), JobState.PAUSED: (220, 40),
    JobState.PAUSING: (530, 40), JobState.RECOVERING: (295, 250), JobState.STOPPING: (610, 250),
    JobState.CANCELLED: (70, 350), JobState.FAILED: (370, 350), JobState.SUCCEEDED: (690, 350),
}  # fmt: skip


def _edge(start: JobState, end: JobState) -> str:
    """An arrow between the borders of two boxes, bent a little, so that two ways stay apart."""
    (x1, y1), (x2, y2) = _PLACES[start], _PLACES[end]
    length = hypot(x2 - x1, y2 - y1)
    across, down = (x2 - x1) / length, (y2 - y1) / length
    bend = 14 if length < 200 else 26
    middle = ((x1 + x2) / 2 - bend * down, (y1 + y2) / 2 + bend * across)
    a, b = _border(x1, y1, *middle), _border(x2, y2, *middle)
    return (
        f'<path d="M{a[0]:.0f} {a[1]:.0f} Q{middle[0]:.0f} {middle[1]:.0f}'
        f' {b[0]:.0f} {b[1]:.0f}" marker-end="url(#head)"/>'
    )


def _border(x: float, y: float, to_x: float, to_y: float) -> tuple[float, float]:
    """Where the line from the centre of a box to a point leaves the box."""
    across, down = to_x - x, to_y - y
    scale = min(
        (_WIDTH / 2) / abs(across) if across else 9e9, (_HEIGHT / 2) / abs(down) if down else 9e9
    )
    return x + across * scale, y + down * scale


def _box(state: JobState) -> str:
    x, y = _PLACES[state]
    colour = "#e6efe9" if state in TERMINAL else "#e8f0f9"
    return (
        f'<rect x="{x - _WIDTH // 2}" y="{y - _HEIGHT // 2}" width="{_WIDTH}" height="{_HEIGHT}"'
        f' rx="6" fill="{colour}"/><text x="{x}" y="{y + 4}">{state}</text>'
    )


def picture() -> str:
    """The diagram as SVG."""
    edges = [
        _edge(start, end) for start in JobState for end in JobState if end in TRANSITIONS[start]
    ]
    boxes = [_box(state) for state in JobState]
    lines = [
        (
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 770 390" font-family="sans-serif"'
            ' font-size="12" text-anchor="middle">'
        ),
        '<rect width="770" height="390" fill="white"/>',
        (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
            ' markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#456"/></marker></defs>'
        ),
        '<g fill="none" stroke="#456" stroke-width="1.1">',
        *edges,
        "</g>",
        '<g stroke="none" fill="#123">',
        *boxes,
        "</g>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
