"""Recommends how to exchange a model in fragments over a measured link. Pure formulae.

Theory. A worker takes a step in C seconds, the fastest in C0. A push of the whole model takes U
seconds of its line, a pull D, and R is the round trip. The model has P fragments, each exchanged
every H steps; T steps after its push a fragment has to be there.

- *A period is 24 steps*, as in Decoupled DiLoCo (arXiv 2604.21428), and the line is free for half
  of it. So the codec is the mildest, down to 4 bits, with which max(U, D) fits into H * C0 / 2;
  where none fits, H grows.
- *A fragment is small* if moving it takes no longer than a round trip or a step, whichever is
  longer: P = ceil((U + D) / max(R, C0)), at most 24.
- *The overlap hides the exchange*: T = ceil((R + (U + D) / P) / C0), less than H.
- *A quorum costs nothing* where its reports come while the fastest still has steps to take. A
  worker takes its H steps H * (C - C0) later than the fastest; K counts those for whom that is at
  most the slack T * C0 - R - (U + D) / P.
"""

import math
from collections.abc import Sequence

import msgspec

from ps.links.advisor import CODECS, Advice

PERIOD, MOST_FRAGMENTS = 24, 24
_LINE_SHARE = 0.5
_HARMLESS = [codec for codec in CODECS if not codec[0].startswith("topk")]


class FragmentAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `decoupled_diloco` for one measured job.

    `fragments` is P, `period` is H, `overlap` is T and `quorum` is K. `codec` is for reports.
    `exchange_s` are the seconds from a fragment's push until it is back; `line_share` is the share
    of the time in which the busier direction of a worker's line is occupied.
    """

    fragments: int
    period: int
    overlap: int
    quorum: int
    codec: str
    exchange_s: float
    line_share: float


def advise_fragments(link: Advice, compute_s: Sequence[float]) -> FragmentAdvice:
    """The settings for workers that take `compute_s` for a step each, behind the same link."""
    fastest = min(compute_s)
    longer, both = max(link.push_s, link.pull_s), link.push_s + link.pull_s
    free = _LINE_SHARE * fastest
    codec, share = next(
        (codec for codec in _HARMLESS if longer * codec[1] <= PERIOD * free), _HARMLESS[-1]
    )
    period = max(PERIOD, math.ceil(longer * share / free))
    patience = max(link.rtt_s, fastest)
    fragments = min(MOST_FRAGMENTS, max(1, math.ceil(both * share / patience)))
    exchange_s = link.rtt_s + both * share / fragments
    overlap = max(1, math.ceil(exchange_s / fastest))
    period = max(period, overlap + 1)
    slack = overlap * fastest - exchange_s
    return FragmentAdvice(
        fragments=fragments,
        period=period,
        overlap=overlap,
        quorum=sum(period * (seconds - fastest) <= slack for seconds in compute_s),
        codec=codec,
        exchange_s=exchange_s,
        line_share=longer * share / (period * fastest),
    )
