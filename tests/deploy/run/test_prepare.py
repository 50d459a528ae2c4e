"""What a run says before it starts."""

from pathlib import Path

import pytest

from deploy.run.prepare import prepare
from deploy.run.settings import TrainSettings
from tests.support.tiny_job import write_job


@pytest.mark.parametrize(("max_iter", "expected"), [(None, 0), (4, 0), (6, 1)])
def test_a_rate_of_0_is_announced(tmp_path: Path, max_iter: int | None, expected: int) -> None:
    """Steps beyond the end of the policy `poly` change nothing, so a notice names both numbers."""
    solver = write_job(tmp_path, max_iter=4, extra='lr_policy: "poly" power: 1')
    data, out = tmp_path / "data", tmp_path / "run"
    settings = TrainSettings(solver=solver, data=data, out=out, max_iter=max_iter)
    found = [line for line in prepare(settings, None).inputs.notices if "poly" in line]
    beyond = "poly reaches 0 at the file's max_iter, 4: nothing is learned from there to"
    assert found == [f"{solver}: lr_policy {beyond} --max-iter 6"] * expected
