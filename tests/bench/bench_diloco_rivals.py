"""A small GPT over slow lines, a learner killed every minute: this project, torchft, Ray Train.

    make bench B="peers diloco-rivals"
    make bench B=diloco-rivals ARGS="--seconds 60 --kill-every 20 --small --only torchft"

Each contender trains the same model from the same weights on the same text, with the same AdamW
and batches, by three learners at speeds 1:2:6. Each learner is at a place of its own, and what
serves them at a fourth; any two places are 100 ms apart on lines of 100 Mbit/s (needs root).
torchft's DiLoCo has an environment of its own, which `make bench B=peers` makes of
peers/torchft.txt; a contender that is not installed or fails is named with the reason.

Printed is the loss on held-out text against seconds and tokens, counted from the first step of any
learner; a contender has --start-s to take it. A killed learner is started again at once, and the
next death waits until all learners take steps. Period and outer optimiser are those of the example,
which were chosen for this project; torchft has them, too.
"""

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ps.transport.link_model import LinkModel, parse_link
from shards.errors import BadInput
from tests.bench.endtoend import places
from tests.bench.endtoend.caretaker import Caretaker
from tests.bench.endtoend.clusters import Kind
from tests.bench.endtoend.contest import ClusterError, Contender, Run, Trial, has_ended
from tests.bench.endtoend.places import Line, Place
from tests.bench.report import Goal, goals, save
from tests.support.fresh_clone import ROOT

DOCS = ROOT / "docs"
LINK = "rtt=100ms,rate=100Mbit"
OURS, TORCHFT, RAY_TRAIN = "downpour", "torchft", "ray-train"
CONTENDERS = {
    OURS: Contender("gpt_downpour.py", ("downpour-sgd", "torch"), Kind.ROLES),
    TORCHFT: Contender("gpt_torchft.py", ("torchft", "torch"), Kind.ROLES, environment="torchft"),
    RAY_TRAIN: Contender("gpt_ray_train.py", ("ray", "torch"), Kind.RAY),
}
SPEEDS, STEP_TOKENS = (6, 2, 1), 8 * 64  # those of the example, which imports PyTorch
_POLL_S = 0.2


class Point(NamedTuple):
    """The loss after some seconds and tokens."""

    seconds: float
    tokens: int
    loss: float


class Curve(NamedTuple):
    """One contender's run of `seconds`; `output` are the last lines of its processes."""

    points: list[Point]
    seconds: float
    started_s: float
    kills: int
    cpu_s: float
    link_bytes: int
    output: str

    @property
    def longest_pause_s(self) -> float:
        """The longest time in which no test found further tokens."""
        further = self.points[:1]
        for point in self.points:
            if point.tokens > further[-1].tokens:
                further.append(point)
        times = [point.seconds for point in further] + [self.seconds]
        return max((later - sooner for sooner, later in pairwise(times)), default=self.seconds)


def run_contender(contender: Contender, trial: Trial, seconds: float, start_s: float) -> Curve:
    """Train for this time from the first steps on, which may take `start_s` to come.

    Raises ClusterError if they do not, with the last lines of the processes; OSError if the places
    cannot be made.
    """
    with ExitStack() as stack:
        caretaker = stack.enter_context(Caretaker())
        made: list[Place] = []
        if trial.line is not None:
            made = stack.enter_context(places.make_places(trial.workers + 1, trial.line))
        run = Run(contender, trial, made, caretaker)
        try:
            run.start()
            while not run.record.exists():
                if time.time() > run.began + start_s or has_ended(run.processes[-1]):
                    raise ClusterError(f"no step in {start_s:g} s: {run.read_output(5)}")
                time.sleep(_POLL_S)
            started_s = time.time() - run.began
            run.watch(started_s + seconds)
        finally:
            cpu_s = run.end()
        points = read_points(run.record, seconds)
        if not points:
            raise ClusterError(f"no test of the model in {seconds:g} s: {run.read_output(5)}")
        counts = run.killer.kills, cpu_s, run.link_bytes
        return Curve(points, seconds, started_s, *counts, run.read_output(20))


def read_points(record: Path, seconds: float) -> list[Point]:
    """The tests of a record in the first `seconds` from its first line on."""
    lines = [json.loads(line) for line in record.read_text().splitlines(keepends=True)]
    first = min(line["time"] for line in lines)
    points = [
        Point(line["time"] - first, line["tokens"], line["loss"])
        for line in lines
        if "loss" in line
    ]
    return sorted(point for point in points if 0 <= point.seconds <= seconds)


def format_row(name: str, curve: Curve, ideal_tokens: float) -> str:
    """The loss at quarters of the time, the tokens at its end, and what was done to get there."""
    losses = []
    for quarter in (1, 2, 3, 4):
        until = [point for point in curve.points if point.seconds <= curve.seconds * quarter / 4]
        losses.append(f"{until[-1].loss:.3f}" if until else "-")
    tokens = curve.points[-1].tokens
    return (
        f"{name:12} {' '.join(f'{loss:>6}' for loss in losses)} {tokens:10,}"
        f" {100 * tokens / ideal_tokens:5.0f} {curve.kills:5} {curve.longest_pause_s:7.1f}"
        f" {curve.started_s:7.1f} {curve.cpu_s:6.0f} {curve.link_bytes / 1e6:7.1f}"
    )


HEAD = (
    f"{'loss after':12} {'1/4':>6} {'1/2':>6} {'3/4':>6} {'end':>6} {'tokens':>10} {'busy%':>5}"
    f" {'kills':>5} {'pause,s':>7} {'start,s':>7} {'CPU s':>6} {'link MB':>7}"
)


def run_all(
    contenders: Mapping[str, Contender],
    trial: Trial,
    seconds: float,
    start_s: float,
    ideal_tokens: float,
) -> dict[str, Curve]:
    """The curves of the contenders that run; prints a row for each, or why there is none."""
    print(HEAD)
    curves = {}
    for name, contender in contenders.items():
        try:
            curves[name] = run_contender(contender, trial, seconds, start_s)
        except (ClusterError, OSError) as error:
            print(f"{name}: failed: {error}")
            continue
        print(format_row(name, curves[name], ideal_tokens), flush=True)
    return curves


def list_goals(curves: Mapping[str, Curve], ideal_tokens: float) -> Iterator[Goal]:
    """Yield the goals that the curves are enough for."""
    if OURS not in curves:
        return
    last = curves[OURS].points[-1]
    yield Goal("tokens, to learners that never wait", last.tokens / ideal_tokens, 0.9, "x", True)
    for name, curve in curves.items():
        if name != OURS:
            other = curve.points[-1]
            yield Goal(f"loss at the end, to {name}", last.loss / other.loss, 1.0, "x")
            yield Goal(f"tokens, to {name}", last.tokens / max(1, other.tokens), 1.0, "x", True)


def choose_contenders(names: Sequence[str]) -> dict[str, Contender]:
    """The contenders that are installed, with their versions; prints the others and the reason."""
    able = {}
    for name in names or CONTENDERS:
        contender = CONTENDERS[name]
        if versions := contender.read_versions():
            print(f"{name}: {versions}; {contender.count_lines()} lines")
            able[name] = contender
        else:
            missing = " and ".join(contender.packages)
            print(f"{name}: left out, for {missing} are not installed: make bench B=peers")
    return able


def read_line(text: str) -> Line | None:
    """The line that `--link` describes by its round trip and rate; None for `none`."""
    if text == "none":
        return None
    try:
        model = parse_link(text)
    except BadInput as error:
        sys.exit(f"--{error}")
    if model != LinkModel(rtt_s=model.rtt_s, rate=model.rate) or math.isinf(model.rate):
        sys.exit(f"--link: expected none, or a round trip and a rate like {LINK}, got {text}")
    if (why := places.missing()) is not None:
        sys.exit(f"--link: {why}; --link none runs without it")
    return Line(model.rtt_s, model.rate)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=300.0, help="of each contender")
    parser.add_argument("--start-s", type=float, default=300.0, help="until the first steps")
    parser.add_argument("--kill-every", type=float, default=60.0, help="seconds between deaths")
    parser.add_argument("--pace", type=float, default=0.25, help="of the fastest, seconds a step")
    parser.add_argument("--link", default=LINK, help="between any two places, or none")
    parser.add_argument("--small", action="store_true", help="36 thousand weights")
    parser.add_argument("--only", nargs="+", default=[], choices=CONTENDERS)
    given = parser.parse_args(arguments)
    for option in ("seconds", "start_s", "kill_every", "pace"):
        if not 0 < (value := getattr(given, option)) < math.inf:
            sys.exit(f"--{option.replace('_', '-')}: expected seconds above 0, got {value}")
    trial = Trial(
        work="gpt",
        data=str(DOCS),
        target=math.inf,
        workers=len(SPEEDS),
        kill_every_s=given.kill_every,
        kill_of_all=True,
        line=read_line(given.link),
    )
    options = ["--pace", str(given.pace), *(["--small"] if given.small else [])]
    able = {
        name: contender._replace(options=options)
        for name, contender in choose_contenders(given.only).items()
    }
    if not able:
        sys.exit("nothing to run: every contender is left out")
    minutes = len(able) * (given.seconds + given.start_s) / 60
    print(f"at most {minutes:.0f} minutes; load before: {os.getloadavg()[0]:.1f}", flush=True)
    ideal = given.seconds / given.pace * sum(SPEEDS) / max(SPEEDS) * STEP_TOKENS
    curves = run_all(able, trial, given.seconds, given.start_s, ideal)
    save("diloco_rivals", {name: curve._asdict() for name, curve in curves.items()})
    goals(list_goals(curves, ideal))


if __name__ == "__main__":
    # Ended from outside, it still ends its contenders and removes their places.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    main()
