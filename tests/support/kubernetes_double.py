"""A double of the API of Kubernetes, over HTTP: Jobs and pods of one namespace, and watches.

It is no cluster. It keeps the API's promises that the launcher builds on: names that conflict,
lists with a version, watches from a version, 410 for versions that it has forgotten, deletion of a
Job's pods in the background. A pod is a process of this machine that runs its container's command.
"""

import json
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

Fields = dict[str, Any]
MINOR = "1.37"
NAMESPACE = "training"


class KubernetesDouble:
    """The state of the double, and its faults. A context manager that serves."""

    def __init__(self, *, runs: bool = True) -> None:
        self.runs = runs  # whether a pod runs its command; else it stays Pending
        self.silent = False  # answers nothing
        self.status = 0  # answers every request with this status
        self.forgets = False  # has forgotten every version: 410 for a watch
        self.refuses_watches = False
        self.requests: list[str] = []
        self.jobs: dict[str, Fields] = {}
        self.pods: dict[str, Fields] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._events: list[tuple[int, str, Fields]] = []
        self._version = 100
        self._changed = threading.Condition(threading.RLock())
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._over = threading.Event()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "KubernetesDouble":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        threading.Thread(target=self._reap, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with self._changed:
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    # What happens in the cluster.

    def set_phase(self, name: str, phase: str, code: int | None = None) -> None:
        """Change the phase of a pod, as its node reports it."""
        with self._changed:
            pod = self.pods[name]
            pod["status"]["phase"] = phase
            if code is not None:
                terminated = {"terminated": {"exitCode": code}}
                pod["status"]["containerStatuses"] = [{"name": "runner", "state": terminated}]
            self._note("MODIFIED", pod)

    def drop(self, name: str) -> None:
        """Remove a pod, as the garbage collector does."""
        with self._changed:
            pod = self.pods.pop(name)
            self._note("DELETED", pod)

    def _note(self, kind: str, pod: Fields) -> None:
        self._version += 1
        pod["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, kind, json.loads(json.dumps(pod))))
        self._changed.notify_all()

    def _start(self, job: Fields) -> None:
        name = f"{job['metadata']['name']}-x1y2z"
        template = job["spec"]["template"]
        pod = {
            "metadata": {"name": name, "labels": dict(template["metadata"]["labels"])},
            "status": {"phase": "Pending"},
        }
        self.pods[name] = pod
        self._note("ADDED", pod)
        if self.runs:
            (container,) = template["spec"]["containers"]
            variables = {item["name"]: item["value"] for item in container["env"]}
            self._processes[name] = subprocess.Popen(
                [*container["command"], *container["args"]], env=os.environ | variables,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            self.set_phase(name, "Running")

    def _reap(self) -> None:
        while not self._over.wait(0.02):
            with self._changed:
                for name, process in list(self._processes.items()):
                    if process.poll() is None:
                        continue
                    del self._processes[name]
                    if name in self.pods:
                        phase = "Failed" if process.returncode else "Succeeded"
                        self.set_phase(name, phase, process.returncode)
                        if "deletionTimestamp" in self.pods[name]["metadata"]:
                            self.drop(name)

    def _end(self, name: str, number: signal.Signals) -> None:
        """Delete a pod: its process is signalled, and the pod goes when that has ended."""
        pod = self.pods[name]
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self._note("MODIFIED", pod)
        process = self._processes.get(name)
        if process is None:
            self.drop(name)
        else:
            process.send_signal(number)

    # The API.

    def answer(self, method: str, url: str, body: Fields | None) -> tuple[int, Fields]:
        """The status and the object for a request that is no watch."""
        path, query = (
            urlsplit(url).path,
            {k: v[0] for k, v in parse_qs(urlsplit(url).query).items()},
        )
        *_, kind = [word for word in path.split("/") if word in {"jobs", "pods"}]
        name = path.partition(f"/{kind}/")[2]
        assert f"/namespaces/{NAMESPACE}/" in path, path
        label, _, value = query.get("labelSelector", "").partition("=")
        with self._changed:
            self.requests.append(f"{method} {kind}{'/' if name else ''}{name}")
            objects = self.jobs if kind == "jobs" else self.pods
            chosen = [
                item
                for item in objects.values()
                if label in item["metadata"]["labels"]
                and value in {"", item["metadata"]["labels"][label]}
            ]
            match method, kind, bool(name):
                case "POST", "jobs", False:
                    assert body is not None
                    return self._create(body)
                case "GET", _, False:
                    listed = {"resourceVersion": str(self._version)}
                    return 200, {"items": chosen, "metadata": listed}
                case "GET", _, True:
                    found = objects.get(name)
                    return (200, found) if found is not None else (404, {"message": "not found"})
                case "DELETE", "jobs", False:
                    assert query["propagationPolicy"] == "Background"
                    for job in chosen:
                        del self.jobs[job["metadata"]["name"]]
                        for pod in [p for p in self.pods if p.startswith(job["metadata"]["name"])]:
                            self._end(pod, signal.SIGTERM)
                    return 200, {"items": chosen}
                case "DELETE", "pods", True:
                    if name in self.pods:
                        self._end(name, signal.SIGKILL)
                    return 200, {}
        return 405, {"message": f"{method} {path}"}

    def _create(self, job: Fields) -> tuple[int, Fields]:
        try:
            kubernetes_validate.validate(job, MINOR, strict=True)
        except kubernetes_validate.ValidationError as error:
            return 422, {"message": str(error.message)}
        if job["metadata"]["name"] in self.jobs:
            return 409, {"message": "jobs already exists", "reason": "AlreadyExists"}
        self.jobs[job["metadata"]["name"]] = job
        self._start(job)
        return 201, job

    def events_after(self, version: int) -> list[tuple[int, str, Fields]]:
        """The events after a version; waits for one for a short time."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._version > version or self._over.is_set() or self.forgets, 0.5
            )
            return [event for event in self._events if event[0] > version]

    def loses_request(self) -> bool:
        """Wait while the API is silent; returns whether it was, and has lost the request."""
        lost = False
        while self.silent and not self._over.is_set():
            lost = True
            time.sleep(0.02)
        return lost

    def expires(self) -> bool:
        """Whether a watch has to end now because its version was forgotten, once."""
        with self._changed:
            forgotten, self.forgets = self.forgets, False
            return forgotten

    def _handler(double) -> type[BaseHTTPRequestHandler]:  # noqa: N805  # `self` is the handler's
        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                watched = "watch=true" in self.path
                if double.loses_request():
                    self.close_connection = True
                    return
                if double.status or (watched and double.refuses_watches):
                    self._send(double.status or 500, {"message": "a fault"})
                elif watched:
                    self._watch()
                else:
                    self._send(*double.answer(self.command, self.path, body))

            do_GET = do_POST = do_DELETE = _serve  # noqa: N815  # the names of http.server

            def _send(self, status: int, fields: Fields) -> None:
                content = json.dumps(fields).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                with suppress(BrokenPipeError):  # the client has given up
                    self.wfile.write(content)

            def _watch(self) -> None:
                query = parse_qs(urlsplit(self.path).query)
                version = int(query["resourceVersion"][0])
                double.requests.append("WATCH pods")
                if double.expires():
                    self._send(410, {"code": 410, "reason": "Expired"})
                    return
                self.send_response(200)
                self.end_headers()
                while not double._over.is_set():
                    if double.refuses_watches or double.silent:
                        return
                    if double.expires():
                        self._event("ERROR", {"code": 410, "reason": "Expired"})
                        return
                    for number, kind, pod in double.events_after(version):
                        self._event(kind, pod)
                        version = number

            def _event(self, kind: str, item: Fields) -> None:
                self.wfile.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")
                self.wfile.flush()

            def log_message(self, *_: object) -> None:
                pass

        return Handler
