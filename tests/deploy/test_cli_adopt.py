"""`downpour snapshots adopt`: training continues where Caffe's solver stopped."""

from pathlib import Path

import numpy as np
import pytest

from deploy.run.prepare import prepare
from deploy.run.settings import TrainSettings
from deploy.run.snapshot_ref import origin_of
from ps import AdminClient
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.threads import local_shards
from tests.support.cli_in_process import Run
from tests.support.cli_refusals import refuses
from tests.support.serial_solver import SerialSolver
from worker.caffe.solver import Solver, read_solver
from worker.caffe.solver_state import SolverState, history_of, write_solver_state
from worker.caffe.weight_files import write_weights
from worker.training.model import Batch

ADOPT = "snapshots adopt tiny_iter_3.solverstate place --solver solver.prototxt"
MOMENTUM = 'type: "Nesterov" momentum: 0.5 lr_policy: "step" gamma: 0.1 stepsize: 2'


def batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    return {"data": rng.integers(0, 256, (8, 1, 8, 8), np.uint8), "label": rng.integers(0, 3, 8)}


@pytest.fixture
def caffe(job: Path) -> SerialSolver:
    """A solver after three iterations; its state and its weights are saved as Caffe saves them."""
    text = (job / "solver.prototxt").read_text()
    (job / "solver.prototxt").write_text(f"{text}\n{MOMENTUM}")
    solver: Solver = read_solver(job / "solver.prototxt").with_data_shape((1, 8, 8))
    serial = SerialSolver(solver)
    for step in range(3):
        serial.step(batch(step))
    write_weights("tiny_iter_3.caffemodel", serial.model.net, serial.weights)
    history = history_of(serial.slots, serial.table, solver.rule)
    state = SolverState(3, history, "/elsewhere/tiny_iter_3.caffemodel", 1)
    write_solver_state(job / "tiny_iter_3.solverstate", state)
    return serial


def test_training_continues(downpour: Run, caffe: SerialSolver, job: Path) -> None:
    """The next step of a worker is the one that Caffe would take: weights, history and rate."""
    status, out, err = downpour(*f"{ADOPT} --data data --workers 2".split())
    assert (status, err) == (0, "")
    assert out == "snapshot place@3: downpour train --resume place@3\n"
    origin = origin_of("place@3")
    settings = TrainSettings(solver=job / "solver.prototxt", data=job / "data", out=job / "run")
    prepared = prepare(settings.replace(workers=2), origin)
    assert prepared.snapshot is not None
    assert (prepared.snapshot.manifest.steps, prepared.is_over) == (6, False)
    (state,) = prepared.snapshot.states
    solver = caffe.solver
    specs = shard_specs(
        caffe.table, shards=1, rule=solver.rule, schedule=solver.schedule, decay=solver.decay,
        bound=None, workers=2,
    )  # fmt: skip
    gradient = caffe.table.empty()
    with local_shards(specs, caffe.table.empty()) as cluster:
        with AdminClient(cluster) as admin:
            admin.restore(0, state)
        with Client(cluster, worker="w1", incarnation=1) as client:
            assert (client.step, client.clock) == (3, 3)
            weights = client.pull().weights.copy()
            np.testing.assert_array_equal(weights, caffe.weights)
            caffe.model.gradient(weights, batch(3), gradient, step=3, seed=1)
            client.push(gradient)
            client.flush()
            pushed = client.pull().weights.copy()
    caffe.step(batch(3))
    np.testing.assert_allclose(pushed, caffe.weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("--weights none.caffemodel", r"none\.caffemodel: cannot be read: No such file"),
        ("--data nowhere", "nowhere"),
    ],
)
def test_what_cannot_be_adopted(
    downpour: Run, caffe: SerialSolver, job: Path, change: str, line: str
) -> None:
    """One line names the file, and nothing is written."""
    refuses(downpour, job, f"{ADOPT} --data data {change}", rf".*{line}")


def test_a_state_of_another_rule_is_refused(downpour: Run, caffe: SerialSolver, job: Path) -> None:
    """Adam has two slots for each tensor, and Caffe's Nesterov has one."""
    text = (job / "solver.prototxt").read_text().replace('"Nesterov"', '"Adam"')
    (job / "solver.prototxt").write_text(text)
    line = r"tiny_iter_3\.solverstate: history: expected 12 arrays, 2 for each of 6 tensors, got 6"
    refuses(downpour, job, f"{ADOPT} --data data", line)
    (job / "tiny_iter_3.caffemodel").unlink()
    line = r"tiny_iter_3\.solverstate: learned_net: found no file tiny_iter_3\.caffemodel next to"
    refuses(downpour, job, f"{ADOPT} --data data", line)


def test_a_place_that_has_the_snapshot(downpour: Run, caffe: SerialSolver, job: Path) -> None:
    """It is not replaced."""
    assert downpour(*f"{ADOPT} --data data".split())[0] == 0
    refuses(downpour, job, f"{ADOPT} --data data", "place: expected a place without a snapshot 3")
