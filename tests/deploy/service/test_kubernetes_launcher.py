"""The launcher for Kubernetes, against a double of its API: it is no cluster."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.runner import job_folder
from deploy.service.job_store import JOBS
from deploy.service.kubernetes_api import ClusterPlace, HttpApi, NoAnswer
from deploy.service.kubernetes_launcher import KubernetesLauncher, launcher_of, load_template
from deploy.service.launcher import Liveness
from shards.errors import BadInput
from tests.support import chart
from tests.support.eventually import eventually
from tests.support.kubernetes_double import NAMESPACE, Fields, KubernetesDouble
from tests.support.service_in_process import STUB, Start

JOB = "0123456789abcdef0"
NONCE = "a1b2c3d4e5f60718"
NAME = f"downpour-{JOB}-{NONCE}"
POD = f"{NAME}-x1y2z"
SLEEP = ["sh", "-c", "exec sleep 60", "runner"]


def template_of(command: list[str]) -> Fields:
    """A small template with a container that runs `command`."""
    container = {"name": "runner", "image": "registry.example/driver:1", "command": command}
    pod = {"restartPolicy": "Never", "containers": [container]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "runner"},
        "spec": {"backoffLimit": 0, "template": {"spec": pod}},
    }


@pytest.fixture
def double() -> Iterator[KubernetesDouble]:
    with KubernetesDouble(runs=False) as kubernetes:
        yield kubernetes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a job."""
    folder = tmp_path / JOB
    (folder / job_folder.LOGS).mkdir(parents=True)
    return folder


Make = Callable[..., KubernetesLauncher]


@pytest.fixture
def make(double: KubernetesDouble, tmp_path: Path) -> Iterator[Make]:
    """Makes launchers that speak to the double, with patience for a busy machine."""
    made: list[KubernetesLauncher] = []

    def launcher(command: list[str] = SLEEP, api: HttpApi | None = None) -> KubernetesLauncher:
        place = ClusterPlace(url=double.url, namespace=NAMESPACE, account=tmp_path)
        api = api or HttpApi(place)
        api._http.timeout = 60.0  # a busy machine is not a silent API
        made.append(KubernetesLauncher(api, template_of(command)))
        return made[-1]

    yield launcher
    for each in made:
        each.close()


def test_an_attempt_is_a_job_made_from_the_template(
    double: KubernetesDouble, make: Make, folder: Path
) -> None:
    """Its pod has the job's id, the nonce, and as arguments the folder and the file of output.

    The double checks the Job by Kubernetes' schema.
    """
    make().launch(folder, 3, NONCE)
    job = double.jobs[NAME]
    labels = {"downpour/job": JOB, "downpour/attempt": NONCE}
    assert job["metadata"]["labels"] == labels
    assert job["spec"]["template"]["metadata"]["labels"] == labels
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"] == [str(folder), str(folder / "logs" / "driver-3.log")]
    assert container["env"] == [
        {"name": "DOWNPOUR_JOB", "value": JOB},
        {"name": "DOWNPOUR_ATTEMPT", "value": NONCE},
    ]


def test_the_charts_template_is_accepted(
    double: KubernetesDouble, make: Make, folder: Path, tmp_path: Path
) -> None:
    """The Job that the chart puts before the launcher gives Jobs that fit Kubernetes' schema."""
    path = tmp_path / "job.json"
    path.write_text(json.dumps(chart.runner_job(chart.render())))
    launcher = make()
    launcher._template = json.dumps(load_template(path)).encode()
    launcher.launch(folder, 1, NONCE)
    (container,) = double.jobs[NAME]["spec"]["template"]["spec"]["containers"]
    assert len(container["env"]) > 2


def test_a_repeated_launch_makes_no_second_job(
    double: KubernetesDouble, make: Make, folder: Path
) -> None:
    """A conflict means that an earlier request has created the Job, and its answer was lost."""
    launcher = make()
    launcher.launch(folder, 1, NONCE)
    launcher.launch(folder, 1, NONCE)
    assert len(double.jobs) == len(double.pods) == 1


def test_a_refused_job_is_an_error_with_its_reason(
    double: KubernetesDouble, make: Make, folder: Path
) -> None:
    """What the API says about a wrong Job is in the error."""
    launcher = make()
    launcher._template = launcher._template.replace(b"Never", b"7").replace(b'"7"', b"7")
    with pytest.raises(OSError, match="string"):
        launcher.launch(folder, 1, NONCE)


def test_a_watch_answers_probes_without_requests(
    double: KubernetesDouble, make: Make, folder: Path
) -> None:
    """Probes of a pod that lives cost the API nothing, once the watch has seen it."""
    launcher = make()
    launcher.launch(folder, 1, NONCE)
    eventually(lambda: launcher._pods.lives(NONCE), because="the watch shows the pod")
    before = len(double.requests)
    assert [launcher.probe(folder, NONCE) for _ in range(50)] == [Liveness.RUNNING] * 50
    assert len(double.requests) == before


@pytest.mark.parametrize(
    ("phase", "code", "liveness"),
    [
        ("Pending", None, Liveness.RUNNING),
        ("Running", None, Liveness.RUNNING),
        ("Unknown", None, Liveness.UNKNOWN),
        ("Succeeded", 0, Liveness.GONE),
        ("Failed", 75, Liveness.GONE),
    ],
)
@pytest.mark.parametrize("watched", [True, False])
def test_phases(
    double: KubernetesDouble,
    make: Make,
    folder: Path,
    phase: str,
    code: int | None,
    liveness: Liveness,
    watched: bool,
) -> None:
    """A pod that has ended is gone, with its status; one on a lost node is neither.

    The same follows with a watch and without one.
    """
    double.refuses_watches = not watched
    launcher = make()
    launcher.launch(folder, 1, NONCE)
    double.set_phase(POD, phase, code)
    eventually(lambda: launcher.probe(folder, NONCE) is liveness, because=phase)
    assert launcher.exit_status(NONCE) == code
    launcher.forget(NONCE)
    assert launcher.exit_status(NONCE) is None


@pytest.mark.parametrize("status", [0, 401, 403, 429, 500, 503])
def test_no_answer_is_unknown(
    double: KubernetesDouble, make: Make, folder: Path, status: int
) -> None:
    """An API that is silent, refuses the account or fails proves nothing about an attempt.

    A signal then raises, for 0 would say that nothing is left. Afterwards all is as before.
    """
    double.refuses_watches = True
    launcher = make()
    launcher.launch(folder, 1, NONCE)
    api: Any = launcher._api
    if not status:
        api._http.timeout = 0.3
    double.silent, double.status = not status, status
    eventually(lambda: launcher.probe(folder, NONCE) is Liveness.UNKNOWN, because="no answer")
    with pytest.raises(NoAnswer):
        launcher.kill(folder, signal.SIGTERM)
    double.silent, double.status = False, 0
    api._http.timeout = 60.0
    eventually(lambda: launcher.probe(folder, NONCE) is Liveness.RUNNING, because="it answers")


def test_a_silent_api_delays_one_probe_and_no_further_one(
    double: KubernetesDouble, make: Make, folder: Path
) -> None:
    """After a timeout further probes are answered at once for a while, without a request."""
    double.refuses_watches = True
    launcher = make()
    double.status = 503
    assert launcher.probe(folder, NONCE) is Liveness.UNKNOWN
    before = [request for request in double.requests if request.startswith("GET jobs")]
    double.status = 0
    assert launcher.probe(folder, NONCE) is Liveness.UNKNOWN
    assert [request for request in double.requests if request.startswith("GET jobs")] == before


def test_what_was_never_created_is_gone(double: KubernetesDouble, make: Make, folder: Path) -> None:
    """Without a Job and without a pod there is no attempt."""
    assert make().probe(folder, NONCE) is Liveness.GONE


def test_a_job_without_a_pod_may_start_one(
    double: KubernetesDouble, make: Make, folder: Path
) -> None:
    """A Job without a pod yet is alive; one that has failed, or is deleted, is not."""
    launcher = make()
    launcher.launch(folder, 1, NONCE)
    # A watch that has not seen the pod yet would still bring it to life after the deletion.
    eventually(lambda: launcher._pods.lives(NONCE), because="the watch shows the pod")
    double.drop(POD)
    eventually(lambda: not launcher._pods.lives(NONCE), because="the watch shows the deletion")
    assert launcher.probe(folder, NONCE) is Liveness.RUNNING
    double.jobs[NAME]["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    # On a busy machine the watch may have been silent for long, and show the deletion only now.
    eventually(lambda: launcher.probe(folder, NONCE) is Liveness.GONE, because="the Job failed")


@pytest.mark.parametrize("at_once", [True, False])
def test_a_forgotten_version_is_relisted(
    double: KubernetesDouble, make: Make, folder: Path, at_once: bool
) -> None:
    """After 410, as an answer or as an event, the pods are read again and watched from there."""
    double.forgets = at_once
    launcher = make()
    eventually(lambda: "WATCH pods" in double.requests, because="it watches")
    double.forgets = not at_once or double.forgets
    eventually(
        lambda: double.requests.count("WATCH pods") > 1 and not double.forgets,
        because="it watches again",
    )
    launcher.launch(folder, 1, NONCE)
    eventually(lambda: launcher._pods.lives(NONCE), because="the new watch shows the pod")
    assert double.requests.count("GET pods") >= 2


def test_signals_are_deletions(double: KubernetesDouble, make: Make, folder: Path) -> None:
    """A signal deletes Jobs and pods, and counts what there was until nothing is left."""
    launcher = make()
    launcher.launch(folder, 1, NONCE)
    assert launcher.kill(folder, signal.SIGTERM) > 0
    eventually(lambda: launcher.kill(folder, signal.SIGKILL) == 0, because="all is deleted")
    assert double.jobs == double.pods == {}
    eventually(lambda: launcher.probe(folder, NONCE) is Liveness.GONE, because="it is deleted")


def test_the_charts_role_has_the_verbs_that_it_uses(
    double: KubernetesDouble, make: Make, folder: Path
) -> None:
    """The account of the service may make these requests, and no others."""
    launcher = make()
    launcher.probe(folder, NONCE)
    launcher.launch(folder, 1, NONCE)
    double.jobs.clear()  # a pod without a Job, as one that a Job has left behind
    launcher.kill(folder, signal.SIGKILL)
    eventually(lambda: "WATCH pods" in double.requests, because="it watches")
    one = {"POST": "create", "GET": "get", "DELETE": "delete"}
    many = {"POST": "create", "GET": "list", "DELETE": "deletecollection", "WATCH": "watch"}
    used: dict[str, set[str]] = {}
    for method, path in (request.split() for request in double.requests):
        resource, _, name = path.partition("/")
        used.setdefault(resource, set()).add((one if name else many)[method])
    rules = chart.find(chart.render(), "Role", "service")["rules"]
    assert used == {rule["resources"][0]: set(rule["verbs"]) for rule in rules}


def test_an_account_is_reread(double: KubernetesDouble, make: Make, tmp_path: Path) -> None:
    """The token is sent as its file has it now: Kubernetes replaces it every hour."""
    place = ClusterPlace(url=double.url, namespace=NAMESPACE, account=tmp_path)
    api = HttpApi(place)
    assert api._headers() == {}
    for token in ("first", "second"):
        (tmp_path / "token").write_text(f"{token}\n")
        assert api._headers() == {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("docker", "expected local or kubernetes:FILE"),
        ("kubernetes", "expected local or kubernetes:FILE"),
        ("kubernetes:/no/such.json", "No such file"),
        ("kubernetes:{text}", "expected a Job as JSON"),
        ("kubernetes:{pod}", "expected a Job with containers"),
        ("kubernetes:{names}", "expected a Job with one container runner"),
        ("kubernetes:{twice}", "kind: expected this field once, got it again"),
        ("kubernetes:{job}", "expected a pod with an account"),
    ],
)
def test_a_wrong_launcher_is_refused(words: str, expected: str, tmp_path: Path) -> None:
    """A wrong word, file, template or machine is one line, before anything starts."""
    names = template_of(SLEEP)
    names["spec"]["template"]["spec"]["containers"][0]["name"] = "main"
    contents = {
        "text": "no JSON",
        "pod": json.dumps({"kind": "Pod"}),
        "names": json.dumps(names),
        "job": json.dumps(template_of(SLEEP)),
        "twice": json.dumps(template_of(SLEEP)).replace('"kind"', '"kind": "Pod", "kind"', 1),
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    files = {name: tmp_path / name for name in contents}
    with pytest.raises(BadInput, match=expected):
        launcher_of(words.format(**files))


@pytest.mark.parametrize(("stub", "state"), [("succeed", "SUCCEEDED"), ("bad", "FAILED")])
def test_a_service_runs_jobs_by_it(
    double: KubernetesDouble, make: Make, start: Start, home: Path, stub: str, state: str
) -> None:
    """A service with this launcher sees a job from submission to its end, and leaves no Job."""
    double.runs = True
    command = ["sh", "-c", f'exec {sys.executable} {STUB} "$1" >> "$2" 2>&1', "runner"]
    launcher: Any = make(command)
    with start(launcher=lambda: launcher) as service:
        job = service.submit(stub)
        service.await_state(job, state)
        (attempt,) = service.http.get(f"/api/v1/jobs/{job}/attempts").json()["attempts"]
        assert attempt["exit_status"] is not None
    assert double.jobs == {}
    assert (home / JOBS / job / "logs" / "driver-1.log").exists()


def test_a_cancelled_job_leaves_nothing(double: KubernetesDouble, make: Make, start: Start) -> None:
    """A runner that obeys no order is ended by deletion of its pod."""
    double.runs = True
    command = ["sh", "-c", f'exec {sys.executable} {STUB} "$1" >> "$2" 2>&1', "runner"]
    launcher: Any = make(command)
    with start(launcher=lambda: launcher) as service:
        job = service.submit("train")
        service.await_state(job, "RUNNING")
        service.ask(job, "cancel", mode="now")
        service.await_state(job, "CANCELLED")
    assert double.jobs == {}
