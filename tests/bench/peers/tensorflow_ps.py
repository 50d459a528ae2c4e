"""TensorFlow's parameter servers: variables on `ps` tasks, each worker a session of its own.

The between-graph replication of its guide to distributed training, as TensorFlowOnSpark ran it. The
gradient and what is pulled stay in the worker's memory: Python sees neither.
"""

import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.bench.peers import contract
from tests.bench.peers.contract import Setting, Update, setting


def _joined(wanted: Setting, job: str, number: int) -> Any:
    """A server of the cluster that runs in this process, one thread an operation."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    ports = [f"127.0.0.1:{port}" for port in os.environ["PEER_PORTS"].split()]
    return tf.distribute.Server(
        {"ps": ports[: wanted.shards], "worker": ports[wanted.shards :]},
        job_name=job,
        task_index=number,
        config=tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1),
    )


def serve(wanted: Setting, shard: int, door: Connection) -> None:
    server = _joined(wanted, "ps", shard)
    door.send(server.target)
    door.recv()
    os._exit(0)  # such a server knows no end


def connect(
    wanted: Setting, number: int, addresses: list[str]
) -> tuple[Update, Callable[[], None]]:
    server = _joined(wanted, "worker", number)
    import tensorflow as tf

    tf.compat.v1.disable_eager_execution()
    here, first, steps = f"/job:worker/task:{number}", [], []
    whole = contract.gradient(wanted.floats)
    for shard, part in enumerate(wanted.parts()):
        there, size = f"/job:ps/task:{shard}", part.stop - part.start
        with tf.device(here):
            source = tf.compat.v1.placeholder(tf.float32, [size])
            gradient = tf.Variable(source, name=f"gradient{number}-{shard}", shape=[size])
        with tf.device(there):
            weights = tf.Variable(tf.zeros([size]), name=f"weights{shard}")
            pushed = tf.raw_ops.ResourceApplyGradientDescent(
                var=weights.handle, alpha=contract.RATE, delta=gradient.read_value()
            )
            with tf.control_dependencies([pushed]):
                read = weights.read_value()
        with tf.device(here):
            steps.append(tf.identity(read).op)
        first += [(gradient.initializer, {source: whole[part]}), (weights.initializer, {})]
    session = tf.compat.v1.Session(server.target)
    for initializer, fed in first:
        session.run(initializer, fed)
    update = session.make_callable(tf.group(*steps))
    return update, session.close


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


if __name__ == "__main__":
    ports = _free_ports(setting().shards + setting().workers)
    os.environ["PEER_PORTS"] = " ".join(map(str, ports))
    contract.run_fleet(serve, connect)
