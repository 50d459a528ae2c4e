"""A small GPT by learners at speeds 1:2:6, one killed: decoupled DiLoCo and torchft's DiLoCo.

    make bench B="peers diloco-rivals"
    make bench B=diloco-rivals ARGS="--seconds 60 --small"

Each contender trains the same model from the same weights on the same text, with the same AdamW
and batches, in three processes of this machine; one of them is killed in the middle, and starts
again five seconds later. Printed is the loss on held-out text against seconds and tokens. torchft
runs in an environment of its own, which `make bench B=peers` makes of
peers/torchft_diloco.txt; a contender that does not run is named with the reason. There is no link
between the processes: the modelled one cannot be put before a contender. Period and momentum are
those of the example, which were chosen for it; torchft has them, too. Ray Train is left out: a
program for it has not been written. bench_endtoend.py has one, for another net.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from tests.bench.peers.gpt_rival import Race
from tests.bench.report import save
from tests.support.fresh_clone import ROOT

EXAMPLE = ROOT / "deploy" / "examples" / "gpt_torch.py"
ENVIRONMENT = ROOT / ".venv-peers" / "torchft_diloco" / "bin" / "python"
RIVALS = {"torchft's DiLoCo": "torchft_diloco"}
_LINE = re.compile(r" *([\d,]+) +([\d.]+) +[\d.]+ +([\d.]+) +\d+\n")


class Point(NamedTuple):
    """The loss after some seconds and tokens."""

    seconds: float
    tokens: int
    loss: float


def run_ours(race: Race) -> list[Point]:
    """The example, with the second learner killed and started again."""
    steps = str(int(race.seconds / race.pace_s))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(EXAMPLE), "--pace", str(race.pace_s), "--steps", steps]
        command += ["--job", f"{folder}/job.json", *(["--small"] if race.small else [])]
        began = time.monotonic()
        run = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=_environment()
        )
        assert run.stdout is not None
        points, victim, again = list[Point](), 0, 0.0
        started = [run]
        try:
            for line in run.stdout:
                seconds = time.monotonic() - began
                if line.startswith("w1 is process"):
                    victim = int(line.split()[-1])
                if (read := _LINE.fullmatch(line)) is not None:
                    point = Point(seconds, int(read[1].replace(",", "")), float(read[3]))
                    points.append(point)
                if victim and seconds > race.kill_s:
                    os.kill(victim, signal.SIGKILL)
                    victim, again = 0, seconds + race.down_s
                if again and seconds > again:
                    again = 0.0
                    restart = [*command, "--learner", "1", "--incarnation", "1"]
                    started.append(
                        subprocess.Popen(
                            restart, start_new_session=True, text=True, env=_environment()
                        )
                    )
                if seconds > race.seconds:
                    return points
            return points
        finally:
            for process in started:
                with suppress(ProcessLookupError):  # it has ended by itself
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run_rival(module: str, race: Race) -> list[Point]:
    """A program of tests/bench/peers; raises RuntimeError with the reason if it fails."""
    if not ENVIRONMENT.exists():
        raise RuntimeError(f"no {ENVIRONMENT}: make bench B=peers")
    setting = msgspec.json.encode(race).decode()
    command = [str(ENVIRONMENT), "-m", f"tests.bench.peers.{module}", setting]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=_environment()
    )
    points = [Point(float(a), int(b), float(c)) for a, b, c in map(str.split, _rows(done.stdout))]
    if not points:
        lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise RuntimeError(lines[-1])
    return points


def _rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.fullmatch(r"[\d.]+ \d+ [\d.]+", line)]


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_all(race: Race, *, rivals: bool) -> dict[str, list[Point]]:
    """The points of each contender that runs; prints a row for each, or why it does not."""
    contenders: dict[str, Callable[[], list[Point]]] = {"decoupled_diloco": lambda: run_ours(race)}
    if rivals:
        for name, module in RIVALS.items():
            contenders[name] = lambda module=module: run_rival(module, race)  # type: ignore[misc]
    curves = {}
    for name, run in contenders.items():
        try:
            curves[name] = run()
        except RuntimeError as error:
            print(f"{name}: left out: {error}")
            continue
        print_row(name, curves[name], race)
    return curves


def print_row(name: str, points: list[Point], race: Race) -> None:
    """The loss at quarters of the time, and the tokens at its end."""
    losses = []
    for quarter in (1, 2, 3, 4):
        until = [point for point in points if point.seconds <= race.seconds * quarter / 4]
        losses.append(f"{until[-1].loss:.3f}" if until else "-")
    print(f"{name:24} {' '.join(f'{loss:>6}' for loss in losses)} {points[-1].tokens:>10,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=300.0, help="of each contender")
    parser.add_argument("--pace", type=float, default=0.25, help="of the fastest, seconds a step")
    parser.add_argument("--small", action="store_true", help="36 thousand weights")
    parser.add_argument("--only-ours", action="store_true")
    chosen = parser.parse_args()
    race = Race(chosen.seconds, chosen.pace, chosen.seconds / 2, small=chosen.small)
    print(f"{'loss after':24} {'1/4':>6} {'1/2':>6} {'3/4':>6} {'end':>6} {'tokens':>10}")
    save("diloco_rivals", run_all(race, rivals=not chosen.only_ours))


if __name__ == "__main__":
    main()
