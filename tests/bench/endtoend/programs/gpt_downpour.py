"""This project: decoupled DiLoCo, with the script of deploy/examples/gpt_torch.py."""

import time
from pathlib import Path

import ps
import worker
import worker.torch
from deploy.examples.gpt_torch import FRAGMENTS, HOW, learn
from tests.bench.endtoend.programs.gpt import Learner, LossRecord, make_gpt
from tests.bench.endtoend.programs.task import Task, read_task


def serve(task: Task, file: Path) -> None:
    """Run the shards, and test the weights that they have, until this process is ended."""
    model, record = make_gpt(), LossRecord(task)
    tables = worker.torch.fragments(model, FRAGMENTS)
    address = task.hosts[0].rpartition(":")[0]
    # Places share their files, and a Unix socket would lead past the line.
    options = {**HOW, "host": address, "transport": "tcp"}
    with worker.start(tables, **options) as job, ps.AdminClient(job.cluster) as admin:
        job.save(file)
        while True:
            if steps := admin.status()[0].steps:
                record.test(worker.torch.load(model, job.read()), steps)
            time.sleep(1.0)


def train(task: Task, file: Path) -> None:
    """Be a learner."""
    while not file.exists():
        time.sleep(0.1)
    me, name = Learner(task, task.member), f"w{task.member}"
    with ps.connect(file) as job:
        options = {"incarnation": me.incarnation, "transport": "tcp"}
        learn(make_gpt(), me.draw_batches(), job, name, **options)


def main() -> None:
    task = read_task()
    file = Path(f"{task.record}.job")
    if task.role == "server":
        serve(task, file)
    elif task.role == "worker":  # nobody leads
        train(task, file)


if __name__ == "__main__":
    main()
