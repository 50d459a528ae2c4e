"""A solver's job."""

from pathlib import Path

from cupy_kernels.types import Precision
from worker.caffe.job import caffe_job
from worker.caffe.model import CaffeModel
from worker.caffe.solver import read_solver
from worker.strategies import Downpour


def test_the_workers_are_told_the_precision() -> None:
    """It is in what the model is built from, wherever that is; the CPU's numbers do not change."""
    solver = read_solver(Path("deploy/demo/lenet_solver.prototxt"), (1, 28, 28))
    models = {}
    for precision in Precision:
        job = caffe_job(
            solver,
            strategy=Downpour(),
            workers=1,
            shards=1,
            bound=0,
            seed=1,
            precision=precision,
        )
        model = job.model()
        assert isinstance(model, CaffeModel)
        assert model.net.description.precision is precision
        models[precision] = model.initial(1).tobytes()
    assert len(set(models.values())) == 1
