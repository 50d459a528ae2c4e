"""Run deploy/targets/compose with podman, train on it, and kill each of its containers.

    python -m tests.bench.compose_stack [--kills service ray-head ...] [--store FOLDER]
                                        [--certificates FILE ...]

The image `driver` is built from the checkout; images of Debian's packages stand in for those of
PostgreSQL and Prometheus. LeNet trains through the service by the commands of
docs/how-to/containers.md, with shards in the stack's Ray and workers in its Spark. Then the main
process of one container after another is killed: it must be healthy again, and the job must take
more steps than before. In the end the job has applied exactly the updates that were asked for,
Prometheus has its figures, and `down` leaves no container or network.

It needs root, podman with its programs for networks, runc, iptables and mmdebstrap. With --store
the images stay in a folder, where another run finds their stages. CERTIFICATES as for image_builds.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from deploy.run.folder import SUMMARY
from deploy.service.client import ServiceClient
from shards.errors import DownpourError
from tests.bench.image_builds import (
    TARGETS,
    build_stand_in,
    open_driver_store,
    run,
)
from tests.bench.report import Goal, goals
from tests.bench.watched_job import MORE_STEPS, OPTIONS, WatchedJob
from tests.programs.table import BIN, downpour
from tests.support.eventually import eventually
from tests.support.fresh_clone import ROOT

SERVICES = tuple(yaml.safe_load((TARGETS / "compose/compose.yaml").read_text())["services"])
_SERVER = "https://localhost:8600"
_PROMETHEUS = "http://127.0.0.1:9090"
_DEMO = ROOT / "deploy" / "demo"
_TRAIN = ["--ray", "ray://ray-head:10001", "--spark", "spark://spark-master:7077"]
_TRAIN += ["--port", "7400", *OPTIONS]
_UP_S, _AGAIN_S = 60.0, 120.0
# A host of tests may not allow what the Compose file asks for.
_LIMITS = {"nofile": {"soft": 8192, "hard": 8192}, "nproc": {"soft": 4096, "hard": 4096}}
_MAKE_TOKEN = (
    "DOWNPOUR_DATABASE=$(cat /run/secrets/database-url)"
    " exec downpour service token create --name prometheus --role viewer"
)


def main() -> None:
    """Build, train, kill, and print the goals."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", nargs="*", choices=SERVICES, default=SERVICES)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--certificates", nargs="*", type=Path, default=[])
    options = parser.parse_args()
    with open_driver_store(options.store, options.certificates) as environ:
        environ = {
            **environ,
            "POSTGRES_IMAGE": build_stand_in("postgres", environ),
            "PROMETHEUS_IMAGE": build_stand_in("prometheus", environ),
        }
        with tempfile.TemporaryDirectory(prefix="compose-") as folder:
            rows = try_stack(Path(folder), environ, options.kills)
        for what, left in (
            (["ps", "--all", "--quiet"], []),
            (["network", "ls", "--format", "{{.Name}}"], ["podman"]),
        ):
            assert run("podman", *what, environ=environ).split() == left, what
    goals(rows)


def try_stack(folder: Path, environ: Mapping[str, str], kills: Sequence[str]) -> list[Goal]:
    """Start the stack, train on it under kills, and stop it; returns the goals."""
    with start_stack(folder, environ) as stack:
        started = time.monotonic()
        stack.await_health()
        rows = [Goal("all containers healthy", time.monotonic() - started, _UP_S, "s")]
        stack.sign_in()
        job = stack.submit()
        started = time.monotonic()
        job.await_steps(1)
        rows.append(Goal("submitted to first steps", time.monotonic() - started, _AGAIN_S, "s"))
        for name in kills:
            steps, started = job.read_steps(), time.monotonic()
            stack.kill(name)
            job.await_steps(steps + MORE_STEPS)
            stack.await_health()
            again_s = time.monotonic() - started
            print(f"{name} killed: trains on, healthy, after {again_s:.0f} s", flush=True)
            rows.append(Goal(f"{name} killed: trains on, healthy", again_s, _AGAIN_S, "s"))
        stack.check_figures()
        job.finish()
    return rows


@contextmanager
def start_stack(folder: Path, environ: Mapping[str, str]) -> Iterator["Stack"]:
    """The containers of the Compose file, from a copy of it with secrets of its own."""
    targets = folder / "deploy" / "targets"
    shutil.copytree(TARGETS / "compose", targets / "compose")
    shutil.copytree(ROOT / "deploy" / "prometheus", folder / "deploy" / "prometheus")
    run(targets / "compose" / "setup.sh", environ=environ)
    own = [name for name in SERVICES if name not in {"postgres", "prometheus"}]
    limits = targets / "limits.yaml"
    limits.write_text(json.dumps({"services": {name: {"ulimits": _LIMITS} for name in own}}))
    stack = Stack(targets / "compose", limits, environ)
    try:
        stack.compose("up", "--detach")
        yield stack
    finally:
        stack.compose("down", "--volumes")
        # podman-compose finds its volumes by a label, which one of them lacks.
        stack.podman("volume", "prune", "--force")


class Stack:
    """The running containers, and a user of their service."""

    def __init__(self, folder: Path, limits: Path, environ: Mapping[str, str]) -> None:
        self._secrets = folder / "secrets"
        self._token = folder / "token"
        self._files: list[str | Path] = ["--file", folder / "compose.yaml", "--file", limits]
        self._environ = environ

    def compose(self, *words: str) -> None:
        run(BIN / "podman-compose", "--no-ansi", *self._files, *words, environ=self._environ)

    def podman(self, *words: str | Path) -> str:
        return run("podman", *words, environ=self._environ)

    def execute(self, name: str, *words: str) -> str:
        """The output of a command in the container of a service."""
        return self.podman("exec", _container(name), *words)

    def await_health(self) -> None:
        """Wait until the health check of each container succeeds; podman alone never runs one."""
        for name in SERVICES:
            healthy = partial(self._is_healthy, name)
            eventually(healthy, because=f"{name} is healthy", within_s=180.0)

    def _is_healthy(self, name: str) -> bool:
        check = ["podman", "healthcheck", "run", _container(name)]
        done = subprocess.run(check, env=self._environ, capture_output=True, check=False)
        return done.returncode == 0

    def sign_in(self) -> None:
        """Take the first token of the service, and give Prometheus one of its own."""
        self._token.write_text(self.execute("service", "cat", "/srv/downpour/first-token"))
        self._token.chmod(0o600)
        # The file is mounted: it must stay the same file.
        (self._secrets / "metrics-token").write_text(
            self.execute("service", "sh", "-euc", _MAKE_TOKEN)
        )

    def submit(self) -> WatchedJob:
        """Submit LeNet as the page of documentation does."""
        options = ["--server", _SERVER, "--token-file", self._token]
        options += ["--ca-file", self._secrets / "tls.crt", "--json", "--upload"]
        solver = _DEMO / "lenet_solver.prototxt"
        command = downpour("submit", solver, "--data", _DEMO / "mnist", *options, *_TRAIN)
        job = str(json.loads(run(*command, environ=self._environ))["id"])
        summary = f"/srv/downpour/jobs/{job}/run/{SUMMARY}"
        return WatchedJob(
            read=partial(self._read, job),
            set_steps=partial(self._set_steps, job),
            read_summary=partial(self.execute, "service", "cat", summary),
        )

    def _read(self, job: str) -> dict[str, Any] | None:
        with suppress(DownpourError), self._connect() as client:
            return client.get(f"/jobs/{job}")
        return None

    def _set_steps(self, job: str, steps: int) -> None:
        with self._connect() as client:
            client.post(f"/jobs/{job}:set", {"settings": {"max_iter": steps}})

    def _connect(self) -> ServiceClient:
        token = self._token.read_text().strip()
        return ServiceClient(_SERVER, token=token, ca_file=self._secrets / "tls.crt")

    def kill(self, name: str) -> None:
        """Kill the main process of a container, as a fault would: podman's kill is an order."""
        process = self.podman("inspect", "--format", "{{.State.Pid}}", _container(name))
        os.kill(int(process), signal.SIGKILL)

    def check_figures(self) -> None:
        """Assert that Prometheus has scraped the figures of the job."""
        query = urllib.parse.urlencode({"query": "downpour_job_steps_total"})

        def scraped() -> bool:
            with urllib.request.urlopen(f"{_PROMETHEUS}/api/v1/query?{query}") as answer:
                return bool(json.load(answer)["data"]["result"])

        eventually(scraped, because="Prometheus has the steps of the job")


def _container(service: str) -> str:
    return f"downpour_{service}_1"


if __name__ == "__main__":
    main()
