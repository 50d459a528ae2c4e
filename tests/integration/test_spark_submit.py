"""A program under `spark-submit`, as users of CaffeOnSpark have it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pyspark
import pytest

import worker
from deploy.clusters.java import spark_environment
from tests.support import tiny_job
from tests.support.fresh_clone import ROOT
from tests.support.quick_start import QUICK_JAVA

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = """
import json

from pyspark.sql import SparkSession

import worker

spark = SparkSession.builder.getOrCreate()
df = spark.read.parquet("data/train.parquet")
trained = worker.train(
    df,
    model=worker.Caffe("solver.prototxt", test_data=df),
    workers=2,
    shards_in="processes",
)
model = trained.save("tiny.caffemodel")
means = worker.test(df, solver="solver.prototxt", weights=model)
features = worker.features(df, net="net.prototxt", weights=model, blobs=["ip1"])
features.write.parquet("features")
print(json.dumps({"code": worker.__file__, "means": means, "columns": features.columns}))
"""


def submit(
    folder: Path, master: str, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run spark-submit in a folder, with a Python that has no checkout on its path."""
    program = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
    environ = os.environ | spark_environment() | {"PYSPARK_PYTHON": sys.executable}
    environ |= {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_HOME": str(Path(pyspark.__file__).parent)}
    environ |= {"JAVA_TOOL_OPTIONS": QUICK_JAVA}  # Spark's own daemon: the path to ours goes
    environ.pop("PYTHONPATH", None)
    return subprocess.run(
        [program, "--master", master, *words],
        cwd=folder,
        env=environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_train_test_and_features(spark_master: str, tmp_path: Path) -> None:
    """On a standalone master, with this project's code from `pack_code` here and in the tasks."""
    tiny_job.write_job(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    code = worker.pack_code(tmp_path)
    done = submit(tmp_path, spark_master, "--py-files", str(code), "program.py")
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert code.name in seen["code"]
    assert seen["means"]["accuracy"][0] > 0.9
    assert seen["columns"] == ["SampleID", "ip1", "label"]
    assert pq.read_table(tmp_path / "features").num_rows == 200


TRAIN = ("train", "--solver", "solver.prototxt", "--data", "data", "--out", "run")


def test_the_application(spark_master: str, tmp_path: Path) -> None:
    """`spark_submit.py train` trains on the Spark of the submission, as its settings say."""
    tiny_job.write_job(tmp_path)
    application = str(ROOT / "deploy" / "cli" / "spark_submit.py")
    words = ("--name", "of the user", application, *TRAIN, "--shards-in", "processes")
    done = submit(tmp_path, spark_master, *words, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["updates"] == 200
    assert summary["test_accuracy"] > 0.9
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert settings["spark"] == "submitted"


def test_a_wrong_option_is_one_line(tmp_path: Path) -> None:
    """A mistake in the options of `train` ends before Spark starts, in a line of ours."""
    application = str(ROOT / "deploy" / "cli" / "spark_submit.py")
    words = (application, *TRAIN, "--workers", "none")
    done = submit(tmp_path, "local[2]", *words, PYTHONPATH=str(ROOT))
    printed = done.stdout + done.stderr  # Spark joins the two of the application
    said = [line for line in printed.splitlines() if "downpour: error" in line]
    assert done.returncode == 2, printed
    assert len(said) == 1, printed
    assert "Traceback" not in printed
    assert "Exception" not in printed
