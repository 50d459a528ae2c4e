"""A solver file turned into a training job."""

from functools import partial
from math import prod

from msgspec.structs import replace

from shards.errors import BadInput
from shards.spec import TableSpec, cut_tables
from worker.caffe.model import CaffeModel
from worker.caffe.net import Network
from worker.caffe.solver import Solver
from worker.job.options import LinkOptions, ShardRuntime, SnapshotPolicy, TrainOptions
from worker.job.training_job import Job
from worker.training.training_loop import Plan


def caffe_job(
    solver: Solver, options: TrainOptions, *, workers: int, logs_apart: bool = False
) -> Job:
    """The job that `solver` describes, run by `workers` workers with these options.

    As in CaffeOnSpark, `max_iter` and the batch size apply to each worker: more workers process
    more data in the same number of iterations. Where an option is None, the solver's own value is
    used. With `logs_apart` each node has its own folder for the shards' logs. Raises BadInput for a
    net without anything to train.
    """
    steps = solver.steps(options.max_iter)
    schedule = solver.schedule_for(steps)
    model = partial(CaffeModel, replace(solver.train, precision=options.precision))
    built = model()
    strategy = options.build_strategy()
    half = strategy.server(workers)
    rule, _, _ = half.settings(solver.rule, schedule, solver.decay)
    cut_tables((TableSpec(built.table, rule),), half.merge, options.shards)
    _check_trains(built.net)
    _check_rows(solver, built)
    snapshots = options.part(SnapshotPolicy)
    if snapshots.snapshot_every is None:
        snapshots = snapshots.replace(snapshot_every=solver.snapshot)
    return Job(
        model=model,
        plan=Plan(
            steps=steps,
            seed=solver.seed(options.seed),
            strategy=strategy,
            schedule=schedule,
            iter_size=solver.iter_size,
            clip=solver.clip_gradients or 0.0,
            prefetch=options.prefetch,
        ),
        rule=solver.rule,
        schedule=schedule,
        decay=solver.decay,
        batch_size=built.net.batch_size,
        workers=workers,
        columns=built.net.column_specs,
        bound=options.staleness,
        rate_factor=options.rate_factor,
        stale=options.on_stale,
        shuffle=options.shuffle,
        skip_images=options.skip_images,
        device=options.build_device(solver.device),
        runtime=options.part(ShardRuntime),
        links=options.part(LinkOptions),
        snapshots=snapshots,
        snapshot_at_end=solver.snapshot_after_train,
        logs_apart=logs_apart,
        display=solver.display,
        average_loss=solver.average_loss,
        driver_model=built,
    )


def model_of(job: Job) -> CaffeModel:
    """The model of a job that `caffe_job` has made, as it was built to check the net."""
    assert isinstance(job.driver_model, CaffeModel)
    return job.driver_model


def _check_trains(net: Network) -> None:
    """Raise BadInput for a net that training would not change."""
    file = net.description.file
    if not net.table.tensors:
        raise BadInput(file, expected="layers with weights to train", got="none")
    if not net.loss_weights:
        raise BadInput(
            file,
            expected="a layer with a loss in the TRAIN phase, such as SoftmaxWithLoss",
            got="none: nothing would be trained",
        )
    if not net.learnable_tensors:
        raise BadInput(
            file,
            expected="weights with an lr_mult other than 0 that a loss depends on",
            got="none: nothing would be trained",
        )


def _check_rows(solver: Solver, model: CaffeModel) -> None:
    """Raise BadInput if the net's input and the data's rows differ in their number of values."""
    data_shape, row_shape = solver.train.data_shape, model.net.row_shape
    if data_shape is not None and row_shape is not None and prod(data_shape) != prod(row_shape):
        raise BadInput(
            f"{solver.train.file}: input data",
            expected=f"{prod(row_shape)} values a row, the data has {prod(data_shape)}",
        )
