"""`worker.train`: a Caffe solver, a Spark DataFrame, and trained weights back."""

from enum import StrEnum
from operator import index
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from cupy_kernels.types import Precision
from ps.durability import Durability
from ps.hosts.hosting import Home, ShardDevice, check_rollback
from ps.logs.saves import ROLLBACK_S
from ps.protocol.compression import NONE, Compression
from ps.replicas.coordinator_server import SILENCE_S
from ps.wire.link_model import parse_link
from ps.wire.transport import Transport
from shards.errors import BadInput
from worker import spark
from worker.caffe.job import caffe_job
from worker.caffe.model import CaffeModel
from worker.caffe.rows import rows_of
from worker.caffe.solver import Solver, read_solver
from worker.caffe.weights import write_caffemodel
from worker.frames import check_columns, first_shape
from worker.inference import read_weights, write_safetensors
from worker.placement import parse_device
from worker.strategies import Downpour, Strategy
from worker.training import Observer, Outcome, run_job

Choice = TypeVar("Choice", bound=StrEnum)


class Trained(msgspec.Struct, frozen=True):
    """Trained weights, a flat float32 arena, with the solver they belong to and how it went."""

    solver: Solver
    weights: NDArray[np.float32]
    outcome: Outcome

    def save(self, path: str | Path) -> Path:
        """Write the weights as .caffemodel or .safetensors, by the name's ending."""
        target = Path(path)
        net = CaffeModel(self.solver.train).net
        match target.suffix:
            case ".caffemodel":
                write_caffemodel(target, net, self.weights)
            case ".safetensors":
                write_safetensors(target, net.table, self.weights)
            case other:
                raise BadInput(f"{target}: expected .caffemodel or .safetensors, got {other!r}")
        return target


def train(
    df: spark.DataFrame,
    *,
    solver: str | Path,
    shards: int = 1,
    workers: int | None = None,
    staleness: int | None = 4,
    strategy: Strategy | None = None,
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
    """Train the network of a Caffe `solver` on a DataFrame; blocks until it is done.

    `df` needs a column `label` (whole numbers) and one named `image` or `data` (binary uint8
    pixels, or a list of numbers). Bytes are a square image and a list is a vector, unless columns
    channels, height, width say a shape, or the net does; a net with convolutions takes a list as a
    square image. Each partition is one worker, unless `workers` says how many to deal the rows into
    (over Spark Connect it must). Every worker needs a row. `staleness` is the bound in steps, None
    for none. `weights` starts from a file (fine-tuning), `resume` goes on from a folder below an
    earlier run's `snapshots`, or from one below its `logs`, which a killed job left. `resume` and
    `snapshots` may be URIs that pyarrow reaches, as s3://bucket/run (docs/snapshots.md).
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
    in the last `rollback_s`, and training goes on; with 0 its death ends the job. Warnings, such as
    a snapshot that failed, go to the `observer`, or else to the logger downpour.worker, and stand
    in the outcome's `notices`.

    Call it from the main thread, and after `ray.init` for shards in Ray. Raises BadInput for what
    the caller can mend, GiveUp when a worker or a shard fails for good.
    """
    check_columns(df)
    check_rollback(rollback_s, Durability.MEMORY, "train: rollback_s")
    rows = rows_of(read_solver(Path(solver)).train)
    read = read_solver(Path(solver), first_shape(df, rows.shape, image=rows.image))
    count = spark.partition_count(df) if workers is None else _whole("workers", workers, 1)
    job = caffe_job(
        read,
        strategy=strategy or Downpour(),
        workers=count,
        shards=_whole("shards", shards, 1),
        bound=None if staleness is None else _whole("staleness", staleness, 0),
        seed=_whole("seed", seed),
        max_iter=None if max_iter is None else _whole("max_iter", max_iter, 1),
        prefetch=prefetch,
        shuffle=shuffle,
        lease_s=lease_s,
        shards_in=_named("shards_in", shards_in, Home),
        shard_device=_named("shard_device", shard_device, ShardDevice),
        link=parse_link(link) if link is not None else None,
        transport=_named("transport", transport, Transport),
        compression=Compression.parse(compress, compress_pull),
        device=parse_device(device),
        precision=_named("precision", precision, Precision),
        durability=_named("durability", durability, Durability),
        silence_s=silence_s,
        rollback_s=rollback_s,
        logs_apart=True,
    )
    outcome = run_job(
        df,
        job,
        weights=_start(read, weights, seed),
        resume=resume,
        snapshots=snapshots,
        logs=Path(logs) if logs is not None else None,
        observer=observer,
        even=workers is not None,
    )
    return Trained(read, outcome.weights, outcome)


def _whole(argument: str, number: int, least: int | None = None) -> int:
    """A plain int of this argument, which may be NumPy's."""
    try:
        plain = index(number)
    except TypeError:
        raise BadInput(f"train: {argument}: expected a whole number, got {number!r}") from None
    if least is not None and plain < least:
        raise BadInput(f"train: {argument}: expected at least {least}, got {plain}")
    return plain


def _named(argument: str, name: str, kind: type[Choice]) -> Choice:
    try:
        return kind(name)
    except ValueError:
        choices = " or ".join(kind)
        raise BadInput(f"train: {argument}: expected {choices}, got {name}") from None


def _start(solver: Solver, path: str | Path | None, seed: int) -> NDArray[np.float32] | None:
    if path is None:
        return None
    model = CaffeModel(solver.train)
    return read_weights(Path(path), model.table, model.initial(seed))
