"""Solver files follow the real Caffe: from their text to the weights, losses and histories.

The numbers come from BVLC Caffe 1.0 on a CPU. The network and the solvers are written here; a step
is what a worker and a shard do: the gradient of the network, and the solver's rule at its rate.
"""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.serial_solver import SerialSolver
from worker.caffe.model import CaffeModel
from worker.caffe.python_nets import (
    Convolution,
    InnerProduct,
    Input,
    Net,
    Pooling,
    ReLU,
    SoftmaxWithLoss,
)
from worker.caffe.solver import read_solver
from worker.caffe.solver_state import history_of

NUMBERS = np.load(Path(__file__).parents[2] / "data" / "caffe" / "solver_runs.npz")
ITERATIONS = 8
NET = Net(
    "tiny",
    [
        Input("data", shape=(8, 2, 6, 6)),
        Input("label", shape=(8,)),
        Convolution(
            "conv1",
            "data",
            num_output=3,
            kernel_size=3,
            param=[{"lr_mult": 1, "decay_mult": 1}, {"lr_mult": 2, "decay_mult": 0}],
        ),
        ReLU("relu1", "conv1", top="conv1"),
        Pooling("pool1", "conv1", pool="MAX", kernel_size=2, stride=2),
        InnerProduct(
            "ip1", "pool1", num_output=4, param=[{"lr_mult": 0.5, "decay_mult": 2}, {"lr_mult": 0}]
        ),
        SoftmaxWithLoss("loss", ["ip1", "label"]),
    ],
)
SOLVERS = {
    "sgd_plain": 'type: "SGD" base_lr: 0.1',
    "sgd_mom_wd_inv": """type: "SGD" base_lr: 0.1 momentum: 0.9 weight_decay: 0.05
                         lr_policy: "inv" gamma: 0.1 power: 0.75""",
    "sgd_L1": 'base_lr: 0.1 momentum: 0.5 weight_decay: 0.05 regularization_type: "L1"',
    "sgd_step": 'base_lr: 0.1 momentum: 0.9 lr_policy: "step" gamma: 0.5 stepsize: 2',
    "sgd_exp": 'base_lr: 0.1 lr_policy: "exp" gamma: 0.8',
    "sgd_sigmoid": 'base_lr: 0.1 lr_policy: "sigmoid" gamma: 0.5 stepsize: 3',
    "adagrad": 'type: "AdaGrad" base_lr: 0.1 weight_decay: 0.01 delta: 1e-8',
    "adam": """type: "Adam" base_lr: 0.01 momentum: 0.9 momentum2: 0.999 delta: 1e-8
               weight_decay: 0.01""",
}

Floats = NDArray[np.float32]


@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_a_solver_file_does_what_caffe_does_with_it(name: str, tmp_path: Path) -> None:
    """Weights within 1e-6 over eight iterations, losses, and the history after four."""
    NET.save(tmp_path / "net.prototxt")
    text = f'net: "net.prototxt" max_iter: {ITERATIONS} {SOLVERS[name]}'
    (tmp_path / "solver.prototxt").write_text(text)
    runs = SerialSolver(read_solver(tmp_path / "solver.prototxt"))
    runs.weights = laid_out(NUMBERS["start"], runs.model)
    for step in range(ITERATIONS):
        loss = runs.step({"data": NUMBERS["X"][step], "label": NUMBERS["Y"][step]})
        assert loss == pytest.approx(NUMBERS[f"{name}|losses"][step], rel=1e-5)
        expected = laid_out(NUMBERS[f"{name}|weights"][step], runs.model)
        np.testing.assert_allclose(runs.weights, expected, rtol=1e-6, atol=1e-6)
        if step == 3 and runs.slots:
            history = history_of(runs.slots, runs.table, runs.solver.rule)
            theirs = np.concatenate([np.ravel(slot) for slot in NUMBERS[f"{name}|slots"]])
            ours = np.concatenate([array.ravel() for array in history])
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-7)


def laid_out(flat: Floats, model: CaffeModel) -> Floats:
    """An arena with the tensors that `flat` has one after another."""
    arena, start = model.table.empty(), 0
    for view in model.table.views(arena).values():
        view[...] = flat[start : start + view.size].reshape(view.shape)
        start += view.size
    assert start == flat.size
    return arena
