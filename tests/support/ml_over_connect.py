"""`worker.ml` over Spark Connect: `python -m tests.support.ml_over_connect URL SAVED FOLDER`.

Loads the pipeline that another process has saved from a classic session, transforms, then fits,
saves and loads one itself. Prints what was seen as JSON.
"""

import json
import sys
from typing import Any

from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler

import worker
from shards.errors import BadInput
from tests.support.ml_points import CLASSES, INPUTS, classifier, points, right
from worker.spark import start_session


def seen(url: str, saved: str, folder: str) -> dict[str, object]:
    """What came of it."""
    with start_session(url, 2, app="ml over connect", env={}) as session:
        df = session.createDataFrame(points(), CLASSES)
        loaded = PipelineModel.load(saved).transform(df)
        assembled = VectorAssembler(inputCols=INPUTS, outputCol="features")
        try:
            classifier().fit(assembled.transform(df))
        except BadInput as error:
            refused = str(error)
        fitted = Pipeline(stages=[assembled, classifier(workers=2)]).fit(df)
        net: Any = fitted.stages[1]
        net.save(f"{folder}/net")
        net.write().overwrite().save(f"{folder}/net")
        again = worker.ml.NetClassifierModel.load(f"{folder}/net")
        return {
            "refused": refused,
            "columns": loaded.columns,
            "loaded": right(loaded, "byMLlib"),
            "fitted": right(again.transform(assembled.transform(df)), "prediction"),
        }


if __name__ == "__main__":
    print(json.dumps(seen(*sys.argv[1:])))
