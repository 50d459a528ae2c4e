"""Starts, probes and ends attempts as Jobs of Kubernetes, made from the chart's template.

An attempt is a Job with one pod, named by its nonce, in a folder that the service and all runners
mount. A watch keeps the phases of pods, so that a probe of a runner that lives costs no request.
That an attempt is gone follows only from the API's own present answer: no pod of it lives, and no
Job can make one. The API may be silent, or may have lost sight of a node: that is `unknown`, and
lasts until an administrator or the node's return decides it. Signals are deletions, for Kubernetes
has no other: SIGTERM gives the template's time to end, SIGKILL a second.
"""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from deploy.runner import job_folder
from deploy.service.kubernetes_api import (
    GONE_VERSION,
    WATCH_S,
    ClusterPlace,
    Fields,
    HttpApi,
    KubernetesApi,
    NoAnswer,
)
from deploy.service.launcher import Launcher, Liveness, LocalLauncher
from ps.logs import logger
from ps.snapshots.checked_json import decode_fields
from shards.errors import UNDECODABLE, BadInput

JOB_LABEL, ATTEMPT_LABEL = "downpour/job", "downpour/attempt"
JOBS, PODS = "batch/v1 jobs", " pods"
CONTAINER = "runner"
_OVER = {"Succeeded", "Failed"}
_FRESH_S = WATCH_S + 10.0  # a watch that is older may have missed the end of a pod
_BETWEEN_S = 0.05
_PAUSE_S = 2.0  # after a failure: a silent API must not hold up every job's reconciliation


def launcher_of(words: str) -> Callable[[], Launcher]:
    """The launcher of --launcher, `local` or `kubernetes:FILE`; raises BadInput."""
    kind, _, file = words.partition(":")
    if words == "local":
        return LocalLauncher
    if kind != "kubernetes" or not file:
        raise BadInput("--launcher", expected="local or kubernetes:FILE", got=f"{words[:80]!r}")
    template, place = load_template(Path(file)), ClusterPlace.of_pod()
    return lambda: KubernetesLauncher(HttpApi(place), template)


def load_template(path: Path) -> Fields:
    """The template of a runner's Job, from JSON; raises BadInput."""
    label = f"--launcher kubernetes:{path}"
    try:
        job: Fields = decode_fields(path.read_bytes())
    except BadInput as error:
        raise error.within(label) from None
    except OSError as error:
        raise BadInput(f"{label}: {error.strerror}") from None
    except UNDECODABLE:
        raise BadInput(label, expected="a Job as JSON", got="another file") from None
    try:
        containers = job["spec"]["template"]["spec"]["containers"]
        names = [container["name"] for container in containers]
    except (KeyError, TypeError):
        raise BadInput(label, expected="a Job with containers", got="none") from None
    if job.get("kind") != "Job" or names != [CONTAINER]:
        raise BadInput(label, expected=f"a Job with one container {CONTAINER}", got=f"{names}")
    return job


class KubernetesLauncher:
    """Launches attempts as Jobs made from `template`."""

    def __init__(
        self,
        api: KubernetesApi,
        template: Fields,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._template = msgspec.json.encode(template)
        self._clock = clock
        self._statuses: dict[str, int] = {}
        self._silent_until = 0.0
        self._pods = PodWatch(api, clock)
        self._pods.start()

    def launch(self, folder: Path, attempt: int, nonce: str) -> None:
        """Create the Job of an attempt; raises OSError if that fails.

        After a timeout the Job may exist all the same. The next probe sees it, and a runner that
        starts later than the next attempt refuses its folder, for its nonce is not the newest.
        """
        status, answer = self._api.request("POST", JOBS, self._job(folder, attempt, nonce))
        if status not in {200, 201, 202, 409}:  # 409: an earlier request has created it
            raise OSError(f"Kubernetes: {answer.get('message', status)}")

    def probe(self, folder: Path, nonce: str) -> Liveness:
        """Return whether the attempt with this nonce is alive, as far as the API knows."""
        if self._pods.lives(nonce):
            return Liveness.RUNNING
        if self._clock() < self._silent_until:
            return Liveness.UNKNOWN
        try:
            pods = self._list(ATTEMPT_LABEL, nonce)
            if pods:
                return self._judge(pods, nonce)
            # Pods first: a Job that is seen afterwards has none yet, or will never have one.
            status, job = self._api.request("GET", f"{JOBS}/{_name(folder, nonce)}")
        except NoAnswer:
            self._silent_until = self._clock() + _PAUSE_S
            return Liveness.UNKNOWN
        if status == 404:
            return Liveness.GONE
        return Liveness.RUNNING if status == 200 and _may_start(job) else Liveness.GONE

    def exit_status(self, nonce: str) -> int | None:
        """The exit status of an attempt's runner, if a probe has seen its end."""
        return self._statuses.get(nonce)

    def forget(self, nonce: str) -> None:
        """Drop what is kept about an attempt that is over."""
        self._statuses.pop(nonce, None)

    def kill(self, folder: Path, number: signal.Signals) -> int:
        """End the Jobs and the pods of the job in `folder`; returns how many there were.

        Raises NoAnswer if that is unknown: then nothing may be concluded.
        """
        # The Jobs go first. They would replace the pods.
        selector = f"{JOB_LABEL}={folder.name}"
        _, answer = self._api.request(
            "DELETE", JOBS, labelSelector=selector, propagationPolicy="Background"
        )
        living = [pod for pod in self._list(JOB_LABEL, folder.name) if _phase(pod) not in _OVER]
        if number is signal.SIGKILL:
            for pod in living:
                # Not 0 seconds: that removes the object before the node has ended the process.
                path = f"{PODS}/{pod['metadata']['name']}"
                self._api.request("DELETE", path, gracePeriodSeconds="1")
        return len(answer.get("items", [])) + len(living)

    def close(self) -> None:
        """Stop watching. Attempts are not affected."""
        self._pods.close()

    def _job(self, folder: Path, attempt: int, nonce: str) -> Fields:
        job: Fields = msgspec.json.decode(self._template)
        labels = {JOB_LABEL: folder.name, ATTEMPT_LABEL: nonce}
        pod = job["spec"]["template"]
        job["metadata"]["name"] = _name(folder, nonce)
        for metadata in (job["metadata"], pod.setdefault("metadata", {})):
            metadata["labels"] = metadata.get("labels", {}) | labels
        (container,) = pod["spec"]["containers"]
        container["args"] = [str(folder), str(job_folder.driver_log(folder, attempt))]
        variables = {job_folder.JOB_VARIABLE: folder.name, job_folder.ATTEMPT_VARIABLE: nonce}
        container["env"] = container.get("env", []) + [
            {"name": name, "value": value} for name, value in variables.items()
        ]
        return job

    def _list(self, label: str, value: str) -> list[Fields]:
        status, answer = self._api.request("GET", PODS, labelSelector=f"{label}={value}")
        if status != 200:
            raise NoAnswer(f"Kubernetes: pods: {answer.get('message', status)}")
        items: list[Fields] = answer["items"]
        return items

    def _judge(self, pods: list[Fields], nonce: str) -> Liveness:
        """The liveness of an attempt from its pods, of which there is usually one."""
        if any(_is_out_of_sight(pod) for pod in pods):
            return Liveness.UNKNOWN
        if any(_phase(pod) not in _OVER for pod in pods):
            return Liveness.RUNNING
        for pod in pods:
            for state in pod["status"].get("containerStatuses", []):
                if state["name"] == CONTAINER and "terminated" in state.get("state", {}):
                    self._statuses[nonce] = int(state["state"]["terminated"]["exitCode"])
        return Liveness.GONE


class PodWatch:
    """Follows the phases of all runners' pods in a thread of its own."""

    def __init__(self, api: KubernetesApi, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._lock = threading.Lock()
        self._living: dict[str, str] = {}  # the nonce of each pod that lives, by the pod's name
        self._heard = -_FRESH_S
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pods", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop following; the thread ends with its present request."""
        self._closed.set()

    def lives(self, nonce: str) -> bool:
        """True if a pod of the attempt lives. False may also mean that the watch is behind."""
        with self._lock:
            fresh = self._clock() - self._heard < _FRESH_S
            return fresh and nonce in self._living.values()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                version = self._relist()
                # Pauses, for an API may end every watch at once.
                while version and not self._closed.wait(_BETWEEN_S):
                    version = self._follow(version)
            except (NoAnswer, KeyError, TypeError) as error:
                with self._lock:
                    self._heard = -_FRESH_S  # what is kept may be over: each probe asks
                logger("service").info("%s", f"pods are asked for one by one: {error!r}")
                self._closed.wait(_PAUSE_S)

    def _relist(self) -> str:
        """Read all pods; returns the version from which to watch."""
        status, answer = self._api.request("GET", PODS, labelSelector=ATTEMPT_LABEL)
        if status != 200:
            raise NoAnswer(f"pods: {answer.get('message', status)}")
        with self._lock:
            self._living.clear()
            self._heard = self._clock()
        for pod in answer["items"]:
            self._take("ADDED", pod)
        return str(answer["metadata"]["resourceVersion"])

    def _follow(self, version: str) -> str:
        """Watch until the API ends that; returns the next version, empty if pods must be relisted.

        The API forgets old versions: then it answers 410, at once or as an event.
        """
        with self._lock:
            self._heard = self._clock()
        for event in self._api.watch(PODS, labelSelector=ATTEMPT_LABEL, resourceVersion=version):
            if event["type"] == "ERROR":
                if event["object"].get("code") == GONE_VERSION:
                    return ""
                raise NoAnswer(str(event["object"].get("message")))
            version = str(event["object"]["metadata"]["resourceVersion"])
            if event["type"] != "BOOKMARK":
                self._take(event["type"], event["object"])
            if self._closed.is_set():
                return ""
        return version

    def _take(self, kind: str, pod: Fields) -> None:
        name = pod["metadata"]["name"]
        lives = kind != "DELETED" and _phase(pod) not in _OVER and not _is_out_of_sight(pod)
        with self._lock:
            self._heard = self._clock()
            if lives:
                self._living[name] = pod["metadata"]["labels"][ATTEMPT_LABEL]
            else:
                self._living.pop(name, None)


def _name(folder: Path, nonce: str) -> str:
    return f"downpour-{folder.name}-{nonce}"


def _phase(pod: Fields) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def _is_out_of_sight(pod: Fields) -> bool:
    """True for a pod on a node that Kubernetes has lost contact with."""
    status = pod.get("status", {})
    return bool(status.get("phase") == "Unknown" or status.get("reason") == "NodeLost")


def _may_start(job: Fields) -> bool:
    """True if a Job without pods may still create one."""
    if "deletionTimestamp" in job["metadata"]:
        return False
    conditions = job.get("status", {}).get("conditions", [])
    return not any(
        item["type"] in {"Complete", "Failed"} and item["status"] == "True" for item in conditions
    )
