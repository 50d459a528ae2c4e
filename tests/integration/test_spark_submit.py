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


def test_train_test_and_features(spark_master: str, tmp_path: Path) -> None:
    """On a standalone master, with this project's code from `pack_code` here and in the tasks."""
    tiny_job.write_job(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    code = worker.pack_code(tmp_path)
    submit = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
    environ = os.environ | spark_environment() | {"PYSPARK_PYTHON": sys.executable}
    environ |= {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_HOME": str(Path(pyspark.__file__).parent)}
    environ |= {"JAVA_TOOL_OPTIONS": QUICK_JAVA}  # Spark's own daemon: the path to ours goes
    environ.pop("PYTHONPATH", None)
    done = subprocess.run(
        [submit, "--master", spark_master, "--py-files", str(code), "program.py"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert code.name in seen["code"]
    assert seen["means"]["accuracy"][0] > 0.9
    assert seen["columns"] == ["SampleID", "ip1", "label"]
    assert pq.read_table(tmp_path / "features").num_rows == 200
