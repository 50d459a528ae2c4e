"""The protocol under a network that loses, doubles and reorders, and under deaths; see network.py.

A failing seed is printed, and alone reproduces its run: `Network(swarm(SEED), SEED).run()`. What
the simulation found has become a named test in test_session.py or tests/shards/.
"""

import pytest

from tests.ps.network import Network, Setting, swarm


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_promises_hold_whatever_goes_wrong(first: int) -> None:
    """Exactly once, the bound, untorn versions that never go back, and an end for everyone.

    Settings differ from seed to seed: shards, workers, bounds, rounds, warm starts, and which of
    loss, duplication, delay, kills, zombies, frozen processes, partitions and restarts there are.
    """
    for seed in range(first, first + 10):
        print(f"seed {seed}: {swarm(seed)}")
        Network(swarm(seed), seed).run()


@pytest.mark.parametrize("bound", [0, 1, 4, None])
def test_a_bad_network_alone_costs_nobody_anything(bound: int | None) -> None:
    """With a third of the messages lost and a third doubled, all pushes count once, nobody dies."""
    net = Network(Setting(bound=bound, drop=0.3, duplicate=0.3, lease_s=60.0), seed=11).run()
    assert net.calm, "no lease ran out"
    for host in net.hosts:
        assert host.shard.version == host.shard.status().pushes == 3 * 12
        assert [entry.takeovers for entry in host.shard.ledger.entries.values()] == [0, 0, 0]
        assert 0 < host.shard.journal.max_clock_gap <= (12 if bound is None else bound + 1)


def test_the_seed_alone_decides_a_run() -> None:
    """Two runs of one seed end at the same moment with the same records; another seed does not."""
    runs = [Network(swarm(seed), seed).run() for seed in (7, 7, 8)]
    ends = [(net.now, net.delivered) for net in runs]
    rows = [net.hosts[0].rows[-1].tobytes() for net in runs]
    assert ends[0] == ends[1] != ends[2]
    assert rows[0] == rows[1] != rows[2]
