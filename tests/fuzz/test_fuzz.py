"""Whatever comes over the network, a shard goes on: a bounded run of what `make fuzz` runs long."""

import secrets

import pytest

from tests.fuzz import files, live, targets

MESSAGES = 30_000  # each through a dozen decoders
FILES = 100
CONNECTIONS = 1_500
GROWTH_BYTES = 64 << 20


def test_messages_that_are_almost_valid() -> None:
    """Each is refused or answered; none raises anything but our own errors, spoils the weights, or
    makes a version that nobody pushed."""
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")
    tally = targets.run(MESSAGES, seed)
    assert tally.tried == MESSAGES
    assert tally.heard > MESSAGES // 20


def test_files_that_are_almost_valid() -> None:
    """Solvers, networks, .caffemodel and .safetensors are read, or refused by an error of ours."""
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")
    tried, read = files.run(FILES, seed)
    assert tried == FILES
    assert 0 < read < FILES


@pytest.mark.parametrize("secure", [False, True])
def test_strangers_at_the_door(secure: bool) -> None:
    """A good client goes on while they come, another can still join, and memory stays flat."""
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")
    found = live.run(CONNECTIONS, seed, secure=secure)
    assert found.connections == CONNECTIONS
    assert found.growth_bytes < GROWTH_BYTES
