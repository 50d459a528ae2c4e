"""What a snapshot costs, how long one takes to write, and how long everything takes to come back.

    python tests/bench/bench_snapshots.py [--floats 62914560] [--rounds 5] [--folder DIR]
    python tests/bench/bench_snapshots.py --held-up   # only the first, in CPU time

By default 240 MiB of weights, with plain SGD the whole state and with Adam a third of it.

- *Held up in the shard*: one shard in this process, pushes one after another. What an Export takes
  there, and what the push behind it takes beyond the median of those before, is what it costs a
  worker in waiting, apart from the processor time that reading and writing take beside it. Once
  with a push that is there *at once*, and once with one that comes *later*, when the shard has used
  the time: then the longest of its moments counts, too, for a push may come in the midst of it.
- *Lost a snapshot*: one shard in a process, one worker that does nothing but push and pull, and
  the one who takes snapshots in a third. How much longer the pushes that fall into a snapshot took
  than as many without; over 30 s, that is the overhead. Nobody pushes like that who computes.
- *Written*: from arrays to the manifest, flushed, onto the disk of the folder.
- *Serving again*: driver and shard killed by signal 9, then one command from a fresh interpreter
  to the first pull of a worker.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

import ps
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.processes import process_shards
from ps.snapshots.catalog import Retention, SnapshotCatalog
from shards.ledger import Ledger
from shards.messages import Ack, Export, State
from shards.rules import SGD, Adam, Rule
from shards.shard import Shard
from shards.shard_state import WEIGHTS, SavedProgress, ShardState, array_name
from shards.tables import Layout, cut_evenly
from tests.bench.other_process import OtherProcess, update_seconds
from tests.bench.report import Goal, goals, save
from tests.support.shard_dsl import blank, hello, join, push
from tests.support.shard_dsl import spec as spec_of

RULES: dict[str, Rule] = {"sgd": SGD(), "adam": Adam()}
EVERY_S = 30.0
Clock = Callable[[], float]
Measured = dict[str, list[float] | list[dict[str, float]]]


def table_of(floats: int) -> ps.DenseTable:
    return ps.DenseTable("net", (ps.TensorSpec("w", (floats,)),))


def mebibytes(floats: int, rule: Rule) -> int:
    return round(4 * floats * (1 + len(rule.slot_names)) / 2**20)


# --- in the shard ---------------------------------------------------------------------------------


def held_up(
    floats: int, rule: Rule, rounds: int, *, at_once: bool, clock: Clock = time.perf_counter
) -> list[float]:
    """Seconds that pushes waited for a snapshot, each round, once there were buffers for one."""
    table = table_of(floats)
    spec = spec_of(table=table, rule=rule, bound=None)
    rule.prepare()
    shard = Shard(spec, boot=1)
    shard.restore(blank(spec=spec))
    for message in (hello("w"), join("w")):
        shard.handle(b"w", message, (), 0.0)
    gradient, seq, waited = np.ones(floats, np.float32), 0, []

    def one() -> float:
        nonlocal seq
        seq += 1
        message = push("w", seq, start=0, stop=floats)
        started = clock()
        answers = shard.handle(b"w", message, (gradient.data,), 0.0)
        took = clock() - started
        assert isinstance(answers[0].message, Ack), answers[0].message
        return took

    for number in range(1, rounds + 2):
        usual = statistics.median(one() for _ in range(7))
        started = clock()
        # A new number each: a repeated request is answered by the export that it has opened.
        (answer,) = shard.handle(b"o", Export(number, "job"), (), 0.0)
        asked = clock() - started
        assert isinstance(answer.message, State)
        assert answer.message.version == seq
        moment = 0.0 if at_once else longest_moment(shard, clock)
        waited.append(asked + moment + max(0.0, one() - usual))
    return waited[1:]  # in the first, memory comes from the system


def longest_moment(shard: Shard, clock: Clock) -> float:
    """Seconds that the longest of the steps took that a server does while nothing comes."""
    longest = 0.0
    while not shard.is_prepared:
        started = clock()
        shard.prepare()
        longest = max(longest, clock() - started)
    return longest


# --- between processes ----------------------------------------------------------------------------


def take(cluster_file: Path, folder: Path) -> None:
    """In another process: for each line a snapshot; answers with its seconds."""
    cluster = ps.Cluster.load(cluster_file)
    shelf = SnapshotCatalog(folder, Retention(count=1))
    told = {"layout": cluster.layout, "shard_map": cluster.map, "rules": ("any",), "workers": 1}
    with ps.AdminClient(cluster, patience_s=60) as console:
        for number, _ in enumerate(sys.stdin):
            started = time.perf_counter()
            shelf.save(number, console.export(), **told)  # type: ignore[arg-type]
            print(time.perf_counter() - started, flush=True)


def lost(floats: int, rule: Rule, rounds: int, folder: Path) -> list[dict[str, float]]:
    """For each round: seconds lost to one snapshot, and the longest push with and without."""
    table = table_of(floats)
    found = []
    with process_shards(shard_specs(table, rule=rule)) as hosts:
        with ps.AdminClient(hosts.cluster, patience_s=60) as console:
            console.install(table.empty())
        hosts.cluster.save(folder / "cluster.json")
        taker = OtherProcess(__file__, "--take", folder / "cluster.json", folder / "snapshots")
        with Client(hosts.cluster, worker="w") as client:
            for _ in range(rounds + 1):
                quiet = [update_seconds(client) for _ in range(9)]
                taker.say("now")
                busy: list[float] = []
                while not taker.has_answered():
                    busy.append(update_seconds(client))
                whole_s = float(taker.hear())
                usual = statistics.mean(quiet)
                found.append(
                    {
                        "lost_s": sum(busy) - len(busy) * usual,
                        "push_s": usual,
                        "longest_quiet_s": max(quiet),
                        "longest_s": max(busy),
                        "snapshot_s": whole_s,
                    }
                )
        taker.end()
    return found[1:]


# --- on disk, and back ----------------------------------------------------------------------------


def state_of(floats: int, rule: Rule) -> ShardState:
    rng = np.random.default_rng(1)
    names = [array_name(table_of(floats).name, one) for one in (WEIGHTS, *rule.slot_names)]
    arrays = {name: rng.standard_normal(floats, np.float32) for name in names}
    return ShardState(SavedProgress(1, 1, 1, Ledger()), arrays)


def written(floats: int, rule: Rule, rounds: int, folder: Path) -> list[float]:
    """Seconds from arrays to a whole snapshot."""
    layout, state, found = Layout((table_of(floats),)), state_of(floats, rule), []
    shelf = SnapshotCatalog(folder, Retention(count=1))
    for number in range(rounds):
        started = time.perf_counter()
        shelf.save(
            number,
            [state],
            layout=layout,
            shard_map=cut_evenly(layout, 1),
            rules=("any",),
            workers=1,
        )
        found.append(time.perf_counter() - started)
    return found


def serve(folder: Path) -> None:
    """In another process: everything from the newest good snapshot, up to a worker's first pull."""
    found = SnapshotCatalog(folder).newest_good()
    specs = shard_specs(found.manifest.layout.tables[0], rule=Adam())
    with process_shards(specs) as hosts:
        with ps.AdminClient(hosts.cluster, patience_s=60) as console:
            for shard, state in enumerate(found.states):
                console.restore(shard, state)
        with Client(hosts.cluster, worker="w") as client:
            client.pull()
            print(*hosts.pids, flush=True)
            sys.stdin.read()


def restarts(folder: Path, rounds: int) -> list[dict[str, float]]:
    """Seconds from nothing to serving, each after a kill -9 of driver and shard; CPU seconds, too,
    which say more on a machine that others keep busy.
    """
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        other = OtherProcess(__file__, "--serve", folder)
        pids = [int(pid) for pid in other.hear().split()]
        took = time.perf_counter() - started
        spent = [psutil.Process(pid).cpu_times() for pid in (other.process.pid, *pids)]
        found.append({"serving_s": took, "cpu_s": sum(one.user + one.system for one in spent)})
        for pid in (other.process.pid, *pids):
            os.kill(pid, signal.SIGKILL)
        other.process.wait()
    return found


def waits(floats: int, rule: Rule, rounds: int, clock: Clock = time.perf_counter) -> Measured:
    """`held_up` by each of both pushes, where it makes a difference."""
    size = f"{mebibytes(floats, rule)} MiB {rule.__struct_config__.tag}"
    return {
        f"held up {when}, {size}": held_up(floats, rule, rounds, at_once=at_once, clock=clock)
        for when, at_once in (("at once", True), ("later", False))
        if at_once or rule.slot_names
    }


def measured(floats: int, rounds: int, folder: Path) -> Measured:
    figures: Measured = {}
    for name, rule in RULES.items():
        size = f"{mebibytes(floats, rule)} MiB {name}"
        figures |= waits(floats, rule, rounds)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            figures[f"lost, {size}"] = lost(floats, rule, rounds, Path(place))
        with tempfile.TemporaryDirectory(dir=folder) as place:
            figures[f"written, {size}"] = written(floats, rule, rounds, Path(place))
            if rule.slot_names:
                figures[f"serving, {size}"] = restarts(Path(place), rounds)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--floats", type=int, default=60 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where snapshots are written (default: here)")
    parser.add_argument("--held-up", action="store_true", help="only this, in CPU time")
    parser.add_argument("--take", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.take is not None:
        take(*given.take)
    elif given.serve is not None:
        serve(given.serve)
    else:
        floats = given.floats // 256 * 256  # as a table has them
        if given.held_up:
            clock = time.thread_time
            sgd, adam = (waits(floats, rule, given.rounds, clock) for rule in RULES.values())
            tell(sgd | adam)
        else:
            tell(measured(floats, given.rounds, given.folder or Path.cwd()))


def tell(figures: Measured) -> None:
    rows = []
    for name, values in figures.items():
        each = [value for value in values if isinstance(value, dict)]
        if each:
            middle = {key: statistics.median(one[key] for one in each) for key in each[0]}
            print(name, "  ".join(f"{key} {value:.3f}" for key, value in middle.items()))
            if "lost_s" in middle:
                share = 100 * middle["lost_s"] / EVERY_S
                rows.append(Goal(f"overhead, one in 30 s{name[4:]}", share, 2, "%"))
            else:
                rows.append(Goal(f"all killed, {name}", middle["serving_s"], 8, "s"))
            continue
        plain = [value for value in values if isinstance(value, float)]
        print(name, "  ".join(f"{value:.3f}" for value in plain))
        middle_s = statistics.median(plain)
        if name.startswith("held up"):
            rows.append(Goal(f"pushes {name}", 1e3 * middle_s, 5, "ms"))
        else:
            rows.append(Goal(name, middle_s, 1.2 if "sgd" in name else 3.0, "s"))
    print(f"\nfigures: {save('snapshots', figures)}")
    goals(rows)


if __name__ == "__main__":
    main()
