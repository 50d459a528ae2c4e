"""Break real processes and real links by a seeded schedule, and judge every read and the weights.

    python -m tests.chaos.run [--level memory] [--seconds 600] [--seed 1] [--kills 300] [--tour]
                              [--kinds kills | --kinds cuts | --kinds "link down,..."]
                              [--bound 4] [--every-s 2] [--soak] [--curve] [--window 4]
                              [--quorum 2]

Workers push integers under plain SGD; every weight is a sum that says how many pushes, and which,
were applied (record.py), and so does every read of it (oracle.py). So do rows of two sparse tables
that most workers push in the same steps (rows.py). Ends with a table, the goals, and status 1 if a
promise was not kept. In runs/chaos it leaves the report as JSON, every round as it was played, and
the workers' journals and logs.

With root it moves into network namespaces of its own and cuts links; without, it says so and does
the rest. Everything it starts ends with it.

With `--window` workers train by a strategy with windows, and there are two dense tables. A push is
the mean of a window's local steps, and as large as one of them.

With `--quorum` learners exchange two fragments by `decoupled_diloco`, whose reports the shards
merge (reports.py). No lease runs out: what waited for a dead learner, or a stranger, would wait for
ever. So strangers stay away, and the job does not move.

With `--curve` all of them speak CURVE, as where other hosts can reach the shards.

`--soak` is about memory: a fault every two seconds, none longer than that, and every other worker
is spared kill -9, so that there are processes that live all along to look at.
"""

import argparse
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from shards.errors import DownpourError
from tests.bench.report import show
from tests.chaos import namespaces
from tests.chaos.cluster import DRIVER, Broken, Party, Plan, party
from tests.chaos.faults import Met, play
from tests.chaos.levels import LEVELS, leave_out_numba
from tests.chaos.memory import Memory
from tests.chaos.oracle import Found
from tests.chaos.record import Verdict
from tests.chaos.report import Outcome, figures, goals, table
from tests.chaos.schedule import KILLS, LINK_KINDS, Kind, Mix, Round, rounds

FOLDER = Path("runs") / "chaos"
_SOAK_S = 2.0
_SLOW = "delay, each way, of the last worker's link to the last shard; it is not cut then"
_KILLS_OF = {
    Kind.KILL_SHARD: "shard",
    Kind.KILL_BACKUP: "backup",
    Kind.KILL_COORDINATOR: "coordinator",
}
_NOT_WITH_REPORTS = (
    Kind.FULL_DISK,  # its snapshots are judged as those of single pushes
    Kind.MOVE,
    Kind.SLOW_READERS,
    Kind.FUZZ,
    Kind.DESCRIPTORS,
)
_USUAL = {
    Kind.KILL_WORKER: 8.0,
    Kind.ABSENCE: 4.0,
    Kind.KILL_SHARD: 6.0,
    Kind.KILL_BACKUP: 3.0,
    Kind.KILL_COORDINATOR: 2.0,
    Kind.LEAVE: 2.0,
    Kind.FORK: 2.0,
    Kind.STOP_WORKER: 2.0,
    Kind.STOP_SHARD: 2.0,
    Kind.FULL_DISK: 1.0,
    Kind.SLOW_READERS: 1.0,
    Kind.FUZZ: 1.0,
    Kind.DESCRIPTORS: 1.0,
    Kind.MOVE: 0.2,  # the former shards stay
} | dict.fromkeys(LINK_KINDS, 1.0)


def mix_for(running: Party, given: argparse.Namespace) -> Mix:
    """What may go wrong in this run."""
    level, workers, serving = running.plan.level, running.names, tuple(running.serving)
    shards = [name for name in serving if name.startswith("shard")]
    targets: dict[Kind, Sequence[str]] = {
        Kind.KILL_WORKER: workers[::2] if given.soak else workers,
        Kind.ABSENCE: workers if given.quorum else [],
        Kind.LEAVE: workers[::2] if given.soak else workers,
        Kind.FORK: (*workers, DRIVER),
        Kind.STOP_WORKER: workers,
        Kind.STOP_SHARD: shards,
        Kind.FULL_DISK: ["the disk"] if running.disk.exists() else [],
        Kind.SLOW_READERS: ["strangers"],
        Kind.FUZZ: ["strangers"],
        Kind.DESCRIPTORS: shards,
        Kind.MOVE: ["the job"] if level.movable and not given.soak else [],
    } | dict.fromkeys(LINK_KINDS, tuple(running.links))
    # A soak looks at shards that live all along, where there would be no log to begin again from.
    spared = given.soak and level.rollback_s is not None
    if given.quorum:
        targets |= dict.fromkeys(_NOT_WITH_REPORTS, ())
    for kind, prefix in _KILLS_OF.items():
        names = [name for name in serving if name.startswith(prefix)]
        targets[kind] = names if kind in level.survives and not spared else []
    weights = {kind: weight for kind, weight in _USUAL.items() if kind in given.kinds}
    span = given.shortest_s, given.longest_s
    return Mix(weights, targets, *span, level.together, given.tour)


class Run:
    """A run under way, and what it has come to so far."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given = given
        self.folder = folder
        self.done: Counter[Kind] = Counter()
        self.met: list[Met] = []
        self.verdicts: list[Verdict] = []
        self.found: Found | None = None
        self.joins: list[int] = []
        self.broken = ""
        self.memory = Memory()
        self.started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def go(self, plan: Plan) -> None:
        """Play rounds until the time is up, or enough was killed; then judge."""
        try:
            with party(plan, self.folder, disk=self.given.spaces) as running:
                self.started = time.monotonic()
                try:
                    self._play_all(running)
                    self.verdicts, self.found = running.finish()
                    self.joins = running.exchanges_to_merge()
                except (Broken, DownpourError):
                    self.found = running.judge_reads()
                    raise
        except (Broken, DownpourError) as error:
            self.broken = f"{type(error).__name__}: {error}"

    def _play_all(self, running: Party) -> None:
        began = self.started
        for told in rounds(self.given.seed, mix_for(running, self.given)):
            if self._enough():
                break
            self._play(running, told)
            began += self.given.every_s
            time.sleep(max(0.0, began - time.monotonic()))

    def _enough(self) -> bool:
        kills = sum(self.done[kind] for kind in KILLS)
        late: bool = self.seconds > self.given.seconds
        return late or 0 < self.given.kills <= kills

    def _play(self, running: Party, told: Round) -> None:
        before = self.seconds
        met = play(running, told)
        self.met += met
        self.done.update(fault.kind for fault in told.faults)
        if self.given.soak:
            running.collect()
            self.memory.look({**running.serving, **running.pids}, self.seconds)
        with (self.folder / "rounds.log").open("a") as log:
            again = max(one.again_s for one in met)
            faults = ", ".join(map(str, told.faults))
            log.write(f"{before:8.2f} s  {faults}: acknowledged again after {again * 1e3:.0f} ms\n")

    def outcome(self) -> Outcome:
        return Outcome(
            level=self.given.level,
            seed=self.given.seed,
            seconds=self.seconds,
            done=self.done,
            met=self.met,
            verdicts=self.verdicts,
            found=self.found,
            joins=self.joins,
            bound=self.given.bound,
            rollback_s=LEVELS[self.given.level].rollback_s,
            kills_wanted=self.given.kills,
            broken=self.broken,
            rss_mb_per_h=self.memory.slopes() if self.given.soak else {},
        )


def main() -> int:
    """Run as told; returns the exit status."""
    given = parse()
    why = namespaces.missing()
    given.spaces = why is None
    if given.spaces:
        namespaces.move_into_own()
    else:
        print(f"no links are cut and no disk is filled: {why}")
    level = LEVELS[given.level]
    links = given.spaces and level.linkable
    plan = Plan(
        level=level,
        workers=given.workers,
        linked=given.linked if links and not given.slow_ms else 0,
        shards=given.shards,
        floats=given.floats,
        bound=given.bound,
        rest_s=given.rest_ms / 1e3,
        retry_s=given.retry_s,
        curve=given.curve,
        slow_s=given.slow_ms / 1e3,
        burst=given.burst,
        window=given.window,
        quorum=given.quorum,
        mutant=given.mutant,
        host=namespaces.HERE if links else "127.0.0.1",
    )
    over = " over CURVE" if given.curve else ""
    print(f"level {plan.level.name}{over}: {plan.level.promise}", flush=True)
    folder = FOLDER.absolute() / f"{given.level}-{given.seed}{'-curve' if given.curve else ''}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if given.light:
        leave_out_numba(folder / "light")
    run = Run(given, folder)
    run.go(plan)
    outcome = run.outcome()
    print(table(outcome))
    show(goals(outcome))
    (folder / "report.json").write_text(json.dumps(figures(outcome), indent=2) + "\n")
    print(folder)
    return 0 if outcome.kept else 1


def kinds(names: str) -> list[Kind]:
    """The kinds of these names; `cuts` are all that cut a link.

    `kills` are all that kill a process, and those that begin or end one in another way.
    """
    groups = {"kills": (*KILLS, Kind.LEAVE, Kind.FORK), "cuts": LINK_KINDS}
    return [*groups[names]] if names in groups else [Kind(name) for name in names.split(",")]


def parse() -> argparse.Namespace:
    """The command's options."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--level", choices=LEVELS, default="memory")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--seconds", type=float, default=600.0)
    options.add_argument("--kills", type=int, default=0, help="end after this many kills")
    options.add_argument(
        "--kinds", type=kinds, default=[*Kind], help="names, with commas; kills; cuts"
    )
    options.add_argument("--tour", action="store_true", help="begin with one fault of each kind")
    options.add_argument("--shortest-s", type=float, default=0.2, help="of a fault that lasts")
    options.add_argument("--longest-s", type=float, help="default: 10; with --soak 2")
    options.add_argument("--every-s", type=float, help="rounds begin so; default: 0; with --soak 2")
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--linked", type=int, default=1, help="of them, behind a link")
    options.add_argument("--shards", type=int, default=2)
    options.add_argument("--floats", type=int, default=4096)
    options.add_argument("--bound", type=int, help="staleness bound in steps; default: none")
    options.add_argument("--rest-ms", type=float, default=2.0, help="of a worker between pushes")
    options.add_argument("--burst", type=int, default=3, help="most pushes of a worker a read")
    options.add_argument(
        "--window",
        type=int,
        default=0,
        help="steps a push, by a strategy with windows, on 2 tables",
    )
    options.add_argument(
        "--quorum",
        type=int,
        default=0,
        help="reports on 2 fragments, merged by this number",
    )
    options.add_argument("--slow-ms", type=float, default=0.0, help=_SLOW)
    options.add_argument("--retry-s", type=float, default=0.1, help="of clients; theirs is 1")
    options.add_argument("--mutant", default="", help="a bug for workers to have: tests/mutants")
    options.add_argument("--light", action="store_true", help="shards without numba start quickly")
    options.add_argument("--curve", action="store_true", help="have all processes speak CURVE")
    options.add_argument("--soak", action="store_true", help="tell the slope of memory")
    given = options.parse_args()
    clashes = given.bound is not None or given.window or given.quorum > given.workers
    if given.quorum and clashes:
        options.error("--quorum: no --bound and no --window, and at most --workers")
    if given.longest_s is None:
        given.longest_s = _SOAK_S if given.soak else 10.0
    if given.every_s is None:
        given.every_s = _SOAK_S if given.soak else 0.0
    return given


if __name__ == "__main__":
    sys.exit(main())
