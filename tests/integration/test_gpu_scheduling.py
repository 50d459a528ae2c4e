"""Spark deals out GPUs by the settings of docs/clusters.md; the GPUs are a script's word here."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters import standalone_spark

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_task_gets_a_gpu_of_its_own(tmp_path: Path) -> None:
    """On a standalone cluster whose worker has two: of two tasks at a time each has another one."""
    conf = tmp_path / "conf"
    conf.mkdir()
    (conf / "spark-defaults.conf").write_text(documented("spark-defaults.conf"))
    with standalone_spark(tmp_path / "spark", gpus=2) as url:
        done = subprocess.run(
            [sys.executable, "-m", "tests.worker.one_session", "gpus", url],
            cwd=ROOT,
            env=os.environ | {"SPARK_CONF_DIR": str(conf)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert sorted(json.loads(done.stdout.splitlines()[-1])) == [["0"], ["1"]]


def documented(file: str) -> str:
    """The block of the page that begins with the file's name in a comment."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    (block,) = re.findall(rf"```\n# {re.escape(file)}\n(.*?)```", page, re.DOTALL)
    return str(block)
