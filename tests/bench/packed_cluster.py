"""LeNet from a packed archive on a cluster of three hosts, each in namespaces of its own.

    python -m tests.bench.packed_cluster [--cases routed-plain ...] [--steps 60]

`downpour pack` writes two archives: one for executors, one for the driver and the nodes of Ray. A
standalone master of Spark and the head of Ray run on one host, a worker of Spark and a node of Ray
on each of two others; none sees a checkout or a Python of the system. `spark-submit` on the first
trains LeNet, with shards in Ray and workers in Spark, and tests it. A case has hosts with a default
route or without one, and shards that are encrypted or not; then Spark's processes authenticate
each other, and Ray requires a token. Meanwhile a stranger on a fourth host knocks at every port:
in a guarded case it reaches nothing, in plain text each kind of server admits it. At last the run
is resumed on this machine without a cluster, from a copy of its snapshots.

It needs root and namespaces. At the end of a case no process, segment or device of it is left.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from subprocess import STDOUT, Popen

from tests.bench.port_scan import FILES as STRANGER_FILES
from tests.bench.port_scan import Scan, describe, find_faults, run_stranger
from tests.bench.report import Goal, goals
from tests.programs.table import downpour
from tests.support.eventually import eventually
from tests.support.fresh_clone import ROOT
from tests.support.hosts import Host, bare_hosts, missing_for_bare_hosts
from tests.support.packed import SPARK_LOG, pack_once, unpack

CASES = {
    f"{route}-{guard}": (route == "routed", guard == "guarded")
    for route in ("routed", "unrouted")
    for guard in ("plain", "guarded")
}
SPARK_SECRET, RAY_TOKEN = "a-secret-of-this-check", "0f" * 32
SHARD_PORTS = {7400, 7401}
LIMIT_S = 900.0
_MORE = 10  # steps after the run is resumed elsewhere
HOME = "/home/user"
_PYTHON = "/opt/downpour/bin/python"
_DEMO = "/opt/downpour/demo"
_CHECK = ["deploy", "check", "--spark", "submitted", "--executors", "2", "--ray"]
TRAIN = ["train", "--solver", f"{_DEMO}/lenet_solver.prototxt", "--data", f"{_DEMO}/mnist"]
TRAIN += ["--out", f"{HOME}/lenet", "--workers", "2", "--shards", "2"]
TRAIN += ["--bind", "0.0.0.0", "--port", "7400"]


def main() -> None:
    """Pack, then run each case, and print the goals."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if reason := missing_for_bare_hosts():
        sys.exit(f"skipped: {reason}")
    rows = []
    with packed_files() as (folder, files):
        for case in options.cases:
            place = folder / case
            place.mkdir()
            started = time.monotonic()
            run_case(case, place, files, options.steps)
            rows.append(Goal(f"{case}: to a trained LeNet", time.monotonic() - started, 360, "s"))
    goals(rows)


@contextmanager
def packed_files() -> Iterator[tuple[Path, Mapping[str, Path]]]:
    """A folder for hosts, and the files that each needs, by its path there: both archives."""
    executor, driver = pack_once("executor"), pack_once("driver", "cli", "server")
    with tempfile.TemporaryDirectory(prefix="hosts") as name:
        unpacked = Path(name) / "downpour"
        unpack(driver, unpacked)
        yield (
            Path(name),
            {
                "/opt/downpour": unpacked,
                "/opt/executor.tar.gz": executor,
                "/opt/log4j2": SPARK_LOG,
            },
        )


def run_case(case: str, folder: Path, files: Mapping[str, Path], steps: int) -> None:
    """Start a cluster, train on it, and assert that every part ran where it should."""
    routed, guarded = CASES[case]
    names = ["head", "one", "two", "guest"]
    with bare_hosts(folder, names, {**files, **STRANGER_FILES}, routed=routed) as (*hosts, guest):
        head, *others = hosts
        for host in hosts:
            assert host.run("sh", "-c", "python3 -V || python -V").returncode != 0
            assert not host.path(str(ROOT)).exists()
        with cluster(folder, dict.fromkeys(hosts, 1) | {head: 0}, guarded=guarded) as environ:
            ray = f"{head.address}:6379"
            submit = partial(head.run, environ=environ, timeout=LIMIT_S)
            ready = submit(*submit_command(head, [*_CHECK, ray], guarded=guarded))
            checked = "head (driver), one, two, head (Ray), one (Ray), two (Ray)"
            assert ready.stdout == f"checked {checked}: nothing missing\n", ready
            train = [*TRAIN, "--ray", ray, "--max-iter", str(steps)]
            cluster_file = head.path(f"{HOME}/lenet/cluster.json")
            scan = Scan(hosts, guest, cluster_file, sends=guarded)
            with scan.running():
                done = submit(*submit_command(head, train, guarded=guarded))
            judge_scan(scan, head, guest, environ, guarded=guarded)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        summary = json.loads(head.path(f"{HOME}/lenet/summary.json").read_text())
        print(f"{case}: {done.stdout.strip()}", flush=True)
        assert summary["updates"] == 2 * steps, summary
        assert summary["test_accuracy"] > 0.8, summary
        for host in others:
            unpacked_there = list(host.path("/tmp/work").glob("app-*/*/environment/bin/python3"))
            assert unpacked_there, f"no executor has run on {host.name}"
        assert "127.0.0.1" not in cluster_file.read_text()
        resume_here(folder, head.path(f"{HOME}/lenet/snapshots"), steps)
        holders = [host.holder for host in hosts]
    eventually(lambda: not any(holder.is_running() for holder in holders), because="all has ended")


def judge_scan(
    scan: Scan, head: Host, guest: Host, environ: Mapping[str, str], *, guarded: bool
) -> None:
    """Assert that the guest reached nothing in a guarded case, and every kind of server else."""
    ray = {"head": f"{head.address}:6379"}
    refusals = run_stranger(guest, ray, RAY_AUTH_MODE="disabled")
    print(*describe(scan.answers), refusals, sep="\n", flush=True)
    assert {port.number for port in scan.answers} >= SHARD_PORTS, scan.answers.keys()
    faults = list(find_faults(scan.answers, scan.secrets | {SPARK_SECRET, RAY_TOKEN}))
    if guarded:
        assert not faults, "\n".join(faults)
        assert all(refusals.values()), refusals
        assert "InvalidAuthToken" in refusals["GcsClient"], refusals
        assert not any(run_stranger(head, ray, **environ).values())
    else:
        seen = "\n".join(faults)
        for kind in ("admits NULL: True", "GetAllNodeInfo is obeyed", "Spark asks for no secret"):
            assert kind in seen, seen
        assert not refusals["GcsClient"], refusals


def resume_here(folder: Path, snapshots: Path, steps: int) -> None:
    """Resume from a copy of the snapshots on this machine: no cluster, no Ray, and one shard."""
    store, out = folder / "store", folder / "resumed"
    shutil.copytree(snapshots, store)
    words = ["train", "--resume", store, "--solver", ROOT / "deploy/demo/lenet_solver.prototxt"]
    words += ["--data", ROOT / "deploy/demo/mnist", "--out", out, "--workers", "2"]
    words += ["--shards", "1", "--shards-in", "processes", "--max-iter", steps + _MORE]
    done = subprocess.run(downpour(*words), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["updates"] == 2 * (steps + _MORE), summary
    assert summary["test_accuracy"] > 0.8, summary


def submit_command(head: Host, words: list[str], *, guarded: bool) -> list[str]:
    """The command of docs/how-to/spark-submit.md, with the addresses of these hosts."""
    spark = ["/opt/spark/bin/spark-submit", "--master", f"spark://{head.address}:7077"]
    spark += ["--archives", "/opt/executor.tar.gz#environment"]
    spark += ["--conf", "spark.pyspark.python=./environment/bin/python"]
    spark += ["--conf", f"spark.pyspark.driver.python={_PYTHON}"]
    application = "/opt/downpour/spark_submit.py"
    return [*spark, application, *words, *([] if guarded else ["--plaintext"])]


@contextmanager
def cluster(
    folder: Path, cores: Mapping[Host, int], *, guarded: bool
) -> Iterator[Mapping[str, str]]:
    """Ray and Spark on hosts while the context lasts; gives the driver's environment.

    The first host has the head of Ray and Spark's master. `cores` are those of each host's worker
    of Spark; with 0 it has none.
    """
    head, *others = cores
    environ = write_settings(cores, guarded=guarded)
    master = f"spark://{head.address}:7077"
    ray = ["/opt/downpour/bin/ray", "start", "--block", "--disable-usage-stats", "--num-cpus", "2"]
    ray += ["--object-store-memory", str(100 << 20)]
    spark_class = ["/opt/spark/bin/spark-class"]
    deploy = "org.apache.spark.deploy"
    with ExitStack() as stack:

        def start(host: Host, name: str, command: list[str], ready: str) -> None:
            log = folder / f"{name}-{host.name}.log"
            with log.open("ab") as output:
                process = host.start(*command, environ=environ, stdout=output, stderr=STDOUT)
            stack.callback(_end, process)
            _await(process, log, ready)

        own = ["--head", "--port", "6379", "--include-dashboard", "false"]
        start(head, "ray", [*ray, *own, "--node-ip-address", head.address], "Ray runtime started")
        at = ["--host", head.address, "--port", "7077", "--webui-port", "8080"]
        name = f"{deploy}.master.Master"
        start(head, "master", [*spark_class, name, *at], "New state: ALIVE")
        for host in others:
            joins = ["--address", f"{head.address}:6379", "--node-ip-address", host.address]
            start(host, "ray", [*ray, *joins], "Ray runtime started")
        name = f"{deploy}.worker.Worker"
        for host in [host for host, count in cores.items() if count]:
            at = ["--host", host.address, "--cores", str(cores[host]), "--memory", "1g"]
            at += ["--work-dir", "/tmp/work"]
            start(host, "worker", [*spark_class, name, *at, master], "Successfully registered")
        yield environ


def write_settings(hosts: Iterable[Host], *, guarded: bool) -> dict[str, str]:
    """Write Spark's settings on each host, and Ray's token; returns the environment for both."""
    lines = ["spark.executor.memory 512m", "spark.ui.enabled false"]
    environ = {
        "SPARK_CONF_DIR": f"{HOME}/conf",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_raylet_start_wait_time_s": "240",  # a busy machine takes longer than Ray's half minute
    }
    if guarded:
        lines += ["spark.authenticate true", "spark.network.crypto.enabled true"]
        lines += ["spark.master.rest.enabled false", "spark.ui.killEnabled false"]
        lines += [f"spark.authenticate.secret {SPARK_SECRET}"]
        environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{HOME}/token"}
    for host in hosts:
        conf = host.path(f"{HOME}/conf")
        conf.mkdir()
        (conf / "spark-defaults.conf").write_text("\n".join(lines) + "\n")
        (conf / "spark-defaults.conf").chmod(0o600)
        (conf / "log4j2.properties").write_text(SPARK_LOG.read_text())
        token = host.path(f"{HOME}/token")
        token.write_text(RAY_TOKEN)
        token.chmod(0o600)
    return environ


def _await(process: "Popen[bytes]", log: Path, ready: str) -> None:
    def said() -> str:
        return f"{log.name} says {ready!r}: {log.read_text(errors='replace')[-2000:]}"

    def check() -> None:
        assert process.poll() is None, said()

    is_ready = lambda: ready in log.read_text(errors="replace")  # noqa: E731  # one line, once
    eventually(is_ready, because=said, within_s=240, check=check)


def _end(process: "Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(5)
    except Exception:  # noqa: BLE001  # it ends with its host
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
