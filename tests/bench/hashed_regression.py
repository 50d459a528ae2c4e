"""Logistic regression over hashed features: a weight for each value of some fields, and of sets.

Features are the fields of a sample, and their pairs (degree 2), or triples as well (3); each has an
id by `worker.hashed` and a row of one weight under FTRL. Workers take the batches of a stream in
turn: worker k of n has every n-th. A batch is predicted before it is learnt, so each sample tests
what was learnt before it.
"""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from time import monotonic, process_time
from typing import Any, NamedTuple

import numpy as np
import psutil
import pyarrow as pa
from numpy.typing import NDArray

import ps
import worker

TABLE = "weight"
_HASHED_ROWS = 1024  # at once, whatever the size of a batch


class Samples(NamedTuple):
    """The fields of samples in the order of a stream, and their labels, 0 or 1."""

    fields: pa.Table
    labels: NDArray[np.float32]


class Settings(NamedTuple):
    """The features, the samples of a step, the shards' rule, and the bound of several workers."""

    degree: int
    batch: int
    rate: float
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 1.0
    staleness: int = 0

    def describe_tables(self) -> ps.Tables:
        rule = ps.FTRL(beta=self.beta, l1=self.l1, l2=self.l2)
        return ps.Tables(**{TABLE: ps.Sparse(1, rule=rule, rate=self.rate, init=ps.Zeros())})


class Predictions(NamedTuple):
    """The chances that a worker computed before it learnt, by sample, and its CPU seconds."""

    samples: NDArray[np.int64]
    chances: NDArray[np.float32]
    cpu_s: float


class Outcome(NamedTuple):
    """The chances of all samples before they were learnt, and the figures of the job."""

    chances: NDArray[np.float32]
    figures: dict[str, float]


Read = Callable[[], Samples]


def hash_features(fields: pa.Table, degree: int) -> NDArray[np.int64]:
    """An id for each sample and each set of up to `degree` fields, (samples, sets)."""
    sets = (
        names
        for size in range(1, degree + 1)
        for names in itertools.combinations(fields.schema.names, size)
    )
    columns = [worker.hashed("-".join(names), *(fields[name] for name in names)) for names in sets]
    return np.stack(columns, axis=1)


def chance_of(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """The chance of label 1, by the weights (samples, features) of samples' features."""
    chances: NDArray[np.float32] = 1 / (1 + np.exp(-np.clip(weights.sum(axis=1), -30, 30)))
    return chances


def train_share(
    where: str, token: str, number: int, workers: int, read: Read, settings: Settings
) -> Predictions:
    """Predict and learn every `workers`-th batch of a stream as worker `number`."""
    samples = read()
    every = np.arange(len(samples.labels))
    mine = every[every // settings.batch % workers == number]
    chances = np.empty(len(mine), np.float32)
    began = process_time()
    with ps.connect(where, token=token) as job, job.worker(f"w{number}") as me:
        for low, high, ids in _batches(samples.fields.take(mine), settings):
            labels = samples.labels[mine[low:high]]
            with me.step(samples=len(ids), gather={TABLE: ids.reshape(-1)}) as step:
                chances[low:high] = chance_of(step.rows(TABLE).reshape(ids.shape))
                step.loss = log_loss(labels, chances[low:high])
                gradient = np.repeat(chances[low:high] - labels, ids.shape[1])
                step.scatter(TABLE, gradient[:, None])
    return Predictions(mine, chances, process_time() - began)


def _batches(fields: pa.Table, settings: Settings) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """The bounds of each batch, and the ids of its features."""
    size = settings.batch * max(1, _HASHED_ROWS // settings.batch)
    for first in range(0, fields.num_rows, size):
        ids = hash_features(fields.slice(first, size), settings.degree)
        for low in range(0, len(ids), settings.batch):
            batch = ids[low : low + settings.batch]
            yield first + low, first + low + len(batch), batch


def train(
    workers: int, read: Read, settings: Settings, then: Callable[[ps.Job], None] | None = None
) -> Outcome:
    """Learn a stream by this many processes; `then` sees the trained job."""
    before = set(psutil.Process().children(recursive=True))
    began = monotonic()
    # Saves are off: a save of millions of rows every ten seconds would cost more than the steps.
    options: dict[str, Any] = {"staleness": settings.staleness, "rollback_s": 0}
    with (
        ps.start(settings.describe_tables(), workers=workers, **options) as job,
        ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool,
    ):
        shards = set(psutil.Process().children(recursive=True)) - before
        shares = [
            pool.submit(train_share, job.address, job.token, number, workers, read, settings)
            for number in range(workers)
        ]
        parts = [share.result() for share in shares]
        seconds = monotonic() - began
        shard_bytes = sum(shard.memory_info().rss for shard in shards)
        rows = sum(sum(status.rows.values()) for status in job.status())
        if then is not None:
            then(job)
    chances = np.empty(sum(len(part.samples) for part in parts), np.float32)
    for part in parts:
        chances[part.samples] = part.chances
    figures = {
        "workers": workers,
        "rows": rows,
        "MB of the shard": round(shard_bytes / 1e6),
        "seconds": round(seconds, 1),
        "CPU s of workers": round(sum(part.cpu_s for part in parts), 1),
    }
    return Outcome(chances, figures)


def log_loss(labels: NDArray[np.float32], chances: NDArray[Any]) -> float:
    """The mean of the negative logarithm of the chance of what happened."""
    sure = np.clip(chances, 1e-6, 1 - 1e-6).astype(np.float64)
    return float(-np.where(labels > 0, np.log(sure), np.log(1 - sure)).mean())


def area_under_curve(labels: NDArray[np.float32], chances: NDArray[Any]) -> float:
    """The share of pairs of samples of both labels in which label 1 has the higher chance.

    Of equal chances it is half.
    """
    _, inverse, counts = np.unique(chances, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positive = int(labels.sum())
    pairs = positive * (len(labels) - positive)
    return float((ranks[labels > 0].sum() - positive * (positive + 1) / 2) / pairs)
