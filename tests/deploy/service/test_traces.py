"""Traces: spans from the submission of a job to its first update, with its id."""

from typing import Any

import pytest

from deploy.service.traces import JobTraces, PhaseSpan, phases, traces_to
from shards.errors import BadInput
from tests.support.eventually import eventually
from tests.support.service_in_process import Start


def events(*states: tuple[str, float]) -> list[dict[str, Any]]:
    return [{"time": time, "attempt": 1, "data": {"state": state}} for state, time in states]


def test_the_phases_of_a_job() -> None:
    """Each state up to the first update is a span; before that, and after it, there is none."""
    path = [("QUEUED", 1.0), ("CHECKING", 3.0), ("STARTING", 4.0), ("RUNNING", 9.0)]
    assert phases(events(*path[:3])) == []
    assert phases(events(*path, ("STOPPING", 10.0), ("SUCCEEDED", 11.0))) == [
        PhaseSpan("queued", 1.0, 3.0, 1),
        PhaseSpan("checking", 3.0, 4.0, 1),
        PhaseSpan("starting", 4.0, 9.0, 1),
    ]
    back = phases(events(("QUEUED", 100.0), ("CANCELLED", 1.0)))
    assert back == [PhaseSpan("queued", 100.0, 100.0, 1)]


def test_spans_of_jobs(start: Start) -> None:
    """A job that trains has one trace with its parts in order; a failed one is marked so, and a
    second attempt makes no second trace."""
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra `otel`")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    with start(traces=lambda store: JobTraces(store, exporter, batched=False)) as running:
        job = running.submit("train")
        running.await_state(job, "RUNNING")
        eventually(lambda: len(exporter.get_finished_spans()) == 4, because="the spans")
        spans = {span.name: span for span in exporter.get_finished_spans()}
        bad = running.submit("bad")
        running.await_state(bad, "FAILED")
        running.ask(job, "pause")
        running.await_state(job, "PAUSED")
        running.ask(job, "resume")
        running.await_attempt(job, 2)
        running.await_state(job, "RUNNING")
        running.ask(job, "cancel")
        running.await_state(job, "CANCELLED")
        queued = running.submit("train", project="later")
        running.await_state(queued, "RUNNING")
        running.ask(queued, "cancel", mode="now")
        running.await_state(queued, "CANCELLED")
        later = exporter.get_finished_spans()[4:]
    assert set(spans) == {"job", "queued", "checking", "starting"}
    root = spans["job"]
    assert root.attributes is not None
    assert root.attributes["downpour.job"] == job
    assert [event.name for event in root.events] == ["first update"]
    ends = [(spans[name].start_time, spans[name].end_time) for name in ("queued", "checking")]
    assert ends[0][1] == ends[1][0]
    assert spans["starting"].end_time == root.end_time
    for name in ("queued", "checking", "starting"):
        parent = spans[name].parent
        assert parent is not None
        assert parent.span_id == root.context.span_id
        attributes = spans[name].attributes
        assert attributes is not None
        assert attributes["downpour.job"] == job
    roots = [span for span in later if span.name == "job"]
    jobs = [(dict(span.attributes or {})["downpour.job"], span.status.is_ok) for span in roots]
    assert jobs == [(bad, False), (queued, True)]


def test_traces_need_a_url() -> None:
    """Another address is refused before anything starts."""
    with pytest.raises(BadInput, match="--traces-to: expected a URL"):
        traces_to("localhost:4318")
