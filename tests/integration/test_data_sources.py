"""Sources that Spark tasks read themselves: a database that a net names, and SequenceFiles."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import worker
from shards.errors import BadInput
from tests.support import tiny_job
from worker import spark as door
from worker.caffe.caffe_pb2 import Datum
from worker.caffe.inference import evaluate
from worker.caffe.model import CaffeModel
from worker.caffe.phases import Phase
from worker.data import image_decoding
from worker.data.databases import datum_bytes
from worker.data.lmdb_file import write_lmdb
from worker.data.sources import open_source

TUPLE_OF_SIX = (
    "aced00057372000c7363616c612e5475706c653689e6cd0b84e7f0300200064c00025f317400124c6a6176612f6c61"
    "6e672f4f626a6563743b4c00025f3271007e00014c00025f3371007e00014c00025f3471007e00014c00025f357100"
    "7e00014c00025f3671007e000178707400013774000137737200116a6176612e6c616e672e496e746567657212e2a0"
    "a4f781873802000149000576616c7565787200106a6176612e6c616e672e4e756d62657286ac951d0b94e08b020000"
    "7870000000017371007e0005000000027371007e000500000003737200116a6176612e6c616e672e426f6f6c65616e"
    "cd207280d59cfaee0200015a000576616c7565787000"
)
"""The key of CaffeOnSpark for a raw image of 1x2x3 with the id and label 7, as Java wrote it."""


def database(path: Path, count: int) -> Path:
    """Images of the tiny job as Datum messages: every second is a PNG, and one is damaged."""
    table = tiny_job.image_table(count)
    values = []
    for number, (label, pixels) in enumerate(zip(*table.to_pydict().values(), strict=True)):
        image = np.frombuffer(pixels, np.uint8).reshape(1, 8, 8)
        data = b"\x89PNG\r\n" if number == 11 else image_decoding.encode(image)
        encoded = Datum(encoded=True, data=data, label=label).SerializeToString()
        values.append(encoded if number % 2 else datum_bytes(label, image))
    write_lmdb(path, ((b"%06d" % number, value) for number, value in enumerate(values)))
    return path


@pytest.mark.slow
def test_a_net_trains_on_the_database_that_it_names(spark: Any, tmp_path: Path) -> None:
    """Two tasks read their own ranges; without data given, and with images to decode."""
    solver = tiny_job.write_job(tmp_path, max_iter=60)
    named = 'type: "Data" top: "data" top: "label" data_param { batch_size: 8 backend: LMDB source:'
    net = tmp_path / "net.prototxt"
    text = net.read_text()
    assert tiny_job.NET.strip() in text
    text = text.replace('type: "MemoryData" top: "data" top: "label"', f'{named} "rows" }}')
    before, _, after = text.partition("memory_data_param")
    net.write_text(before + after.partition("}")[2])
    database(tmp_path / "rows", 120)
    kind = worker.Caffe(solver)
    trained = worker.train(spark, model=kind, workers=2, staleness=2, shards_in="processes")
    assert sorted(report.steps for report in trained.outcome.reports) == [60, 60]
    fitted: Any = trained.model
    model = CaffeModel(replace(fitted.solver.train, phase=Phase.TEST))
    rows = open_source(tmp_path / "rows").batches()
    assert evaluate(model, trained.weights, rows, tiny_job.BATCH)["accuracy"] > 0.9
    with pytest.raises(BadInput, match="workers: expected the number of workers, at most 120"):
        worker.train(spark, model=kind)


def test_sequence_files_of_caffe_on_spark(spark: Any, tmp_path: Path) -> None:
    """Keys are Java's tuples; a missing file is named, and a key of another kind."""
    key, path = bytes.fromhex(TUPLE_OF_SIX), str(tmp_path / "images")
    output = "org.apache.hadoop.mapreduce.lib.output.SequenceFileOutputFormat"
    kind = "org.apache.hadoop.io.BytesWritable"
    rows = spark.sparkContext.parallelize([(bytearray(key), bytearray(b"abcdef"))], 1)
    rows.saveAsNewAPIHadoopFile(path, output, kind, kind)
    (found,) = door.sequence_file(spark, path).collect()
    assert tuple(found) == ("7", 7, 1, 2, 3, False, b"abcdef")
    with pytest.raises(BadInput, match=r"SequenceFile .*nowhere: cannot be read: .*does not exist"):
        door.sequence_file(spark, str(tmp_path / "nowhere"))
