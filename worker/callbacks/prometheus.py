"""`worker.Prometheus`: a callback that serves the figures of a run to a Prometheus server.

trained = worker.run(df, train, params=params, callbacks=[worker.Prometheus(9464)])
"""

from typing import Any

from shards import argument_checks
from shards.errors import BadInput
from shards.extras import missing
from worker.callbacks.base import Callback, Parameters, RunStatus, WatchedRun
from worker.training.evaluation import Evaluation


class Prometheus(Callback):
    """Serves the figures of its runs at http://HOST:PORT/metrics until `close`.

    The server listens on loopback unless `host` is another address, and begins with the first run;
    port 0 is any free one, and `port` is then the one chosen. Anybody who reaches it can read the
    figures: downpour_job_updates_total, downpour_job_samples_total, downpour_job_loss,
    downpour_job_staleness_updates, downpour_job_rate, downpour_job_workers and
    downpour_job_goodput_ratio, each by `job`; and downpour_job_test by `job` and `figure`. Loss and
    staleness are means over the pushes since the last status.

    Raises BadInput without the library prometheus-client, and for an address that is in use.
    """

    def __init__(self, port: int, *, host: str = "127.0.0.1") -> None:
        try:
            import prometheus_client as library
        except ImportError:
            raise missing("Prometheus", "prometheus-client", "prometheus") from None
        self.port = argument_checks.whole("Prometheus: port", port, 0, 65535)
        self._host = argument_checks.name("Prometheus: host", host)
        self._library = library
        self._registry = library.CollectorRegistry()
        self._server: Any = None
        figures = {
            "loss": "The training loss.",
            "staleness_updates": "Mean staleness of updates.",
            "rate": "The learning rate.",
            "workers": "Workers that are registered.",
            "goodput_ratio": "The share of the workers' time in useful steps.",
        }
        self._gauges = {name: self._gauge(name, text, "job") for name, text in figures.items()}
        self._tests = self._gauge("test", "The latest test of the weights.", "job", "figure")
        self._updates = self._counter("updates", "Updates applied.")
        self._samples = self._counter("samples", "Rows trained on.")

    def started(self, run: WatchedRun) -> None:
        """Start the server, if none runs yet."""
        self._job, self._counted = run.job, 0
        if self._server is not None:
            return
        start = self._library.start_http_server
        try:
            self._server, self._thread = start(self.port, self._host, self._registry)
        except OSError as error:
            line = error.strerror or error
            raise BadInput(f"Prometheus: {self._host}:{self.port}: {line}") from None
        self.port = self._server.server_port

    def progressed(self, status: RunStatus) -> None:
        """Set the figures of the job."""
        values = {
            "loss": status.loss,
            "staleness_updates": status.staleness,
            "rate": status.rate,
            "workers": status.workers,
            "goodput_ratio": status.goodput,
        }
        for name, value in values.items():
            if value is not None:
                self._gauges[name].labels(self._job).set(value)
        self._updates.labels(self._job).inc(status.updates)
        self._samples.labels(self._job).inc(max(0, status.samples - self._counted))
        self._counted = max(self._counted, status.samples)

    def evaluated(self, result: Evaluation, parameters: Parameters) -> None:
        """Set the figures of a test."""
        for name, value in result.figures.items():
            self._tests.labels(self._job, name).set(value)

    def close(self) -> None:
        """Stop the server. Idempotent."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def _gauge(self, name: str, text: str, *labels: str) -> Any:
        return self._library.Gauge(f"downpour_job_{name}", text, labels, registry=self._registry)

    def _counter(self, name: str, text: str) -> Any:
        full = f"downpour_job_{name}"
        return self._library.Counter(full, text, ["job"], registry=self._registry)
