"""Writes the course of a run as events that TensorBoard shows.

trained = worker.run(df, train, params=params, observer=worker.TensorBoard("runs/first"))
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps import paths
from ps.cluster import Cluster
from ps.logs import logger
from shards.errors import BadInput
from shards.messages import ShardStatus
from worker.evaluation import Evaluation


class TensorBoard:
    """An observer of `worker.run` and `worker.train` that writes events below `folder`.

    The scalars are `train/loss`, the mean of the pushes since the last event, `train/staleness` and
    `train/rate`; and `test/NAME` for each figure of a test. The horizontal axis counts the samples
    that the job has trained on. Events are on disk as soon as they are written. Raises BadInput
    without the library tensorboardX.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise BadInput(
                "TensorBoard: expected tensorboardX (pip install 'downpour-sgd[tensorboard]'), got"
                " none"
            ) from None
        self._writer: Any = SummaryWriter(str(paths.path("TensorBoard: folder", folder)))
        self._logger = logger("worker")

    def started(self, cluster: Cluster, restored: list[int] | None) -> None:
        """The shards hold their weights."""

    def progressed(self, statuses: list[ShardStatus], records: list[NDArray[np.void]]) -> None:
        """Write the means of the pushes since the last call, if there are any."""
        pushed = records[0][records[0]["dropped"] == 0]
        if not len(pushed):
            return
        samples = statuses[0].samples
        losses = pushed["loss"][np.isfinite(pushed["loss"])]
        if len(losses):
            self._write("train/loss", float(losses.mean()), samples)
        self._write("train/staleness", float(pushed["staleness"].mean()), samples)
        self._write("train/rate", statuses[0].rate, samples)
        self._writer.flush()

    def evaluated(self, result: Evaluation) -> None:
        """Write the figures of a test."""
        for name, value in result.figures.items():
            self._write(f"test/{name}", value, result.samples)
        self._writer.flush()

    def resharded(self, cluster: Cluster) -> None:
        """Later reports come from other shards."""

    def notice(self, text: str) -> None:
        """Log a message for the operator."""
        self._logger.warning("%s", text)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._writer.close()

    def _write(self, name: str, value: float, samples: int) -> None:
        self._writer.add_scalar(name, value, samples)
