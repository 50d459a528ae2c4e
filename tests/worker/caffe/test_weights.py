"""Weights go to files and come back, by layer name; other programs read and write the same."""

from collections.abc import Callable
from pathlib import Path

import cv2
import h5py
import numpy as np
import pytest

from shards.errors import BadInput
from tests.support.small_nets import SMALL, network
from tests.support.snapshot_stores import full_disk
from worker.caffe import weights
from worker.caffe.caffe_pb2 import NetParameter, V1LayerParameter
from worker.caffe.net import Network
from worker.caffe.phases import Phase
from worker.caffe.weight_files import read_blobs, write_blobs, write_weights

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


FILES = ["w.caffemodel", "w.caffemodel.h5", "w.safetensors"]
TWINS = """
layer { name: "data" type: "Input" top: "a" top: "b" input_param { shape { dim: [2, 3] } } }
layer { name: "left" type: "InnerProduct" bottom: "a" top: "left" param { name: "w" }
        param { name: "b" } inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
layer { name: "right" type: "InnerProduct" bottom: "b" top: "right" param { name: "w" }
        param { name: "b" } inner_product_param { num_output: 2 } }
"""


def save(
    tmp_path: Path, net: Network, name: str = "w.caffemodel", seed: int = 5
) -> tuple[Path, weights.Floats]:
    arena, path = net.initial(seed), tmp_path / name
    write_weights(path, net, arena)
    return path, arena


def load(path: Path, net: Network) -> weights.Floats:
    """The file's tensors alone."""
    arena = net.table.empty()
    copied = weights.into_arena(read_blobs(path), net, arena, "w")
    assert (copied.missing, copied.unused) == ((), ())
    return arena


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("text", [SMALL, TWINS])
def test_what_is_written_is_read(tmp_path: Path, text: str, name: str) -> None:
    """Every float, by layer name, tensors that layers share too; nothing else is in the folder."""
    net = network(text)
    path, arena = save(tmp_path, net, name)
    np.testing.assert_array_equal(load(path, net), arena)
    assert list(tmp_path.iterdir()) == [path]


def test_hdf5_is_laid_out_as_caffe_does(tmp_path: Path) -> None:
    """A group `data`, in it a group for each layer, with datasets 0, 1, ...; float32, no chunks."""
    net = network(SMALL)
    path, arena = save(tmp_path, net, "w.h5")
    with h5py.File(path) as file:
        assert list(file) == ["data"]
        assert {name: list(layer) for name, layer in file["data"].items()} == {
            "conv1": ["0", "1"],
            "ip1": ["0", "1"],
        }
        bias = file["data/conv1/1"]
        assert (bias.dtype, bias.chunks) == (np.float32, None)
        np.testing.assert_array_equal(bias, net.table.views(arena)["conv1/1"])


def test_hdf5_of_caffe_is_read(tmp_path: Path) -> None:
    """Groups of layers without tensors, and gradients in a group of their own, are passed over."""
    net, path = network(SMALL), tmp_path / "w.caffemodel.h5"
    arena = net.initial(2)
    with h5py.File(path, "w") as file:
        for group in ("data", "diff"):
            file.create_group(f"{group}/relu1")
        for name, view in net.table.views(arena).items():
            file[f"data/{name}"], file[f"diff/{name}"] = view, np.zeros_like(view)
    np.testing.assert_array_equal(load(path, net), arena)


def test_names_of_layers_with_slashes(tmp_path: Path) -> None:
    """GoogLeNet has such names."""
    net = network(SMALL.replace('"conv1"', '"inception/1x1"').replace('"ip1"', '"inception/2"'))
    for name in FILES:
        path, arena = save(tmp_path, net, name)
        np.testing.assert_array_equal(load(path, net), arena)


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
    copied = weights.into_arena(read_blobs(path), other, arena, "w.caffemodel")
    assert copied == weights.Copied("w.caffemodel", ("conv1",), ("head",), ("ip1",))
    assert str(copied) == "w.caffemodel: copied conv1; left at their fillers: head; not used: ip1"
    before, after = other.table.views(fresh), other.table.views(arena)
    np.testing.assert_array_equal(before["head/0"], after["head/0"])
    assert not np.array_equal(before["conv1/0"], after["conv1/0"])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            ("num_output: 4", "num_output: 7"),
            r"w: layer ip1: blob 0: expected shape \(7, 12\), got \(4, 12\); to start the layer",
        ),
        (
            ("kernel_size: 3", "kernel_size: 3 bias_term: false"),
            "w: layer conv1: expected 1 blob, got 2",
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
        weights.into_arena(read_blobs(path), other, other.table.empty(), "w")


def test_files_of_the_older_form_are_read(tmp_path: Path) -> None:
    """`layers` entries, and shapes padded to four dimensions with leading ones."""
    net = network(SMALL)
    arena, path = net.initial(5), tmp_path / "old.caffemodel"
    for version in (0, 1):
        old = NetParameter(name="old")
        for layer in ("conv1", "ip1"):
            entry = old.layers.add()
            if version:
                entry.name, entry.type = layer, V1LayerParameter.INNER_PRODUCT
            else:
                entry.layer.name, entry.layer.type = layer, "innerproduct"
            blobs = entry.blobs if version else entry.layer.blobs
            for index in "01":
                tensor = net.table.views(arena)[f"{layer}/{index}"]
                n, c, h, w = (1,) * (4 - tensor.ndim) + tensor.shape
                blobs.add(num=n, channels=c, height=h, width=w, data=tensor.ravel().tolist())
        path.write_bytes(old.SerializeToString())
        np.testing.assert_array_equal(load(path, net), arena)


BY_CHANNEL = """
    layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 dim: 4 dim: 4 } } }
    layer { name: "n" type: "BatchNorm" bottom: "x" top: "n" }
    layer { name: "s" type: "Scale" bottom: "n" top: "s" scale_param { bias_term: true } }
    layer { name: "b" type: "Bias" bottom: "s" top: "b" }
    layer { name: "p" type: "PReLU" bottom: "b" top: "p" }
    layer { name: "one" type: "PReLU" bottom: "p" top: "one" prelu_param { channel_shared: true } }
    layer { name: "c" type: "Convolution" bottom: "one" top: "c"
            convolution_param { num_output: 5 kernel_size: 1 } }
    layer { name: "ip" type: "InnerProduct" bottom: "c" top: "ip"
            inner_product_param { num_output: 6 } }
"""


@pytest.mark.parametrize("pad", [(0, 4), (1, 2), (2, 0)], ids=["behind", "around", "before"])
def test_blobs_with_axes_of_size_1_are_read(tmp_path: Path, pad: tuple[int, int]) -> None:
    """Statistics, factors, slopes, biases and products of (1, C, 1, 1) and the like."""
    net = network(BY_CHANNEL)
    arena = np.random.default_rng(3).random(net.table.size, np.float32)
    views = net.table.views(arena)
    blobs = {
        name: view.reshape((1,) * pad[0] + view.shape + (1,) * pad[1])
        for name, view in views.items()
    }
    path = tmp_path / "old.caffemodel"
    write_blobs(path, blobs)
    read = net.table.empty()
    weights.into_arena(read_blobs(path), net, read, "old")
    for name, view in net.table.views(read).items():
        np.testing.assert_array_equal(view, views[name], err_msg=name)


def test_statistics_of_another_size_have_no_remedy_that_would_lose_them() -> None:
    """Another name would start them at zero; the numbers may not be in another order, either."""
    net = network(BY_CHANNEL)
    blobs = {f"n/{at}": np.ones((1, 4, 1, 1), np.float32) for at in range(3)}
    with pytest.raises(BadInput, match=r"blob 0: expected shape \(3,\), got \(1, 4, 1, 1\)$"):
        weights.into_arena(blobs, net, net.table.empty(), "w")
    turned = {f"ip/{at}": np.ones(shape, np.float32) for at, shape in enumerate([(80, 6), (6,)])}
    with pytest.raises(BadInput, match=r"ip: blob 0: expected shape \(6, 80\), got \(80, 6\)"):
        weights.into_arena(turned, net, net.table.empty(), "w")


def test_double_precision_blobs_are_read(tmp_path: Path) -> None:
    """As Caffe built for float64 writes them."""
    message = NetParameter()
    message.layer.add(name="a").blobs.add(double_data=[1.5, 2.5]).shape.dim.append(2)
    path = tmp_path / "d.caffemodel"
    path.write_bytes(message.SerializeToString())
    assert read_blobs(path)["a/0"].tolist() == [1.5, 2.5]


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """They would look like a learning rate that is too high."""
    net = network(SMALL)
    path, arena = save(tmp_path, net)
    arena[0] = np.nan
    write_weights(path, net, arena)
    with pytest.raises(BadInput, match=r"w\.caffemodel: \w+/0: expected finite numbers, got a NaN"):
        weights.read_weights(path, net, arena)


def test_a_file_that_is_no_caffemodel_is_refused(tmp_path: Path) -> None:
    """A file may be missing, empty, truncated, of another kind, or state a false blob shape."""
    path = tmp_path / "w.caffemodel"
    with pytest.raises(BadInput, match=r"w\.caffemodel: cannot be read: No such file"):
        read_blobs(path)
    path.write_bytes(b"")
    with pytest.raises(BadInput, match=r"expected a \.caffemodel, got a file with no layers"):
        read_blobs(path)
    whole, _ = save(tmp_path, network(SMALL))
    path.write_bytes(whole.read_bytes()[:-7])
    with pytest.raises(BadInput, match=r"expected a \.caffemodel, got .* bytes of something else"):
        read_blobs(path)
    for dims in ([3], [2, -1], [-2]):
        message = NetParameter()
        message.layer.add(name="a").blobs.add(data=[1, 2]).shape.dim.extend(dims)
        path.write_bytes(message.SerializeToString())
        with pytest.raises(
            BadInput, match=r"layer a: blob 0: a blob states shape .* and holds 2 numbers"
        ):
            read_blobs(path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Writing says what went wrong, in one line."""
    net = network(SMALL)
    with pytest.raises(BadInput, match=r"w\.caffemodel: cannot be written: No such file"):
        write_weights(tmp_path / "none" / "w.caffemodel", net, net.initial(1))


def test_an_arena_moves_between_nets() -> None:
    """A test net without some training layers takes the tensors that it has."""
    aux = 'layer { name: "aux" type: "InnerProduct" bottom: "data" top: "aux"'
    aux += " include { phase: TRAIN } inner_product_param { num_output: 2 } }\n"
    text = SMALL.replace('layer { name: "conv1"', aux + 'layer { name: "conv1"', 1)
    assert aux in text
    train, test = network(text), network(text, Phase.TEST)
    arena = train.initial(3)
    laid = weights.lay_out(arena, train.table, test)
    for name, view in test.table.views(laid).items():
        np.testing.assert_array_equal(view, train.table.views(arena)[name])
    assert weights.lay_out(arena, train.table, train) is arena


def test_a_full_disk_keeps_no_room(tmp_path: Path) -> None:
    """A partly written file is removed, and the previous file stays."""
    net = network(SMALL)
    path, arena = save(tmp_path, net)
    content = path.read_bytes()
    with (
        full_disk(100),
        pytest.raises(BadInput, match=r"w\.caffemodel: cannot be written: File too"),
    ):
        write_weights(path, net, arena)
    with full_disk(100), pytest.raises(BadInput, match=r"w\.safetensors: cannot be written: F"):
        write_weights(tmp_path / "w.safetensors", net, arena)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == content


HOSTILE: dict[str, tuple[Callable[[h5py.File], object], str]] = {
    "a link": (
        lambda file: file.__setitem__("data/a/0", h5py.ExternalLink("o.h5", "/x")),
        "a link",
    ),
    "a soft link": (lambda file: file.__setitem__("data/a/0", h5py.SoftLink("/data")), "a link"),
    "a loop": (lambda file: file.__setitem__("data/a", file["data"]), "two names in the file"),
    "text": (lambda file: file.__setitem__("data/a/0", "words"), "expected numbers"),
    "a shape without data": (
        lambda file: file.create_dataset("data/a/0", (2**40,), np.float32),
        r"expected 4398046511104 contiguous bytes for shape \(1099511627776,\), got 0",
    ),
    "a bomb": (
        lambda file: file.create_dataset("data/a/0", data=np.zeros(2**20), compression="gzip"),
        "expected 8388608 contiguous bytes",
    ),
    "nothing": (lambda file: file.create_group("other"), "expected a group `data`"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hdf5_that_states_more_than_it_has(tmp_path: Path, name: str) -> None:
    """Nothing outside the file is read, and no more memory is taken than the file has bytes."""
    make, error = HOSTILE[name]
    path = tmp_path / "w.h5"
    with h5py.File(path, "w") as file:
        file.create_group("data")
        make(file)
    with pytest.raises(BadInput, match=rf"w\.h5: .*{error}"):
        read_blobs(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(BadInput, match=r"w\.h5: expected an HDF5 file"):
        read_blobs(path)
