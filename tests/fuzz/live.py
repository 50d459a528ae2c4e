"""A shard in a process of its own, a good client of it, and a crowd of strangers at its door."""

import contextlib
import time
from typing import NamedTuple

import numpy as np
import psutil

import ps
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.processes import process_shards
from ps.transport.transports import Transport
from tests.fuzz.hostile import Crowd

_BETWEEN = 50  # connections between two updates of the good client
_WARM = 200  # connections before memory is looked at: every buffer is there then
TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (256,)),))


class Found(NamedTuple):
    """What came of it; `growth_bytes` is the shard's resident memory, the most of it seen."""

    connections: int
    updates: int
    growth_bytes: int
    seconds: float


def run(connections: int, seed: int, *, secure: bool) -> Found:
    """So many hostile connections. Raises when the shard dies, or keeps the good client waiting."""
    started = time.monotonic()
    specs = shard_specs(TABLE, lease_s=60.0)
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(process_shards(specs, transport=Transport.TCP, secure=secure))
        with ps.AdminClient(hosts.cluster) as console:
            console.install(TABLE.empty())
        client = stack.enter_context(
            Client(hosts.cluster, worker="good", patience_s=60, transport="tcp")
        )
        crowd = stack.enter_context(contextlib.closing(Crowd(hosts.cluster.endpoints[0], seed)))
        shard = psutil.Process(hosts.pids[0])
        crowd.come(min(_WARM, connections))
        _update(client)
        before = most = shard.memory_info().rss
        updates = 1
        while crowd.came < connections:
            crowd.come(min(_BETWEEN, connections - crowd.came))
            _update(client)
            updates += 1
            hosts.check()
            most = max(most, shard.memory_info().rss)
        assert client.pull().versions == (updates,)
        with Client(hosts.cluster, worker="another", patience_s=60, transport="tcp"):
            pass
    return Found(crowd.came, updates, most - before, time.monotonic() - started)


def _update(client: Client) -> None:
    client.pull()
    client.push(np.ones(TABLE.size, np.float32))
    client.flush()
