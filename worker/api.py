"""`worker.train`: a Caffe solver, a Spark DataFrame, and trained weights back."""

from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from cupy_kernels.types import Precision
from ps import paths
from ps.durability import Durability
from ps.hosts.hosting import Home, ShardDevice, check_rollback
from ps.logs.saves import ROLLBACK_S
from ps.protocol.compression import NONE, Compression
from ps.replicas.coordinator_server import SILENCE_S
from ps.wire.link_model import link_of
from ps.wire.transport import Transport
from shards import arguments
from shards.errors import BadInput
from worker import spark
from worker.caffe.job import caffe_job
from worker.caffe.model import CaffeModel
from worker.caffe.solver import Solver, read_solver
from worker.caffe.weights import write_caffemodel
from worker.columns import SHAPE_COLUMNS, Shape, pixel_column
from worker.inference import read_weights, write_safetensors
from worker.placement import parse_device
from worker.replica import SEEDS
from worker.strategies import Strategy, strategy_of
from worker.training import Observer, Outcome, check_frame, run_job

Choice = TypeVar("Choice", bound=StrEnum)


class Trained(msgspec.Struct, frozen=True):
    """Trained weights, a flat float32 arena, with the solver they belong to and how it went."""

    solver: Solver
    weights: NDArray[np.float32]
    outcome: Outcome

    def save(self, path: str | Path) -> Path:
        """Write the weights as .caffemodel or .safetensors, by the name's ending."""
        target = paths.path("save: path", path)
        if target.suffix not in (".caffemodel", ".safetensors"):
            raise BadInput(f"{target}: expected .caffemodel or .safetensors, got {target.suffix!r}")
        net = CaffeModel(self.solver.train).net
        if target.suffix == ".caffemodel":
            write_caffemodel(target, net, self.weights)
        else:
            write_safetensors(target, net.table, self.weights)
        return target


def train(
    df: spark.DataFrame,
    *,
    solver: str | Path,
    shards: int = 1,
    workers: int | None = None,
    staleness: float | None = 4,
    strategy: Strategy | str | None = None,
    seed: int = 1,
    max_iter: int | None = None,
    weights: str | Path | None = None,
    resume: str | Path | None = None,
    snapshots: str | Path | None = None,
    prefetch: bool = False,
    shuffle: bool = True,
    lease_s: float = 10.0,
    shards_in: str = Home.RAY,
    shard_device: str = ShardDevice.CPU,
    link: str | None = None,
    transport: str = Transport.AUTO,
    compress: str = NONE,
    compress_pull: str = NONE,
    device: str = "auto",
    precision: str = Precision.FP32,
    durability: str = Durability.MEMORY,
    silence_s: float = SILENCE_S,
    rollback_s: float = ROLLBACK_S,
    logs: str | Path | None = None,
    observer: Observer | None = None,
) -> Trained:
    """Train the network of a Caffe `solver` on a DataFrame of images; blocks until it is done.

    `df` needs a column `label` (whole numbers) and one named `image` or `data` (binary uint8
    pixels, or a list of numbers); columns channels, height, width say an image's shape where it is
    not square. Each of its partitions is one worker, unless `workers` says how many to deal it into
    (over Spark Connect it must). `staleness` is the bound in steps, None or inf for none; strategy
    "bsp" needs 0. `weights` starts
    from a file (fine-tuning), `resume` goes on from a folder below an earlier run's `snapshots`, or
    from one below its `logs`, which a killed job left. `resume` and `snapshots` may be URIs that
    pyarrow reaches, as s3://bucket/run (docs/snapshots.md).
    `shards_in` is where the shards live: "ray", in actors, or "processes" of this machine;
    `shard_device` what holds their weights, "cpu" or "gpu".
    `link`, such as "rtt=100ms,rate=100Mbit", puts each worker behind a link like that, to see how
    training would fare on it (ps/wire/link_model.py). `transport` carries weights and gradients:
    "shm" is memory shared on one host, "ipc" a Unix socket there, "tcp" works everywhere, and
    "auto" is the best that each worker has. `compress` is how pushes travel: "fp16", "bf16",
    "int8", "4bit", "1bit", "topk:SHARE" or "threshold:TAU", with ",zstd" if wanted; `compress_pull`
    how weights do: "fp16" or "bf16", or as changes, "int8", "4bit" or "topk:SHARE"
    (docs/compression.md). `device` is what each worker computes on: "cpu", "gpu" (one of its own),
    "gpu:N", or "auto", a GPU where one answers. `precision` is what a GPU rounds the factors of
    products to: "fp32" (not at all), "tf32" or "bf16"; sums stay in float32, and so does the CPU.
    `durability` is what survives the death of a shard: "memory" (its last save), "process",
    "logged" or "replicated" (docs/durability.md); the two between need a folder `logs`, of this job
    alone, which each node with a shard has to itself or shares with others. One with an earlier
    job's logs is refused, unless `resume` holds as much. A copy of a replicated shard that is
    silent for `silence_s` counts as dead. At "memory" a shard that dies takes back what it applied
    in the last `rollback_s`, and training goes on; with 0 its death ends the job.

    Call it from the main thread, and after `ray.init` for shards in Ray. Raises BadInput for what
    the caller can mend, GiveUp when a worker or a shard fails for good.
    """
    check_frame("train: df", df)
    _check_columns(df)
    check_rollback(rollback_s, Durability.MEMORY, "train: rollback_s")
    for argument, value in (("prefetch", prefetch), ("shuffle", shuffle)):
        arguments.flag(f"train: {argument}", value)
    for argument, where in (
        ("weights", weights),
        ("resume", resume),
        ("snapshots", snapshots),
        ("logs", logs),
    ):
        if where is not None:
            paths.place(f"train: {argument}", where)
    read = read_solver(paths.path("train: solver", solver), _shape(df))
    count = spark.partition_count(df) if workers is None else _whole("workers", workers, 1)
    job = caffe_job(
        read,
        strategy=strategy_of("train: strategy", "downpour" if strategy is None else strategy),
        workers=count,
        shards=_whole("shards", shards, 1),
        bound=arguments.bound("train: staleness", staleness),
        seed=arguments.whole("train: seed", seed, *SEEDS),
        max_iter=None if max_iter is None else _whole("max_iter", max_iter, 1),
        prefetch=prefetch,
        shuffle=shuffle,
        lease_s=arguments.seconds("train: lease_s", lease_s),
        shards_in=_named("shards_in", shards_in, Home),
        shard_device=_named("shard_device", shard_device, ShardDevice),
        link=link_of(link),
        transport=_named("transport", transport, Transport),
        compression=Compression.parse(compress, compress_pull),
        device=parse_device(device),
        precision=_named("precision", precision, Precision),
        durability=_named("durability", durability, Durability),
        silence_s=arguments.seconds("train: silence_s", silence_s),
        rollback_s=rollback_s,
        logs_apart=True,
    )
    outcome = run_job(
        spark.partitions(df, count),
        job,
        weights=_start(read, weights, seed),
        resume=resume,
        snapshots=snapshots,
        logs=logs,
        observer=observer,
    )
    return Trained(read, outcome.weights, outcome)


def _check_columns(df: spark.DataFrame) -> None:
    pixel_column(df.columns, "train: the DataFrame")
    if "label" not in df.columns:
        raise BadInput(
            f"train: the DataFrame: expected a column label, got {', '.join(df.columns)}"
        )


def _whole(argument: str, number: int, least: int | None = None) -> int:
    """A plain int of this argument, which may be NumPy's."""
    return arguments.whole(f"train: {argument}", number, least)


def _named(argument: str, name: str, kind: type[Choice]) -> Choice:
    return arguments.choice(f"train: {argument}", name, kind)


def _shape(df: spark.DataFrame) -> Shape | None:
    """(channels, height, width) as the first row says; None without those columns."""
    if not set(SHAPE_COLUMNS) <= set(df.columns):
        return None
    row = df.select(*SHAPE_COLUMNS).head()
    if row is None:
        raise BadInput("train: expected a DataFrame with rows, got an empty one")
    if any(value is None for value in row):
        got = ", ".join(map(str, row))
        raise BadInput(f"train: expected channels, height and width in the first row, got {got}")
    channels, height, width = (int(value) for value in row)
    return channels, height, width


def _start(solver: Solver, path: str | Path | None, seed: int) -> NDArray[np.float32] | None:
    if path is None:
        return None
    model = CaffeModel(solver.train)
    return read_weights(paths.path("train: weights", path), model.table, model.initial(seed))
