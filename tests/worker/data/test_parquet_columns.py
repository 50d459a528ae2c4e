"""Parquet of encoded images and typed columns, as CaffeOnSpark's users have them."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shards.errors import BadInput
from worker.caffe.layer import StepKey
from worker.caffe.net import Description, Network
from worker.caffe.net_data import data_of
from worker.caffe.net_sources import open_net_data
from worker.data import image_decoding
from worker.data.arrow_columns import read_columns
from worker.data.encoded import decode_images
from worker.data.source import Source
from worker.data.sources import open_source

IMAGES = np.random.default_rng(3).integers(0, 256, (20, 3, 8, 8), np.uint8)
PNGS = [image_decoding.encode(image) for image in IMAGES]


def write(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=6)
    return path


def test_encoded_images_with_labels_as_text(tmp_path: Path) -> None:
    """CaffeOnSpark's image DataFrames: label is a string, data an image file."""
    path = write(
        tmp_path / "a.parquet",
        label=[str(n % 10) for n in range(20)],
        data=PNGS,
        encoded=[True] * 20,
    )
    source = open_source(path, classes=10)
    assert (source.rows, source.shape) == (20, (3, 8, 8))
    assert isinstance(source, Source)
    table = pa.Table.from_batches(list(source.batches(4, 5, 17)))
    assert table["data"].to_pylist() == [image.tobytes() for image in IMAGES[5:17]]
    assert table["label"].to_pylist() == [str(n % 10) for n in range(5, 17)]
    with pytest.raises(BadInput, match=r"column label: row 3: expected a label in \[0, 3\), got 3"):
        list(open_source(path, classes=3).batches())


def test_a_file_of_no_rows_comes_first(tmp_path: Path) -> None:
    """Spark writes one for an empty partition; the next shows that images are encoded."""
    empty = pa.array([], pa.binary())
    write(tmp_path / "part-0.parquet", label=pa.array([], pa.int64()), data=empty)
    write(tmp_path / "part-1.parquet", label=[1] * 20, data=pa.array(PNGS, pa.large_binary()))
    source = open_source(tmp_path)
    assert (source.rows, source.shape) == (20, (3, 8, 8))


def test_columns_that_files_cannot_have(tmp_path: Path) -> None:
    """Two of one name, and a label that only the folder's name states."""
    twice = tmp_path / "twice.parquet"
    pq.write_table(pa.table([PNGS, [0] * 20, [1] * 20], names=["data", "label", "label"]), twice)
    with pytest.raises(BadInput, match="expected one column label, got 2 of this name"):
        open_source(twice)
    (tmp_path / "by" / "label=3").mkdir(parents=True)
    write(tmp_path / "by" / "label=3" / "a.parquet", data=PNGS)
    with pytest.raises(BadInput, match="got a folder of partitionBy, label=3; read it with Spark"):
        open_source(tmp_path / "by")


TYPED = """
layer {{ name: "d" type: "CoSData" source_class: "com.yahoo.ml.caffe.DataFrameSource"
  top: "data" top: "label" top: "words" top: "weight"
  cos_data_param {{ source: "{source}" batch_size: 4
    top {{ name: "data" type: {image} channels: 3 height: 8 width: 8 out_height: 6 out_width: 6
           transform_param {{ crop_size: 6 mean_value: 100 }} }}
    top {{ name: "label" type: STRING }}
    top {{ name: "words" type: INT_ARRAY channels: 5 sample_num_axes: 1 transpose: true }}
    top {{ name: "weight" type: FLOAT_ARRAY channels: 2 height: 2 sample_num_axes: 2 }} }} }}
"""
WORDS = np.arange(100).reshape(20, 5)
WEIGHTS = np.random.default_rng(4).standard_normal((20, 4)).astype(np.float32)


@pytest.mark.parametrize("kind", ["RAW_IMAGE", "ENCODED_IMAGE", "ENCODED_IMAGE_WITH_DIM"])
def test_typed_columns_reach_the_net(tmp_path: Path, kind: str) -> None:
    """Each top has its type, shape and transform; a transposed one has time as its first axis."""
    data: Any = {
        "RAW_IMAGE": [image.tobytes() for image in IMAGES],
        "ENCODED_IMAGE": PNGS,
        "ENCODED_IMAGE_WITH_DIM": [{"image": png, "height": 8, "width": 8} for png in PNGS],
    }[kind]
    labels = [str(n % 3) for n in range(20)]
    path = write(
        tmp_path / "a.parquet", data=data, label=labels, words=list(WORDS), weight=list(WEIGHTS)
    )
    text = (
        TYPED.format(source=path, image=kind) + 'layer { name: "s" type: "Silence" bottom: "data" }'
    )
    from worker.caffe.phases import Phase

    net = Network(Description(text, Phase.TEST))
    source = open_net_data(data_of(net.description))
    batch = read_columns(next(iter(source.batches(4))), net.column_specs, "rows")
    net.forward(net.table.empty(), net.prepare(batch, StepKey(0, 1)), StepKey(0, 1))
    np.testing.assert_array_equal(
        net.blob("data"), IMAGES[:4, :, 1:7, 1:7].astype(np.float32) - 100
    )
    np.testing.assert_array_equal(net.blob("label"), np.reshape([0, 1, 2, 0], (4, 1, 1, 1)))
    np.testing.assert_array_equal(net.blob("words"), WORDS[:4].T)
    np.testing.assert_array_equal(net.blob("weight"), WEIGHTS[:4].reshape(4, 2, 2))
    assert net.batch_size == 4


MEMORY = """
layer {{ name: "d" type: "MemoryData" top: "data" top: "label"
  source_class: "com.yahoo.ml.caffe.ImageDataFrame"
  memory_data_param {{ source: "{source}" batch_size: 4 {fields} }} }}
layer {{ name: "s" type: "Silence" bottom: "data" bottom: "label" }}
"""


def test_the_net_says_that_images_are_encoded(tmp_path: Path) -> None:
    """`image_encoded` counts where the rows have no such column, also for a format that raw pixels
    may look like; images that are decoded already stay as they are."""
    bitmaps = [image_decoding.encode(image, "BMP") for image in IMAGES]
    path = write(tmp_path / "a.parquet", data=bitmaps, label=list(range(20)))
    net = Description(MEMORY.format(source=path, fields="image_encoded: true"))
    source = open_net_data(data_of(net))
    assert source.shape == (3, 8, 8)
    specs = Network(msgspec.structs.replace(net, data_shape=source.shape)).column_specs
    found = pa.Table.from_batches(decode_images(source.batches(), specs, "rows"))
    assert found["data"].to_pylist() == [image.tobytes() for image in IMAGES]


def test_the_net_says_that_images_are_raw() -> None:
    """Then pixels that begin like a PNG are pixels."""
    rows = pa.record_batch({"data": [PNGS[0]], "label": [1]})
    text = MEMORY.format(source="", fields="image_encoded: false")
    net = Network(Description(text, data_shape=(1, 1, len(PNGS[0]))))
    assert next(decode_images([rows], net.column_specs, "rows")).equals(rows)


def test_columns_that_the_net_selects() -> None:
    """They must have those that the layer reads."""
    select = 'dataframe_column_select: "{}" dataframe_column_select: "image"'
    fields = f"channels: 3 height: 8 width: 8 {select}"
    Network(Description(MEMORY.format(source="", fields=fields.format("label"))))
    line = (
        r"layer d \(MemoryData\): dataframe_column_select: expected a column label, got id, image"
    )
    with pytest.raises(BadInput, match=line):
        Network(Description(MEMORY.format(source="", fields=fields.format("id"))))


def test_another_format_of_files(tmp_path: Path) -> None:
    """It is refused by name where the files are read here."""
    net = Description(MEMORY.format(source=tmp_path, fields='dataframe_format: "json"'))
    with pytest.raises(BadInput, match="layer d: dataframe_format: expected parquet, got json"):
        open_net_data(data_of(net))


def test_a_column_that_is_missing(tmp_path: Path) -> None:
    """The error names the layer, the file and the column."""
    path = write(tmp_path / "a.parquet", data=PNGS, label=["1"] * 20)
    net = Description(TYPED.format(source=path, image="ENCODED_IMAGE"))
    with pytest.raises(BadInput, match=r"layer d: .*a\.parquet: expected a column words, got data"):
        open_net_data(data_of(net))


def test_a_column_name_that_is_no_text(tmp_path: Path) -> None:
    """A damaged footer is an error that names the file."""
    file = tmp_path / "t.parquet"
    pq.write_table(pa.table({"label": [1], "image": [b"abcd"]}), file)
    file.write_bytes(file.read_bytes().replace(b"image", b"\xec\xf2age"))
    with pytest.raises(BadInput, match=r"t\.parquet: expected a whole Parquet file, got "):
        open_source(file)
