"""Figures for Prometheus. Labels are a job, a cause or a state: never a worker or a user."""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from deploy.run.disk_space import free_bytes
from deploy.runner import job_folder
from deploy.runner.readings import read_newest
from deploy.service.job_store import JobStore
from deploy.service.states import TRAINING
from deploy.service.stream import Feed
from shards.shard_status import Histogram


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
        steps = CounterMetricFamily("downpour_job_steps", "Steps taken.", labels=["job"])
        loss = GaugeMetricFamily("downpour_job_loss", "The training loss.", labels=["job"])
        stale = GaugeMetricFamily(
            "downpour_job_staleness_updates", "Median staleness of updates.", labels=["job"]
        )
        useful = GaugeMetricFamily(
            "downpour_job_goodput_ratio",
            "The share of the workers' time in useful steps.",
            labels=["job"],
        )
        waiting = GaugeMetricFamily(
            "downpour_job_waiting_workers", "Workers that wait at the bound.", labels=["job"]
        )
        saved = GaugeMetricFamily(
            "downpour_job_snapshot_steps", "The step of the newest snapshot.", labels=["job"]
        )
        attempts = CounterMetricFamily("downpour_job_attempts", "Attempts begun.", labels=["job"])
        alerts = GaugeMetricFamily("downpour_job_alert", "Alerts on.", labels=["job", "alert"])
        running = GaugeMetricFamily("downpour_job_running", "Whether it trains.", labels=["job"])
        for row in self._store.heads():
            running.add_metric([row.id], row.state in TRAINING)
            for alert in row.alerts:
                alerts.add_metric([row.id, alert], 1)
            attempts.add_metric([row.id], row.attempt)
            if row.snapshot is not None:
                saved.add_metric([row.id], int(row.snapshot))
            for metric, name in (
                (steps, "steps"),
                (loss, "loss"),
                (stale, "staleness_p50"),
                (useful, "goodput"),
                (waiting, "waiting"),
            ):
                value = row.head.get(name)
                if value is not None:
                    metric.add_metric([row.id], value)
        yield from (steps, loss, stale, useful, waiting, saved, attempts, alerts, running)
        yield from self._shards()
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

    def _shards(self) -> Iterator[Metric]:
        """The histograms of the shards of jobs that train."""
        families = {
            "apply_s": ("downpour_shard_apply_seconds", "Seconds that a push took at a shard."),
            "queues": ("downpour_shard_queue_length", "Messages in a turn of a shard."),
            "parked": ("downpour_shard_parked_requests", "Requests at the gate after a turn."),
        }
        metrics = {
            field: HistogramMetricFamily(name, text, labels=["job", "shard"])
            for field, (name, text) in families.items()
        }
        for row in self._store.heads():
            if row.state not in TRAINING:
                continue
            reading = read_newest(self._store.folder(row.id) / job_folder.READINGS)
            for shard in reading.readings.shards if reading is not None else ():
                for field, metric in metrics.items():
                    histogram: Histogram = getattr(shard, field)
                    if histogram.counts:
                        labels = [row.id, str(shard.shard)]
                        metric.add_metric(labels, buckets(histogram), histogram.total)
        yield from metrics.values()


def buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """The buckets as Prometheus counts them: all values up to each bound."""
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
