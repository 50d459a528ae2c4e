"""The connections between copies, over real sockets."""

from collections.abc import Iterator

import numpy as np
import pytest

from ps.replication.peer_link import PeerLink
from shards.messages import Piece
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


def sync(epoch: int, number: int) -> Sync:
    return Sync(epoch, 7, Piece(epoch, number, 0))


def piece(epoch: int, number: int) -> Post:
    return Post(2, sync(epoch, number), (np.zeros(FLOATS, np.float32),))


def heard(peers: PeerLink, last: ToPeer) -> list[ToPeer]:
    """The messages that arrive, up to and including `last`."""
    found: list[ToPeer] = []

    def came() -> bool:
        found.extend(message for _, message, _ in peers.arrivals())
        return last in found

    eventually(came, because=lambda: f"{last} comes, got {found}")
    return found


def test_a_piece_is_not_sent_while_it_is_leaving(primary: PeerLink) -> None:
    """A piece that is repeated while the first copy waits for a slow link would only delay what
    follows. Once it has been sent, it may follow.
    """
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    primary.set_members({1, 2}, {2: endpoint})
    entry, last = Replicate(4, 8, 0.0), Replicate(5, 9, 0.0)
    for post in (piece(4, 0), Post(2, entry), piece(4, 1), piece(4, 0), piece(5, 0), piece(5, 0)):
        primary.send(post)
    primary.send(Post(2, last))
    backup = PeerLink("job", 2, FLOATS, endpoint)  # nothing could leave before it was there
    try:
        assert heard(backup, last) == [sync(4, 0), entry, sync(4, 1), sync(5, 0), last]
        eventually(
            lambda: not any(primary._leaving.in_progress(*key) for key in primary._leaving.sent),
            because="the pieces are sent",
        )
        primary.send(piece(5, 0))
        assert heard(backup, sync(5, 0)) == [sync(5, 0)]
    finally:
        backup.close()
