"""What `make gpu` does beside measuring, as far as it can be tried without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cupy_kernels import cupy_device
from deploy.examples import cifar10
from tests.bench.report import Goal
from tests.gpu import cifar, run, training
from tests.gpu.race import Ceilings, Times
from tests.support.cifar_package import write_package
from worker.caffe.model import CaffeModel
from worker.caffe.solver import read_solver


def test_without_a_gpu_nothing_is_run() -> None:
    """It says so and exits with 2."""
    if cupy_device.gpu() is not None:
        pytest.skip("a GPU answers here")
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.run"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "no GPU answers here: nothing was run\n")


def test_it_needs_only_the_base_install() -> None:
    """Neither Ray nor Spark nor Arrow nor OpenCV is loaded for it."""
    code = (
        "import sys, tests.gpu.run;"
        "print([m for m in ('ray', 'pyspark', 'pyarrow', 'cv2', 'psutil', 'numba', 'hypothesis')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_lenet_learns_through_a_process_shard() -> None:
    """On the CPU, by the same way as on a GPU: 60 steps are far better than guessing."""
    data = training.mnist(Path("deploy/demo/mnist"))
    few = training.Data(data.train, data.train_label, data.test[:1000], data.test_label[:1000])
    solver = read_solver(Path("deploy/demo/lenet_solver.prototxt"), (1, 28, 28))
    trained = training.train(solver, few, 60, training._CPU)
    assert trained.accuracy > 0.6


def test_cifar_becomes_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's images and labels, in one file; training subtracts the mean."""
    digest, images = write_package(tmp_path / "c.tgz")
    monkeypatch.setattr(cifar10, "SHA256", digest)
    monkeypatch.setattr(sys, "argv", ["cifar", str(tmp_path / "c.tgz"), str(tmp_path / "c.npz")])
    cifar.main()
    with np.load(tmp_path / "c.npz") as arrays:
        assert arrays["train_data"].shape == (20, 3, 32, 32)
        np.testing.assert_array_equal(arrays["test_data"], images)
        assert arrays["test_label"].tolist() == [0, 1, 2, 3]
    data = training.read_cifar(tmp_path / "c.npz")
    assert np.abs(data.train.mean(axis=0)).max() < 1e-3


def test_the_network_is_cifar10_quick() -> None:
    """145,578 parameters, and a test net with an accuracy."""
    solver = read_solver(training._NETS / "cifar10_quick_solver.prototxt", (3, 32, 32))
    table = CaffeModel(solver.train).table
    assert sum(tensor.size for tensor in table.tensors) == 145_578
    assert "accuracy" in CaffeModel(solver.tests[0].net).net.outputs


def test_what_was_measured_is_written_down(tmp_path: Path) -> None:
    """Figures, device and versions as JSON; the goals as a table."""
    found = run.Findings()
    found.ceilings = Ceilings(4e12)
    found.times = {"race": {"ours": Times(1e-3, 1e-3, 2e-3, 1e-3)}}
    found.goals = [Goal("fast", 2.0, 1.0, "ms"), Goal("good", 0.95, 0.9, "", at_least=True)]
    found.write(tmp_path, {"device": "a GPU", "cupy": "14"})
    figures = json.loads((tmp_path / "gpu.json").read_text())
    assert figures["facts"] == {"device": "a GPU", "cupy": "14"}
    assert figures["times"]["race"]["ours"]["p90"] == 2e-3
    assert [goal["met"] for goal in figures["goals"]] == [False, True]
    text = (tmp_path / "gpu.md").read_text()
    assert text.startswith("On a GPU, cupy 14:\n")
    assert "| short | fast | 2 ms | ≤ 1 ms |" in text
    assert "| met | good | 0.95  | ≥ 0.9  |" in text
