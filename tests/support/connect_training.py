"""`worker.train` over Spark Connect: `python -m tests.support.connect_training SPARK RAY FOLDER`.

In a process of its own, for one has one Spark session at a time. Prints one line of JSON.
"""

import json
import sys
from pathlib import Path

import worker
from deploy import ray_cluster
from shards.errors import BadInput
from tests.support.tiny_job import image_table
from worker import spark


def train(url: str, ray: str, folder: Path) -> dict[str, object]:
    """Train tiny's net in `folder` and save its weights there; returns what was seen."""
    with (
        ray_cluster.connect(ray, cpus=2),
        spark.start_session(url, 2, app="over connect", env={}) as session,
    ):
        df = session.createDataFrame(image_table(200))
        model = worker.Caffe(folder / "solver.prototxt")
        try:
            worker.train(df, model=model)
        except BadInput as error:
            refused = str(error)
        trained = worker.train(df, model=model, shards=2, workers=3, staleness=2, max_iter=60)
        trained.save(folder / "weights.caffemodel")
    return {
        "refused": refused,
        "steps": sorted(report.steps for report in trained.outcome.reports),
        "versions": [status.version for status in trained.outcome.statuses],
        "gap": max(status.max_clock_gap for status in trained.outcome.statuses),
    }


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
