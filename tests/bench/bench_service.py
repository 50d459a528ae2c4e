"""The training service: how fast lists are, how soon it is back, what it weighs.

    python tests/bench/bench_service.py [--jobs 10000] [--folders 1000] [--live 20] [--keyed 1000]
                                        [--queued 500] [--unread 60]

Each part starts a `downpour serve` of its own in a fresh home. The jobs of the long list are rows
of the database; the folders that are indexed again are real ones, of jobs in a terminal state; the
live jobs are runners that train nothing (tests/support/stub_runner.py).
"""

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import sqlalchemy as sa

from deploy.run.settings import TrainSettings
from deploy.runner.job_folder import Submission
from deploy.service import database_tables, server
from deploy.service.access_store import ProjectLimits
from deploy.service.database_tables import DATABASE, open_database
from deploy.service.job_store import JOBS, JobStore
from deploy.service.states import JobState
from tests.bench.report import Goal, goals, save
from tests.support import tiny_job
from tests.support.job_processes import kill_processes
from tests.support.ports import free_port
from tests.support.service_in_process import STUB

_SERVE = (
    "import sys; from pathlib import Path; from deploy.service import app, launcher, server;"
    "app.LocalLauncher = lambda: launcher.LocalLauncher((sys.executable, sys.argv[3]));"
    "server.serve(app.ServeOptions(home=Path(sys.argv[1]), slots=int(sys.argv[4])),"
    " server.Listen(host='127.0.0.1', port=int(sys.argv[2])))"
)


_PARTS = ("list", "live", "folders", "keyed", "busy", "queue", "unread")


@contextmanager
def served(
    home: Path, slots: int = 1000
) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client, float]]:
    """A service on `home`, a client, and the seconds until it had looked at all jobs."""
    port = free_port()
    begun = time.perf_counter()
    words = [str(home), str(port), str(STUB), str(slots)]
    process = subprocess.Popen([sys.executable, "-c", _SERVE, *words])
    with client_of(process, home, port) as http:
        yield process, http, time.perf_counter() - begun


@contextmanager
def client_of(process: subprocess.Popen[bytes], home: Path, port: int) -> Iterator[httpx.Client]:
    """A client of a service, once it is ready; the process is ended afterwards."""
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            while True:
                with suppress(httpx.TransportError):
                    if http.get("/readyz").status_code == 200:
                        break
                time.sleep(0.02)
            yield http
    except BaseException:
        end_runners(home)
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def end_runners(home: Path) -> None:
    """End the runners that a failed benchmark leaves behind: they outlive their service."""
    jobs = home / JOBS
    if jobs.exists():
        kill_processes(folder.name for folder in jobs.iterdir())


def submit(http: httpx.Client, solver: Path, stub: str = "train") -> str:
    """Submit a job whose runner is the stub with this behaviour; returns its id."""
    body = {"settings": {"solver": str(solver)}, "labels": {"stub": stub}}
    return str(http.post("/api/v1/jobs", json=body).json()["id"])


def lines_read(url: str) -> int:
    """Read a stream, as an open page does, until the service ends it; returns its lines."""
    with httpx.stream("GET", url, timeout=None) as answer:
        return sum(1 for _ in answer.iter_lines())


def rss_mb(process: subprocess.Popen[bytes]) -> float:
    return float(psutil.Process(process.pid).memory_info().rss) / 1e6


def p95_ms(http: httpx.Client, path: str, times: int = 100) -> tuple[float, int]:
    """The 95th percentile of the time of a GET, and the bytes of its answer as they were sent."""
    spent, size = [], 0
    for _ in range(times):
        begun = time.perf_counter()
        answer = http.get(path)
        spent.append(1000 * (time.perf_counter() - begun))
        answer.raise_for_status()
        size = answer.num_bytes_downloaded
    return statistics.quantiles(spent, n=20)[-1], size


def fill(home: Path, jobs: int, **columns: Any) -> None:
    """Give the database of a home many jobs, with figures as of jobs that trained."""
    engine = open_database(home / DATABASE)
    head = {"steps": 10**6, "planned": 10**6, "loss": 0.1, "line": [1.0 / n for n in range(1, 41)]}
    settings = TrainSettings(solver=Path("/s"), out=Path("/o")).plain()
    blank = {
        "project": "default", "labels": {"team": "a"}, "priority": 0, "slots": 2,
        "settings": settings, "state": JobState.SUCCEEDED, "state_seq": 6, "attempt": 1,
        "nonce": "", "code": "", "reason": "done", "contact": "", "cancelled": False,
        "fruitless": 0, "not_before": 0.0, "events_read": 9, "created": 1.0, "updated": 2.0,
        "head": head, **columns,
    }  # fmt: skip
    rows = [blank | {"id": f"{n:017x}", "name": f"job {n}"} for n in range(jobs)]
    with engine.begin() as connection:
        connection.execute(sa.insert(database_tables.job), rows)
    engine.dispose()


def queue(home: Path, jobs: int) -> dict[str, float]:
    """The share of a core that a service uses for jobs that a limit keeps in the queue."""
    fill(home, jobs, state=JobState.QUEUED)
    with server.access_of(home) as access:
        access.set_limits("default", ProjectLimits(running=0))
    with served(home) as (process, http, _):
        time.sleep(2.0)
        before, begun = psutil.Process(process.pid).cpu_times(), time.perf_counter()
        time.sleep(20.0)
        now, spent = psutil.Process(process.pid).cpu_times(), time.perf_counter() - begun
        found = http.get("/api/v1/jobs?state=QUEUED&limit=200").json()["jobs"]
        assert len(found) == min(jobs, 200)
    return {"queued_cpu_share": (now.user + now.system - before.user - before.system) / spent}


def unread(home: Path, solver: Path, clients: int) -> dict[str, float]:
    """What a service weighs while clients ask for the end of a long log and read nothing."""
    with served(home) as (process, http, _):
        job = submit(http, solver)
        line = b"".join(b"line %011d of a log\n" % number for number in range(1 << 15))
        with (home / JOBS / job / "logs" / "shard-0.log").open("wb") as file:
            for _ in range(84_000_000 // len(line) + 1):
                file.write(line)
        path = f"/api/v1/jobs/{job}/logs?part=shard-0&tail={16 << 20}"
        assert len(http.get(path).content) == 16 << 20
        before, peak = rss_mb(process), 0.0
        with ExitStack() as stack:
            for _ in range(clients):
                made = socket.create_connection((http.base_url.host, http.base_url.port or 80))
                stack.callback(made.close)
                host = f"Host: {http.base_url.host}:{http.base_url.port}"
                made.sendall(f"GET {path} HTTP/1.1\r\n{host}\r\n\r\n".encode())
            for _ in range(50):
                time.sleep(0.1)
                peak = max(peak, rss_mb(process))
        time.sleep(1.0)
        after = rss_mb(process)
        http.post(f"/api/v1/jobs/{job}:cancel", json={"mode": "now"})
    return {"unread_more_mb": peak - before, "unread_kept_mb": after - before}


def long_list(home: Path, jobs: int) -> dict[str, float]:
    """A list of many jobs: rows of all states."""
    fill(home, jobs)
    with served(home) as (process, http, _):
        idle = rss_mb(process)
        first, size = p95_ms(http, "/api/v1/jobs?limit=50")
        middle, _ = p95_ms(http, f"/api/v1/jobs?limit=50&cursor={jobs // 2:017x}")
        page, page_size = p95_ms(http, "/")
        return {
            "list_p95_ms": max(first, middle), "list_bytes": size, "page_p95_ms": page,
            "page_bytes": page_size, "rss_idle_mb": idle, "rss_after_mb": rss_mb(process),
        }  # fmt: skip


def live_jobs(home: Path, solver: Path, count: int) -> dict[str, float]:
    """Jobs that train while the service is killed: how soon the next one has them all."""
    with served(home) as (process, http, _):
        begun = time.perf_counter()
        ids = [submit(http, solver) for _ in range(count)]
        spent = (time.perf_counter() - begun) / count
        while len(http.get("/api/v1/jobs?state=RUNNING&limit=200").json()["jobs"]) < count:
            time.sleep(0.05)
        weight = rss_mb(process)
        process.kill()
        process.wait()
    with served(home) as (process, http, back):
        running = http.get("/api/v1/jobs?state=RUNNING&limit=200").json()["jobs"]
        assert len(running) == count
        assert all(job["attempt"] == 1 for job in running)
        for job in ids:
            http.post(f"/api/v1/jobs/{job}:cancel", json={}).raise_for_status()
        while http.get("/api/v1/jobs?state=CANCELLED&limit=200").json()["jobs"] == []:
            time.sleep(0.05)
        while len(http.get("/api/v1/jobs?state=CANCELLED&limit=200").json()["jobs"]) < count:
            time.sleep(0.05)
    return {"restart_s": back, "submit_ms": 1000 * spent, "rss_live_mb": weight}


def keyed(home: Path, solver: Path, count: int, seed: int) -> dict[str, float]:
    """Submit jobs with keys, kill the service amid them, and submit all of them again."""
    given = {"solver": str(solver), "workers": 2}
    body = {"settings": given, "labels": {"stub": "train"}}
    dice = random.Random(seed)

    def submit_keyed(http: httpx.Client, numbers: range) -> dict[int, str]:
        found = {}
        for number in numbers:
            with suppress(httpx.TransportError):
                key = {"Idempotency-Key": f"key {number}"}
                found[number] = http.post("/api/v1/jobs", json=body, headers=key).json()["id"]
        return found

    with served(home, slots=2) as (process, http, _):
        first = submit_keyed(http, range(dice.randrange(count // 4, 3 * count // 4)))
        victim = threading.Timer(dice.uniform(0.0, 0.5), process.kill)
        victim.start()
        first |= submit_keyed(http, range(len(first), count))
        victim.join()
        process.wait()
    begun = time.perf_counter()
    with served(home, slots=2) as (_, http, _):
        again = submit_keyed(http, range(count))
        spent = time.perf_counter() - begun
        cursor, ids = None, set()
        while True:
            where = {"limit": 200} | ({"cursor": cursor} if cursor else {})
            page = http.get("/api/v1/jobs", params=where).json()
            ids |= {job["id"] for job in page["jobs"]}
            if (cursor := page["cursor"]) is None:
                break
        for job in http.get("/api/v1/jobs?state=RUNNING&state=STARTING").json()["jobs"]:
            http.post(f"/api/v1/jobs/{job['id']}:cancel", json={"mode": "now"})
    same = all(again[number] == job for number, job in first.items())
    assert (len(ids), len(again), same) == (count, count, True), (len(ids), len(again), same)
    return {"keyed_jobs": len(ids), "keyed_before_kill": len(first), "keyed_again_s": spent}


def busy(home: Path, solver: Path, jobs: int, rate: int, viewers: int) -> dict[str, float]:
    """Events of live jobs while viewers watch: how late they arrive, and what that costs."""
    with served(home) as (process, http, _), ExitStack() as stack:
        ids = [submit(http, solver) for _ in range(jobs)]
        while len(http.get("/api/v1/jobs?state=RUNNING&limit=200").json()["jobs"]) < jobs:
            time.sleep(0.05)
        for _ in range(viewers - 1):
            stack.enter_context(http.stream("GET", f"/api/v1/stream?jobs={ids[0]}", timeout=None))
        lags: list[float] = []
        ended = threading.Event()
        watcher = threading.Thread(target=_watch, args=(str(http.base_url), lags, ended))
        watcher.start()
        time.sleep(1.0)
        used = psutil.Process(process.pid).cpu_times()
        begun = time.perf_counter()
        numbers = [
            len((home / "jobs" / job / "events.jsonl").read_bytes().splitlines()) for job in ids
        ]
        each, sent = max(1, rate // jobs // 10), 0
        while time.perf_counter() - begun < 5.0:
            for place, job in enumerate(ids):
                lines = []
                for _ in range(each):
                    numbers[place] += 1
                    entry = {"number": numbers[place], "time": time.time(), "attempt": 1}
                    lines.append(json.dumps(entry | {"kind": "notice", "data": {"text": "x"}}))
                with (home / "jobs" / job / "events.jsonl").open("a") as file:
                    file.write("\n".join(lines) + "\n")
                sent += each
            time.sleep(max(0.0, begun + sent / rate - time.perf_counter()))
        spent = time.perf_counter() - begun
        deadline = time.monotonic() + 60.0
        while len(lags) < sent and time.monotonic() < deadline:
            time.sleep(0.1)
        now = psutil.Process(process.pid).cpu_times()
        weight = rss_mb(process)
        ended.set()
        for job in ids:
            http.post(f"/api/v1/jobs/{job}:cancel", json={"mode": "now"})
        watcher.join()
    assert len(lags) == sent, (len(lags), sent)
    return {
        "events_per_s": sent / spent, "event_lag_p95_s": statistics.quantiles(lags, n=20)[-1],
        "busy_rss_mb": weight, "viewers": viewers,
        "busy_cpu_share": (now.user + now.system - used.user - used.system) / spent,
    }  # fmt: skip


def _watch(url: str, lags: list[float], ended: threading.Event) -> None:
    """Note how long after its time each notice arrives at a viewer of all jobs."""
    path = f"{url.rstrip('/')}/api/v1/stream?after=0"
    with suppress(httpx.TransportError), httpx.stream("GET", path, timeout=2.0) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: ") and '"notice"' in line:
                lags.append(time.time() - json.loads(line[6:])["time"])
            if ended.is_set():
                return


def reindexed(home: Path, solver: Path, count: int) -> dict[str, float]:
    """Rebuild a database from the folders of its jobs."""
    engine = open_database(home / DATABASE)
    store = JobStore(home, engine)
    for number in range(count):
        job = f"{number:017x}"
        settings = TrainSettings(solver=solver, out=store.folder(job) / "run")
        row = store.create(Submission(id=job, name=f"job {number}", created=1.0), settings)
        store.move(row, JobState.CANCELLED, reason="cancelled by a user")
    engine.dispose()
    begun = time.perf_counter()
    assert server.reindex(home) == count
    return {"reindex_s": time.perf_counter() - begun}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--folders", type=int, default=1000)
    parser.add_argument("--live", type=int, default=20)
    parser.add_argument("--keyed", type=int, default=1000)
    parser.add_argument("--queued", type=int, default=500)
    parser.add_argument("--unread", type=int, default=60)
    chosen = parser.parse_args()
    figures: dict[str, float] = {"cores": len(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as folder:
        homes = [Path(folder) / name for name in _PARTS]
        for home in homes:
            home.mkdir(mode=0o700)
        solver = tiny_job.write_job(Path(folder))
        figures |= queue(homes[5], chosen.queued)
        figures |= unread(homes[6], solver, chosen.unread)
        figures |= long_list(homes[0], chosen.jobs)
        figures |= live_jobs(homes[1], solver, chosen.live)
        figures |= reindexed(homes[2], solver, chosen.folders)
        figures |= keyed(homes[3], solver, chosen.keyed, seed=1)
        figures |= busy(homes[4], solver, chosen.live, 5100, viewers=50)
    save("service", figures)
    goals(
        [
            Goal(f"list of {chosen.jobs} jobs, p95", figures["list_p95_ms"], 100, "ms"),
            Goal("list of 50 jobs, as sent", figures["list_bytes"] / 1e3, 60, "kB"),
            Goal("page of 50 jobs, p95", figures["page_p95_ms"], 500, "ms"),
            Goal("service, idle", figures["rss_idle_mb"], 110, "MB"),
            Goal(f"service, {chosen.live} live jobs", figures["rss_live_mb"], 150, "MB"),
            Goal(f"restart with {chosen.live} live jobs", figures["restart_s"], 3, "s"),
            Goal("events taken in", figures["events_per_s"], 5000, "/s", at_least=True),
            Goal("event to a viewer, p95", figures["event_lag_p95_s"], 1, "s"),
            Goal("service, 20 live jobs and 50 viewers", figures["busy_rss_mb"], 150, "MB"),
            Goal(
                f"service, {chosen.queued} queued jobs",
                100 * figures["queued_cpu_share"],
                2,
                "% of a core",
            ),
            Goal(
                f"{chosen.unread} clients that never read, more",
                figures["unread_more_mb"],
                64,
                "MB",
            ),
            Goal(f"reindex of {chosen.folders} folders", figures["reindex_s"], 20, "s"),
        ]
    )


if __name__ == "__main__":
    main()
