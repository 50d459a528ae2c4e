"""The SDK's examples train on MNIST: three processes, one job, a reader that tests."""

import difflib
import gzip
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import ps

DEMO = Path(ps.__file__).parents[1] / "deploy"
WORKERS = 3


def digits() -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """MNIST's test set: images of shape (10000, 784), from 0 to 1, and labels."""
    mnist = DEMO / "demo" / "mnist"
    images, labels = (
        np.frombuffer(gzip.decompress((mnist / f"t10k-{name}.gz").read_bytes())[skip:], np.uint8)
        for name, skip in (("images-idx3-ubyte", 16), ("labels-idx1-ubyte", 8))
    )
    return np.divide(images.reshape(-1, 784), 255, dtype=np.float32), labels


def trained(example: str, tables: Any, tmp_path: Path) -> Any:
    """The weights after three processes of the example have trained them."""
    with ps.start(tables, shards=2, staleness=4, workers=WORKERS) as job:
        job.save(tmp_path / "job.json")
        workers = [
            subprocess.Popen(
                [
                    sys.executable,
                    DEMO / "examples" / example,
                    tmp_path / "job.json",
                    f"{n}",
                    f"{WORKERS}",
                ],
                # On a small machine three times all its cores wait for each other.
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
            for n in range(WORKERS)
        ]
        assert [worker.wait() for worker in workers] == [0] * WORKERS
        return job.read()


@pytest.mark.slow
def test_numpy(tmp_path: Path) -> None:
    """The NumPy example reaches 90 % on the test set."""
    dice = np.random.default_rng(1)
    start = {
        "w1": dice.normal(0, 0.05, (784, 64)).astype(np.float32),
        "b1": np.zeros(64, np.float32),
        "w2": dice.normal(0, 0.1, (64, 10)).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }
    p = trained("mnist_numpy.py", ps.Dense.like(start, rate=0.1), tmp_path)
    images, labels = digits()
    hidden = np.maximum(images @ p["w1"] + p["b1"], 0)
    assert ((hidden @ p["w2"] + p["b2"]).argmax(1) == labels).mean() > 0.9


@pytest.mark.slow
def test_pytorch(tmp_path: Path) -> None:
    """The PyTorch example reaches 90 % on the test set."""
    torch = pytest.importorskip("torch")
    from deploy.examples.mnist_torch import model

    tables = ps.Dense.like(dict(model.named_parameters()), rate=0.1)
    model.load_state_dict(trained("mnist_torch.py", tables, tmp_path))
    images, labels = digits()
    with torch.no_grad():
        scores = model(torch.from_numpy(images).view(-1, 1, 28, 28))
    assert (scores.argmax(1).numpy() == labels).mean() > 0.9


@pytest.mark.slow
def test_gpt(tmp_path: Path) -> None:
    """Three learners of different speeds, each on text of its own behind a slow link, lower the
    loss on text that none of them reads; every token of theirs is counted.
    """
    pytest.importorskip("torch")
    docs = DEMO.parent / "docs"
    command = f"{sys.executable} {DEMO}/examples/gpt_torch.py --size small --link slow".split()
    command += ["--steps", "144", "--pace", "0.02"]
    command += ["--text", *(f"{docs}/{kind}" for kind in ("tutorials", "how-to"))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *_, heading, first = done.stdout.splitlines()[: WORKERS + 2]
    *_, last, loss = done.stdout.splitlines()
    assert heading.split() == ["tokens", "seconds", "MB", "pushed", "loss", "learners"]
    assert first.split()[0] == last.split()[-1] == "0"
    assert last.split()[0] == f"{(144 + 48 + 24) * 8 * 64:,}"
    assert float(loss.split()[1]) < float(first.split()[-2]) - 1


def test_gpt_changes_few_lines() -> None:
    """A learner is the plain script with at most ten lines more or changed."""
    pytest.importorskip("torch")
    from deploy.examples import gpt_torch

    plain, learner = (inspect.getsource(f).splitlines() for f in (gpt_torch.train, gpt_torch.learn))
    lines = difflib.unified_diff([x.strip() for x in plain], [x.strip() for x in learner], n=0)
    changed = [line for line in lines if line[0] == "+" and line[1] != "+"]
    assert 0 < len(changed) <= 10


def test_gpt_comes_in_sizes() -> None:
    """Each has about as many weights as its name says; those for a GPU are not allocated here."""
    torch = pytest.importorskip("torch")
    from deploy.examples.gpt_torch import SIZES, make_model

    with torch.device("meta"):
        models = [make_model(size, "meta") for size in SIZES]
        counts = [sum(weights.numel() for weights in model.parameters()) for model in models]
    assert dict(zip(SIZES, counts, strict=True)) == {
        "small": 35_712,
        "1M": 1_032_576,
        "30M": 31_688_704,
        "100M": 99_477_504,
    }


def test_factorisation_machine() -> None:
    """It learns labels that depend on pairs of features alone, where a linear model is a guess."""
    from deploy.examples.factorisation_machine import fit

    dice = np.random.default_rng(1)
    values = dice.integers(0, 20, (4000, 2))
    labels = values.sum(1) % 2
    ids = values * 2**32 + [0, 2**20]
    scores = fit(ids[:3500], labels[:3500], ids[3500:])
    assert ((scores > 0) == labels[3500:]).mean() > 0.9
