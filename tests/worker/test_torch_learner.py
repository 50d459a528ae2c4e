"""A learner in PyTorch that is killed, and its optimiser's state; skipped without PyTorch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import worker
import worker.torch
from ps.snapshots.worker_saves import FOLDER, find_saves
from ps.storage import open_store
from shards.errors import BadInput
from tests.support.eventually import eventually
from tests.support.torch_learner import ROWS, adam, net
from worker.torch.local_optimizer import TorchOptimizer
from worker.training.optimizer_state import read_state

torch: Any = pytest.importorskip("torch", reason="needs the extra `torch`")

PERIOD = 8
STRATEGY = f"decoupled_diloco:h={PERIOD},overlap=2"
FRAGMENTS = 3


def start_learner(
    job: Path, keep: Path, name: str, steps: int, incarnation: int = 0
) -> tuple[subprocess.Popen[bytes], Path]:
    """A learner in a process of its own, and the file of its report."""
    report = keep / f"{name}.{incarnation}.report"
    options = {
        "job": str(job),
        "name": name,
        "fragments": FRAGMENTS,
        "strategy": STRATEGY,
        "workers": 2,
        "incarnation": incarnation,
        "steps": steps,
        "keep": str(keep),
        "report": str(report),
    }
    command = [sys.executable, "-m", "tests.support.torch_learner", json.dumps(options)]
    return subprocess.Popen(command), report


def run_learner(*args: Any, **options: Any) -> dict[str, Any]:
    """The report of a learner that runs to its end."""
    process, report = start_learner(*args, **options)
    assert process.wait(120) == 0
    result: dict[str, Any] = json.loads(report.read_text())
    return result


def test_a_killed_learner_continues_its_moments_and_lends_them(tmp_path: Path) -> None:
    """After kill -9 AdamW continues with its last save to the bit, rates included; every step and
    sample counts once. A new learner begins with the moments of that one, at its own rates."""
    file = tmp_path / "job"
    tables = worker.torch.fragments(net(), FRAGMENTS)
    with worker.start(tables, strategy=STRATEGY, workers=2, on="threads", shards=2) as job:
        job.save(file)
        killed, _ = start_learner(file, tmp_path, "w0", 1_000_000)
        eventually(
            lambda: any(
                save.note.seq >= 6 for save in find_saves(open_store(tmp_path), job.cluster.job)
            ),
            because="the learner saves its state after exchanges",
            check=lambda: killed.poll() is None or pytest.fail("the learner ended"),
        )
        killed.kill()
        killed.wait()
        saves = find_saves(open_store(tmp_path), job.cluster.job)
        state, arrays = max(saves, key=lambda save: save.note.seq).read(job.tables.layout.size)
        own = state.own_state(arrays)
        saved = read_state(own.arrays, own.values)
        assert saved is not None
        before = max(status.steps for status in job.status())

        again = run_learner(file, tmp_path, "w0", before + 30, incarnation=1)
        assert again["began"] == {
            name: array.tobytes().hex() for name, array in saved.arrays.items()
        }
        assert len(again["began"]) == 3 * 4  # two moments and a count for each parameter
        assert again["rates"] == [group["lr"] for group in saved.values["groups"]]
        assert 0 < again["rates"][0] < 0.01
        assert before <= again["first"] < before + 30  # a push may still have been on its way
        assert again["step"] == before + 30
        assert {status.steps for status in job.status()} == {before + 30}
        assert {status.samples for status in job.status()} == {ROWS * (before + 30)}

        assert again["schedule"] == json.loads(saved.values["scheduler"]["state"])
        epoch = again["schedule"]["last_epoch"]
        assert 0 < epoch <= again["first"]
        assert again["rates"][0] == pytest.approx(0.01 * 0.999**epoch), "both of one moment"

        joiner = run_learner(file, tmp_path, "w1", 10)
        assert joiner["began"].keys() == again["began"].keys()
        assert joiner["rates"] == [0.01, 0.005]
        assert joiner["schedule"]["last_epoch"] == 0
        assert (joiner["first"], joiner["step"], joiner["lost"]) == (0, 10, "")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            "kind: expected SGD, got AdamW",
        ),
        (lambda model: torch.optim.AdamW(model.parameters()), "parameters: expected those of this"),
    ],
)
def test_the_state_of_another_optimizer_is_not_taken(
    tmp_path: Path, other: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says why the optimiser began afresh, in the log and as `lost`."""
    how: dict[str, Any] = {"strategy": "local_sgd:h=2", "keep": tmp_path}
    with worker.start(worker.torch.params(net()), strategy="local_sgd:h=2", on="threads") as job:
        for incarnation, make in enumerate((adam, other)):
            model = net()
            own = make(model)
            with worker.torch.join(job, "w0", model, own, incarnation=incarnation, **how) as opt:
                assert len(own.state) == 0
                for _ in range(4):
                    model(torch.ones(2, 3)).sum().backward()
                    opt.step()
    assert opt.lost.startswith("w0 began without the state of its optimizer: its state: ")
    assert message in opt.lost
    assert opt.lost in [record.getMessage() for record in caplog.records]
    assert len(list((tmp_path / FOLDER).glob("w0.1.*.json"))) >= 1


def test_a_state_of_schedulers_in_sequence_returns() -> None:
    """Those of a sequence, functions and counters of milestones excepted: the rates continue."""
    from torch.optim import lr_scheduler

    def make() -> tuple[Any, Any, TorchOptimizer]:
        model = net()
        own = adam(model)
        parts = [
            lr_scheduler.LambdaLR(own, lambda step: 1 / (step + 1)),
            lr_scheduler.MultiStepLR(own, [2, 4]),
            lr_scheduler.CyclicLR(own, 0.001, 0.1, cycle_momentum=False),
        ]
        schedule = lr_scheduler.SequentialLR(own, parts, [3, 8])
        return own, schedule, TorchOptimizer(own, model, Mock(), schedule)

    own, schedule, local = make()
    for _ in range(6):
        local.step()
    again, other, restored = make()
    restored.begin(local.save())
    for _ in range(6):
        local.step()
        restored.step()
        assert schedule.get_last_lr() == other.get_last_lr()
        assert [group["lr"] for group in own.param_groups] == [
            group["lr"] for group in again.param_groups
        ]


def test_wrong_schedulers(tmp_path: Path) -> None:
    """One line names the argument, before the worker begins."""
    from torch.optim import lr_scheduler

    model = net()
    own = adam(model)
    constant = lr_scheduler.ConstantLR(own)
    with worker.start(worker.torch.params(net()), strategy="local_sgd:h=2", on="threads") as job:
        for optimizer, scheduler, message in (
            (own, 3, "a torch.optim.lr_scheduler.LRScheduler or None, got 3"),
            (None, constant, "None without an optimizer"),
            (adam(model), constant, "one of this optimizer, got another one's"),
            (own, lr_scheduler.ReduceLROnPlateau(own), "without a metric"),
        ):
            joined = worker.torch.join(
                job, "w0", model, optimizer, scheduler=scheduler, strategy="local_sgd:h=2"
            )
            with pytest.raises(BadInput, match=f"^wrap: scheduler: expected .*{message}"), joined:
                pass
