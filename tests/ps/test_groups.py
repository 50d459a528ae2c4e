"""Replicated shards lose nothing and double nothing, whatever happens to one copy at a time."""

import msgspec
import pytest

from tests.ps.group_network import Faults, GroupNetwork
from tests.ps.network import Setting, swarm


def test_undisturbed_copies_agree() -> None:
    """Without faults every push is held twice before it is acknowledged."""
    calm = Setting(drop=0.0, duplicate=0.0, delay_s=0.05)
    net = GroupNetwork(calm, Faults(deaths=0, stops=0, splits=0, coordinator_deaths=0), 1).run()
    assert all(group.in_sync for group in net.record.values())


@pytest.mark.parametrize("seed", range(40))
def test_acknowledged_pushes_survive_their_primary(seed: int) -> None:
    """Deaths, stops, splits and a coordinator that dies: each push is in the weights once."""
    setting = msgspec.structs.replace(swarm(seed), quiet_s=20.0, restarts=0)
    net = GroupNetwork(setting, Faults(), seed).run()
    assert all(group.settled is not None for group in net.record.values())
