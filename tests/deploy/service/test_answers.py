"""The reference of bodies is true: answers have its types, and its examples are accepted."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.runner.readings import SeriesPoint
from deploy.service.answers import ANSWERS, OTHERS
from deploy.service.webhooks import Hosts
from tests.support.service_bodies import described, example, request_models
from tests.support.service_examples import REQUESTS
from tests.support.service_in_process import Running, Start
from tests.support.snapshot_stores import write_snapshot


def test_every_route_is_in_the_tables() -> None:
    """No route is without an answer, no answer without a route, and none has two."""
    routes = {
        f"{method.upper()} {path.removeprefix('/api/v1')}"
        for path, methods in described().openapi()["paths"].items()
        for method in methods
    }
    assert routes == {*ANSWERS, *OTHERS}
    assert not ANSWERS.keys() & OTHERS.keys()


def test_examples_of_requests_are_accepted() -> None:
    """The model of each body accepts its example."""
    models = {kind.__name__: kind for kind in request_models().values()}
    assert models.keys() == REQUESTS.keys()
    for name, model in models.items():
        model.model_validate(REQUESTS[name], strict=False)


KINDS = {kind.__name__: kind for kind in ANSWERS.values()}


@pytest.mark.parametrize("name", sorted(KINDS))
def test_examples_of_answers_have_their_types(name: str) -> None:
    """An example of the page has the fields of its type, no more and no less."""
    shown = example(KINDS[name])
    written = msgspec.json.encode(msgspec.convert(shown, KINDS[name]))
    assert msgspec.json.decode(written) == shown


def test_answers_have_their_types(start: Start, tmp_path: Path) -> None:
    """What a service answers has the fields of the reference, no more and no less."""
    hosts = Hosts(("hooks.example.org",))
    with start(driven=False, webhook_hosts=hosts) as running:
        asked = set()

        def ask(route: str, path: str = "", **request: Any) -> dict[str, Any]:
            asked.add(route)
            method, _, place = route.partition(" ")
            answer = running.http.request(method, f"/api/v1{path or place}", **request)
            assert answer.is_success, answer.text
            found: dict[str, Any] = answer.json()
            kind = ANSWERS[route]
            converted = msgspec.convert(found, kind)
            assert found.keys() <= set(kind.__struct_fields__), route
            assert found == msgspec.to_builtins(converted), route
            return found

        solver = {"settings": {"solver": str(running.solver)}, "labels": {"stub": "train"}}
        job = ask("POST /jobs", json=solver)["id"]
        path = f"/jobs/{job}"
        _fill(running, job)
        for part in ("", "/attempts", "/events", "/series", "/snapshots", "/artefacts"):
            ask(f"GET /jobs/{{job}}{part}", f"{path}{part}")
        ask("GET /jobs")
        ask("PATCH /jobs/{job}", path, json=REQUESTS["JobChange"])
        ask("POST /jobs/{job}:set", f"{path}:set", json=REQUESTS["Changes"])
        for verb in ("pause", "resume"):
            ask(f"POST /jobs/{{job}}:{verb}", f"{path}:{verb}")
        ask("POST /jobs/{job}:clone", f"{path}:clone", json={"settings": {"max_iter": 5}})
        snapshot = "/jobs/{job}/snapshots/{number}"
        ask(f"GET {snapshot}:verify", f"{path}/snapshots/50:verify")
        for verb in ("pin", "unpin"):
            ask(f"POST {snapshot}:{verb}", f"{path}/snapshots/50:{verb}")
        ask("GET /compare", f"/compare?jobs={job}")
        ask("POST /jobs/{job}:cancel", f"{path}:cancel")
        token = ask("POST /tokens", json=REQUESTS["NewToken"])
        ask("DELETE /tokens/{token}", f"/tokens/{token['id']}")
        ask("PUT /projects/{project}", "/projects/vision", json=REQUESTS["LimitsRequest"])
        ask("POST /webhooks", json=REQUESTS["NewWebhook"])
        file = {"path": "a", "bytes": 1, "sha256": REQUESTS["UploadRequest"]["files"][0]["sha256"]}
        upload = ask("POST /uploads", json={"files": [file]})
        ask("GET /uploads/{upload}", f"/uploads/{upload['id']}")
        for name in ("whoami", "tokens", "projects", "audit", "webhooks", "experiments", "service"):
            ask(f"GET /{name}")
        ask("POST /service:gc", json={})
    left = {
        "POST /jobs/{job}:snapshot", "POST /jobs/{job}:reshard", "POST /jobs:adopt",
        "PUT /uploads/{upload}/files", f"GET {snapshot}:diff", "GET /jobs/{job}/reading",
    }  # fmt: skip  # the same types as above, or what runners and other commands write
    assert asked == ANSWERS.keys() - left


def _fill(running: Running, job: str) -> None:
    """Give a job a run with a snapshot, an artefact and a series."""
    found = running.get(job)["settings"]
    run = Path(found["out"])
    run.mkdir(parents=True)
    (run / "settings.json").write_bytes(msgspec.json.encode(found))
    (run / "weights.safetensors").touch()
    write_snapshot(run / "snapshots", 50, steps=100)
    point = SeriesPoint(
        time=1.0, seconds=1.0, steps=10, samples=80, loss=0.5, samples_per_s=None,
        staleness_p50=1.0, staleness_p99=2.0, staleness_max=3, clock_gap=1, waiting=0,
    )  # fmt: skip
    series = running.service.store.folder(job) / "readings" / "series.jsonl"
    series.write_bytes(msgspec.json.encode(point) + b"\n")
