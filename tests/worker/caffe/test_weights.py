"""Weights go to .caffemodel files and come back, and other readers understand them."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from shards.errors import BadInput
from tests.support.small_nets import SMALL, network
from tests.support.snapshot_stores import full_disk
from worker.caffe import weights
from worker.caffe.caffe_pb2 import NetParameter, V1LayerParameter
from worker.caffe.net import Network
from worker.caffe.phases import Phase
from worker.inference import write_safetensors

INPUT = (
    'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [3, 1, 12, 12] } } }'
)
BODY = """
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
        convolution_param { num_output: 4 kernel_size: 3 stride: 2 pad: 1 group: 1
          weight_filler { type: "xavier" } bias_filler { type: "gaussian" } } }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool"
        pooling_param { pool: MAX kernel_size: 3 stride: 2 } }
layer { name: "ip" type: "InnerProduct" bottom: "pool" top: "ip"
        inner_product_param { num_output: 5
          weight_filler { type: "xavier" } bias_filler { type: "gaussian" } } }
layer { name: "relu" type: "ReLU" bottom: "ip" top: "relu" }
layer { name: "out" type: "InnerProduct" bottom: "relu" top: "out"
        inner_product_param { num_output: 3
          weight_filler { type: "xavier" } bias_filler { type: "gaussian" } } }
layer { name: "prob" type: "Softmax" bottom: "out" top: "prob" }
"""


def save(tmp_path: Path, net: Network, seed: int = 5) -> tuple[Path, weights.Floats]:
    arena, path = net.initial(seed), tmp_path / "w.caffemodel"
    weights.write_caffemodel(path, net, arena)
    return path, arena


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Every float, by layer name, and nothing else is left in the folder."""
    net = network(SMALL)
    path, arena = save(tmp_path, net)
    read = net.table.empty()
    assert weights.into_arena(weights.read_caffemodel(path), net.table, read, "w") == ()
    np.testing.assert_array_equal(read, arena)
    assert list(tmp_path.iterdir()) == [path]


def test_opencv_reads_what_is_written(tmp_path: Path) -> None:
    """An independent reader computes the same blobs from the file, convolution to softmax."""
    net = network(INPUT + BODY, Phase.TEST)
    path, arena = save(tmp_path, net)
    x = np.random.default_rng(1).standard_normal((3, 1, 12, 12), np.float32)
    net.forward(arena, {"data": x})
    prototxt = (INPUT + BODY).encode()
    other = cv2.dnn.readNetFromCaffe(
        np.frombuffer(prototxt, np.uint8), np.frombuffer(path.read_bytes(), np.uint8)
    )
    other.setInput(x, "data")
    names = ["pool", "ip", "prob"]
    for name, blob in zip(names, other.forward(names), strict=True):
        np.testing.assert_allclose(net.blob(name), blob, rtol=1e-4, atol=1e-5, err_msg=name)


def test_layers_are_matched_by_name(tmp_path: Path) -> None:
    """A net with another head takes what it shares and keeps its own start for the rest."""
    path, _ = save(tmp_path, network(SMALL))
    other = network(SMALL.replace('"ip1"', '"head"').replace("num_output: 4", "num_output: 7"))
    arena = other.initial(9)
    fresh = arena.copy()
    missing = weights.into_arena(weights.read_caffemodel(path), other.table, arena, "w")
    assert missing == ("head/0", "head/1")
    before, after = other.table.views(fresh), other.table.views(arena)
    np.testing.assert_array_equal(before["head/0"], after["head/0"])
    assert not np.array_equal(before["conv1/0"], after["conv1/0"])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            ("num_output: 4", "num_output: 7"),
            r"w: layer ip1: blob 0: expected shape \(7, 12\), got \(4, 12\)",
        ),
        (
            ("kernel_size: 3", "kernel_size: 3 bias_term: false"),
            "w: layer conv1: expected 1 blobs, got 2",
        ),
    ],
)
def test_a_shape_that_differs_is_an_error_that_names_the_layer(
    tmp_path: Path, change: tuple[str, str], error: str
) -> None:
    """Both shapes are named, and so are differing numbers of blobs."""
    path, _ = save(tmp_path, network(SMALL))
    other = network(SMALL.replace(*change))
    with pytest.raises(BadInput, match=error):
        weights.into_arena(weights.read_caffemodel(path), other.table, other.table.empty(), "w")


def test_files_of_the_older_form_are_read(tmp_path: Path) -> None:
    """`layers` entries, and shapes padded to four dimensions with leading ones."""
    net = network(SMALL)
    arena, read = net.initial(5), net.table.empty()
    old = NetParameter(name="old")
    for layer, tensors in weights.from_arena(net.table, arena).items():
        entry = old.layers.add(name=layer, type=V1LayerParameter.INNER_PRODUCT)
        for tensor in tensors:
            n, c, h, w = (1,) * (4 - tensor.ndim) + tensor.shape
            entry.blobs.add(num=n, channels=c, height=h, width=w, data=tensor.ravel().tolist())
    path = tmp_path / "old.caffemodel"
    path.write_bytes(old.SerializeToString())
    assert weights.into_arena(weights.read_caffemodel(path), net.table, read, "w") == ()
    np.testing.assert_array_equal(read, arena)


def test_double_precision_blobs_are_read(tmp_path: Path) -> None:
    """As Caffe built for float64 writes them."""
    message = NetParameter()
    message.layer.add(name="a").blobs.add(double_data=[1.5, 2.5]).shape.dim.append(2)
    path = tmp_path / "d.caffemodel"
    path.write_bytes(message.SerializeToString())
    assert weights.read_caffemodel(path)["a"][0].tolist() == [1.5, 2.5]


def test_a_file_that_is_no_caffemodel_is_refused(tmp_path: Path) -> None:
    """A file may be missing, empty, truncated, of another kind, or state a false blob shape."""
    path = tmp_path / "w.caffemodel"
    with pytest.raises(BadInput, match=r"w\.caffemodel: cannot be read: No such file"):
        weights.read_caffemodel(path)
    path.write_bytes(b"")
    with pytest.raises(BadInput, match=r"expected a \.caffemodel, got a file with no layers"):
        weights.read_caffemodel(path)
    whole, _ = save(tmp_path, network(SMALL))
    path.write_bytes(whole.read_bytes()[:-7])
    with pytest.raises(BadInput, match=r"expected a \.caffemodel, got .* bytes of something else"):
        weights.read_caffemodel(path)
    for dims in ([3], [2, -1], [-2]):
        message = NetParameter()
        message.layer.add(name="a").blobs.add(data=[1, 2]).shape.dim.extend(dims)
        path.write_bytes(message.SerializeToString())
        with pytest.raises(BadInput, match=r"layer a: a blob states shape .* and holds 2 numbers"):
            weights.read_caffemodel(path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Writing says what went wrong, in one line."""
    net = network(SMALL)
    with pytest.raises(BadInput, match=r"w\.caffemodel: cannot be written: No such file"):
        weights.write_caffemodel(tmp_path / "none" / "w.caffemodel", net, net.initial(1))


def test_an_arena_moves_between_nets() -> None:
    """A test net without some training layers takes the tensors that it has."""
    aux = 'layer { name: "aux" type: "InnerProduct" bottom: "data" top: "aux"'
    aux += " include { phase: TRAIN } inner_product_param { num_output: 2 } }\n"
    text = SMALL.replace('layer { name: "conv1"', aux + 'layer { name: "conv1"', 1)
    assert aux in text
    train, test = network(text), network(text, Phase.TEST)
    arena = train.initial(3)
    laid = weights.moved(arena, train.table, test)
    for name, view in test.table.views(laid).items():
        np.testing.assert_array_equal(view, train.table.views(arena)[name])
    assert weights.moved(arena, train.table, train) is arena


def test_a_full_disk_keeps_no_room(tmp_path: Path) -> None:
    """A partly written file is removed, and the previous file stays."""
    net = network(SMALL)
    path, arena = save(tmp_path, net)
    content = path.read_bytes()
    with (
        full_disk(100),
        pytest.raises(BadInput, match=r"w\.caffemodel: cannot be written: File too"),
    ):
        weights.write_caffemodel(path, net, arena)
    with full_disk(100), pytest.raises(BadInput, match=r"w\.safetensors: cannot be written: F"):
        write_safetensors(tmp_path / "w.safetensors", net.table, arena)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == content
