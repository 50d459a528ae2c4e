"""Figures for Prometheus. Labels are a job, a cause or a state: never a worker or a user."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deploy.disk_space import free_bytes
from deploy.service.job_store import JobStore
from deploy.service.states import TRAINING
from deploy.service.stream import Feed


class ServiceMetrics(Collector):
    """Collects the figures from the store whenever they are asked for."""

    def __init__(self, store: JobStore, feed: Feed, reserve_bytes: int) -> None:
        self._store = store
        self._feed = feed
        self._reserve_bytes = reserve_bytes
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The figures in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []  # so that registering reads no database

    def collect(self) -> Iterator[Metric]:
        jobs = GaugeMetricFamily("downpour_jobs", "Jobs by state.", labels=["state"])
        for state, count in self._store.counts().items():
            jobs.add_metric([state], count)
        yield jobs
        updates = CounterMetricFamily("downpour_job_updates", "Steps applied.", labels=["job"])
        loss = GaugeMetricFamily("downpour_job_loss", "The training loss.", labels=["job"])
        stale = GaugeMetricFamily(
            "downpour_job_staleness_updates", "Median staleness of updates.", labels=["job"]
        )
        attempts = CounterMetricFamily("downpour_job_attempts", "Attempts begun.", labels=["job"])
        alerts = GaugeMetricFamily("downpour_job_alert", "Alerts on.", labels=["job", "alert"])
        running = GaugeMetricFamily("downpour_job_running", "Whether it trains.", labels=["job"])
        for row in self._store.heads():
            running.add_metric([row.id], row.state in TRAINING)
            for alert in row.alerts:
                alerts.add_metric([row.id, alert], 1)
            attempts.add_metric([row.id], row.attempt)
            for metric, name in ((updates, "steps"), (loss, "loss"), (stale, "staleness_p50")):
                value = row.head.get(name)
                if value is not None:
                    metric.add_metric([row.id], value)
        yield from (updates, loss, stale, attempts, alerts, running)
        free = free_bytes(self._store.folder(""))
        if free is not None:
            disk = GaugeMetricFamily("downpour_service_disk_free_bytes", "Free on the home's disk.")
            disk.add_metric([], free)
            yield disk
        reserve = GaugeMetricFamily("downpour_service_disk_reserve_bytes", "What is kept free.")
        reserve.add_metric([], self._reserve_bytes)
        yield reserve
        clients = GaugeMetricFamily("downpour_service_stream_clients", "Open event streams.")
        clients.add_metric([], self._feed.clients)
        yield clients
