"""This project: `downpour train` on a Caffe solver, in Spark tasks.

The run folder does not say when the first step was: it is reckoned from the first test, which makes
it late by the time that this test took.
"""

import argparse
import csv
import subprocess
import sys
import time
from pathlib import Path

from tests.bench.endtoend.programs.task import Task, read_task, write_line

_MNIST = Path(__file__).parents[4] / "deploy" / "demo" / "mnist"
_TESTED_AT_ONCE, _TESTED = 100, 10_000
_POLL_S = 0.1


def write_solver(task: Task, folder: Path) -> Path:
    """The demo's LeNet with this rate and this batch, tested as often as the others are."""
    net = (_MNIST.parent / "lenet_train_test.prototxt").read_text()
    head, train, rest = net.partition("batch_size:")
    size = rest.split(maxsplit=1)[0]
    net_path, solver_path = folder / "net.prototxt", folder / "solver.prototxt"
    net_path.write_text(f"{head}{train} {task.batch}{rest.lstrip().removeprefix(size)}")
    interval = task.between // (task.workers * task.batch)
    solver_path.write_text(
        f'net: "{net_path}"\ntest_iter: {_TESTED // _TESTED_AT_ONCE}\n'
        f"test_interval: {interval}\ntest_initialization: false\n"
        f"max_iter: 100000\ndisplay: 100\nrandom_seed: {task.seed}\n"
        f'type: "SGD"\nbase_lr: {task.rate}\nlr_policy: "fixed"\n'
    )
    return solver_path


def read_tests(path: Path) -> list[tuple[float, float]]:
    """The seconds of training and the accuracy of each test so far."""
    if not path.exists():
        return []
    with path.open() as file:
        return [(float(row["seconds"]), float(row["accuracy"])) for row in csv.DictReader(file)]


def main() -> None:
    task = read_task()
    parser = argparse.ArgumentParser()
    parser.add_argument("--tau", type=int, default=4, help="steps between two exchanges")
    parser.add_argument("--staleness")
    given = parser.parse_known_args()[0]
    folder = Path(task.record).parent
    solver = write_solver(task, folder)
    options = {
        "--data": _MNIST,
        "--out": folder / "run",
        "--workers": task.workers,
        "--shards-in": "processes",
        "--strategy": f"eamsgd:tau={given.tau},momentum={task.momentum}",
        "--until": f"accuracy>={task.target}",
    }
    if given.staleness is not None:
        options["--staleness"] = given.staleness
    if task.cluster:
        # Places share their files, and a Unix socket would lead past the line.
        options |= {"--spark": task.cluster, "--bind": "0.0.0.0", "--transport": "tcp"}
    words = [str(word) for pair in options.items() for word in pair]
    if task.cluster:
        words.append("--plaintext")  # as everything is that other programs send
    downpour = Path(sys.executable).with_name("downpour")
    run = subprocess.Popen([downpour, "train", "--solver", solver, *words])
    tests: list[tuple[float, float]] = []
    while run.poll() is None:
        now = read_tests(folder / "run" / "evaluations.csv")
        if now and not tests:
            write_line(task, None, time.time() - now[0][0])
        for _, accuracy in now[len(tests) :]:
            write_line(task, accuracy)
        tests = now
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
