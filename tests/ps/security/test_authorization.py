"""The key registry: which keys are admitted, and what each may send."""

import pytest

from ps.security.authorization import (
    Admission,
    Enrolment,
    Enrolments,
    Invitation,
    KeyRegistry,
    issue,
)
from ps.security.keys import KeyPair, address_of, key_bytes, pin_key
from shards.errors import BadInput, BadMessage, Fenced, GiveUp, Retry
from shards.messages import AskStatus, Join, Probe, Renew

OPERATOR, TOKEN, ONE, TWO = (digit * 64 for digit in "0a12")
HOUR = 3600.0


def register(joins: int = 3, lasts_s: float = HOUR) -> KeyRegistry:
    return KeyRegistry(Admission(OPERATOR, Invitation(TOKEN, joins, lasts_s)), now=0.0)


def test_only_known_keys_come_in() -> None:
    """The operator's key, the invitation's, and those enrolled by it are admitted; no other."""
    door = register()
    assert [door.admits(key) for key in (OPERATOR, TOKEN, ONE, "")] == [True, True, False, False]
    door.enrol("w1", 0, ONE, now=1.0)
    assert door.admits(ONE)
    assert [door.is_invitation(key) for key in (OPERATOR, TOKEN, ONE)] == [False, True, False]


def test_a_worker_speaks_for_its_own_name_alone() -> None:
    """Its own name and probes are allowed; another name and operator messages are not."""
    door = register()
    door.enrol("w1", 0, ONE, now=1.0)
    door.check(ONE, Renew(1, "job", "w1", 0, 1), now=2.0)
    door.check(ONE, Probe(1, "job", 0), now=2.0)
    with pytest.raises(BadMessage, match=r"join: expected worker w1, whose key this is, got .* w2"):
        door.check(ONE, Join(1, "job", "w2", 0, 1, 0), now=2.0)
    with pytest.raises(BadMessage, match=r"askstatus: expected the operator's key, got .* w1"):
        door.check(ONE, AskStatus(1, "job"), now=2.0)
    door.check(OPERATOR, AskStatus(1, "job"), now=2.0)
    door.check(OPERATOR, Renew(1, "job", "w1", 0, 1), now=2.0)


def test_a_later_life_shuts_out_the_earlier_one() -> None:
    """A name has one key, the one enrolled last; the key before it is refused."""
    door = register()
    door.enrol("w1", 0, ONE, now=1.0)
    door.enrol("w1", 0, TWO, now=2.0)
    assert [door.admits(key) for key in (ONE, TWO)] == [False, True]
    with pytest.raises(Fenced, match="a later incarnation of this worker has joined"):
        door.check(ONE, Renew(1, "job", "w1", 0, 1), now=3.0)


def test_an_earlier_life_does_not_come_back() -> None:
    """Where all workers reconnect, as to a new primary, an older incarnation never wins."""
    door = register()
    assert door.enrol("w1", 1, TWO, now=1.0)
    with pytest.raises(Fenced, match=r"w1: incarnation 0 comes too late: incarnation 1 has joined"):
        door.enrol("w1", 0, ONE, now=2.0)
    assert [door.admits(key) for key in (ONE, TWO)] == [False, True]
    assert not door.enrol("w1", 1, TWO, now=3.0), "nothing new"
    assert door.enrol("w1", 1, ONE, now=4.0), "its very life may have a new key"


def test_a_register_goes_on_from_another() -> None:
    """Admitted keys stay admitted, fenced ones stay fenced, and used joins stay used."""
    former = register(joins=2)
    former.enrol("w1", 1, ONE, now=1.0)
    door = KeyRegistry(Admission(OPERATOR, Invitation(TOKEN, 2, HOUR)), 9.0, former.enrolments)
    door.check(ONE, Renew(1, "job", "w1", 1, 1), now=9.0)
    with pytest.raises(Fenced):
        door.enrol("w1", 0, TWO, now=9.0)
    door.enrol("w2", 0, TWO, now=9.0)
    with pytest.raises(Retry, match="too many have joined"):
        door.enrol("w3", 0, "3" * 64, now=9.0)
    assert door.enrolments == Enrolments(0, (Enrolment("w1", 1, ONE), Enrolment("w2", 0, TWO)))


def test_joins_are_limited_at_a_time_and_come_back() -> None:
    """Each new enrolment counts, a repeated one does not.

    A thief of the token that has used up all joins keeps others out only until one is earned.
    """
    door = register(joins=2)
    for _ in range(3):
        door.enrol("w1", 0, ONE, now=1.0)
    door.enrol("w2", 0, TWO, now=1.0)
    with pytest.raises(Retry, match=r"w3: too many .*: it is good for 2 joins at once and 1 a sec"):
        door.enrol("w3", 0, "3" * 64, now=1.9)
    door.enrol("w2", 0, TWO, now=1.9)
    door.enrol("w3", 0, "3" * 64, now=2.1)
    with pytest.raises(Retry):
        door.enrol("w1", 1, "4" * 64, now=2.1)
    for worker in ("w1", "w2"):  # those that were earned meanwhile, but no more than two
        door.enrol(worker, 1, worker[1] * 63 + "f", now=1000.0)
    with pytest.raises(Retry):
        door.enrol("w3", 1, "5" * 64, now=1000.0)


def test_names_are_limited() -> None:
    """Beyond the limit no name is enrolled; known ones may still join again."""
    door = KeyRegistry(Admission(OPERATOR, Invitation(TOKEN, 9, HOUR, names=2)), now=0.0)
    door.enrol("w1", 0, ONE, now=1.0)
    door.enrol("w2", 0, TWO, now=1.0)
    with pytest.raises(GiveUp, match="w3: expected one of the 2 names that have joined, got a new"):
        door.enrol("w3", 0, "3" * 64, now=1.0)
    assert door.enrol("w1", 1, "4" * 64, now=1.0)


def test_a_token_expires_after_the_operators_last_word() -> None:
    """It lasts while the operator is heard, and then for the stated time."""
    door = register()
    door.enrol("w1", 0, ONE, now=HOUR)
    door.check(OPERATOR, AskStatus(1, "job"), now=HOUR)
    door.enrol("w2", 0, TWO, now=2 * HOUR)
    late = "w3: the job's join token has expired: it lasts 3600 s .* which was 3601 s ago"
    with pytest.raises(GiveUp, match=late):
        door.enrol("w3", 0, "3" * 64, now=2 * HOUR + 1)


def test_a_key_has_one_part() -> None:
    """The operator's key, the token's own, or another worker's cannot be enrolled."""
    door = register(joins=9)
    door.enrol("w1", 0, ONE, now=0.0)
    for taken in (OPERATOR, TOKEN, ONE):
        with pytest.raises(BadMessage, match="w2: expected a key of its own, got one that is in"):
            door.enrol("w2", 0, taken, now=0.0)


def test_shards_are_told_no_secret() -> None:
    """A job's shards hold the public halves of the keys of its driver and workers."""
    access, admission = issue(workers=4)
    assert KeyPair.of(access.operator).public == admission.operator
    assert KeyPair.of(access.token).public == admission.invitation.key
    assert len({access.operator, access.token, admission.operator, admission.invitation.key}) == 4
    assert access.token not in repr(access)
    assert KeyPair.of(access.token).secret not in repr(KeyPair.of(access.token))


def test_an_endpoint_pins_a_key() -> None:
    """A pinned key is read as it was written; a plain endpoint has none."""
    endpoint = pin_key("tcp://10.0.0.1:7400", ONE)
    assert endpoint == f"curve://{ONE}@10.0.0.1:7400"
    assert address_of(endpoint) == ("tcp://10.0.0.1:7400", ONE)
    for plain in ("tcp://10.0.0.1:7400", "ipc:///tmp/s", f"curve://{ONE[1:]}@h:1"):
        assert address_of(plain) == (plain, "")


@pytest.mark.parametrize("digits", ["", "0" * 63, "x" * 64, "0" * 66])
def test_what_is_no_key_is_refused(digits: str) -> None:
    """The error does not repeat it: it may be a truncated secret."""
    with pytest.raises(BadInput, match=f"key: expected 64 .* digits, got {len(digits)} characters"):
        key_bytes(digits)
