"""The link model keeps its promises: rate, delay, order, loss, outages and window, from a seed."""

import math
import statistics

import pytest

from ps.transport.link_model import Jitter, Lane, LinkModel, LinkStream, parse_link
from shards.errors import BadInput


def stream(model: LinkModel, seed: str = "s") -> LinkStream:
    return LinkStream(Lane(model, seed, 0.0), seed)


def test_a_link_is_written_as_people_do() -> None:
    """Every part is read with its unit, and an omitted part has no effect."""
    text = "rtt=100ms, jitter=500us,shape=pareto,rate=1.5Gbit,loss=0.1%,outage=2s/60s"
    assert parse_link(f"{text},window=4MB,seed=7") == LinkModel(
        rtt_s=0.1,
        jitter_s=0.0005,
        shape=Jitter.PARETO,
        rate=187.5e6,
        loss=0.001,
        outage_s=2.0,
        outage_every_s=60.0,
        window=4_000_000,
        seed=7,
    )
    assert parse_link("") == LinkModel()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("rtt", "'rtt'"),
        ("rtt=100", "one of us, ms, s, got 'rtt=100'"),
        ("rtt=-1ms", "'rtt=-1ms'"),
        ("rtt=1e400s", "'rtt=1e400s'"),
        ("speed=1Gbit", "got 'speed=1Gbit'"),
        ("rate=0bit", "rate: expected more than 0"),
        ("loss=100%", "loss: expected less than 100"),
        ("outage=60s/2s", "outage: expected LENGTH/EVERY"),
        ("outage=2s", "outage=2s"),
        ("window=1KB", "window: expected at least"),
        ("shape=round", "link: shape: expected one of uniform, normal, pareto, got 'round'"),
        ("rtt=1ms,rate=1Mbit,rtt=2ms", "link: expected rtt once, got it again"),
        ("seed=x", "link: seed: expected a whole number, got 'x'"),
    ],
)
def test_what_is_no_link_is_named(text: str, complaint: str) -> None:
    """The error quotes the invalid part, and what was expected."""
    with pytest.raises(BadInput, match=complaint):
        parse_link(text)


def test_bytes_take_their_time() -> None:
    """The last of n bytes comes out n / rate and half a round trip after they were sent."""
    one = stream(parse_link("rtt=100ms,rate=8Mbit"))
    one.enter(2000, 10.0)  # what the bucket holds
    assert one.enter(5000, 10.0) == pytest.approx(10.0 + 0.005 + 0.05)
    assert one.enter(5000, 10.0) == pytest.approx(10.0 + 0.010 + 0.05)
    assert one.enter(5000, 20.0) == pytest.approx(20.0 + 0.003 + 0.05), "the bucket refilled"


def test_connections_share_a_line() -> None:
    """Two connections over one lane get its rate together, not each."""
    lane = Lane(parse_link("rate=8Mbit"), "s", 0.0)
    first, second = LinkStream(lane, "a"), LinkStream(lane, "b")
    for _ in range(10):
        first.enter(1000, 5.0)
        last = second.enter(1000, 5.0)
    assert last == pytest.approx(5.0 + 20 * 0.001 - 0.002), "2 ms were in the bucket"


def test_a_late_driver_costs_the_line_nothing() -> None:
    """Bytes that waited for the line leave at its rate, however late their driver wakes; those that
    come to an idle line get no more than the bucket holds.
    """
    one = stream(parse_link("rate=8Mbit"))
    one.enter(0, 10.0)
    now, carried = 10.0, 0
    for _ in range(20):
        while one.may_enter(5000, now):
            one.enter(5000, now, waited=True)
            carried += 5000
        assert one.must_queue(5000, now)
        now += 0.05
    assert carried == 970_000, "0.95 s of the line, and 20 ms that wait for it"
    assert one.enter(5000, 20.0) == pytest.approx(20.003)


@pytest.mark.parametrize("shape", list(Jitter))
def test_jitter_has_its_mean_and_deviation(shape: Jitter) -> None:
    """Single messages' round trips average the RTT and scatter by the jitter, in any shape."""
    model = LinkModel(rtt_s=0.1, jitter_s=0.01, shape=shape)
    there, back = stream(model, "there"), stream(model, "back")
    taken = []
    for number in range(20_000):
        sent = float(number)
        taken.append(back.enter(1, there.enter(1, sent)) - sent)
    assert statistics.mean(taken) == pytest.approx(0.1, rel=0.01)
    assert statistics.stdev(taken) == pytest.approx(0.01, rel=0.15)


def test_nothing_overtakes() -> None:
    """Jitter and loss never let a byte come out before one that was sent earlier."""
    one = stream(parse_link("rtt=100ms,jitter=40ms,loss=2%,rate=100Mbit"))
    arrivals = [one.enter(1448, 0.001 * number) for number in range(5000)]
    assert arrivals == sorted(arrivals)


def test_loss_costs_a_round_trip() -> None:
    """The share of chunks a round trip late equals that of chunks with a lost packet."""
    one = stream(parse_link("rtt=100ms,loss=1%"))
    late = [one.enter(14480, float(number)) - number > 0.1 for number in range(20_000)]
    assert sum(late) / len(late) == pytest.approx(1 - 0.99**10, rel=0.05)


def test_nothing_leaves_in_an_outage() -> None:
    """Bytes sent in an outage leave at its end, equally both ways, for the configured share of
    time.
    """
    model = parse_link("outage=2s/20s")
    up, down = (stream(model) for _ in range(2))
    held = []
    for number in range(200_000):
        sent = 0.01 * number
        arrived = up.enter(1, sent)
        assert down.enter(1, sent) == arrived
        held.append(arrived - sent)
    assert max(held) == pytest.approx(2.0, abs=0.011)
    assert sum(wait > 0 for wait in held) / len(held) == pytest.approx(0.1, rel=0.25)


def test_a_window_bounds_a_connection() -> None:
    """A connection with a window below rate times RTT carries one window per round trip."""
    one, now, sent = stream(parse_link("rtt=100ms,rate=1Gbit,window=1MB")), 0.0, 0
    while now < 10.0:
        if one.may_enter(50_000, now):
            one.enter(50_000, now)
            sent += 50_000
        else:
            now = max(one.enter_at(50_000, now), math.nextafter(now, math.inf))
    assert sent / now == pytest.approx(1e6 / 0.1, rel=0.1)


def test_the_queue_is_short() -> None:
    """The queue before the line is bounded, so that a full link does not add seconds."""
    one, sent = stream(parse_link("rate=80Mbit")), 0
    while one.may_enter(10_000, 0.0):
        one.enter(10_000, 0.0)
        sent += 10_000
    assert sent <= 10e6 * 0.025
    assert one.enter_at(10_000, 0.0) > 0


def test_one_seed_is_one_link() -> None:
    """The same seed gives the same arrivals, another seed different ones."""
    model = parse_link("rtt=50ms,jitter=10ms,loss=1%,outage=1s/10s")

    def arrivals(seed: str) -> list[float]:
        one = stream(model, seed)
        return [one.enter(1000, 0.1 * number) for number in range(500)]

    assert arrivals("a") == arrivals("a") != arrivals("b")
