"""A model trained with shards and workers killed every few seconds, beside the same undisturbed.

    python -m tests.chaos.training [--level replicated] [--light] [--steps 200] [--every-s 3]
                                   [--picture docs/images/chaos.png]

LeNet on MNIST (tests/support/lenet_job.py), workers and shards in processes. A worker that was
killed is begun again under its name, as Spark would; a shard, as its level has it. Somebody keeps
the weights every second, and tests them afterwards on rows that nobody trains on.
"""

import argparse
import math
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ps import AdminClient, Cluster
from tests.bench.report import Goal, goals, save
from tests.chaos.levels import LEVELS, Level, leave_out_numba
from tests.chaos.schedule import Kind
from tests.support import lenet_job
from tests.support.eventually import eventually
from worker.job.training_job import Job

WORKERS, SHARDS, BOUND = 4, 2, 4
PATIENCE_S = 120.0
TESTED = 500
_POLL_S = 1.0
_POLL_S = 0.1
_FORK = multiprocessing.get_context("forkserver")


class Moment(NamedTuple):
    """The weights at one moment: seconds from the start, and updates applied."""

    at_s: float
    updates: int
    weights: NDArray[np.float32]


class Look(NamedTuple):
    """The same, tested: loss and accuracy."""

    at_s: float
    updates: int
    loss: float
    accuracy: float


class Death(NamedTuple):
    """Who was killed, and when."""

    at_s: float
    who: str


class Course(NamedTuple):
    """One run."""

    looks: list[Look]
    deaths: list[Death]


class Crew:
    """The workers, each begun again when it was killed, until it has done its steps."""

    def __init__(self, cluster: Cluster, folder: Path, job: Job) -> None:
        self._told = folder, job, cluster, PATIENCE_S
        self._incarnations = [0] * WORKERS
        self._lives = [self._begin(number) for number in range(WORKERS)]

    def _begin(self, number: int) -> BaseProcess:
        life = _FORK.Process(
            target=lenet_job.run_worker, args=(number, self._incarnations[number], *self._told)
        )
        life.start()
        return life

    @property
    def busy(self) -> list[int]:
        """Those that have not done their steps; raises when one failed that nobody killed."""
        for number, life in enumerate(self._lives):
            if life.exitcode not in {None, 0}:
                raise RuntimeError(f"worker w{number} ended with status {life.exitcode}")
        return [number for number, life in enumerate(self._lives) if life.exitcode is None]

    def kill(self, number: int) -> None:
        """kill -9, and the next life."""
        self._lives[number].kill()
        self._lives[number].join()
        self._incarnations[number] += 1
        self._lives[number] = self._begin(number)

    def end(self) -> None:
        for life in self._lives:
            life.kill()
            life.join()


class Judge:
    """Looks at the weights of a running job."""

    def __init__(self, cluster: Cluster) -> None:
        self._console = AdminClient(cluster, patience_s=PATIENCE_S)
        self._started = time.monotonic()

    @property
    def now(self) -> float:
        return time.monotonic() - self._started

    @property
    def updates(self) -> int:
        """What every shard has applied."""
        return min(status.version for status in self._console.status())

    def await_first(self) -> None:
        """Wait for the first update; time counts from then."""
        eventually(lambda: self.updates, because="a first update", within_s=PATIENCE_S)
        self._started = time.monotonic()

    def look(self) -> Moment:
        updates = self.updates
        return Moment(self.now, updates, self._console.read())

    def close(self) -> None:
        self._console.close()


def train(level: Level, steps: int, every_s: float, seed: int) -> Course:
    """One run from fresh shards to the last step; nobody is killed where `every_s` is infinite."""
    job = lenet_job.lenet_job(
        steps=steps, workers=WORKERS, shards=SHARDS, bound=BOUND, lease_s=PATIENCE_S
    )
    specs = lenet_job.specs_of(job)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lenet_job.write_rows(folder)
        hosts = stack.enter_context(level.start(specs, "127.0.0.1", folder, False))
        with AdminClient(hosts.cluster) as console:
            console.install(job.model().initial(seed))
        judge = Judge(hosts.cluster)
        stack.callback(judge.close)
        crew = Crew(hosts.cluster, folder, job)
        stack.callback(crew.end)
        judge.await_first()
        moments, deaths = _watch(level, hosts, crew, judge, every_s, random.Random(seed))
    return Course([_tested(one) for one in moments], deaths)


def _tested(one: Moment) -> Look:
    figures = lenet_job.examine(one.weights, TESTED)
    return Look(one.at_s, one.updates, figures["loss"], figures["accuracy"])


def _watch(
    level: Level, hosts: Any, crew: Crew, judge: Judge, every_s: float, dice: random.Random
) -> tuple[list[Moment], list[Death]]:
    moments, deaths, next_at = [judge.look()], list[Death](), judge.now + every_s
    while busy := crew.busy:
        if judge.now > next_at and level.whole(hosts):
            deaths.append(Death(judge.now, _kill_one(level, hosts, crew, busy, dice)))
            next_at = judge.now + every_s
        time.sleep(_POLL_S)
        if judge.now > moments[-1].at_s + _POLL_S:
            moments.append(judge.look())
    return [*moments, judge.look()], deaths


def _kill_one(
    level: Level, hosts: Any, crew: Crew, busy: Sequence[int], dice: random.Random
) -> str:
    """kill -9 of a worker, or by even chance of a process whose loss the level survives."""
    serving = level.serving(hosts) if Kind.KILL_SHARD in level.survives else {}
    if serving and dice.randrange(2):
        who = dice.choice(sorted(serving))
        os.kill(serving[who], signal.SIGKILL)
        return who
    number = dice.choice(busy)
    crew.kill(number)
    return f"worker w{number}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--level", choices=LEVELS, default="replicated")
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--every-s", type=float, default=3.0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--light", action="store_true", help="shards without numba start quickly")
    options.add_argument("--picture", type=Path)
    given = options.parse_args()
    _FORK.set_forkserver_preload(["tests.support.lenet_job"])
    level = LEVELS[given.level]
    with tempfile.TemporaryDirectory() as folder:
        if given.light:
            leave_out_numba(Path(folder) / "light")
        calm = train(level, given.steps, math.inf, given.seed)
        stormy = train(level, given.steps, given.every_s, given.seed)
    for name, course in (("undisturbed", calm), ("killed", stormy)):
        last = course.looks[-1]
        print(
            f"{name:12} {last.at_s:6.1f} s  {last.updates} updates  {len(course.deaths)} kills"
            f"  loss {last.loss:.4f}  accuracy {last.accuracy:.2%}"
        )
    print(save("chaos_training", {"level": level.name, "calm": calm, "stormy": stormy}))
    if given.picture is not None:
        draw(calm, stormy, level.name, given.picture)
    ends, due = (calm.looks[-1], stormy.looks[-1]), WORKERS * given.steps
    goals(
        [
            Goal("accuracy lost to kills", ends[0].accuracy - ends[1].accuracy, 0.01),
            Goal("updates lost or doubled", max(abs(one.updates - due) for one in ends), 0),
        ]
    )


def draw(calm: Course, stormy: Course, level: str, out: Path) -> None:
    """Loss over updates, and updates over time, of both runs; each death is a sign on them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for course, name, colour in ((calm, "undisturbed", "#9aa5b1"), (stormy, "killed", "#2a6fbb")):
        looks = course.looks
        label = f"{name}: accuracy {looks[-1].accuracy:.1%}"
        updates = [one.updates for one in looks]
        left.plot(updates, [one.loss for one in looks], color=colour, label=label)
        right.plot([one.at_s for one in looks], updates, color=colour)
    workers = [one for one in stormy.deaths if one.who.startswith("worker")]
    others = [one for one in stormy.deaths if one not in workers]
    for shape, colour, word, dead in (
        ("v", "#c2410c", "a worker", workers),
        ("X", "#7c3aed", "a shard or coordinator", others),
    ):
        if dead:
            then = [_at(stormy, one.at_s) for one in dead]
            style = {"color": colour, "s": 30, "zorder": 3, "marker": shape}
            label = f"kill -9 of {word}: {len(dead)}"
            left.scatter([x.updates for x in then], [x.loss for x in then], label=label, **style)
            right.scatter([one.at_s for one in dead], [x.updates for x in then], **style)
    left.set(xlabel="updates applied", ylabel=f"loss on {TESTED} test images")
    right.set(xlabel="seconds", ylabel="updates applied")
    left.legend(frameon=False, fontsize=9)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e4e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
    title = f"LeNet: {WORKERS} workers, {SHARDS} shards at level {level}, bound {BOUND}"
    figure.suptitle(title, fontsize=14, fontweight="bold", color="#1f2933")
    figure.savefig(out, dpi=110)


def _at(course: Course, at_s: float) -> Look:
    """The last look before a moment."""
    return [one for one in course.looks if one.at_s <= at_s][-1]


if __name__ == "__main__":
    main()
