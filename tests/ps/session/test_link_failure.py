"""When a connection is replaced: decided by its system's report, and by a dial."""

import pytest

from ps.session.link_failure import LinkAction, LinkFailureDetector, TcpInfo

NOTHING, DIAL, RENEW = LinkAction.NOTHING, LinkAction.DIAL, LinkAction.RENEW


def line(
    retransmits: int = 0, bytes_received: int = 100, bytes_acked: int = 100, rtt_s: float = 0.001
) -> TcpInfo:
    return TcpInfo(retransmits, bytes_received, bytes_acked, rtt_s)


def looks(
    doubt: LinkFailureDetector, seen: list[tuple[float, TcpInfo | None, float | None]]
) -> list[LinkAction]:
    """The detector's actions at each of these times."""
    return [doubt.decide(one, through_s, now) for now, one, through_s in seen]


def dials(doubt: LinkFailureDetector, one: TcpInfo | None, until_s: float) -> list[float]:
    """The times at which a link that stays cut is dialled, checked every tenth of a second."""
    times = [tenth / 10 for tenth in range(int(10 * until_s))]
    return [now for now in times if doubt.decide(one, None, now) is DIAL]


def test_silence_alone_is_no_reason() -> None:
    """An idle connection, or one that lost a single packet, is kept."""
    doubt = LinkFailureDetector()
    moves = looks(doubt, [(now / 10, line(retransmits=now % 2), None) for now in range(100)])
    assert set(moves) == {NOTHING}
    assert not doubt.in_doubt


def test_a_slow_link_is_never_given_up() -> None:
    """A message may take minutes, as long as its bytes are acknowledged, however late."""
    moves = looks(
        LinkFailureDetector(),
        [(now / 10, line(bytes_acked=now, rtt_s=5.0), None) for now in range(3000)],
    )
    assert set(moves) == {NOTHING}


def test_a_cut_link_is_dialled_until_it_is_whole_and_then_renewed() -> None:
    """After two failed transmissions dials begin; once one is through, the link is renewed."""
    moves = looks(
        LinkFailureDetector(),
        [
            (0.0, line(retransmits=1), None),
            (0.4, line(retransmits=2), None),
            (0.5, line(retransmits=2), None),
            (0.7, line(retransmits=2), None),
            (0.8, line(retransmits=3), 0.002),
        ],
    )
    assert moves == [NOTHING, DIAL, NOTHING, DIAL, RENEW]


def test_a_link_that_is_cut_for_long_is_dialled_ever_less_often() -> None:
    """Four dials a second at first, one a second after a quarter of a minute."""
    times = dials(LinkFailureDetector(), line(retransmits=2), 60.0)
    assert times[:3] == [0.0, 0.3, 0.6]
    assert sum(now >= 50.0 for now in times) == 10


def test_a_far_peer_is_dialled_no_sooner_than_it_can_answer() -> None:
    """With a round trip of half a second, dials are two round trips apart."""
    assert dials(LinkFailureDetector(), line(retransmits=2, rtt_s=0.5), 3.05) == [0.0, 1.0, 2.0]


def test_what_is_acknowledged_after_all_is_kept_while_it_moves() -> None:
    """A sudden queue of seconds looks like a cut; a connection that moves again is kept, though
    nothing arrives.
    """
    doubt = LinkFailureDetector()
    assert doubt.decide(line(retransmits=2), None, 0.0) is DIAL
    moves = looks(
        doubt,
        [
            (1 + now / 10, line(bytes_acked=200 + now), 0.9 if not now else None)
            for now in range(99)
        ],
    )
    assert set(moves) == {NOTHING}
    assert doubt.decide(line(bytes_acked=500, bytes_received=101), None, 11.0) is NOTHING
    assert not doubt.in_doubt


def test_the_other_side_may_be_the_one_that_waits() -> None:
    """If all our data is acknowledged and nothing arrives, the link is replaced after a while,
    once.
    """
    doubt = LinkFailureDetector()
    assert looks(
        doubt,
        [
            (0.0, line(retransmits=2), None),
            (0.1, line(), 0.001),
            (0.2, line(), None),
            (0.3, line(), None),
            (0.4, line(), None),
        ],
    ) == [DIAL, NOTHING, NOTHING, NOTHING, RENEW]
    assert set(
        looks(doubt, [(0.5 + now / 10, line(bytes_received=0), None) for now in range(50)])
    ) == {NOTHING}


@pytest.mark.parametrize("one", [None, line(retransmits=2)])
def test_a_new_connection_has_time_for_its_greetings(one: TcpInfo | None) -> None:
    """It is not dialled during its handshakes, but afterwards if nothing comes of them."""
    doubt = LinkFailureDetector()
    assert looks(doubt, [(0.0, one, None), (0.1, one, 0.1)]) == [DIAL, RENEW]
    moves = looks(doubt, [(now / 10, None, None) for now in range(2, 16)])
    assert moves == [NOTHING] * 13 + [DIAL]


def test_what_was_found_out_before_an_absence_says_nothing_of_now() -> None:
    """After an absence the detector starts afresh, though a dial got through meanwhile."""
    doubt, cut = LinkFailureDetector(), line(retransmits=2)
    assert looks(doubt, [(0.0, cut, None), (5.0, cut, 0.1), (5.1, cut, 0.1)]) == [DIAL, DIAL, RENEW]
    assert looks(doubt, [(8.0, line(), None)]) == [NOTHING]


def test_no_connection_is_a_reason_to_dial() -> None:
    """ZeroMQ's own next attempt may be far off, or wait for the answer to a lost one."""
    assert looks(LinkFailureDetector(), [(0.0, None, None), (0.3, None, 0.2)]) == [DIAL, RENEW]
