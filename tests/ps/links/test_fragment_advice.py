"""Settings of fragments, computed by hand for links of whole numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps.links.advisor import Advice
from ps.links.fragment_advice import advise_fragments
from tests.support.link_figures import MB, advise_for


def link(rtt_s: float, whole_s: float) -> Advice:
    """A link with this round trip; its line moves the whole model in `whole_s` each way."""
    return advise_for(rtt_s, MB / whole_s, 1.0)


def test_a_fast_line_needs_neither_codec_nor_quorum() -> None:
    """A model that moves within a step is one table, back within a step; equal workers are all
    waited for."""
    advice = advise_fragments(link(0.0, 0.1), [1.0] * 4)
    assert (advice.fragments, advice.period, advice.overlap) == (1, 24, 1)
    assert (advice.quorum, advice.codec) == (4, "none")
    assert advice.exchange_s == pytest.approx(0.2)
    assert advice.line_share == pytest.approx(0.1 / 24)


def test_a_long_round_trip_is_hidden_by_the_overlap() -> None:
    """100 ms with steps of 100 ms and a model of 1 s each way: 24 steps leave 1.2 s for a push. Of
    20 tables each takes 100 ms, and is back after 200."""
    advice = advise_fragments(link(0.1, 1.0), [0.1])
    assert (advice.fragments, advice.period, advice.overlap) == (20, 24, 2)
    assert advice.codec == "none"
    assert advice.exchange_s == pytest.approx(0.2)
    assert advice.line_share == pytest.approx(1 / 2.4)


def test_a_thin_line_has_fewer_bits_then_longer_periods() -> None:
    """24 steps of 100 ms leave 1.2 s: 4 s each way fit as int8 (1.04 s); 40 s do not even as 4
    bits (5.2 s), which are half of 104 steps."""
    assert advise_fragments(link(0.1, 4.0), [0.1]).codec == "int8"
    advice = advise_fragments(link(0.1, 40.0), [0.1])
    assert (advice.codec, advice.period, advice.fragments) == ("4bit", 104, 24)
    assert advice.line_share == pytest.approx(0.5)


def test_a_quorum_is_of_those_whose_reports_come_in_time() -> None:
    """Steps of 100, 101 and 200 ms: after 24 of them the second is 24 ms late, within the 90 ms
    that an exchange of 110 ms leaves of 2 steps; the third is seconds late."""
    advice = advise_fragments(link(0.09, 0.01), [0.1, 0.101, 0.2])
    assert (advice.overlap, advice.quorum) == (2, 2)
    assert advice.exchange_s == pytest.approx(0.11)


@given(
    st.floats(0, 1),
    st.floats(0.001, 1000),
    st.lists(st.floats(0.001, 100), min_size=1, max_size=5),
)
def test_the_line_carries_it(rtt_s: float, whole_s: float, compute_s: list[float]) -> None:
    """Whatever the link: half of the line stays free, a fragment is back within the overlap, which
    is shorter than the period, and the fastest worker is in the quorum."""
    advice = advise_fragments(link(rtt_s, whole_s), compute_s)
    assert advice.line_share <= 0.5 + 1e-9
    assert advice.exchange_s <= advice.overlap * min(compute_s) * (1 + 1e-9)
    assert 1 <= advice.overlap < advice.period
    assert 1 <= advice.fragments <= 24
    assert 1 <= advice.quorum <= len(compute_s)
