"""Where the start of a training goes, from the command to the first step.

    python tests/bench/bench_start.py [--rounds 3] [--warm]

`downpour train` on the demo's data, with 4 workers on the embedded Spark and 2 shards in Ray.
*Prepared* is a machine that has trained before, and on which `downpour prepare` has run; on a
*warm* one it has not. *Cold* has an empty cache of numba as well; the files of the libraries may be
in memory. The moments are those of the run's summary, `step` to half a second;
`cpu` are the CPU seconds of all processes of the run, the test included. Rounds take turns, and
each figure is the median of its rounds.
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec

from deploy.run.summary import Summary
from deploy.runner.subreaper import __file__ as subreaper
from tests.bench.report import Goal, goals, save
from tests.support.cpu_seconds import read_tree
from tests.support.fresh_clone import ROOT

MOMENTS = ("inputs", "ray", "spark", "shards", "workers", "step")
STEPS, PREPARED_S, COLD_S, POLL_S = 20, 8.0, 15.0, 0.2
TRAIN = (
    "train", "--solver", "deploy/demo/lenet_solver.prototxt",
    "--data", "deploy/demo/mnist", "--shards", "2", "--workers", "4", "--staleness", "4",
    "--strategy", "downpour:scale=1", "--max-iter", str(STEPS),
)  # fmt: skip


def start(folder: Path, env: dict[str, str]) -> dict[str, float]:
    """Train for some steps; returns the moments of the start, and the CPU seconds of the run."""
    command = [
        sys.executable,
        "-I",
        "-S",
        subreaper,
        str(Path(sys.executable).with_name("downpour")),
        *TRAIN,
    ]
    used: dict[int, float] = {}
    with (folder / "output").open("w") as output:
        run = subprocess.Popen(
            [*command, "--out", str(folder / "run")],
            cwd=ROOT,
            env=os.environ | env,
            stdout=output,
            stderr=output,
        )
        while run.poll() is None:
            used |= read_tree(run.pid)
            time.sleep(POLL_S)
    if run.returncode:
        sys.exit((folder / "output").read_text())
    summary = msgspec.json.decode((folder / "run" / "summary.json").read_bytes(), type=Summary)
    return summary.start | {"cpu": sum(used.values())}


def prepare_machine(caches: Path) -> None:
    """Run `downpour prepare`, which writes into `caches`."""
    downpour = Path(sys.executable).with_name("downpour")
    env = os.environ | {"XDG_CACHE_HOME": str(caches)}
    subprocess.run([downpour, "prepare"], env=env, check=True)


def main() -> None:
    """Print the moments of each start, then the goals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="leave out the cold ones")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {options.rounds}")
    rounds: dict[str, list[dict[str, float]]] = {}
    machines = ("prepared", "warm") if options.warm else ("prepared", "warm", "cold")
    with TemporaryDirectory() as prepared:
        prepare_machine(Path(prepared))
        for _, name in itertools.product(range(options.rounds), machines):
            with TemporaryDirectory() as place:
                env = {"XDG_CACHE_HOME": prepared if name == "prepared" else place}
                if name == "cold":
                    env["NUMBA_CACHE_DIR"] = place
                found = start(Path(place), env)
            rounds.setdefault(name, []).append(found)
            print(f"{name:8}", *(f"{key} {value:.1f}" for key, value in found.items()), sep="  ")
    figures = {
        name: {key: median(one.get(key, float("nan")) for one in of) for key in (*MOMENTS, "cpu")}
        for name, of in rounds.items()
    }
    save("start", figures)
    print(f"{'seconds':8}", *(f"{key:>8}" for key in (*MOMENTS, "cpu")))
    for name, of in figures.items():
        print(f"{name:8}", *(f"{value:8.1f}" for value in of.values()))
    limits = {"prepared": PREPARED_S, "cold": COLD_S}
    goals(
        Goal(f"first step, {name}", figures[name]["step"], limit, "s")
        for name, limit in limits.items()
        if name in figures
    )


if __name__ == "__main__":
    main()
