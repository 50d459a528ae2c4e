"""What the service refuses: as early as it is known, in our words, in the form of its reader."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.run.folder import RunFolder
from deploy.run.settings import TrainSettings
from deploy.service import submissions
from deploy.service.retention import ServiceLimits
from deploy.service.uploads import UploadedFile, Uploads
from shards.errors import BadInput, GiveUp
from tests.support.service_in_process import Running, Start
from tests.support.snapshot_stores import write_snapshot

WORDS_OF_LIBRARIES = re.compile(
    r"Input should|Field required|Extra inputs|Value error|Expected `|JSON decode|JSON is malformed"
    r"|Object |string_|pydantic|msgspec|Traceback|\[Errno|Errno|parsing the body|regexp|pattern"
)


@pytest.fixture
def idle(start: Start) -> Iterator[Running]:
    """A service that starts no job."""
    with start(driven=False) as running:
        yield running


def body(running: Running, **settings: Any) -> dict[str, Any]:
    return {"settings": {"solver": str(running.solver), **settings}, "labels": {"stub": "train"}}


def refused(answer: Any, field: str, status: int = 422) -> dict[str, Any]:
    """The problem of an answer, which is complete and in our words."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert problem["field"] == field, problem
    assert all(problem.get(name) for name in ("code", "detail", "expected", "got", "hint")), problem
    assert not WORDS_OF_LIBRARIES.search(answer.text), problem
    return problem


@pytest.mark.parametrize("name", ["solver", "data", "out", "logs", "weights", "snapshots"])
@pytest.mark.parametrize("value", [[], {}, 1.5, True, "", "inf", "nan", "folder/file", "x\0y"])
def test_a_value_that_is_no_path(idle: Running, name: str, value: object) -> None:
    """Whatever is no absolute path is refused with its option, and makes nothing."""
    answer = idle.http.post("/api/v1/jobs", json=body(idle, **{name: value}))
    assert (answer.status_code, answer.json()["code"]) == (422, "bad_input"), answer.text
    assert answer.json()["field"] == ("body" if value == "x\0y" else name)
    assert not list(idle.service.store.folder("").iterdir())


def test_a_name_that_no_disk_can_keep(idle: Running, tmp_path: Path) -> None:
    """A name of more than 255 bytes is the sender's fault wherever it is, and leaves nothing."""
    uploads = idle.service.options.home / "uploads"
    for long in ("a" * 256, "ü" * 128):
        path = str(tmp_path / long / "file")
        for name in ("data", "test_data", "weights", "snapshots", "out", "logs"):
            answer = idle.http.post("/api/v1/jobs", json=body(idle, **{name: path}))
            assert (answer.status_code, answer.json()["field"]) == (422, name), answer.text
        request = body(idle) | {"resume": f"{path}@1"}
        assert idle.http.post("/api/v1/jobs", json=request).status_code == 422
        request = body(idle, snapshots=f"file://{path}")
        assert idle.http.post("/api/v1/jobs", json=request).status_code == 422
        assert idle.http.post("/api/v1/jobs:adopt", json={"run": path}).status_code == 422
        file = {"path": long, "bytes": 0, "sha256": "0" * 64}
        assert idle.http.post("/api/v1/uploads", json={"files": [file]}).status_code == 422
        assert not uploads.exists() or not list(uploads.iterdir())


def test_nul_is_refused_wherever_it_is(idle: Running) -> None:
    """In bodies, paths and queries, for people and programs."""
    nul = "/tmp/\0"
    for path, request in (
        ("/jobs", body(idle) | {"resume": nul}),
        ("/jobs", body(idle) | {"labels": {"x": nul}}),
        ("/jobs:adopt", {"run": nul}),
        ("/uploads", {"files": [{"path": nul, "bytes": 0, "sha256": "0" * 64}]}),
    ):
        refused(idle.http.post(f"/api/v1{path}", json=request), "body")
    for path in ("/api/v1/jobs?q=%00", "/api/v1/jobs/a%00b", "/?q=%00", "/jobs/%00"):
        refused(idle.http.get(path), "path")
    assert idle.http.post("/api/v1/jobs", json=body(idle) | {"name": "\\u0000"}).is_success


def test_a_solver_is_a_file(idle: Running, tmp_path: Path) -> None:
    """A folder, a circle of links and an address that cannot be read are refused at once."""
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    for name, value in (
        ("solver", str(tmp_path)), ("weights", str(tmp_path)), ("data", str(circle)),
        ("ray", "http://["), ("snapshot_every", []), ("staleness", "many"), ("strategy", 5),
    ):  # fmt: skip
        answer = idle.http.post("/api/v1/jobs", json=body(idle, **{name: value}))
        assert (answer.status_code, answer.json()["field"]) == (422, name), answer.text


@pytest.mark.parametrize("text", ["\x1b[31m", "\x9b2J", "a\u202eb", "two\nlines", "a\u2028b"])
def test_names_and_labels_act_on_no_terminal(idle: Running, text: str) -> None:
    """Control and formatting characters are refused in what all users of a project see."""
    for wrong in ({"name": text}, {"labels": {"team": text}}):
        answer = idle.http.post("/api/v1/jobs", json=body(idle) | wrong)
        assert (answer.status_code, answer.json()["field"]) == (422, next(iter(wrong)))
    job = idle.submit("train")
    for wrong in ({"name": text}, {"labels": {"team": text}}):
        assert idle.http.patch(f"/api/v1/jobs/{job}", json=wrong).status_code == 422
    assert idle.ask(job, "clone", name=text).status_code == 422


def test_values_are_of_the_types_of_json(idle: Running) -> None:
    """What looks like a number or a truth is refused, most of all where it would delete."""
    job = idle.submit("train")
    before = idle.http.get(f"/api/v1/jobs/{job}").json()["settings"]
    for path, field, request in (
        ("service:gc", "delete", {"delete": "yes"}),
        ("service:gc", "delete", {"delete": 1}),
        (f"jobs/{job}:reshard", "shards", {"shards": "2"}),
        (f"jobs/{job}:reshard", "shards", {"shards": True}),
        ("tokens", "days", {"name": "a", "role": "viewer", "days": "1"}),
        ("uploads", "files.0.bytes", {"files": [{"path": "a", "bytes": "1", "sha256": "0" * 64}]}),
    ):
        refused(idle.http.post(f"/api/v1/{path}", json=request), field)
    assert idle.http.get(f"/api/v1/jobs/{job}").json()["settings"] == before


def test_a_pipe_is_no_file(idle: Running, tmp_path: Path) -> None:
    """A pipe without a writer is refused, because to open it takes for ever."""
    for name, file in (("solver", "a.prototxt"), ("weights", "a.caffemodel")):
        os.mkfifo(tmp_path / file)
        answer = idle.http.post("/api/v1/jobs", json=body(idle, **{name: str(tmp_path / file)}))
        refused(answer, name)
    solver = idle.solver.read_text()
    job = idle.submit("train")
    idle.solver.unlink()
    os.mkfifo(idle.solver)
    assert idle.ask(job, "set", settings={"max_iter": None}).status_code == 202
    idle.solver.unlink()
    idle.solver.write_text(solver)


def test_a_solver_without_a_number_of_steps(idle: Running) -> None:
    """A job with no max_iter, in the solver or as an option, is refused; a comment gives none."""
    text = idle.solver.read_text()
    for steps in ("", "# max_iter: 5", 'snapshot_prefix: "max_iter: 5"', "max_iter: 0"):
        idle.solver.write_text(f"{re.sub('max_iter: [0-9]+', '', text)}\n{steps}\n")
        problem = refused(idle.http.post("/api/v1/jobs", json=body(idle)), "max_iter")
        assert problem["got"].startswith("none"), problem
    answer = idle.http.post("/api/v1/jobs", json=body(idle, max_iter=5))
    assert answer.status_code == 201, answer.text
    job = f"/api/v1/jobs/{answer.json()['id']}"
    changes = {"settings": {"max_iter": None}}
    refused(idle.http.post(f"{job}:set", json=changes), "max_iter")
    idle.solver.write_text(text.replace("max_iter", 'snapshot_prefix: "a#b" max_iter'))
    assert idle.http.post("/api/v1/jobs", json=body(idle)).status_code == 201


def test_an_upload_that_is_refused_leaves_nothing(idle: Running, tmp_path: Path) -> None:
    """It does not count as one in progress of its project."""
    uploads = Uploads(tmp_path, reserve_bytes=1 << 62)
    with pytest.raises(GiveUp, match="room"):
        uploads.begin([UploadedFile("a", 1, "0" * 64)])
    assert uploads.usage("default").uploads == 0
    assert not list(tmp_path.glob("uploads/*"))
    bad = {"path": "a", "bytes": 0, "sha256": "0" * 64}  # not the digest of no bytes
    answer = idle.http.post("/api/v1/uploads", json={"files": [bad]})
    assert answer.status_code == 422
    assert idle.service.uploads.usage("default").uploads == 0


def test_a_run_folder_that_is_in_use(
    idle: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--out may not name a run, another file's folder, that of another job, or what cannot be."""
    run, other, file = tmp_path / "run", tmp_path / "other", tmp_path / "file"
    RunFolder.create(run, {}).close()
    (run / "summary.json").touch()
    other.mkdir()
    (other / "thesis.tex").touch()
    file.touch()
    for out, words in (
        (run, "which holds a run"),
        (other, "with thesis.tex"),
        (file, "Not a directory"),
        (file / "below", "Not a directory"),
        (other / "locked" / "run", f"where {other} cannot be written"),
    ):
        monkeypatch.setattr("deploy.service.submissions.os.access", lambda path, _: path != other)
        answer = idle.http.post("/api/v1/jobs", json=body(idle, out=str(out)))
        assert words in answer.json()["detail"], answer.text
        assert answer.json()["field"] == "out"
    free = {"json": body(idle, out=str(tmp_path / "free"))}
    job = idle.http.post("/api/v1/jobs", **free).json()["id"]
    assert f"that of job {job}" in refused(idle.http.post("/api/v1/jobs", **free), "out")["got"]
    idle.ask(job, "cancel")
    assert idle.http.post("/api/v1/jobs", **free).status_code == 201


def with_snapshot(idle: Running, job: str, number: int) -> Path:
    """Give a job a run folder with a snapshot after this number of steps of each of 2 workers."""
    run = Path(idle.get(job)["settings"]["out"])
    run.mkdir(parents=True)
    settings = TrainSettings.of_plain(idle.get(job)["settings"])
    (run / "settings.json").write_bytes(msgspec.json.encode(settings.plain()))
    write_snapshot(run / "snapshots", number, steps=2 * number)
    return run


def test_a_clone_without_a_step_left(idle: Running) -> None:
    """The length is the option's, else the solver's; a larger one is accepted."""
    job = idle.submit("train")
    run = with_snapshot(idle, job, 100)
    for changes in ({}, {"max_iter": 60}):
        answer = idle.ask(job, "clone", snapshot="newest", settings=changes)
        assert "more than 100" in refused(answer, "max_iter")["expected"]
    answer = idle.http.post("/api/v1/jobs", json=body(idle) | {"resume": f"{run}@100"})
    refused(answer, "max_iter")
    assert idle.ask(job, "clone", snapshot="100", settings={"max_iter": 101}).status_code == 202
    assert idle.ask(job, "clone", settings={"max_iter": 60}).status_code == 202, "from the start"


def test_a_clone_of_a_snapshot_that_is_not_there(idle: Running) -> None:
    """An unknown number, one of a run without any, and one of a folder that was deleted."""
    job = idle.submit("train")
    assert "has none" in refused(idle.ask(job, "clone", snapshot="newest"), "snapshot")["expected"]
    run = with_snapshot(idle, job, 50)
    assert (
        "which has 50" in refused(idle.ask(job, "clone", snapshot="7000"), "snapshot")["expected"]
    )
    for resume in (f"{run}@51", "/nowhere@3", str(run / "snapshots" / "9")):
        refused_resume = idle.http.post("/api/v1/jobs", json=body(idle) | {"resume": resume})
        assert (refused_resume.status_code, refused_resume.json()["field"]) == (422, "resume")
    run.rename(run.with_name("elsewhere"))
    refused(idle.ask(job, "clone", snapshot="50"), "snapshot")
    assert len(idle.http.get("/api/v1/jobs").json()["jobs"]) == 1


def test_a_snapshot_in_a_store_that_cannot_be_listed(
    idle: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the service cannot know now is left to the start of the job."""
    monkeypatch.setattr(submissions, "check_own", lambda *_, **__: None)
    made = idle.http.post("/api/v1/jobs", json=body(idle, snapshots="s3://bucket/none"))
    row = idle.service.store.get(made.json()["id"])
    monkeypatch.setattr(submissions, "list_complete_snapshots", lambda _: [])
    assert submissions._snapshot_of(row, "7") == "7"
    with pytest.raises(BadInput, match="which has none"):
        submissions._snapshot_of(row, "newest")


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (b"{", "body"),
        (b"\xff\xfe", "body"),
        (b"[" * 100_000, "body"),
        (b"", "body"),
        (b"[]", "body"),
        (b'"text"', "body"),
        (b"{}", "settings"),
        (b'{"settings": {}, "surplus": 1}', "surplus"),
        (b'{"settings": []}', "settings"),
        (b'{"settings": {"workers": 1, "workers": 2}}', "workers"),
        (b'{"settings": {}, "name": "a", "name": "b"}', "name"),
        (b'{"settings": {}, "name": 3}', "name"),
        (b'{"settings": {}, "name": "\\ud800"}', "body"),
        (b'{"settings": {}, "labels": {"a": 1}}', "labels.a"),
        (b'{"settings": {}, "priority": "high"}', "priority"),
        (b'{"settings": {}, "priority": 1.5}', "priority"),
        (b'{"settings": {}, "priority": "1"}', "priority"),
        (b'{"settings": {}, "priority": true}', "priority"),
        (b'{"settings": {}, "priority": 1e400}', "priority"),
        (b'{"settings": {}, "priority": 10000}', "priority"),
    ],
)
def test_bodies(idle: Running, content: bytes, field: str) -> None:
    """A body that is no JSON, or whose fields are wrong, is refused in our words."""
    answer = idle.http.post(
        "/api/v1/jobs", content=content, headers={"Content-Type": "application/json"}
    )
    refused(answer, field, answer.status_code)
    assert answer.status_code in {400, 422}


@pytest.mark.parametrize(
    ("method", "path", "field"),
    [
        ("GET", "/jobs?cursor=zzz", "cursor"),
        ("GET", "/jobs?staet=RUNNING", "staet"),
        ("GET", "/jobs?state=running", "state.0"),
        ("GET", "/jobs?limit=many", "limit"),
        ("GET", "/jobs?limit=0", "limit"),
        ("GET", "/jobs?limit=201", "limit"),
        ("GET", "/jobs?limit=2&limit=3", "limit"),
        ("GET", f"/jobs/JOB/events?after={1 << 63}", "after"),
        ("GET", f"/jobs/JOB/logs?after={1 << 63}", "after"),
        ("GET", f"/stream?after={1 << 63}", "after"),
        ("GET", "/tokens?name=x", "name"),
        ("GET", "/jobs/JOB/series?x=updates", "x"),
        ("GET", "/jobs/JOB/snapshots/abc:verify", "number"),
        ("GET", "/jobs/JOB/snapshots/1:diff", "to"),
        ("POST", "/jobs/JOB:cancel?mode=now", "mode"),
    ],
)
def test_paths_and_queries(idle: Running, method: str, path: str, field: str) -> None:
    """A query parameter that a route lacks is refused, and so is a value that it does not take."""
    refused(idle.http.request(method, f"/api/v1{path}".replace("JOB", idle.submit())), field)


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize("path", ["/jobs/JOB:foo", "/jobs/JOB:", "/jobs/JOB/snapshots/1:foo"])
def test_verbs_that_do_not_exist(idle: Running, method: str, path: str) -> None:
    """The refusal lists the verbs that there are; what has no verbs is not found."""
    job = idle.submit()
    problem = refused(idle.http.request(method, f"/api/v1{path}".replace("JOB", job)), "verb", 404)
    assert ("pause" in problem["expected"]) != ("verify" in problem["expected"])
    refused(idle.http.request(method, "/api/v1/nowhere"), "path", 404)
    refused(idle.http.put("/api/v1/jobs/x:pause"), "method", 405)


def test_options_are_refused_in_one_spelling(idle: Running) -> None:
    """An option that `:set` cannot change is refused with a list of those it can, as on the command
    line."""
    problem = refused_set(idle, lr=1)
    options = problem["expected"].removeprefix("one of ").split(", ")
    assert "--max-iter" in options
    assert all(re.fullmatch(r"--[a-z-]+", option) for option in options)
    assert problem["got"] == "--lr"
    for name, value in (("staleness", "many"), ("prefetch", 1), ("lease_s", "long")):
        assert refused_set(idle, **{name: value})["field"] == name


def refused_set(idle: Running, **settings: Any) -> dict[str, Any]:
    answer = idle.ask(idle.submit(), "set", settings=settings)
    assert answer.status_code == 422
    assert not WORDS_OF_LIBRARIES.search(answer.text), answer.text
    problem: dict[str, Any] = answer.json()
    return problem


def test_every_operation_refuses_in_our_words(idle: Running) -> None:
    """Each parameter and each field of each body of the interface, given something wrong."""
    job, described = idle.submit(), idle.http.get("/api/v1/openapi.json").json()
    schemas = described["components"]["schemas"]
    tried = 0
    for path, methods in described["paths"].items():
        if path.endswith("/stream"):
            continue
        for method, operation in methods.items():
            place = path.replace("{job}", job).replace("{number}", "1")
            place = re.sub(r"{\w+}", "x", place)
            for each in operation.get("parameters", []):
                if each["in"] == "query":
                    answer = idle.http.request(method, f"{place}?{each['name']}=%00{'x' * 5000}")
                    assert not WORDS_OF_LIBRARIES.search(answer.text), answer.text
                    tried += 1
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if content is None:
                continue
            wrongs: list[Any] = [3, None, {"surplus": 1}]
            reference = content["schema"].get("$ref", "").rpartition("/")[2]
            wrongs += [
                {name: {"a": [{}]}} for name in schemas.get(reference, {}).get("properties", ())
            ]
            for wrong in wrongs:
                answer = idle.http.request(method, place, json=wrong)
                assert answer.is_success or answer.headers["content-type"].startswith(
                    "application/problem+json"
                )
                assert not WORDS_OF_LIBRARIES.search(answer.text), answer.text
                tried += 1
    assert tried > 80


HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.mark.parametrize(
    ("path", "status"),
    [("/jobs/nope", 404), ("/nope", 404), ("/?cursor=zzz", 422), ("/compare?jobs=nope", 404)],
)
def test_a_browser_gets_a_page(idle: Running, path: str, status: int) -> None:
    """An error on the way to a page is a page with a way back; a program gets a problem."""
    page = idle.http.get(path, headers=HTML)
    assert (page.status_code, page.headers["content-type"]) == (status, "text/html; charset=utf-8")
    assert '<a href="/">Back to the list of jobs</a>' in page.text
    assert "script-src 'self'" in page.headers["content-security-policy"]
    problem = idle.http.get(path)
    assert problem.headers["content-type"] == "application/problem+json"
    hostile = idle.http.get("/jobs/<script>alert(1)</script>", headers=HTML)
    assert "<script>alert" not in hostile.text


def test_the_interface_never_answers_with_a_page(idle: Running) -> None:
    """Below /api/v1 a problem is JSON, whatever the sender accepts."""
    for path in ("/api/v1/jobs/nope", "/api/v1/nope", "/api/v1/jobs?cursor=zzz"):
        answer = idle.http.get(path, headers=HTML)
        assert answer.headers["content-type"] == "application/problem+json"


def test_the_filter_of_the_list_may_be_empty(idle: Running) -> None:
    """The form sends all its fields, also those without a value."""
    assert idle.http.get("/?q=&state=", headers=HTML).status_code == 200


def test_files_of_settings_are_refused_in_our_words(tmp_path: Path, solver: Path) -> None:
    """A settings file that is damaged, no JSON, or has a wrong value says so."""
    file = tmp_path / "settings.json"
    good = TrainSettings(solver=solver, out=tmp_path / "run").plain()
    for content, words in (
        ("{", "damaged or no JSON"),
        ("[]", "damaged or no JSON"),
        (json.dumps(good | {"workers": "two"}), "--workers: expected a whole number, got 'two'"),
        (json.dumps({"solver": "x"}), "--out: expected a value, got none"),
    ):
        file.write_text(content)
        with pytest.raises(BadInput, match=re.escape(words)) as caught:
            TrainSettings.load(file)
        assert not WORDS_OF_LIBRARIES.search(str(caught.value))


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("free-mb=much", "--limit free-mb: expected a whole number"),
        ("silent-s=-1", "--limit silent-s: expected a number"),
        ("silent-s", "--limit silent-s: expected a number"),
        ("x=1", "expected one of free-mb"),
    ],
)
def test_limits(word: str, expected: str) -> None:
    """A limit that is wrong is refused with its name; several together all count."""
    with pytest.raises(BadInput, match=expected) as caught:
        ServiceLimits.of_words([word])
    assert not WORDS_OF_LIBRARIES.search(str(caught.value))
    found = ServiceLimits.of_words(["free-mb=7", "logs-days=2.5"])
    assert (found.free_mb, found.logs_days) == (7, 2.5)
