"""Kill a sweep of 500 trials 50 times; its files must be those of an unbroken one.

    python -m tests.bench.sweep_kills [--kills 50] [--seed 1]

The runner is a process of its own, killed with SIGKILL after a random number of results and up to
one trial's time more. The next one continues. Each notes a trial before it begins, so that those
begun more than once are counted. The exit status is 1 if a file differs, or if more trials were
begun again than the runner was killed.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from deploy.experiments import runner
from deploy.experiments.runner import run_sweep
from deploy.experiments.sweeps import read_sweep
from deploy.experiments.trials import Trial, TrialResult, run_trial
from tests.bench.report import Goal, goals

SWEEP = """
name = "killed"
seeds = [0, 49]
workload = "quad"
gradients = 200
look_every = 50
strategy = "{kind}"
[cluster]
workers = 4
[grid]
kind = ["asp", "stale_rate", "easgd:tau=5", "softsync:n=2", "dc_asgd"]
rate = [0.02, 0.05]
"""
_TRIAL_S = 0.05


def run_noted(sweep: Path, folder: Path) -> None:
    """Run a sweep, and note each trial that begins."""
    noted = folder.with_suffix(".begun").open("a", buffering=1)

    def begin(trial: Trial) -> TrialResult:
        noted.write(f"{trial.id}\n")
        return run_trial(trial)

    runner.run_trial = begin  # type: ignore[attr-defined]
    run_sweep(read_sweep(sweep), folder, note=lambda _: None)


def killed(sweep: Path, folder: Path, kills: int, trials: int, dice: random.Random) -> int:
    """Run a sweep and kill its runner; the kills that came before its end."""
    results, command = folder / "trials", [sys.executable, "-m", "tests.bench.sweep_kills"]
    for number in range(kills + 1):
        process = subprocess.Popen([*command, "--run", str(sweep), str(folder)])
        done = len(list(results.glob("*.parquet")))
        # What is left is shared out evenly among the kills to come.
        until = done + dice.randint(0, max(0, 2 * (trials - done) // (kills + 1 - number) - 1))
        while number < kills and process.poll() is None:
            if len(list(results.glob("*.parquet"))) >= until and folder.exists():
                time.sleep(dice.random() * _TRIAL_S)
                process.kill()
                break
            time.sleep(0.002)
        if process.wait() == 0:
            return number
    raise SystemExit(f"the last runner ended with status {process.returncode}")


def main() -> None:
    """Run the sweep both ways and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run", nargs=2, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        run_noted(*given.run)
        return
    with tempfile.TemporaryDirectory() as home:
        whole, broken, file = Path(home, "whole"), Path(home, "broken"), Path(home, "sweep.toml")
        file.write_text(SWEEP)
        sweep = read_sweep(file)
        run_sweep(sweep, whole, note=lambda _: None)
        kills = killed(file, broken, given.kills, len(sweep.trials), random.Random(given.seed))
        kept, found = (
            {one.name: one.read_bytes() for one in (folder / "trials").iterdir()}
            for folder in (whole, broken)
        )
        different = sum(kept.get(name) != found.get(name) for name in kept | found)
        again = len(broken.with_suffix(".begun").read_text().split()) - len(sweep.trials)
    goals(
        [
            Goal(
                f"kills of a sweep of {len(sweep.trials)} trials", kills, given.kills, at_least=True
            ),
            Goal("files that differ from an unbroken sweep's", different, 0),
            Goal("trials begun again, at most one a kill", again, kills),
        ]
    )
    raise SystemExit(1 if different or again > kills else 0)


if __name__ == "__main__":
    main()
