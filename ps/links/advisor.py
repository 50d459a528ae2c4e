"""Recommends settings for a measured link. Pure formulae.

Theory. A step computes for C seconds. Its push takes U seconds of the worker's line and its pull D,
both summed over the shards, because their parts cross the same line; R is the longest round trip.
Done in sequence, a step takes C + R + U + D. What can be hidden, and by what:

- *Bandwidth cannot be hidden.* While max(U, D) > C the line is the slowest part. The remedy is to
  send less: the mildest codec for which U fits into C, and likewise D; beyond 16-bit floats, pulls
  are of changes. What is left is spread over several steps, n_push = ceil(U / C) and n_fetch =
  ceil(D / C).
- *Latency can.* A push is not waited for. A pull that is requested `ahead` steps early arrives in
  time when ahead * C >= R + D, hence ahead = ceil((R + D) / C).
- *The bound must allow it.* A pull for a step that is `ahead` of the present one reaches the gate
  when the others' last U / C steps are still on their way to it, and n_push - 1 are held back. One
  more step allows for workers that are not equally fast. So bound = ahead + ceil(U / C) + n_push,
  or n_push + n_fetch where a fetch serves several steps. A time below a twentieth of C is
  neglected.
- *The pipe must be full.* Its content is rate times round trip; pieces of P bytes fill it when
  ceil(content / P) + 1 are in flight, pushes when ceil((R + U) / max(C, U)) + 1 may be unanswered.
- *A TCP connection carries at most one window per round trip.* Where the round trip is long,
  clients open several connections (striping.py), and the rates are those of several. Where it is
  short and several were faster, TCP must be allowed twice the pipe's content, because half of a
  buffer is the kernel's.
"""

import math
from collections.abc import Sequence

import msgspec

from ps.links.benchmark import LinkFigures
from ps.security.keys import address_of
from ps.session.compression import NONE
from ps.transport.addresses import on_this_host
from ps.transport.striping import stripes_for
from shards.schema_digest import differs

PIECE_BYTES = 1 << 20
_NEGLIGIBLE = 0.05
_FASTER = 1.3
_SKEW_S = 1.0

# The codecs for pushes and pulls, mildest first, and their bytes on the wire relative to float32,
# including one scale for each block of 256 values.
CODECS = ((NONE, 1.0), ("bf16", 0.5), ("int8", 0.26), ("4bit", 0.13), ("topk:0.01", 0.02))


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Recommended settings for one measured job, and the seconds that they were computed from.

    `stripes` is the most connections that clients open to a shard by themselves; `window_bytes` is
    the size to allow TCP's buffers, 0 where they are large enough; `plain_step_s` is a step done in
    sequence, `step_s` the expected step with these settings in steady state. `ahead` is how many
    steps early to request a pull.
    """

    compute_s: float
    rtt_s: float
    push_s: float
    pull_s: float
    plain_step_s: float
    step_s: float
    staleness: int
    n_push: int
    n_fetch: int
    prefetch: bool
    ahead: int
    pushes_in_flight: int
    pieces_in_flight: int
    stripes: int
    window_bytes: int
    push_codec: str
    pull_codec: str
    transport: str


def advise(
    links: Sequence[LinkFigures],
    shard_bytes: Sequence[int],
    endpoints: Sequence[str],
    compute_s: float,
) -> Advice:
    """The settings for steps that compute for `compute_s` and move `shard_bytes` to each shard.

    `links` are the measured ones, one per shard and in order, like `endpoints`.
    """
    rtt_s = max(link.rtt_s for link in links)
    stripes = [stripes_for(link.rtt_s, size) for link, size in zip(links, shard_bytes, strict=True)]
    up, down = zip(*map(_rates, links, stripes), strict=True)
    push_s = sum(size / rate for size, rate in zip(shard_bytes, up, strict=True))
    pull_s = sum(size / rate for size, rate in zip(shard_bytes, down, strict=True))
    push_codec, push_share = _mildest(push_s, compute_s)
    pull_codec, pull_share = _mildest(pull_s, compute_s)
    sent_s, fetched_s = push_s * push_share, pull_s * pull_share
    n_push, n_fetch = _steps(sent_s, compute_s), _steps(fetched_s, compute_s)
    slow = rtt_s + fetched_s > _NEGLIGIBLE * compute_s
    prefetch = n_fetch == 1 and slow
    ahead = _steps(rtt_s + fetched_s, compute_s) if prefetch else 0
    travelling = _steps(sent_s, compute_s) if sent_s > _NEGLIGIBLE * compute_s else 0
    content = max(
        rate * link.rtt_s for link, *rates in zip(links, up, down, strict=True) for rate in rates
    )
    pushed_every_s = max(n_push * compute_s, sent_s)
    waits_s = rtt_s + fetched_s if n_fetch > 1 else 0.0
    return Advice(
        compute_s=compute_s,
        rtt_s=rtt_s,
        push_s=push_s,
        pull_s=pull_s,
        plain_step_s=compute_s + rtt_s + push_s + pull_s,
        step_s=max(compute_s + waits_s / n_fetch, sent_s / n_push, fetched_s / n_fetch),
        staleness=n_push + n_fetch if n_fetch > 1 else ahead + travelling + n_push,
        n_push=n_push,
        n_fetch=n_fetch,
        prefetch=prefetch,
        ahead=ahead,
        pushes_in_flight=math.ceil((rtt_s + sent_s) / pushed_every_s) + 1,
        pieces_in_flight=math.ceil(content / PIECE_BYTES) + 1,
        stripes=max(stripes),
        window_bytes=max(map(_window, links, stripes)),
        push_codec=push_codec,
        pull_codec=pull_codec,
        transport="auto" if any(map(_on_this_host, endpoints)) else "tcp",
    )


def remarks(links: Sequence[LinkFigures]) -> list[str]:
    """Problems of the shards themselves, one line each."""
    problems = []
    for link in links:
        if difference := differs(link.protocol, link.schema):
            problems.append(f"shard {link.shard}: {difference}: it will refuse workers from here")
        error_s = link.rtt_s / 2
        if abs(link.skew_s) > _SKEW_S + error_s:
            ahead = "ahead" if link.skew_s > 0 else "behind"
            problems.append(
                f"shard {link.shard}'s clock is {abs(link.skew_s):.1f} s {ahead} of ours: times in"
                " logs do not line up (training does not mind)"
            )
    return problems


def _steps(taken_s: float, compute_s: float) -> int:
    return max(1, math.ceil(taken_s / compute_s))


def _mildest(taken_s: float, compute_s: float) -> tuple[str, float]:
    """The first codec with which the transfer fits into a step; the strongest where none does."""
    fitting = (codec for codec in CODECS if taken_s * codec[1] <= compute_s)
    return next(fitting, CODECS[-1])


def _rates(link: LinkFigures, stripes: int) -> tuple[float, float]:
    """Bytes a second up and down over `stripes` connections."""
    return (link.striped_up, link.striped_down) if stripes > 1 else (link.up, link.down)


def _window(link: LinkFigures, stripes: int) -> int:
    """The size to allow TCP's buffers, in bytes; 0 where they do not limit the link."""
    if stripes > 1:
        return 0
    gain = max(link.striped_up / link.up, link.striped_down / link.down)
    content = max(link.striped_up, link.striped_down) * link.rtt_s
    return math.ceil(2 * content) if gain > _FASTER and content > PIECE_BYTES else 0


def _on_this_host(endpoint: str) -> bool:
    plain = address_of(endpoint).plain
    host = plain.removeprefix("tcp://").rpartition(":")[0]
    return plain.startswith("ipc://") or on_this_host(host)
