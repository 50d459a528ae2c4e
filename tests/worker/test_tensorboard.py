"""`worker.TensorBoard`: the course of a run as events, read back by our own reader."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorboardX", reason="needs the extra `tensorboard`")

from tensorboardX.proto.event_pb2 import Event

import worker
from worker.tfrecord.framing import read_blocks

PARAMS = {"w": np.zeros((), np.float32)}


def train(_args: Any, ctx: worker.Context) -> None:
    def gradient(params: Any, batch: Any) -> tuple[float, Any]:
        error = params["w"] - batch["id"].mean()
        return float(error**2) / 2, {"w": error}

    ctx.loop(gradient, 10, epochs=2)


def test_a_run_is_written(spark: Any, tmp_path: Path) -> None:
    """Losses, staleness and rate over the samples, and the figures of tests."""
    board = worker.TensorBoard(tmp_path)
    trained = worker.run(
        spark.range(0, 100, 1, 2),
        train,
        params=PARAMS,
        shards_in="processes",
        evaluate=lambda params: {"w": float(params["w"])},
        observer=board,
    )
    board.close()
    (file,) = tmp_path.iterdir()
    found: dict[str, list[tuple[int, float]]] = {}
    with file.open("rb") as stream:
        records = [
            block.data[start:end]
            for block in read_blocks(stream, file.name)
            for start, end in zip(block.starts, block.ends, strict=True)
        ]
    for record in records:
        event = Event.FromString(record)
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    assert found.keys() == {"train/loss", "train/staleness", "train/rate", "test/w"}
    assert all(0 < samples <= 200 for name in found for samples, _ in found[name])
    (rate,) = {value for _, value in found["train/rate"]}
    assert abs(rate - 0.01) < 1e-6
    ((samples, last),) = found["test/w"]
    assert (samples, last) == (200, float(trained.params["w"]))
