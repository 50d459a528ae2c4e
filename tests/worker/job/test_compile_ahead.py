"""Loops are compiled once, before the workers need them."""

from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from threadpoolctl import threadpool_info

from deploy.run.prepare import Inputs
from deploy.run.settings import TrainSettings
from tests.support.fresh_clone import ROOT
from worker.caffe.model import CaffeModel
from worker.job import compile_ahead
from worker.job.training_job import Job
from worker.training.device_selection import DeviceRequest

DEMO = ROOT / "deploy" / "demo"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    solver, data = DEMO / "lenet_solver.prototxt", DEMO / "mnist"
    return Inputs(TrainSettings(solver=solver, data=data, out=tmp_path / "run")).job


def count_gradients(patch: pytest.MonkeyPatch) -> list[float]:
    """The losses of all gradients that a net computes from now on, where numba has a folder."""
    patch.setattr(compile_ahead, "stores_loops", lambda: True)
    losses: list[float] = []
    original = CaffeModel.gradient

    def gradient(*args: object, **options: object) -> float:
        losses.append(original(*args, **options))  # type: ignore[arg-type]
        return losses[-1]

    patch.setattr(CaffeModel, "gradient", gradient)
    return losses


def test_a_step_of_zeros_precedes_the_workers(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's net takes the step: its loss is that of a guess among ten classes."""
    monkeypatch.setattr(compile_ahead, "compiles_first", lambda *, net: net)
    losses = count_gradients(monkeypatch)
    compile_ahead.compile_ahead(job)()
    assert losses == [pytest.approx(np.log(10))]


def test_nothing_is_compiled_in_vain(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has the loops takes no step, nor does one whose workers need none."""
    losses = count_gradients(monkeypatch)
    monkeypatch.setattr(compile_ahead, "compiles_first", lambda *, net: not net)
    compile_ahead.compile_ahead(job)()
    monkeypatch.setattr(compile_ahead, "compiles_first", lambda *, net: net)
    compile_ahead.compile_ahead(structs.replace(job, device=DeviceRequest(gpu=True)))()
    compile_ahead.compile_ahead(structs.replace(job, driver_model=None))()
    compile_ahead.compile_ahead(job, workers_here=False)()
    monkeypatch.setattr(compile_ahead, "stores_loops", lambda: False)
    compile_ahead.compile_ahead(job)()
    assert not losses


def test_a_model_that_fails_is_left_to_the_workers(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes ahead, after the step was tried."""
    monkeypatch.setattr(compile_ahead, "compiles_first", lambda *, net: net)
    steps: list[int] = []

    def gradient(*_: object, step: int, **__: object) -> float:
        steps.append(step)
        raise ValueError("no step on zeros")

    monkeypatch.setattr(CaffeModel, "gradient", gradient)
    compile_ahead.compile_ahead(job)()
    assert steps == [0]


def test_the_step_is_computed_on_one_thread_of_blas(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start of a JVM forks the driver, for which OpenBLAS ends its threads: a product on
    several of them, begun before, would never end, nor would the fork."""
    monkeypatch.setattr(compile_ahead, "stores_loops", lambda: True)
    monkeypatch.setattr(compile_ahead, "compiles_first", lambda *, net: net)
    threads: list[int] = []

    def gradient(*_: object, **__: object) -> float:
        pools = (pool for pool in threadpool_info() if pool["user_api"] == "blas")
        threads.extend(pool["num_threads"] for pool in pools)
        return 0.0

    monkeypatch.setattr(CaffeModel, "gradient", gradient)
    compile_ahead.compile_ahead(job)()
    assert threads
    assert set(threads) == {1}
