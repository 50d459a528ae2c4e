"""The command in this process, and a job for it."""

from pathlib import Path

import pytest

from deploy.run import ray_and_spark
from tests.support import tiny_job
from tests.support.cli_in_process import Run, command


@pytest.fixture
def downpour(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in this process; returns its exit status, standard output and error."""

    def started(*_: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(ray_and_spark, "start", started)
    # An embedded Ray that other tests of this process share has put its own token there.
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)

    return command(capsys, monkeypatch)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the net, solver and data of the tiny job."""
    tiny_job.write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide all GPUs."""
    monkeypatch.setattr("cupy_kernels.cupy_device.gpu", lambda: None)
