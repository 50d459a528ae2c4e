"""What a worker notices while the whole state of its shard is exported.

    python tests/bench/bench_export.py [--mebibytes 256] [--rounds 6]

One shard in a process, a worker that pulls and pushes its whole table (Adam, so a third of the
state) without pause, and an operator in another process that exports the state once a round. A
second connection asks for the shard's status every 10 ms, as heartbeats do. Seconds are the median
over the rounds; to compare with another checkout, run this file with its PYTHONPATH.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import ps
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.processes import process_shards
from shards.rules import Adam
from tests.bench.other_process import OtherProcess, update_seconds
from tests.bench.report import save

Row = dict[str, float]


def peak_mebibytes(pid: int | str = "self") -> float:
    """The most memory that a process has held."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def export(cluster_file: Path) -> None:
    """In another process: an export for each line; answers with its seconds and its memory."""
    with ps.AdminClient(ps.Cluster.load(cluster_file), patience_s=60) as admin:
        for _ in sys.stdin:
            started = time.perf_counter()
            states = admin.export()
            print(json.dumps([time.perf_counter() - started, peak_mebibytes()]), flush=True)
            del states


def measured(floats: int, rounds: int, folder: Path) -> list[Row]:
    table = ps.DenseTable("net", (ps.TensorSpec("w", (floats,)),))
    asked: list[tuple[float, float]] = []
    ended = threading.Event()

    def ask(cluster: ps.Cluster) -> None:
        with ps.AdminClient(cluster) as admin:
            while not ended.wait(0.01):
                started = time.perf_counter()
                admin.status()
                asked.append((started, time.perf_counter() - started))

    with process_shards(shard_specs(table, rule=Adam())) as hosts:
        with ps.AdminClient(hosts.cluster, patience_s=60) as admin:
            admin.install(table.empty())
        hosts.cluster.save(folder / "cluster.json")
        other = OtherProcess(__file__, "--export", folder / "cluster.json")
        asking = threading.Thread(target=ask, args=(hosts.cluster,))
        asking.start()
        rows = []
        with Client(hosts.cluster, worker="w") as client:
            for _ in range(rounds + 1):  # in the first, memory comes from the system
                began = time.perf_counter()
                quiet = [update_seconds(client) for _ in range(6)]
                middle = time.perf_counter()
                other.say("export")
                busy = [update_seconds(client)]
                while not other.has_answered():
                    busy.append(update_seconds(client))
                took_s, peak = json.loads(other.hear())
                before = [s for at, s in asked if began <= at < middle]
                during = [s for at, s in asked if at >= middle]
                rows.append(
                    {
                        "export_s": took_s,
                        "update_s": statistics.median(quiet),
                        "longest_update_s": max(busy),
                        "status_s": statistics.median(before),
                        "longest_status_s": max(during),
                        "operator_peak_mib": peak,
                        "shard_peak_mib": peak_mebibytes(hosts.pids[0]),
                    }
                )
        ended.set()
        asking.join()
        other.end()
    return rows[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mebibytes", type=int, default=256, help="the size of the state")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--export", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.export is not None:
        export(given.export)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = measured((given.mebibytes << 20) // 12 // 256 * 256, given.rounds, Path(folder))
    for name in rows[0]:
        print(f"{name:20} {statistics.median(row[name] for row in rows):10.3f}")
    print(f"\nfigures: {save('export', {'rounds': rows})}")


if __name__ == "__main__":
    main()
