"""Alerts, disk space and webhooks: when they come, whom they reach, and what they never touch."""

import hmac
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from deploy.run.progress_model import Readings, WorkerReading
from deploy.runner.readings import Reading, SeriesPoint
from deploy.service.alerts import ALERTS, DiskWatch, JobWatch
from deploy.service.job_rows import JobRow
from deploy.service.states import JobState
from deploy.service.webhooks import MAX_TRIES, Hosts, Webhooks
from shards.errors import BadInput, GiveUp
from tests.support.service_in_process import Running, Start

DATABASES = ("sqlite", "postgresql")
ROW = JobRow(
    id="j", name="n", project="p", owner="local", labels={}, priority=0, slots=2,
    state=JobState.RUNNING, state_seq=3, attempt=1, nonce="", code="", reason="", contact="",
    cancelled=False, fruitless=0, not_before=0.0, snapshot=None, request_key=None,
    events_read=0, created=0.0, updated=0.0, head={}, settings={"out": "."},
)  # fmt: skip


def reading(waiting: int = 0, workers: int = 4, **more: Any) -> Reading:
    """A reading in which some of the workers wait at the bound."""
    rows = tuple(
        WorkerReading(
            name=f"w{n}", clock=n, step=n, standing="runs", waits=n < waiting, loss=1.0, restarts=0
        )
        for n in range(workers)
    )
    figures = Readings(
        elapsed_s=1.0, steps=1, planned=9, remaining_s=None, samples_per_s=None, loss=1.0, rate=0.1,
        epoch=None, staleness_mean=None, staleness_max=None, bound=4, absent=0, workers=rows,
        shards=(),
    )  # fmt: skip
    point = SeriesPoint(
        time=1.0, seconds=1.0, steps=1, samples=1, loss=1.0, samples_per_s=None,
        staleness_p50=None, staleness_p99=None, staleness_max=None, clock_gap=0, waiting=waiting,
    )  # fmt: skip
    given = {"staleness": [], "times_s": {}, "holds": {}, **more}
    return Reading(time=1.0, attempt=1, readings=figures, point=point, **given)


def names(
    watch: JobWatch, row: JobRow, found: Reading | None, now: float
) -> list[tuple[str, bool]]:
    return [(change.alert, change.on) for change in watch.check(row, found, now)]


def test_an_alert_begins_and_ends_once() -> None:
    """Each change is reported once; what has to last is reported when it has lasted."""
    watch = JobWatch()
    assert names(watch, ROW, reading(2), 0.0) == []
    assert names(watch, ROW, reading(2), 59.0) == []
    assert names(watch, ROW, reading(2), 60.0) == [("at_bound", True)]
    known = msgspec.structs.replace(ROW, alerts=["at_bound"])
    assert names(watch, known, reading(2), 61.0) == []
    assert names(watch, known, reading(1), 62.0) == [("at_bound", False)]
    assert names(watch, ROW, reading(2), 63.0) == []


@pytest.mark.parametrize(
    ("row", "found", "alert"),
    [
        ({"contact": "lost since 12:00"}, None, "silent"),
        ({"code": "disk", "state": JobState.PAUSING, "reason": "full"}, None, "disk"),
        ({}, reading(diverged=True), "diverged"),
        ({}, reading(holds={"w1": 80, "w2": 40}), "held_up"),
    ],
)
def test_what_is_alarming(row: dict[str, Any], found: Reading | None, alert: str) -> None:
    """Each kind of alert comes from its own evidence, and from a reading of this attempt."""
    job = msgspec.structs.replace(ROW, **row)
    assert names(JobWatch(), job, found, 0.0) == [(alert, True)]
    assert alert in ALERTS
    if found is not None:
        later = msgspec.structs.replace(job, attempt=2)
        assert names(JobWatch(), later, found, 0.0) == []


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.RECOVERING, JobState.PAUSED])
def test_a_run_folder_that_is_missing(state: JobState, tmp_path: Path) -> None:
    """A job that has a snapshot would begin from the start. Before, nothing has to be there; and a
    job that is not to train needs no folder."""
    row = msgspec.structs.replace(ROW, state=state, settings={"out": str(tmp_path / "run")})
    assert names(JobWatch(), row, None, 0.0) == []
    later = msgspec.structs.replace(row, snapshot="12")
    lost = [] if state is JobState.PAUSED else [("unwritable", True)]
    assert names(JobWatch(), later, None, 0.0) == lost
    (tmp_path / "run").mkdir()
    assert names(JobWatch(), later, None, 0.0) == []


def test_a_degraded_job_alarms_after_a_while() -> None:
    """For five minutes it may recover by itself."""
    watch, job = JobWatch(), msgspec.structs.replace(ROW, state=JobState.DEGRADED)
    assert names(watch, job, None, 0.0) == []
    assert names(watch, job, None, 300.0) == [("degraded", True)]


def test_a_disk_that_fills_up(start: Start) -> None:
    """First no job starts, then jobs that train pause; both say how much is free."""
    free = 10**12
    with start(driven=True) as running:
        supervisor = running.service.supervisor
        supervisor._disk = DiskWatch(100 << 20, free=lambda _: free)
        job = running.submit("train")
        running.await_state(job, "RUNNING")
        free = 150 << 20
        waiting = running.submit("succeed")
        running.await_state(job, "RUNNING")
        supervisor.reconcile()
        assert "157.3 MB free" in running.http.get("/api/v1/service").json()["halted"]
        assert "No job is started" in running.http.get("/service").text
        assert running.get(waiting)["state"] == "QUEUED"
        free = 90 << 20
        found = running.await_state(job, "PAUSED")
        assert (found["code"], found["alerts"]) == ("disk", ["disk"])
        assert "94.4 MB free" in found["reason"]
        free = 10**12
        running.await_state(waiting, "SUCCEEDED")
        running.ask(job, "resume")
        running.await_attempt(job, 2)
        running.ask(job, "cancel")
        assert running.await_state(job, "CANCELLED")["alerts"] == []


class Receiver:
    """A receiver of webhooks: `answers` are its status codes in turn, then 200."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        request.read()
        self.requests.append(request)
        status = self.answers.pop(0) if self.answers else 200
        return httpx.Response(status, headers={"Location": "http://127.0.0.1/elsewhere"})


def webhooks(running: Running, receiver: Receiver, now: list[float], *hosts: str) -> Webhooks:
    return Webhooks(
        running.service.store,
        running.service.store._engine,
        Hosts(hosts or ("private:127.0.0.1",)),
        clock=lambda: now[0],
        transport=httpx.MockTransport(receiver),
    )


def test_a_webhook_is_signed_and_retried(start: Start) -> None:
    """Each notable event arrives in order with a signature; a receiver that fails, or redirects, is
    asked again later and later, and the next event waits for that."""
    receiver, now = Receiver(500, 302), [1000.0]
    with start(driven=False) as running:
        sender = webhooks(running, receiver, now)
        made = sender.add("http://127.0.0.1:9/hook")
        job = running.submit("train")
        running.ask(job, "pause")
        running.ask(job, "cancel")
        for expected, wait in ((1, 4.9), (1, 5.1), (2, 9.9), (2, 10.1), (4, 1.0)):
            sender.send_due()
            assert len(receiver.requests) == expected
            now[0] += wait if wait not in {5.1, 10.1} else 0.2
    states = [json.loads(each.content)["data"]["state"] for each in receiver.requests]
    assert states == ["PAUSED", "PAUSED", "PAUSED", "CANCELLED"]
    last = receiver.requests[-1]
    seconds, digest = last.headers["Downpour-Signature"].removeprefix("t=").split(",v1=")
    message = f"{seconds}.".encode() + last.content
    assert hmac.new(made["secret"].encode(), message, "sha256").hexdigest() == digest
    assert json.loads(last.content)["job"] == job
    (kept,) = sender.all()
    assert (kept["delivered"], kept["given_up"], "secret" in kept) == (2, 0, False)


def test_an_event_is_given_up(start: Start) -> None:
    """After the last try the next event is sent."""
    receiver, now = Receiver(*[503] * MAX_TRIES), [0.0]
    with start(driven=False) as running:
        sender = webhooks(running, receiver, now)
        sender.add("http://127.0.0.1/hook")
        job = running.submit("train")
        running.ask(job, "pause")
        running.ask(job, "cancel")
        for _ in range(MAX_TRIES):
            sender.send_due()
            now[0] += 3600
        (kept,) = sender.all()
        assert (kept["delivered"], kept["given_up"]) == (1, 1)
        sender.remove(kept["id"])
        assert sender.all() == []


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("http://evil.example/x", ("good.example",)),
        ("http://good.example.evil.example/", ("good.example", "*.good.example")),
        ("http://user@good.example/", ("good.example",)),
        ("ftp://good.example/", ("good.example",)),
        ("file:///etc/passwd", ("*",)),
        ("http://127.0.0.1/", ()),
    ],
)
def test_a_host_that_is_not_allowed(url: str, hosts: tuple[str, ...]) -> None:
    """Only hosts that the operator has named may be asked."""
    with pytest.raises(BadInput, match="url: expected"):
        Hosts(hosts).check(url)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "10.0.0.1", "169.254.169.254", "localhost"])
def test_an_address_that_is_not_public(host: str) -> None:
    """A name on the list that leads to this machine or network is refused when it is resolved."""
    hosts = Hosts(("*",))
    hosts.check(f"http://{host}/")
    with pytest.raises(GiveUp, match="no public address"):
        hosts.address(f"http://{host}/")
    named = host.strip("[]")
    assert Hosts((f"private:{named}",)).address(f"http://{host}/")


def test_a_webhook_never_reaches_this_machine(start: Start) -> None:
    """Neither a name on the list that leads to loopback, nor a redirect to it, is connected to."""
    receiver, now = Receiver(302, 307), [1000.0]
    with start(driven=False) as running:
        inner = webhooks(running, receiver, now, "*")
        inner.add("http://127.0.0.1:9/inner")
        running.ask(running.submit("train"), "cancel")
        inner.send_due()
        (kept,) = inner.all()
        assert (receiver.requests, kept["delivered"]) == ([], 0)
        assert "127.0.0.1 is no public address" in kept["last"]
        inner.remove(kept["id"])
        outer = webhooks(running, receiver, now)
        outer.add("http://127.0.0.1:9/hook")
        running.ask(running.submit("train"), "cancel")
        for _ in range(3):
            outer.send_due()
            now[0] += 60.0
        (kept,) = outer.all()
    assert [each.url.path for each in receiver.requests] == ["/hook"] * 3
    assert kept["delivered"] == 1


def test_ids_of_events_are_never_used_twice(start: Start) -> None:
    """The job of the newest events is deleted, or all jobs are indexed again: a webhook still gets
    the events that follow, and none twice."""
    receiver, now = Receiver(), [1000.0]
    with start(driven=False) as running:
        sender = webhooks(running, receiver, now)
        sender.add("http://127.0.0.1:9/hook")
        for _ in range(2):
            job = running.submit("train")
            running.ask(job, "cancel")
            sender.send_due()
            assert running.http.delete(f"/api/v1/jobs/{job}").status_code == 204
        running.ask(running.submit("train"), "cancel")
        sender.send_due()
        running.service.store.rebuild()
        sender.send_due()
        assert len(receiver.requests) == 3
        running.ask(running.submit("train"), "cancel")
        sender.send_due()
    assert len(receiver.requests) == 4


def test_a_url_that_cannot_be_sent_to_is_an_error_of_its_webhook(start: Start) -> None:
    """The courier survives it, and other webhooks get their events."""
    receiver, now = Receiver(), [1000.0]
    with start(driven=False) as running:
        sender = webhooks(running, receiver, now)
        sender.add("http://127.0.0.1:9/a\x7f")
        sender.add("http://127.0.0.1:9/b")
        running.ask(running.submit("train"), "cancel")
        sender.send_due()
    assert [each.url.path for each in receiver.requests] == ["/b"]


def test_webhooks_by_rest(start: Start, home: Path) -> None:
    """The secret is in the first answer alone; without an allowed host there are none."""
    with start(driven=False) as running:
        answer = running.http.post("/api/v1/webhooks", json={"url": "http://127.0.0.1/x"})
        assert (answer.status_code, answer.json()["field"]) == (422, "url")
        assert running.http.get("/api/v1/webhooks").json() == {"webhooks": []}
        assert running.http.delete("/api/v1/webhooks/unknown").status_code == 404
