"""Which keys may send what to the coordinator of replicated shards."""

import msgspec
import pytest

from ps.replication.coordinator_server import CopyRegistry
from ps.security.authorization import Admission, Invitation
from ps.security.keys import pin_key
from ps.transport import coordinator_messages
from ps.transport.coordinator_messages import (
    AdmitCopies,
    CoordinatorRequest,
    EndJob,
    Heartbeat,
    LocatePrimaries,
)
from shards.errors import BadMessage
from shards.replication_messages import Beat

OPERATOR, TOKEN, ONE, TWO, NOBODY = (digit * 64 for digit in "01234")


def report(boot: int, clients: str, peer: str) -> Heartbeat:
    ends = [pin_key(f"tcp://127.0.0.1:{port}", key) for port, key in ((1, clients), (2, peer))]
    return Heartbeat("job", Beat(0, boot, 0), *ends)


@pytest.fixture
def roll() -> CopyRegistry:
    """A registry with copies 1 and 2."""
    roll = CopyRegistry(Admission(OPERATOR, Invitation(TOKEN, 1)))
    roll.enter({1: ONE})
    roll.enter({2: TWO})
    return roll


def test_who_is_let_in(roll: CopyRegistry) -> None:
    """The operator, the token's holder and the copies are admitted; no other or empty key."""
    known = [key for key in (OPERATOR, TOKEN, ONE, TWO, NOBODY, "") if roll.admits(key)]
    assert known == [OPERATOR, TOKEN, ONE, TWO]


@pytest.mark.parametrize(
    ("message", "keys"),
    [
        (LocatePrimaries("job"), {OPERATOR, TOKEN}),
        (AdmitCopies("job", {3: NOBODY}), {OPERATOR}),
        (EndJob("job", "no copy is left"), {OPERATOR}),
        (report(1, ONE, ONE), {ONE}),
        (report(2, TWO, TWO), {TWO}),
        (report(1, TWO, TWO), set()),
        (report(2, ONE, ONE), set()),
        (report(1, ONE, TWO), set()),
        (report(1, TWO, ONE), set()),
        (report(3, NOBODY, NOBODY), set()),
        (Heartbeat("job", Beat(0, 1, 0), "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"), set()),
    ],
)
def test_who_may_say_it(roll: CopyRegistry, message: CoordinatorRequest, keys: set[str]) -> None:
    """A copy reports in its own name, with addresses of its own; other keys keep to their part."""
    for key in (OPERATOR, TOKEN, ONE, TWO, NOBODY, ""):
        if key in keys:
            roll.check(key, message)
        else:
            with pytest.raises(BadMessage, match=r"^coordinator: .* from a key that may not send"):
                roll.check(key, message)


@pytest.mark.parametrize("key", ["", "0" * 63, "0" * 65, "G" * 64, "0" * 64 + "\n"])
def test_a_key_that_is_none(key: str) -> None:
    """A malformed key makes a malformed message."""
    with pytest.raises(BadMessage):
        coordinator_messages.decode_coordinator_request(
            msgspec.msgpack.encode(AdmitCopies("job", {1: key}))
        )
