"""`worker.TensorBoard`: a callback that writes the course of a run as TensorBoard's events.

trained = worker.run(df, train, params=params, callbacks=[worker.TensorBoard("runs/first")])
"""

from pathlib import Path
from typing import Any

from ps import path_checks
from shards import argument_checks
from shards.errors import BadInput
from shards.extras import missing
from worker.callbacks.base import Callback, Parameters, RunStatus, WatchedRun
from worker.training.evaluation import Evaluation


class TensorBoard(Callback):
    """Writes events below `folder`; each run of the callback adds a file.

    The scalars are `train/loss`, the mean of the pushes since the last event, `train/staleness`,
    `train/rate` and `train/samples_s`; and `test/NAME` for each figure of a test. The horizontal
    axis counts the samples that the job has trained on. Events are on disk as soon as they are
    written. Raises BadInput without the library tensorboardX.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise missing("TensorBoard", "tensorboardX", "tensorboard") from None
        self.folder = path_checks.path("TensorBoard: folder", folder)
        self._open = SummaryWriter
        self._writer: Any = None

    def serve(self, port: int = 0) -> str:
        """Start TensorBoard's own server on this machine, and return its address.

        It listens on loopback, at `port` or any free one, and ends with this process. Raises
        BadInput without TensorBoard, and for a port that is in use.
        """
        try:
            from tensorboard import program
        except ImportError:
            raise missing("TensorBoard", "TensorBoard", "tensorboard-server") from None
        argument_checks.whole("serve: port", port, 0, 65535)
        server = program.TensorBoard()
        server.configure(logdir=str(self.folder), host="127.0.0.1", port=port, load_fast="false")
        try:
            return str(server.launch())
        except program.TensorBoardServerException as error:
            raise BadInput(f"serve: port {port}: {error.msg.splitlines()[0]}") from None

    def started(self, run: WatchedRun) -> None:
        """Begin a file."""
        self._writer = self._open(str(self.folder))

    def progressed(self, status: RunStatus) -> None:
        """Write the means of the pushes since the last call, if there are any."""
        if not status.updates:
            return
        for name in ("loss", "staleness", "rate", "samples_s", "goodput"):
            if (value := getattr(status, name)) is not None:
                self._writer.add_scalar(f"train/{name}", value, status.samples)
        self._writer.flush()

    def evaluated(self, result: Evaluation, parameters: Parameters) -> None:
        """Write the figures of a test."""
        for name, value in result.figures.items():
            self._writer.add_scalar(f"test/{name}", value, result.samples)
        self._writer.flush()

    def ended(self, parameters: Parameters | None) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
