"""The REST interface and the page: answers, refusals, keys, streams, and what is escaped."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import deploy
from deploy.run.progress_model import ShardReading
from deploy.runner.readings import SeriesPoint
from deploy.service import job_store
from deploy.service.answers import OTHERS
from deploy.service.problems import MEDIA_TYPE
from deploy.service.states import JobState, Verb
from deploy.service.stream import Feed, messages
from shards.shard_status import Histogram
from tests.support.job_readings import write_figures
from tests.support.service_in_process import Running, Start

DATABASES = ("sqlite", "postgresql")
HOSTILE = "<script>alert(1)</script>"


def body(running: Running, **settings: Any) -> dict[str, Any]:
    return {"settings": {"solver": str(running.solver), **settings}, "labels": {"stub": "train"}}


@pytest.fixture
def idle(start: Start) -> Any:
    """A service that starts no job, so that what is queued stays queued."""
    with start(driven=False) as running:
        yield running


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"nonsense": 1}, "nonsense", "an option that `downpour train --help` lists"),
        ({"workers": "two"}, "workers", "expected a whole number, got 'two'"),
        ({"workers": 9}, "workers", "--slots"),
        ({"data": "/nowhere"}, "data", "it is missing"),
        ({"solver": "/nowhere"}, "solver", "it is missing"),
        ({"snapshots": "s3://key:secret@bucket/run"}, "snapshots", "without a key"),
        ({"strategy": "sync"}, "strategy", "got 'sync'"),
    ],
)
def test_what_cannot_run_is_refused(
    idle: Running, settings: dict[str, Any], field: str, words: str
) -> None:
    """A submission that is wrong is a problem with its field, and makes no job."""
    answer = idle.http.post("/api/v1/jobs", json=body(idle, **settings))
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["code"] == "bad_input"
    assert words in problem["detail"]
    assert problem["field"] == field
    assert "secret" not in answer.text
    assert idle.http.get("/api/v1/jobs").json()["jobs"] == []


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"name": "x" * 201}, "name"),
        ({"name": "two\nlines"}, "name"),
        ({"project": "../up"}, "project"),
        ({"labels": {"a b": "c"}}, "labels"),
        ({"priority": 10**9}, "priority"),
        ({"surplus": 1}, "surplus"),
        ({"settings": []}, "settings"),
    ],
)
def test_fields_of_a_submission_are_checked(
    idle: Running, given: dict[str, Any], field: str
) -> None:
    """Names, labels and numbers have limits, and unknown fields are refused."""
    answer = idle.http.post("/api/v1/jobs", json=body(idle) | given)
    assert (answer.status_code, answer.json()["field"]) == (422, field)


def test_a_key_makes_one_job(idle: Running) -> None:
    """A repeated request gets the first answer; another body with this key is refused."""
    headers = {"Idempotency-Key": "k1"}
    first = idle.http.post("/api/v1/jobs", json=body(idle), headers=headers)
    again = idle.http.post("/api/v1/jobs", json=body(idle), headers=headers)
    assert (first.status_code, again.json()) == (201, first.json())
    other = idle.http.post("/api/v1/jobs", json=body(idle, workers=1), headers=headers)
    assert (other.status_code, other.json()["code"]) == (422, "key_reused")
    assert len(idle.http.get("/api/v1/jobs").json()["jobs"]) == 1


def test_a_key_survives_a_crash_before_the_answer(start: Start) -> None:
    """If the job was stored and its answer was not, the repeated request finds the job."""
    headers = {"Idempotency-Key": "k2"}
    with start(driven=False) as running:
        made = running.http.post("/api/v1/jobs", json=body(running), headers=headers).json()
        with running.service.store._engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM idempotency")
        again = running.http.post("/api/v1/jobs", json=body(running), headers=headers).json()
        assert again["id"] == made["id"]


def test_lists_are_paged_and_filtered(idle: Running) -> None:
    """A cursor continues where the page ended, also when new jobs arrive meanwhile."""
    for number in range(5):
        idle.submit("train", name=f"job {number}", project="p" if number % 2 else "q")
    page = idle.http.get("/api/v1/jobs?limit=2").json()
    idle.submit("train", name="late")
    rest = idle.http.get(f"/api/v1/jobs?limit=200&cursor={page['cursor']}").json()
    names = [job["name"] for job in page["jobs"] + rest["jobs"]]
    assert names == [f"job {number}" for number in (4, 3, 2, 1, 0)]
    assert rest["cursor"] is None

    def names_of(query: str) -> list[str]:
        return [job["name"] for job in idle.http.get(f"/api/v1/jobs?{query}").json()["jobs"]]

    assert names_of("project=p") == ["job 3", "job 1"]
    assert names_of("q=LATE") == ["late"]
    assert names_of("q=%25") == []
    assert len(names_of("label=stub")) == 6
    assert names_of("label=stub=other") == []
    assert names_of("state=RUNNING") == []
    assert len(names_of("state=QUEUED&state=RUNNING")) == 6


def test_verbs_that_do_not_apply_name_the_state(idle: Running) -> None:
    """409 with the state and the states in which the verb applies; 404 for an unknown job."""
    job = idle.submit("train")
    assert idle.ask(job, "pause").json()["state"] == JobState.PAUSED
    for verb in ("pause", "snapshot"):
        answer = idle.ask(job, verb)
        assert (answer.status_code, answer.json()["got"]) == (409, "PAUSED")
    assert idle.ask(job, "resume").json()["state"] == JobState.QUEUED
    assert idle.ask(job, "cancel").json()["state"] == JobState.CANCELLED
    for verb in ("pause", "resume", "cancel", "snapshot"):
        assert idle.ask(job, verb).status_code == 409
    assert idle.ask(job, "explode").status_code == 404
    bodies: dict[str, Any] = {"reshard": {"shards": 2}, "set": {"settings": {"staleness": 1}}}
    for verb in Verb:
        assert idle.ask("unknown", verb, **bodies.get(verb, {})).status_code == 404


def test_a_clone_has_its_own_folder_and_the_changes(idle: Running) -> None:
    """Settings that are given replace those of the job; the run folder is a new one."""
    job = idle.submit("train", name="first")
    made = idle.ask(job, "clone", settings={"workers": 1}).json()
    found = idle.get(made["id"])
    assert (found["name"], found["settings"]["workers"]) == ("first (copy)", 1)
    assert found["settings"]["out"] != idle.get(job)["settings"]["out"]
    wrong = idle.ask(job, "clone", snapshot="7000")
    assert (wrong.status_code, wrong.json()["code"]) == (422, "bad_input")


def test_change_and_delete(idle: Running) -> None:
    """Name, labels and priority can change; only what has ended can be deleted."""
    job = idle.submit("train")
    path = f"/api/v1/jobs/{job}"
    changed = idle.http.patch(path, json={"name": "new", "priority": 3}).json()
    assert (changed["name"], changed["priority"]) == ("new", 3)
    assert idle.http.patch(path, json={"state": "RUNNING"}).status_code == 422
    assert idle.http.delete(path).status_code == 409
    idle.ask(job, "cancel")
    folder = idle.service.store.folder(job)
    assert idle.http.delete(path).status_code == 204
    assert not folder.exists()
    assert idle.http.get(path).status_code == 404


def test_paths_stay_below_the_roots(start: Start, tmp_path: Path) -> None:
    """With roots, a path outside them is refused, by `..` and by a symbolic link as well."""
    with start(driven=False, roots=(tmp_path / "input",)) as running:
        outside = tmp_path / "outside.prototxt"
        outside.write_text(running.solver.read_text())
        link = tmp_path / "input" / "link.prototxt"
        link.symlink_to(outside)
        for path in (outside, tmp_path / "input" / ".." / "outside.prototxt", link):
            answer = running.http.post("/api/v1/jobs", json=body(running, solver=str(path)))
            assert "expected a path below" in answer.json()["detail"]
        answer = running.http.post("/api/v1/jobs", json=body(running, out="/tmp/elsewhere"))
        assert answer.json()["field"] == "out"
        assert running.submit("train")


@pytest.mark.parametrize("part", ["../job", "..%2Fsettings", "%2e%2e/job", "driver-9"])
def test_logs_stay_in_their_folder(idle: Running, part: str) -> None:
    """A part that is not among the logs of the job is not found."""
    job = idle.submit("train")
    assert idle.http.get(f"/api/v1/jobs/{job}/logs?part={part}").status_code == 404


def test_logs_are_read_from_the_end_and_continued(service: Running) -> None:
    """`after` continues at the byte that the answer before has named."""
    job = service.submit()
    service.await_state(job, "SUCCEEDED")
    path = f"/api/v1/jobs/{job}/logs"
    first = service.http.get(f"{path}?tail=8")
    assert (first.text, first.headers["x-log-parts"]) == ("succeed\n", "driver-1")
    rest = service.http.get(f"{path}?after={first.headers['x-log-next']}")
    assert rest.text == ""


def test_series(idle: Running) -> None:
    """Columns are drawn over steps, samples or seconds, thinned to the points asked for."""
    job = idle.submit("train")
    figures: dict[str, Any] = {
        "samples_per_s": None, "staleness_p50": 1.0, "staleness_p99": 3.0, "staleness_max": 4,
        "clock_gap": 2, "waiting": 0,
    }  # fmt: skip
    points = [
        SeriesPoint(
            time=100.0 + n, seconds=float(n), steps=10 * n, samples=80 * n, loss=1 / n, **figures
        )
        for n in range(1, 101)
    ]
    path = idle.service.store.folder(job) / "readings" / "series.jsonl"
    path.write_bytes(b"\n".join(map(msgspec.json.encode, points)) + b"\n{torn")
    url = f"/api/v1/jobs/{job}/series"
    found = idle.http.get(f"{url}?names=loss,staleness_p99&x=samples&points=10").json()
    assert found["x"] == [80 * n for n in range(1, 101, 11)]
    assert found["series"]["loss"][0] == 1.0
    lines = idle.http.get(f"{url}?names=loss&x=steps&format=csv&points=2000").text.splitlines()
    assert (lines[0], len(lines)) == ("steps,loss", 101)
    assert idle.http.get(f"{url}?names=password").status_code == 422


def test_a_stream_replays_what_was_missed(idle: Running) -> None:
    """After the last id come all later events, once each and in order, then those that follow."""
    job = idle.submit("train")
    for verb in ("pause", "resume"):
        idle.ask(job, verb)
    every = idle.http.get(f"/api/v1/jobs/{job}/events").json()["events"]

    head, *rest, reading = streamed(idle, Feed(), [job], every[0]["id"], 4)
    assert head == b"retry: 1000"
    ids = [each["id"] for each in every[1:]]
    assert [each.splitlines()[0] for each in rest] == [f"id: {n}".encode() for n in ids]
    data = [json.loads(each.split(b"data: ")[1]) for each in rest]
    assert [each["data"]["state"] for each in data] == ["PAUSED", "QUEUED"]
    assert reading.startswith(b"event: reading\n")


def streamed(idle: Running, feed: Feed, jobs: list[str], after: int, count: int) -> list[bytes]:
    """The first messages of a new stream."""

    async def collect() -> list[bytes]:
        source = messages(idle.service.store, feed, jobs, after)
        text = b""
        while text.count(b"\n\n") < count:
            text += await anext(source)
        await source.aclose()
        return text.removesuffix(b"\n\n").split(b"\n\n")

    return asyncio.run(collect())


def test_streams_share_a_memory(idle: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """From wherever a stream starts, it gets the same events: of its job, once each, in order."""
    monkeypatch.setattr("deploy.service.stream._KEPT_BYTES", 2000)
    monkeypatch.setattr("deploy.service.stream.BATCH", 3)
    feed, store = idle.service.feed, idle.service.store
    first, other = idle.submit("train"), idle.submit("train")
    feed.recent(store)
    for _ in range(10):
        for job in (first, other):
            store.note(store.get(job), "notice", text="x" * 20)
    every = store.events([first])
    for start in (0, 2, len(every) - 1):
        rest = [str(each["id"]) for each in every[start + 1 :]]
        found = streamed(idle, feed, [first], every[start]["id"], len(rest) + 2)
        assert [text.decode().split()[1] for text in found[1:-1]] == rest
        assert found[-1].startswith(b"event: reading\n")


def test_a_stream_ends_with_the_service(idle: Running) -> None:
    """A stream that is open does not keep the service from stopping."""
    idle.service.feed.close()
    for last in ("", "7", "9" * 30, "9" * 5000):  # the last two are ids that no stream has sent
        headers = {"Last-Event-ID": last}
        with idle.http.stream("GET", "/api/v1/stream", headers=headers) as answer:
            assert b"".join(answer.iter_bytes()) == b"retry: 1000\n\n"
    assert idle.http.get("/api/v1/stream?jobs=unknown").status_code == 404


def test_the_page_escapes_what_users_write(idle: Running) -> None:
    """A name made of markup is text on every page, and the policy allows no inline script."""
    job = idle.submit("train", name=HOSTILE, labels={"stub": "train", "x": HOSTILE})
    idle.ask(job, "pause")
    for path in ("/", "/parts/jobs", f"/jobs/{job}", f"/?q={HOSTILE}"):
        answer = idle.http.get(path)
        assert answer.status_code == 200
        assert HOSTILE not in answer.text
        assert "&lt;script&gt;" in answer.text
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "style=" not in answer.text
        assert " on" + "click" not in answer.text
    assert "http://" not in answer.text.replace("http://www.w3.org", "")


def test_the_page_is_small(idle: Running) -> None:
    """Page, scripts and styles are less than 250 kB, and are served with a digest in their name."""
    job = idle.submit("train")
    text = idle.http.get(f"/jobs/{job}").text
    assets = {word.split('"')[0] for word in text.split('="') if word.startswith("/static/")}
    assert len(assets) == 6
    size = len(text)
    for path in assets:
        assert "?v=" in path
        answer = idle.http.get(path)
        assert "immutable" in answer.headers["cache-control"]
        size += len(answer.content)
    assert size < 250_000


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1.evil.example"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Content-Length": str(2 << 20)}, 413),
        ({"Origin": "http://127.0.0.1"}, 201),
    ],
)
def test_other_sites_cannot_submit(idle: Running, headers: dict[str, str], status: int) -> None:
    """A request that a browser makes for another site is refused, as is a foreign host's name."""
    answer = idle.http.post("/api/v1/jobs", json=body(idle), headers=headers)
    assert answer.status_code == status


def test_health_and_metrics(service: Running) -> None:
    """Probes answer, and metrics count jobs by state, with no label of a worker or a user."""
    job = service.submit()
    service.await_state(job, "SUCCEEDED")
    assert service.http.get("/healthz").json()["status"] == "ok"
    assert service.http.get("/readyz").json() == {"ready": True}
    text = service.http.get("/metrics").text
    assert 'downpour_jobs{state="SUCCEEDED"} 1.0' in text
    assert "worker=" not in text
    rules = (Path(deploy.__file__).parent / "prometheus" / "alerts.yml").read_text()
    named = set(re.findall(r"downpour_\w+", rules))
    assert named <= set(re.findall(r"downpour_\w+", text))


def test_metrics_have_the_histograms_of_shards(idle: Running) -> None:
    """Buckets count all values up to their bound; a job that no longer trains has none."""
    store = idle.service.store
    job = idle.submit("train")
    histogram = Histogram((0.001, 2.5), (3, 1, 1), 9.5)
    shard = ShardReading(0, 5, None, None, None, 0, apply_s=histogram)
    write_figures(store.folder(job), shards=(shard,))
    assert "downpour_shard_apply_seconds_count{" not in idle.http.get("/metrics").text
    for state in (JobState.CHECKING, JobState.STARTING, JobState.RUNNING):
        store.move(store.get(job), state)
    lines = idle.http.get("/metrics").text.splitlines()
    own = f'{{job="{job}",shard="0"'
    for line in (
        f'downpour_shard_apply_seconds_bucket{{job="{job}",le="0.001",shard="0"}} 3.0',
        f'downpour_shard_apply_seconds_bucket{{job="{job}",le="+Inf",shard="0"}} 5.0',
        f"downpour_shard_apply_seconds_sum{own}}} 9.5",
    ):
        assert line in lines
    assert not [line for line in lines if line.startswith("downpour_shard_queue_length_")]


def test_metrics_have_the_jobs_that_train(idle: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others wait, and were submitted before them."""
    monkeypatch.setattr(job_store, "MAX_HEADS", 2)
    store = idle.service.store
    jobs = [idle.submit("train") for _ in range(4)]
    store.move(store.get(jobs[-1]), JobState.CHECKING)
    lines = idle.http.get("/metrics").text.splitlines()
    shown = [line for line in lines if line.startswith("downpour_job_running{")]
    assert shown == [f'downpour_job_running{{job="{job}"}} 0.0' for job in (jobs[-1], jobs[0])]


def test_every_route_is_described(idle: Running) -> None:
    """OpenAPI lists each route of the interface with a summary or a description."""
    paths = idle.http.get("/api/v1/openapi.json").json()["paths"]
    assert {"/api/v1/jobs", "/api/v1/jobs/{job}", "/api/v1/stream"} <= set(paths)
    assert all(f"/api/v1/jobs/{{job}}:{verb}" in paths for verb in Verb)
    assert all(each.get("description") for path in paths.values() for each in path.values())


def test_every_answer_is_described(idle: Running) -> None:
    """OpenAPI has the type of each answer with all that it refers to; refusals are problems."""
    document = idle.http.get("/api/v1/openapi.json").json()
    schemas = document["components"]["schemas"]
    referred = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert referred == set(schemas)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            route = f"{method.upper()} {path.removeprefix('/api/v1')}"
            answers = operation["responses"]
            assert "422" not in answers
            assert list(answers["4XX"]["content"]) == [MEDIA_TYPE]
            (good,) = [each for status, each in answers.items() if status.startswith("2")]
            typed = good.get("content", {}).get("application/json")
            assert (typed is None) == (route in OTHERS)
            assert typed is None or list(typed["schema"]) == ["$ref"]
    listed = document["paths"]["/api/v1/jobs"]["get"]["responses"]["200"]["content"]
    assert listed["application/json"]["schema"] == {"$ref": "#/components/schemas/JobList"}
    items = schemas["JobList"]["properties"]["jobs"]["items"]
    assert items == {"$ref": "#/components/schemas/JobShown"}
    assert "state" in schemas["JobShown"]["required"]
