"""The advice holds: a simulated pipeline with it takes the step time that it predicts.

The simulation does not use the formulae: it plays a worker, its twin, the line each way and the
gate, event by event.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ps.links.advisor import CODECS, Advice, advise, remarks
from ps.session.compression import Compression
from shards.messages import PROTOCOL
from shards.schema_digest import SCHEMA
from tests.support.link_figures import MB, advise_for, make_link


def played(advice: Advice, rtt_s: float, push_s: float, pull_s: float) -> float:
    """Seconds per step in the steady state of a worker with a twin that does the same.

    `push_s` and `pull_s` occupy the line one way each; all of it arrives half an `rtt_s` later.
    """
    period = math.lcm(advice.n_push, advice.n_fetch)
    half = period * max(10, 200 // period)
    steps = 2 * half
    begun, ended, weights_at = [0.0] * steps, [0.0] * steps, [0.0] * steps
    clock_at: list[float] = []  # when the shard knows that so many steps are done
    up_free = down_free = 0.0
    for step in range(steps):
        if step % advice.n_fetch:
            weights_at[step] = ended[step - 1]
        else:
            asked = begun[max(0, step - advice.ahead)] if advice.ahead else ended[step - 1]
            reached = (asked if step else 0.0) + rtt_s / 2
            needs = step + advice.n_fetch - 1 - advice.staleness
            if needs > 0:
                assert len(clock_at) >= needs, "the bound waits for what will never be pushed"
                reached = max(reached, clock_at[needs - 1])
            down_free = max(down_free, reached) + pull_s
            weights_at[step] = down_free + rtt_s / 2
        begun[step] = max(ended[step - 1] if step else 0.0, weights_at[step])
        ended[step] = begun[step] + advice.compute_s
        if (step + 1) % advice.n_push == 0:
            up_free = max(up_free, ended[step]) + push_s
            clock_at += [up_free + rtt_s / 2] * advice.n_push
    last = steps - period
    return (begun[last] - begun[half]) / (last - half)


@given(
    rtt_s=st.floats(0.0001, 0.5),
    rate=st.floats(5e6, 1e9),
    compute_s=st.floats(0.02, 1.0),
    size=st.integers(10_000, 5 * MB),
)
def test_a_step_takes_what_is_reckoned(
    rtt_s: float, rate: float, compute_s: float, size: int
) -> None:
    """Where the line is not the slowest part, a step takes its computing and at most 6 % more."""
    advice = advise_for(rtt_s, rate, compute_s, size)
    push_s = advice.push_s * dict(CODECS)[advice.push_codec]
    pull_s = advice.pull_s * dict(CODECS)[advice.pull_codec]
    taken_s = played(advice, rtt_s, push_s, pull_s)
    assert taken_s <= 1.06 * advice.step_s
    if advice.n_fetch == 1 and push_s <= compute_s:
        assert advice.step_s == compute_s


def test_a_fast_link_wants_nothing() -> None:
    """On a local network there is nothing to hide."""
    advice = advise_for(0.0005, 1e9, 0.1)
    assert (advice.prefetch, advice.ahead, advice.n_push, advice.n_fetch) == (False, 0, 1, 1)
    assert (advice.push_codec, advice.pull_codec, advice.window_bytes) == ("none", "none", 0)
    assert advice.staleness == 1
    assert advice.transport == "tcp"


def test_latency_is_hidden_ahead() -> None:
    """100 ms and 12.5 MB/s with 60 ms of computing, by hand; much less does not suffice."""
    advice = advise_for(0.1, 12.5e6, 0.06, size=MB // 2)
    assert (advice.push_s, advice.pull_s) == pytest.approx((0.04, 0.04))
    assert advice.plain_step_s == pytest.approx(0.06 + 0.1 + 0.04 + 0.04)
    assert advice.ahead == math.ceil((0.1 + 0.04) / 0.06) == 3
    assert advice.staleness == 3 + 1 + 1
    assert advice.pushes_in_flight == math.ceil(0.14 / 0.06) + 1
    assert advice.pieces_in_flight == math.ceil(1.25e6 / (1 << 20)) + 1
    assert played(advice, 0.1, 0.04, 0.04) == pytest.approx(0.06)
    for less in (replace(advice, ahead=2), replace(advice, staleness=2)):
        assert played(less, 0.1, 0.04, 0.04) > 1.05 * 0.06


def test_the_mildest_codec_that_fits_is_told() -> None:
    """Transfers longer than a step get the mildest codec that fits, then are spread over steps."""
    advices = [advise_for(0.05, 1e6, compute_s) for compute_s in (1.0, 0.6, 0.3, 0.2, 0.03)]
    wanted = ["none", "bf16", "int8", "4bit", "topk:0.01"]
    assert [advice.push_codec for advice in advices] == wanted
    assert [advice.pull_codec for advice in advices] == wanted
    assert [(advice.n_push, advice.n_fetch) for advice in advices] == [(1, 1)] * 5
    thin = advise_for(0.05, 1e6, 0.01)
    assert (thin.push_codec, thin.n_push) == ("topk:0.01", 2)
    assert (thin.pull_codec, thin.n_fetch, thin.prefetch) == ("topk:0.01", 2, False)


def test_each_way_is_compressed_by_itself() -> None:
    """A line that is slow one way only, as home lines are, needs a codec for that way only."""
    home = make_link(0.02, 2e6, down=20e6, striped_down=20e6)
    advice = advise([home], [MB], ["tcp://10.0.0.1:7400"], 0.2)
    assert (advice.push_s, advice.pull_s) == pytest.approx((0.5, 0.05))
    assert (advice.push_codec, advice.pull_codec) == ("int8", "none")


def test_a_short_window_is_told() -> None:
    """Twice the pipe's content where several connections were faster, but not within noise."""
    endpoints = ["tcp://10.0.0.1:7400"]
    short = make_link(0.015, 100e6, striped_up=300e6, striped_down=200e6)
    advice = advise([short], [MB], endpoints, 0.1)
    assert (advice.stripes, advice.window_bytes) == (1, 2 * 300e6 * 0.015)
    assert advice.push_s == pytest.approx(MB / 100e6)
    near = make_link(0.001, 100e6, striped_up=200e6, striped_down=200e6)
    assert advise([near], [MB], endpoints, 0.1).window_bytes == 0


def test_a_long_link_is_reckoned_over_several_connections() -> None:
    """Clients open them by themselves, so no window needs raising; not for a small model."""
    endpoints = ["tcp://10.0.0.1:7400"]
    long = make_link(0.1, 20e6, striped_up=100e6, striped_down=80e6)
    advice = advise([long], [MB], endpoints, 0.1)
    assert (advice.stripes, advice.window_bytes) == (8, 0)
    assert (advice.push_s, advice.pull_s) == pytest.approx((MB / 100e6, MB / 80e6))
    small = advise([long], [1000], endpoints, 0.1)
    assert small.stripes == 1
    assert small.push_s == pytest.approx(1000 / 20e6)


def test_shards_share_the_line() -> None:
    """Parts of a step cross the worker's line one after another; the longest round trip counts
    once.
    """
    advice = advise(
        [make_link(0.02, 10e6), make_link(0.08, 5e6)], [MB, MB], ["tcp://a:1", "ipc:///tmp/s"], 1.0
    )
    assert advice.push_s == pytest.approx(0.1 + 0.2)
    assert advice.rtt_s == 0.08
    assert advice.transport == "auto"


def test_what_is_amiss_is_told() -> None:
    """Another schema and a wrong clock are reported with their shard; small skews are not."""
    fine = make_link(0.1, 1e6, skew_s=0.9)
    odd = replace(make_link(0.1, 1e6, skew_s=-90.0), shard=1, schema="x")
    other, clock = remarks([fine, odd])
    assert other == (
        f"shard 1: expected schema {SCHEMA} of protocol {PROTOCOL}, got schema x: it will refuse"
        " workers from here"
    )
    assert clock.startswith("shard 1's clock is 90.0 s behind of ours")


def test_the_codecs_exist() -> None:
    """Every recommended codec can be set."""
    for push, _ in CODECS:
        for pull, _ in CODECS:
            Compression.parse(push, pull)
