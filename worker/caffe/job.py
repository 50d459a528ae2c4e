"""A solver file turned into a training job."""

from functools import partial
from math import prod

import msgspec

from cupy_kernels.types import Precision
from ps.durability import Durability
from ps.launch.launch_plan import ShardDevice
from ps.launch.launcher import Placement
from ps.replication.coordinator_server import SILENCE_S
from ps.session.compression import Compression
from ps.snapshots.catalog import EVERYTHING, Retention
from ps.transport.link_model import LinkModel
from ps.transport.local_sockets import Transport
from ps.wal.autosave import ROLLBACK_S
from shards.errors import BadInput
from shards.tables import cut_evenly
from worker.caffe.model import CaffeModel
from worker.caffe.net import Network
from worker.caffe.solver import Solver
from worker.device_selection import ANY, DeviceRequest
from worker.job import Job
from worker.strategies import Strategy
from worker.training_loop import Plan


def caffe_job(
    solver: Solver,
    *,
    strategy: Strategy,
    workers: int,
    shards: int,
    bound: int | None,
    seed: int | None = None,
    max_iter: int | None = None,
    prefetch: bool = False,
    shuffle: bool = True,
    lease_s: float = 10.0,
    shards_in: Placement = Placement.RAY,
    shard_device: ShardDevice = ShardDevice.CPU,
    bind: str = "127.0.0.1",
    port: int = 0,
    plaintext: bool = False,
    link: LinkModel | None = None,
    transport: Transport = Transport.AUTO,
    compression: Compression | None = None,
    device: DeviceRequest = ANY,
    precision: Precision = Precision.FP32,
    durability: Durability = Durability.MEMORY,
    silence_s: float = SILENCE_S,
    rollback_s: float = ROLLBACK_S,
    logs_apart: bool = False,
    snapshot_every: int | None = None,
    snapshot_every_s: float = 0.0,
    snapshot_aligned: bool = False,
    keep: Retention = EVERYTHING,
) -> Job:
    """The job that `solver` describes, run by `workers` on `shards`.

    As in CaffeOnSpark, `max_iter` and the batch size apply to each worker: more workers process
    more data in the same number of iterations. If `seed`, `max_iter` or `snapshot_every`
    (iterations between two snapshots) is None, the solver's value is used. `precision` is that of
    products on a GPU. Snapshots are also taken every `snapshot_every_s` seconds. Raises BadInput
    for a net without anything to train.
    """
    model = partial(CaffeModel, msgspec.structs.replace(solver.train, precision=precision))
    built = model()
    cut_evenly(built.table, shards)
    _check_trains(built.net)
    _check_rows(solver, built)
    return Job(
        model=model,
        plan=Plan(
            steps=solver.max_iter if max_iter is None else max_iter,
            seed=solver.seed(seed),
            strategy=strategy,
            schedule=solver.schedule,
            iter_size=solver.iter_size,
            clip=solver.clip_gradients or 0.0,
            prefetch=prefetch,
        ),
        rule=solver.rule,
        schedule=solver.schedule,
        decay=solver.decay,
        batch_size=built.net.batch_size,
        workers=workers,
        shape=built.net.row_shape,
        shards=shards,
        bound=bound,
        shuffle=shuffle,
        lease_s=lease_s,
        snapshot_every=solver.snapshot if snapshot_every is None else snapshot_every,
        snapshot_every_s=snapshot_every_s,
        snapshot_aligned=snapshot_aligned,
        keep=keep,
        shards_in=shards_in,
        shard_device=shard_device,
        bind=bind,
        port=port,
        plaintext=plaintext,
        link=link,
        transport=transport,
        compression=compression or Compression(),
        device=device,
        durability=durability,
        silence_s=silence_s,
        rollback_s=rollback_s,
        logs_apart=logs_apart,
        snapshot_at_end=solver.snapshot_after_train,
        display=solver.display,
        average_loss=solver.average_loss,
    )


def _check_trains(net: Network) -> None:
    """Raise BadInput for a net that training would not change."""
    file = net.description.file
    if not net.table.tensors:
        raise BadInput(f"{file}: expected layers with weights to train, got none")
    if not net.loss_weights:
        raise BadInput(
            f"{file}: expected a layer with a loss in the TRAIN phase, such as SoftmaxWithLoss,"
            " got none: nothing would be trained"
        )
    if not net.trained:
        raise BadInput(
            f"{file}: expected weights with an lr_mult other than 0 that a loss depends on, got"
            " none: nothing would be trained"
        )


def _check_rows(solver: Solver, model: CaffeModel) -> None:
    """Raise BadInput if the net's input and the data's rows differ in their number of values."""
    given, wanted = solver.train.data_shape, model.net.row_shape
    if given is not None and wanted is not None and prod(given) != prod(wanted):
        raise BadInput(
            f"{solver.train.file}: input data: expected {prod(wanted)} values a row, the data has"
            f" {prod(given)}"
        )
