"""Traces of OpenTelemetry: how the time of a job passes from its submission to its first update.

One trace for each job: the span `job` and its parts `queued`, `checking` and `starting`. The last
one ends when every shard has applied an update. The spans are made from the events of the job once
that is so, or once it has failed before. So a restart of the service in between loses none.

OpenTelemetry is imported only by a service with an address to send traces to.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from deploy.service.job_rows import JobRow
from deploy.service.job_store import JobStore
from deploy.service.states import TERMINAL, JobState
from ps import __version__
from shards.errors import BadInput
from shards.extras import missing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_NAMES = {
    JobState.QUEUED: "queued",
    JobState.CHECKING: "checking",
    JobState.STARTING: "starting",
    JobState.PAUSED: "paused",
    JobState.RECOVERING: "recovering",
    JobState.STOPPING: "stopping",
}
_ENDS = {JobState.RUNNING, *TERMINAL}
_PATH, _TIMEOUT_S, _FLUSH_MS = "/v1/traces", 5.0, 2000


class PhaseSpan(NamedTuple):
    """A part of a job's start: a state, with its begin and end in seconds since 1970."""

    name: str
    start: float
    end: float
    attempt: int


def phases(events: Sequence[Mapping[str, Any]]) -> list[PhaseSpan]:
    """The states of a job up to its first update, or its end, in order; empty before that.

    `events` are those of one job from the first on. No span ends before it begins, even where the
    clock was set back.
    """
    spans: list[PhaseSpan] = []
    begun: tuple[JobState, float, int] | None = None
    for event in events:
        if (text := event["data"].get("state")) is None:
            continue
        state, now = JobState(text), float(event["time"])
        if begun is not None:
            now = max(now, begun[1])
            spans.append(PhaseSpan(_NAMES[begun[0]], begun[1], now, begun[2]))
        if state in _ENDS:
            return spans
        begun = state, now, int(event["attempt"])
    return []


class JobTraces:
    """Sends the trace of each job to an exporter. `job_changed` is called after transitions."""

    def __init__(self, store: JobStore, exporter: "SpanExporter", *, batched: bool = True) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

        resource = Resource.create({"service.name": "downpour", "service.version": __version__})
        self._store = store
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        processor = BatchSpanProcessor if batched else SimpleSpanProcessor
        self._provider.add_span_processor(processor(exporter))
        self._tracer = self._provider.get_tracer("downpour.service", __version__)

    def job_changed(self, before: JobState, row: JobRow) -> None:
        """Send the trace of a job after its first update, or after an end without one."""
        begun = before is JobState.STARTING and row.state is JobState.RUNNING
        if not begun and row.state not in TERMINAL:
            return
        events = self._events_of_start(row.id)
        last = events[-1]
        if last["data"].get("state") == row.state and last["attempt"] == row.attempt:
            self._send(row, phases(events))

    def stop(self) -> None:
        """Send what is left, for a moment, and end."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()

    def _events_of_start(self, job: str) -> list[dict[str, Any]]:
        """The events of a job up to its first update, or all that there are."""
        events: list[dict[str, Any]] = []
        while batch := self._store.events([job], events[-1]["id"] if events else 0):
            for event in batch:
                events.append(event)
                if event["data"].get("state") in _ENDS:
                    return events
        return events

    def _send(self, row: JobRow, spans: list[PhaseSpan]) -> None:
        from opentelemetry import trace

        if not spans:
            return
        whole: dict[str, str | int] = {
            "downpour.job": row.id, "downpour.job.name": row.name, "downpour.project": row.project,
            "downpour.state": str(row.state), "downpour.workers": row.slots,
        }  # fmt: skip
        root = self._tracer.start_span("job", attributes=whole, start_time=_ns(spans[0].start))
        context = trace.set_span_in_context(root)
        for span in spans:
            attributes: dict[str, str | int] = {
                "downpour.job": row.id,
                "downpour.attempt": span.attempt,
            }
            part = self._tracer.start_span(
                span.name, context, attributes=attributes, start_time=_ns(span.start)
            )
            part.end(_ns(span.end))
        if row.state is JobState.FAILED:
            root.set_status(trace.Status(trace.StatusCode.ERROR, f"{row.code}: {row.reason}"))
        elif row.state is JobState.RUNNING:
            root.add_event("first update", timestamp=_ns(spans[-1].end))
        root.end(_ns(spans[-1].end))


def traces_to(url: str) -> Callable[[JobStore], JobTraces]:
    """Return a sender of a store's traces to a collector, by OTLP over HTTP; raises BadInput."""
    if not url.startswith(("http://", "https://")):
        raise BadInput("--traces-to", expected="a URL such as http://127.0.0.1:4318", got=url[:80])
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        raise missing("--traces-to", str(error.name), "otel") from None
    exporter = OTLPSpanExporter(endpoint=url.rstrip("/") + _PATH, timeout=_TIMEOUT_S)
    return lambda store: JobTraces(store, exporter)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
