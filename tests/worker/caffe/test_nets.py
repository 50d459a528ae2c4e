"""The networks that Caffe is known for: each builds, computes what OpenCV computes, and learns."""

from pathlib import Path

import numpy as np
import pytest

from tests.support import caffe_nets
from tests.support.caffe_nets import NETS
from worker.caffe.caffe_pb2 import LayerParameter
from worker.caffe.model import CaffeModel
from worker.caffe.net import Description, Network
from worker.caffe.phases import Phase
from worker.caffe.python_nets import Input, Net, load_net
from worker.caffe.solver import read_solver
from worker.caffe.text import parse_net
from worker.caffe.weight_files import read_blobs, write_weights
from worker.caffe.weights import into_arena, read_weights
from worker.training.model import Batch

PARAMETERS = {
    "lenet": 431_080,
    "cifar10_quick": 145_578,
    "cifar10_full": 89_578,
    "alexnet": 60_965_224,
    "caffenet": 60_965_224,
    "googlenet": 13_378_280,
    "resnet50": 25_557_032,
}
"""The numbers of the papers and of Caffe's model zoo, without the statistics of BatchNorm."""


NONE: frozenset[str] = frozenset()


def filled(model: CaffeModel, seed: int) -> np.ndarray:
    """Initial weights; buffers hold statistics as after training, those of a factor of 2."""
    weights, rng = model.initial(seed), np.random.default_rng(seed)
    for name, view in model.table.views(weights).items():
        if name in model.net.buffers:
            view[...] = 2.0 if view.shape == (1,) else rng.uniform(0.5, 3.0, view.shape)
    return weights


@pytest.mark.parametrize("name", NETS)
def test_a_net_computes_what_opencv_computes(name: str, tmp_path: Path) -> None:
    """The probabilities of one image, for weights that went through a .caffemodel."""
    cv2 = pytest.importorskip("cv2")
    net = NETS[name]()
    text = caffe_nets.deploy(net, 1)
    model = CaffeModel(Description(text, Phase.TEST))
    weights = filled(model, seed=1)
    count = sum(t.size for t in model.table.tensors if t.name not in model.net.buffers)
    image = np.random.default_rng(2).standard_normal((1, *net.image), np.float32)
    ours = model.forward(weights, {"data": image}, ["prob"])["prob"]

    (tmp_path / "net.prototxt").write_text(text)
    write_weights(tmp_path / "net.caffemodel", model.net, weights)
    theirs = cv2.dnn.readNetFromCaffe(
        str(tmp_path / "net.prototxt"), str(tmp_path / "net.caffemodel")
    )
    theirs.setInput(image)
    np.testing.assert_allclose(ours, theirs.forward("prob"), rtol=2e-3, atol=1e-6)
    back = model.table.empty()
    into_arena(read_blobs(tmp_path / "net.caffemodel"), model.net, back, "file")
    np.testing.assert_array_equal(back, weights)
    assert count == PARAMETERS[name]


def falls(
    model: CaffeModel, batch: Batch, rate: float, steps: int = 2, without: frozenset[str] = NONE
) -> None:
    """Assert that the loss falls in each step along its gradient, and that buffers move.

    All tensors but those in `without` have a gradient.
    """
    weights, out = model.initial(3), model.table.empty()
    losses = []
    for step in range(steps + 1):
        losses.append(model.gradient(weights, batch, out, step=0, seed=0))
        assert np.isfinite(out).all()
        views = model.table.views(out)
        for name in model.net.learnable_tensors - without:
            assert views[name].any(), f"{name} has no gradient in step {step}"
        for name in model.net.buffers:
            assert views[name].any(), f"{name} has no change in step {step}"
        weights -= np.float32(rate) * out
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", NETS)
def test_a_net_learns(name: str) -> None:
    """Two steps along the gradient of one small batch; every tensor has a gradient."""
    net = NETS[name]()
    small = net.image if net.image[1] < 100 else (3, 227, 227)
    rng = np.random.default_rng(4)
    batch: Batch = {
        "data": rng.standard_normal((2, *small), np.float32),
        "label": rng.integers(0, 10, 2),
    }
    falls(CaffeModel(Description(caffe_nets.training(net._replace(image=small), 2))), batch, 1e-3)


def test_the_siamese_net_learns() -> None:
    """Both halves use the same tensors, which get the gradients of both.

    The biases behind the last rectifier move both halves alike, so their gradients cancel.
    """
    model = CaffeModel(caffe_nets.siamese(4).description())
    names = [tensor.name for tensor in model.table.tensors]
    assert names == [
        f"{layer}/{i}" for layer in ("conv1", "conv2", "ip1", "ip2", "feat") for i in "01"
    ]
    rng = np.random.default_rng(5)
    pairs: Batch = {
        "pair": rng.standard_normal((4, 2, 28, 28), np.float32),
        "sim": np.array([0, 1, 1, 0]),
    }
    falls(model, pairs, 1e-4, without=frozenset({"ip2/1", "feat/1"}))


def test_the_autoencoder_learns() -> None:
    """The cross-entropy falls; the Euclidean distance has a weight of 0 and is reported."""
    model = CaffeModel(caffe_nets.autoencoder(4).description())
    pixels = np.random.default_rng(6).random((4, 1, 28, 28), np.float32)
    falls(model, {"data": pixels}, 1e-3)
    outputs = model.outputs(model.initial(3), {"data": pixels})
    assert set(outputs) == {"cross", "apart"}
    assert outputs["apart"] > 0


def test_the_captioning_net_learns() -> None:
    """An LSTM over words, with the image's features in every step, and targets that are ignored."""
    model = CaffeModel(caffe_nets.captioning(5, 3).description())
    rng = np.random.default_rng(7)
    cont = np.ones((5, 3), np.float32)
    cont[0] = 0
    target = rng.integers(0, 50, (5, 3))
    target[4, 1] = -1
    batch: Batch = {
        "words": rng.integers(0, 50, (5, 3)),
        "cont": cont,
        "target": target,
        "features": rng.standard_normal((3, 20), np.float32),
    }
    falls(model, batch, 0.5)


SMALL_NETS = {
    "lenet": lambda: Net("lenet", load(caffe_nets.training(caffe_nets.lenet(), 2))),
    "cifar10_quick": lambda: Net("q", load(caffe_nets.training(caffe_nets.cifar10_quick(), 2))),
    "cifar10_full": lambda: Net("f", load(caffe_nets.training(caffe_nets.cifar10_full(), 2))),
    "siamese": lambda: caffe_nets.siamese(2),
    "autoencoder": lambda: caffe_nets.autoencoder(2),
    "captioning": lambda: caffe_nets.captioning(3, 2),
}


def load(prototxt: str) -> tuple[LayerParameter, ...]:
    return tuple(parse_net(prototxt).layer)


@pytest.mark.parametrize("suffix", ["caffemodel", "h5", "safetensors"])
@pytest.mark.parametrize("name", SMALL_NETS)
def test_weights_survive_every_format(name: str, suffix: str, tmp_path: Path) -> None:
    """Every float, for a net that is read again from its own prototxt."""
    net = SMALL_NETS[name]()
    model = CaffeModel(net.description())
    weights, path = model.initial(3), tmp_path / f"w.{suffix}"
    write_weights(path, model.net, weights)
    again = CaffeModel(load_net(net.save(tmp_path / "net.prototxt")).description())
    back, copied = read_weights(path, again.net, again.table.empty())
    assert (again.table, copied.missing, copied.unused) == (model.table, (), ())
    np.testing.assert_array_equal(back, weights)


@pytest.mark.parametrize(
    ("name", "blob", "without"),
    [
        ("siamese", "feat", {"Input", "Slice", "ContrastiveLoss"}),
        ("autoencoder", "pixels", {"Input", "SigmoidCrossEntropyLoss", "EuclideanLoss", "Flatten"}),
    ],
)
def test_a_part_of_a_net_computes_what_opencv_computes(
    name: str, blob: str, without: set[str], tmp_path: Path
) -> None:
    """One half of the siamese net, and the reconstruction of the autoencoder."""
    cv2 = pytest.importorskip("cv2")
    body = [layer for layer in SMALL_NETS[name]().layers if layer.type not in without]
    kept = [layer for layer in body if not layer.name.endswith("_p")]
    net = Net(name, [Input("data", shape=(1, 1, 28, 28)), *kept])
    model = CaffeModel(net.description(Phase.TEST))
    weights = model.initial(1)
    write_weights(tmp_path / "w.caffemodel", model.net, weights)
    image = np.random.default_rng(2).random((1, 1, 28, 28), np.float32)
    ours = model.forward(weights, {"data": image}, [blob])[blob]
    prototxt = net.save(tmp_path / "net.prototxt")
    theirs = cv2.dnn.readNetFromCaffe(str(prototxt), str(tmp_path / "w.caffemodel"))
    theirs.setInput(image)
    np.testing.assert_allclose(ours, theirs.forward(blob), rtol=1e-3, atol=1e-5)


EXAMPLES = Path(__file__).parents[3] / "deploy" / "examples"


@pytest.mark.parametrize("name", ["cifar10_quick", "caffenet"])
def test_an_example_is_the_network_of_its_name(name: str) -> None:
    """Its training and test nets have the tensors of the net above, at both phases' batch sizes."""
    solver = read_solver(EXAMPLES / f"{name}_solver.prototxt")
    net = Network(Description(caffe_nets.deploy(NETS[name](), 1)))
    for description in (solver.train, solver.tests[0].net):
        example = Network(description)
        assert [t.shape for t in example.table.tensors] == [t.shape for t in net.table.tensors]
        assert [t.lr_mult for t in example.table.tensors] == [1, 2] * (len(net.table.tensors) // 2)
    assert "accuracy" in Network(solver.tests[0].net).outputs


def test_the_cifar_example_learns() -> None:
    """From its own fillers, on images in bytes."""
    solver = read_solver(EXAMPLES / "cifar10_quick_solver.prototxt")
    rng = np.random.default_rng(8)
    batch: Batch = {
        "data": rng.integers(0, 256, (20, 3, 32, 32), np.uint8),
        "label": rng.integers(0, 10, 20),
    }
    falls(CaffeModel(solver.train), batch, 1e-3)


def test_the_lrcn_example_learns() -> None:
    """Sequences of letters for images, through two LSTMs, with an accuracy in tests."""
    solver = read_solver(EXAMPLES / "lrcn_solver.prototxt")
    rng = np.random.default_rng(9)
    cont = np.ones((6, 64), np.float32)
    cont[0] = 0
    batch: Batch = {
        "data": rng.random((64, 1, 28, 28), np.float32),
        "words": rng.integers(0, 16, (6, 64)),
        "cont": cont,
        "target": rng.integers(-1, 16, (6, 64)),
    }
    falls(CaffeModel(solver.train), batch, 0.1, steps=1)
    test = CaffeModel(solver.tests[0].net)
    assert set(test.outputs(test.initial(1), batch)) == {"accuracy", "loss"}
