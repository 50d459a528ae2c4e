"""The connections between copies, over real sockets."""

from collections.abc import Iterator

import numpy as np
import pytest

from ps.replication.peer_link import PeerLink
from shards.replica import Post
from shards.replication_messages import Replicate, Sync, ToPeer
from tests.support.eventually import eventually
from tests.support.ports import free_port

FLOATS = 1 << 19  # 2 MB: large
HERE = "tcp://127.0.0.1:*"


@pytest.fixture
def primary() -> Iterator[PeerLink]:
    peers = PeerLink("job", 1, FLOATS, HERE)
    yield peers
    peers.close()


def state(epoch: int, position: int) -> Post:
    return Post(2, Sync(epoch, position), (np.zeros(FLOATS, np.float32),))


def heard(peers: PeerLink, last: ToPeer) -> list[ToPeer]:
    """The messages that arrive, up to and including `last`."""
    found: list[ToPeer] = []

    def came() -> bool:
        found.extend(message for _, message, _ in peers.arrivals())
        return last in found

    eventually(came, because=lambda: f"{last} comes, got {found}")
    return found


def test_of_an_epoch_one_state_leaves_at_a_time(primary: PeerLink) -> None:
    """Only one state of an epoch is sent at a time, whatever its position.

    Another one behind it would hold on to more memory, and delay every entry. Once the first has
    been sent, another may follow.
    """
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    primary.know({1, 2}, {2: endpoint})
    entry, last = Replicate(4, 8, 0.0), Replicate(5, 9, 0.0)
    for post in (state(4, 7), Post(2, entry), state(4, 8), state(4, 9), state(5, 8), state(5, 9)):
        primary.send(post)
    primary.send(Post(2, last))
    backup = PeerLink("job", 2, FLOATS, endpoint)  # nothing could leave before it was there
    try:
        found = heard(backup, last)
        assert found == [Sync(4, 7), entry, Sync(5, 8), last]
        eventually(lambda: not primary._leaving.in_progress(2, -6), because="the state is sent")
        primary.send(state(5, 10))
        assert heard(backup, Sync(5, 10)) == [Sync(5, 10)]
    finally:
        backup.close()
