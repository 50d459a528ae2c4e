"""`worker.MLflow`: a callback that records a run with MLflow.

trained = worker.run(df, train, params=params, callbacks=[worker.MLflow("planes")])
"""

import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shards import argument_checks
from shards.extras import missing
from worker.callbacks.base import Callback, Parameters, RunStatus, WatchedRun
from worker.training.evaluation import Evaluation

_MODEL = "model.safetensors"
_LONGEST = 6000  # characters of a parameter's value, as MLflow limits it
_MAX_PARAMETERS = 100  # in one request


class MLflow(Callback):
    """Records each run in an `experiment` of MLflow: settings, metrics by step, and the model.

    The parameters of MLflow's run are the settings of ours. The metrics are `train/loss`,
    `train/staleness`, `train/rate` and `train/samples_s`, at most every `every_s` seconds, and
    `test/NAME` for each figure of a test; the step counts the samples trained on. The parameters
    that the run returns become the artefact model.safetensors. `uri` is that of MLflow's tracking
    store, by default what MLflow itself is set to: MLFLOW_TRACKING_URI, or a database in the
    working directory. `run_id` is MLflow's id of the latest run.

    Raises BadInput without the library mlflow-skinny or mlflow.
    """

    def __init__(
        self,
        experiment: str = "downpour",
        *,
        name: str | None = None,
        uri: str | None = None,
        every_s: float = 5.0,
    ) -> None:
        """`name` is shown for the run; None has MLflow choose one."""
        try:
            from mlflow import MlflowClient, entities
        except ImportError:
            raise missing("MLflow", "mlflow-skinny", "mlflow") from None
        self._experiment = argument_checks.name("MLflow: experiment", experiment)
        self._name = None if name is None else argument_checks.name("MLflow: name", name)
        self._every_s = argument_checks.seconds("MLflow: every_s", every_s, zero=True)
        self._entities = entities
        self._make_client = MlflowClient
        self._uri = uri
        self._client: Any = None
        self.run_id: str | None = None

    def started(self, run: WatchedRun) -> None:
        """Create a run, and record the settings."""
        self.run_id, self._written_s = None, -self._every_s
        self._last: RunStatus | None = None
        self._client = client = self._make_client(tracking_uri=self._uri)
        experiment = client.get_experiment_by_name(self._experiment)
        experiment_id = (
            experiment.experiment_id if experiment else client.create_experiment(self._experiment)
        )
        self.run_id = client.create_run(
            experiment_id, run_name=self._name, tags={"downpour.job": run.job}
        ).info.run_id
        settings = {**run.settings, "workers": run.workers}
        params = [
            self._entities.Param(name, str(value)[:_LONGEST]) for name, value in settings.items()
        ]
        for first in range(0, len(params), _MAX_PARAMETERS):
            client.log_batch(self.run_id, params=params[first : first + _MAX_PARAMETERS])

    def progressed(self, status: RunStatus) -> None:
        """Record the status, unless an earlier one is recent."""
        if not status.updates:
            return
        self._last = status
        if status.seconds >= self._written_s + self._every_s:
            self._write_last()

    def evaluated(self, result: Evaluation, parameters: Parameters) -> None:
        """Record the figures of a test."""
        values = {f"test/{name}": value for name, value in result.figures.items()}
        self._record(values, result.samples)

    def ended(self, parameters: Parameters | None) -> None:
        """Record the model, and the end of the run."""
        if self.run_id is None:
            return
        self._write_last()
        if parameters is not None:
            with TemporaryDirectory() as folder:
                parameters.save(Path(folder) / _MODEL)
                self._client.log_artifact(self.run_id, str(Path(folder) / _MODEL))
        self._client.set_terminated(self.run_id, "FAILED" if parameters is None else "FINISHED")

    def _write_last(self) -> None:
        """Record the latest status, if it is not recorded."""
        status, self._last = self._last, None
        if status is None:
            return
        self._written_s = status.seconds
        names = ("loss", "staleness", "rate", "samples_s", "goodput")
        self._record({f"train/{name}": getattr(status, name) for name in names}, status.samples)

    def _record(self, values: Mapping[str, float | None], samples: int) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(name, value, now_ms, samples)
            for name, value in values.items()
            if value is not None
        ]
        self._client.log_batch(self.run_id, metrics=metrics)
