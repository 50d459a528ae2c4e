"""Run the units of deploy/targets/units under systemd, train under them, and stop and kill each.

    python -m tests.bench.unit_hosts [--store FOLDER] [--certificates FILE ...]

Two containers of podman have systemd as their first process. One runs the head of Ray, the master
of Spark and the service, the other a node and a worker, all installed by the commands of
docs/how-to/units.md. LeNet trains through the service. That is restarted, stopped and started: the
process of the job is the same all the time, and takes steps. Then the main process of each unit is
killed: systemd starts it again, and the job takes more steps. In the end the job has applied just
the updates that were asked for, and the commands of removal leave no process of the user.

It needs root, podman with its programs for networks, runc, iptables and mmdebstrap. --store and
--certificates are as for compose_stack.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

from deploy.run.folder import SUMMARY
from tests.bench.image_builds import (
    TARGETS,
    build_stand_in,
    open_driver_store,
    run,
)
from tests.bench.report import Goal, goals
from tests.bench.watched_job import MORE_STEPS, OPTIONS, WatchedJob
from tests.support.doc_pages import fences, read
from tests.support.eventually import eventually
from tests.support.fresh_clone import ROOT

HEAD_UNITS = ("downpour-ray-head", "downpour-spark-master", "downpour")
NODE_UNITS = ("downpour-ray-node", "downpour-spark-worker")
HOSTS = {"head": HEAD_UNITS, "node": NODE_UNITS}
_NETWORK = "units"
_HOME, _DATA = "/var/lib/downpour", "/var/lib/downpour-data"
_DOWNPOUR = "/opt/downpour/bin/downpour"
_START_S, _AGAIN_S = 120.0, 120.0


def main() -> None:
    """Build, train, stop, kill, and print the goals."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", type=Path)
    parser.add_argument("--certificates", nargs="*", type=Path, default=[])
    options = parser.parse_args()
    with open_driver_store(options.store, options.certificates) as environ:
        image = build_stand_in("host", environ)
        with tempfile.TemporaryDirectory(prefix="units-") as folder:
            checkout = prepare_checkout(Path(folder), environ)
            with start_hosts(image, checkout, environ) as hosts:
                rows = try_units(hosts)
    goals(rows)


def prepare_checkout(folder: Path, environ: Mapping[str, str]) -> Path:
    """A folder with what the page needs of a checkout, the demo, and the secrets."""
    shutil.copytree(TARGETS, folder / "deploy" / "targets")
    shutil.copytree(ROOT / "deploy" / "demo", folder / "demo")
    compose = folder / "deploy" / "targets" / "compose"
    run(compose / "setup.sh", environ=environ)
    (compose / "secrets").rename(folder / "secrets")
    return folder


class UnitHost:
    """A container with systemd, and an address in the network of the check."""

    def __init__(self, name: str, environ: Mapping[str, str]) -> None:
        self.name = name
        self._environ = environ
        place = f"{{{{.NetworkSettings.Networks.{_NETWORK}.IPAddress}}}}"
        self.address = self.podman("inspect", "--format", place, name).strip()

    def podman(self, *words: str | Path) -> str:
        return run("podman", *words, environ=self._environ)

    def shell(self, script: str) -> str:
        """The output of a script of the shell, run by root in the checkout."""
        return self.podman("exec", "--workdir", "/checkout", self.name, "sh", "-euc", script)

    def is_active(self, unit: str) -> bool:
        with suppress(CalledProcessError):
            return self.shell(f"systemctl is-active {unit}").strip() == "active"
        return False

    def await_active(self, units: tuple[str, ...]) -> None:
        for unit in units:
            eventually(partial(self.is_active, unit), because=f"{unit} is active")


@contextmanager
def start_hosts(
    image: str, checkout: Path, environ: Mapping[str, str]
) -> Iterator[dict[str, UnitHost]]:
    """The containers, each with the checkout, until the context ends."""
    run("podman", "network", "create", _NETWORK, environ=environ)
    try:
        for name in HOSTS:
            run(
                *("podman", "run", "--detach", "--name", name, "--hostname", name),
                *("--network", _NETWORK, "--privileged", "--systemd", "always"),
                *("--no-healthcheck", "--shm-size", "2g", "--volume", f"{checkout}:/checkout:ro"),
                image,
                environ=environ,
            )
        yield {name: UnitHost(name, environ) for name in HOSTS}
    finally:
        run("podman", "rm", "--force", "--time", "2", *HOSTS, environ=environ)
        run("podman", "network", "rm", _NETWORK, environ=environ)


def try_units(hosts: Mapping[str, UnitHost]) -> list[Goal]:
    """Install, train, stop and kill the units, and remove them; returns the goals."""
    page = [block.text for block in fences(read("docs/how-to/units.md"))]
    install, give_secrets, start_head, start_node, remove = page
    started = time.monotonic()
    for host in hosts.values():
        host.shell(install)
        host.shell(write_variables(host.address, hosts["head"].address))
        host.shell(give_secrets)
    for name, start in (("head", start_head), ("node", start_node)):
        hosts[name].shell(start)
        hosts[name].await_active(HOSTS[name])
        for unit in HOSTS[name]:
            assert hosts[name].shell(f"systemctl is-enabled {unit}").strip() == "enabled", unit
    rows = [Goal("installed and started", time.monotonic() - started, _START_S, "s")]
    job_id, job = submit(hosts["head"])
    job.await_steps(1)
    try_stops(hosts["head"], job_id, job)
    for name, units in HOSTS.items():
        for unit in units:
            steps, started = job.read_steps(), time.monotonic()
            hosts[name].shell(f"systemctl kill --kill-whom main --signal KILL {unit}")
            job.await_steps(steps + MORE_STEPS)
            hosts[name].await_active((unit,))
            again_s = time.monotonic() - started
            rows.append(Goal(f"{unit} killed: trains on, active", again_s, _AGAIN_S, "s"))
            print(f"{unit} killed: trains on, active, after {again_s:.0f} s", flush=True)
    job.finish()
    for host in hosts.values():
        host.shell(remove)
        left = host.shell("ps -u downpour -o pid=,args= || true")
        assert not left.strip(), left
    return rows


def write_variables(address: str, head: str) -> str:
    """The script that edits /etc/downpour/cluster.env for a host."""
    values = {"NODE_ADDRESS": address, "RAY_HEAD": head, "SPARK_MASTER": head}
    values |= {"SPARK_CORES": "2", "SPARK_MEMORY": "2g"}
    edits = " ".join(f"-e 's/^{name}=.*/{name}={value}/'" for name, value in values.items())
    return f"sed -i {edits} /etc/downpour/cluster.env"


def submit(host: UnitHost) -> tuple[str, WatchedJob]:
    """Submit LeNet to the service on a host; returns the job's id, too."""
    host.shell(f"cp -r /checkout/demo {_DATA}/demo && chown -R downpour {_DATA}/demo")
    where = ["--ray", f"{host.address}:6379", "--spark", f"spark://{host.address}:7077"]
    files = ["--solver", f"{_DATA}/demo/lenet_solver.prototxt", "--data", f"{_DATA}/demo/mnist"]
    job = json.loads(
        host.shell(" ".join([_DOWNPOUR, "submit", *files, *where, *OPTIONS, "--json"]))
    )

    def read() -> dict[str, Any] | None:
        with suppress(CalledProcessError):
            shown: dict[str, Any] = json.loads(
                host.shell(f"{_DOWNPOUR} describe {job['id']} --json")
            )
            return shown
        return None

    return job["id"], WatchedJob(
        read=read,
        set_steps=lambda steps: host.shell(f"{_DOWNPOUR} set {job['id']} max_iter={steps}"),
        read_summary=partial(host.shell, f"cat {_HOME}/jobs/{job['id']}/run/{SUMMARY}"),
    )


def try_stops(host: UnitHost, job_id: str, job: WatchedJob) -> None:
    """Restart, stop and start the service; assert that the job's process has trained meanwhile."""

    def read_process() -> str:
        return host.shell(f"pgrep --uid downpour --full 'deploy.runner.*{job_id}'").strip()

    process, steps = read_process(), job.read_steps()
    host.shell("systemctl restart downpour")
    job.await_steps(steps + MORE_STEPS)
    host.shell("systemctl stop downpour")
    time.sleep(5)
    assert read_process() == process
    host.shell("systemctl start downpour")
    job.await_steps(steps + 2 * MORE_STEPS)
    assert read_process() == process
    print("the service was restarted, stopped and started: the job's process is the same")


if __name__ == "__main__":
    main()
