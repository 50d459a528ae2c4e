"""TensorFlow's ParameterServerStrategy: a coordinator, one parameter server, and workers.

The training loop of its guide, with Keras 2, since Keras 3 does not know this strategy.
"""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from typing import Any

import tensorflow as tf

from tests.bench.endtoend.programs.keras_nets import make_net, predict, read_samples
from tests.bench.endtoend.programs.task import (
    Task,
    measure,
    note_process,
    read_task,
    write_line,
)

_STEPS_AT_ONCE = 10
"""Steps of one scheduled function, as the guide recommends for small steps."""


def serve(task: Task, cluster: Any) -> None:
    """Be a parameter server or a worker, until this process is ended."""
    if task.role == "worker":
        note_process(task, task.member)
    job = "ps" if task.role == "server" else "worker"
    tf.distribute.Server(cluster, job_name=job, task_index=task.member, protocol="grpc").join()


def coordinate(task: Task, cluster: Any) -> None:
    """Schedule the steps of all workers, and test in between."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    tested = read_samples(task, "test")
    with strategy.scope():
        net = make_net(task, tested.shape[1:])
        optimizer = tf.keras.optimizers.legacy.SGD(task.rate, momentum=task.momentum)

    def make_batches() -> Any:
        samples = read_samples(task, "train"), task.read("train_y")
        rows = tf.data.Dataset.from_tensor_slices(samples)
        return rows.shuffle(60_000).repeat().batch(task.batch)

    def learn(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            outputs = net(x, training=True)
            loss = tf.reduce_mean(tf.keras.losses.sparse_categorical_crossentropy(y, outputs))
        weights = net.trainable_variables
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow is not installed here
    def step(batches: Any) -> None:
        for _ in range(_STEPS_AT_ONCE):
            strategy.run(learn, args=next(batches))

    batches = iter(coordinator.create_per_worker_dataset(make_batches))
    here = make_net(task, tested.shape[1:])
    write_line(task, None)
    while True:
        for _ in range(task.between // (task.batch * _STEPS_AT_ONCE)):
            coordinator.schedule(step, args=(batches,))
        coordinator.join()
        here.set_weights(net.get_weights())
        accuracy = measure(task, predict(here, tested))
        write_line(task, accuracy)
        if accuracy >= task.target:
            return


def main() -> None:
    task = read_task()
    server, chief, *workers = task.hosts
    jobs = {"ps": [server], "chief": [chief], "worker": workers}
    cluster = tf.train.ClusterSpec(jobs)
    coordinate(task, cluster) if task.role == "chief" else serve(task, cluster)


if __name__ == "__main__":
    main()
