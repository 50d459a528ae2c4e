"""Whatever comes over the network, a shard continues: a short run of `make check C=fuzz`."""

import pytest

from tests.fuzz import files, flips, live, targets

MESSAGES = 30_000  # each through a dozen decoders
ROW_PUSHES = 3_000
FILES = 100
FLIPS = 3_200
CONNECTIONS = 1_500
GROWTH_BYTES = 64 << 20
SEED = 1  # always the same verdict; `make check C=fuzz` draws another each time


def test_messages_that_are_almost_valid() -> None:
    """Each is refused or answered; none raises anything but our own errors, spoils the weights, or
    makes a version that nobody pushed."""
    tally = targets.run(MESSAGES, SEED)
    assert tally.tried == MESSAGES
    assert tally.heard > MESSAGES // 20


def test_rows_that_are_almost_valid() -> None:
    """Each push of rows is applied whole, or refused and changes nothing; no pull changes any."""
    tally = targets.run_rows(ROW_PUSHES, SEED)
    assert ROW_PUSHES // 10 < tally.heard < ROW_PUSHES // 2


def test_files_that_are_almost_valid() -> None:
    """Solvers, networks, .caffemodel and .safetensors are read, or refused by an error of ours."""
    tried, read = files.run(FILES, SEED)
    assert tried == FILES
    assert 0 < read < FILES


@pytest.mark.timeout(600)
def test_flipped_bits() -> None:
    """In every kind of file that is written and read again: noticed by an error that names the
    file, or harmless. Most are noticed, but for the mark of a log, which is then left out of
    account."""
    tallies = flips.run(FLIPS, SEED)
    assert sum(tally.tried for tally in tallies.values()) >= FLIPS
    assert tallies.pop("log's mark").noticed == 0
    for kind, tally in tallies.items():
        assert tally.noticed > tally.tried / 2, kind


@pytest.mark.parametrize("secure", [False, True])
def test_strangers_at_the_door(secure: bool) -> None:
    """A good client goes on while they come, another can still join, and memory stays flat."""
    found = live.run(CONNECTIONS, SEED, secure=secure)
    assert found.connections == CONNECTIONS
    assert found.growth_bytes < GROWTH_BYTES
