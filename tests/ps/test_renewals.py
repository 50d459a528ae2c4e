"""The lease of a waiting worker, over real sockets: it reacts to a refused renewal."""

import threading
import time

import numpy as np
import pytest
import zmq

import ps
from ps import AdminClient
from ps.client import Client
from ps.job_spec import make_cluster, shard_specs
from ps.server.server import ShardServer
from shards import wire_format
from shards.messages import PROTOCOL, FromWorker, Hello, Join, Leave
from shards.schedules import Fixed
from shards.schema_digest import SCHEMA
from shards.shard_status import Standing
from tests.support.eventually import eventually

TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (512,)),))
PATIENCE_S = 120.0


def say(socket: zmq.Socket[bytes], message: FromWorker) -> None:
    """Send a message and wait for its answer."""
    socket.send_multipart([bytes(part) for part in wire_format.enclose([(message, ())])])
    socket.recv_multipart()


@pytest.mark.timeout(300)
def test_a_worker_that_owes_a_shard_nothing_greets_its_next_life() -> None:
    """It waits for weights of shard 1 only, and shard 0 dies and is rolled back: the worker is
    registered there again while it waits.
    """
    specs = shard_specs(TABLE, shards=2, bound=0, schedule=Fixed(base_rate=1.0), lease_s=30.0)
    first, other = (ShardServer(spec, boot=1) for spec in specs)
    job, context = specs[0].job, zmq.Context()
    with other, context.socket(zmq.DEALER) as slow:
        slow.setsockopt(zmq.LINGER, 0)
        slow.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
        slow.connect(other.endpoint)
        with first:
            cluster = make_cluster(specs, [first.endpoint, other.endpoint])
            with AdminClient(cluster, patience_s=PATIENCE_S) as console:
                console.install(TABLE.empty())
            # Only at shard 1 does it hold the other worker back.
            say(slow, Hello(1, job, "slow", 0, PROTOCOL, SCHEMA))
            say(slow, Join(2, job, "slow", 0, 1, 0))
            client = Client(cluster, worker="w", patience_s=PATIENCE_S)
            client.pull()
            client.push(np.ones(TABLE.size, np.float32))
            client.flush()
            waiting = threading.Thread(target=client.pull, daemon=True)
            waiting.start()
            eventually(
                lambda: not client._current.session._outstanding.to(0), because="shard 0 answers"
            )
            endpoint, state = first.endpoint, first.shard.copy()
        with ShardServer(specs[0], boot=2, bind=endpoint) as second:
            second.shard.restore(state)
            second.shard.ledger.detach_workers()
            second.shard.roll_back(time.monotonic())
            entry = second.shard.ledger.entries["w"]
            eventually(
                lambda: entry.standing is Standing.ACTIVE, because="the restarted shard is greeted"
            )
            assert waiting.is_alive()
            say(slow, Leave(3, job, "slow", 0, 1))
            waiting.join(PATIENCE_S)
            assert not waiting.is_alive()
            client.close()
    context.term()
