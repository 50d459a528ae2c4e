"""The networks that Caffe is known for, written in Python.

Each net reads the column `data` and ends in scores; `training` adds labels and losses, and `deploy`
probabilities, both as prototxt. Sizes are those of the papers; the batch and the image may be
smaller.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

from worker.caffe.caffe_pb2 import LayerParameter
from worker.caffe.python_nets import (
    LRN,
    LSTM,
    BatchNorm,
    Concat,
    ContrastiveLoss,
    Convolution,
    Dropout,
    Eltwise,
    Embed,
    EuclideanLoss,
    Flatten,
    InnerProduct,
    Input,
    Net,
    Pooling,
    ReLU,
    Scale,
    Sigmoid,
    SigmoidCrossEntropyLoss,
    Slice,
    Softmax,
    SoftmaxWithLoss,
)

Layers = list[LayerParameter]


class KnownNet(NamedTuple):
    """A net's body, the shape of an image, and its scores with the weights of their losses."""

    body: Layers
    image: tuple[int, int, int]
    heads: tuple[tuple[str, float], ...]


def conv(  # as many as a convolution has settings
    name: str, bottom: str, out: int, k: int, stride: int = 1, pad: int = 0, group: int = 1,
    **more: Any,
) -> Layers:  # fmt: skip
    if more.get("bias_term", True):
        more["bias_filler"] = 0.1
    window = {"kernel_size": k, "stride": stride, "pad": pad, "group": group}
    return [Convolution(name, bottom, num_output=out, weight_filler="msra", **window, **more)]


def relu(name: str, blob: str) -> Layers:
    return [ReLU(name, blob, top=blob)]


def pool(name: str, bottom: str, kind: str, k: int, stride: int, pad: int = 0) -> Layers:
    return [Pooling(name, bottom, pool=kind, kernel_size=k, stride=stride, pad=pad)]


def mean(name: str, bottom: str) -> Layers:
    return [Pooling(name, bottom, pool="AVE", global_pooling=True)]


def norm(name: str, bottom: str, size: int = 5, alpha: float = 1e-4, **more: Any) -> Layers:
    return [LRN(name, bottom, local_size=size, alpha=alpha, beta=0.75, **more)]


def dense(name: str, bottom: str, out: int, **more: Any) -> Layers:
    filled = {"weight_filler": "xavier", "bias_filler": 0.1}
    return [InnerProduct(name, bottom, num_output=out, **filled, **more)]


def drop(name: str, blob: str, ratio: float = 0.5) -> Layers:
    return [Dropout(name, blob, top=blob, dropout_ratio=ratio)]


def lenet() -> KnownNet:
    body = conv("conv1", "data", 20, 5) + pool("pool1", "conv1", "MAX", 2, 2)
    body += conv("conv2", "pool1", 50, 5) + pool("pool2", "conv2", "MAX", 2, 2)
    body += dense("ip1", "pool2", 500) + relu("relu1", "ip1") + dense("ip2", "ip1", 10)
    return KnownNet(body, (1, 28, 28), (("ip2", 1.0),))


def cifar10_quick() -> KnownNet:
    body = conv("conv1", "data", 32, 5, pad=2) + pool("pool1", "conv1", "MAX", 3, 2)
    body += relu("relu1", "pool1")
    for number, (bottom, out) in enumerate((("pool1", 32), ("pool2", 64)), 2):
        body += conv(f"conv{number}", bottom, out, 5, pad=2) + relu(f"r{number}", f"conv{number}")
        body += pool(f"pool{number}", f"conv{number}", "AVE", 3, 2)
    body += dense("ip1", "pool3", 64) + dense("ip2", "ip1", 10)
    return KnownNet(body, (3, 32, 32), (("ip2", 1.0),))


def cifar10_full() -> KnownNet:
    within = {"norm_region": "WITHIN_CHANNEL"}
    body = conv("conv1", "data", 32, 5, pad=2) + pool("pool1", "conv1", "MAX", 3, 2)
    body += relu("relu1", "pool1") + norm("norm1", "pool1", 3, 5e-5, **within)
    body += conv("conv2", "norm1", 32, 5, pad=2) + relu("relu2", "conv2")
    body += pool("pool2", "conv2", "AVE", 3, 2) + norm(
        "norm2", "pool2", 3, 5e-5, norm_region="WITHIN_CHANNEL"
    )
    body += conv("conv3", "norm2", 64, 5, pad=2) + relu("relu3", "conv3")
    body += pool("pool3", "conv3", "AVE", 3, 2) + dense("ip1", "pool3", 10)
    return KnownNet(body, (3, 32, 32), (("ip1", 1.0),))


def _krizhevsky(*, norm_first: bool) -> KnownNet:
    """AlexNet, and CaffeNet, which pools before it normalises."""
    body: Layers = []
    bottom = "data"
    for number, (out, k, stride, pad, group) in enumerate(
        ((96, 11, 4, 0, 1), (256, 5, 1, 2, 2), (384, 3, 1, 1, 1), (384, 3, 1, 1, 2),
         (256, 3, 1, 1, 2)), 1,
    ):  # fmt: skip
        name = f"conv{number}"
        body += conv(name, bottom, out, k, stride, pad, group) + relu(f"relu{number}", name)
        bottom = name
        if number <= 2 and norm_first:
            body += norm(f"norm{number}", bottom)
            bottom = f"norm{number}"
        if number in {1, 2, 5}:
            body += pool(f"pool{number}", bottom, "MAX", 3, 2)
            bottom = f"pool{number}"
        if number <= 2 and not norm_first:
            body += norm(f"norm{number}", bottom)
            bottom = f"norm{number}"
    for number in (6, 7):
        name = f"fc{number}"
        body += (
            dense(name, bottom, 4096) + relu(f"relu{number}", name) + drop(f"drop{number}", name)
        )
        bottom = name
    return KnownNet(body + dense("fc8", bottom, 1000), (3, 227, 227), (("fc8", 1.0),))


def alexnet() -> KnownNet:
    return _krizhevsky(norm_first=True)


def caffenet() -> KnownNet:
    return _krizhevsky(norm_first=False)


def googlenet() -> KnownNet:
    """Szegedy et al. 2014, with both auxiliary heads."""
    body = conv("conv1", "data", 64, 7, 2, 3) + relu("relu1", "conv1")
    body += pool("pool1", "conv1", "MAX", 3, 2) + norm("norm1", "pool1")
    body += conv("reduce2", "norm1", 64, 1) + relu("relu2a", "reduce2")
    body += conv("conv2", "reduce2", 192, 3, pad=1) + relu("relu2", "conv2")
    body += norm("norm2", "conv2") + pool("pool2", "norm2", "MAX", 3, 2)
    bottom = "pool2"
    for name, widths in (
        ("3a", (64, 96, 128, 16, 32, 32)), ("3b", (128, 128, 192, 32, 96, 64)),
        ("4a", (192, 96, 208, 16, 48, 64)), ("4b", (160, 112, 224, 24, 64, 64)),
        ("4c", (128, 128, 256, 24, 64, 64)), ("4d", (112, 144, 288, 32, 64, 64)),
        ("4e", (256, 160, 320, 32, 128, 128)), ("5a", (256, 160, 320, 32, 128, 128)),
        ("5b", (384, 192, 384, 48, 128, 128)),
    ):  # fmt: skip
        body += _inception(name, bottom, widths)
        bottom = name
        if name in {"4a", "4d"}:
            body += _auxiliary(f"aux{name}", name)
        if name in {"3b", "4e"}:
            body += pool(f"pool{name}", name, "MAX", 3, 2)
            bottom = f"pool{name}"
    body += mean("pool5", bottom)
    body += drop("drop5", "pool5", 0.4) + dense("scores", "pool5", 1000)
    return KnownNet(body, (3, 224, 224), (("aux4a", 0.3), ("aux4d", 0.3), ("scores", 1.0)))


def _inception(name: str, bottom: str, widths: tuple[int, ...]) -> Layers:
    one, reduce3, three, reduce5, five, project = widths
    parts = (
        conv(f"{name}_1", bottom, one, 1),
        conv(f"{name}_3r", bottom, reduce3, 1) + relu(f"{name}_relu3r", f"{name}_3r"),
        conv(f"{name}_3", f"{name}_3r", three, 3, pad=1),
        conv(f"{name}_5r", bottom, reduce5, 1) + relu(f"{name}_relu5r", f"{name}_5r"),
        conv(f"{name}_5", f"{name}_5r", five, 5, pad=2),
        pool(f"{name}_pool", bottom, "MAX", 3, 1, 1),
        conv(f"{name}_p", f"{name}_pool", project, 1),
    )
    ends = [f"{name}_{end}" for end in ("1", "3", "5", "p")]
    rectified = [relu(f"{end}_relu", end) for end in ends]
    return [*chain(*parts, *rectified), Concat(name, ends)]


def _auxiliary(name: str, bottom: str) -> Layers:
    return (
        pool(f"{name}_pool", bottom, "AVE", 5, 3)
        + conv(f"{name}_conv", f"{name}_pool", 128, 1)
        + relu(f"{name}_relu", f"{name}_conv")
        + dense(f"{name}_fc", f"{name}_conv", 1024)
        + relu(f"{name}_relu2", f"{name}_fc")
        + drop(f"{name}_drop", f"{name}_fc", 0.7)
        + dense(name, f"{name}_fc", 1000)
    )


def resnet50() -> KnownNet:
    """He et al. 2015."""
    body = _normalised("conv1", "data", 64, 7, 2, 3) + relu("relu1", "conv1")
    body += pool("pool1", "conv1", "MAX", 3, 2)
    bottom = "pool1"
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 2):
        for block in range(blocks):
            name = f"res{stage}{'abcdef'[block]}"
            stride = 2 if block == 0 and stage > 2 else 1
            shortcut = bottom
            if block == 0:
                body += _normalised(f"{name}_1", bottom, 4 * width, 1, stride)
                shortcut = f"{name}_1"
            for part, (out, k, step) in enumerate(
                ((width, 1, stride), (width, 3, 1), (4 * width, 1, 1))
            ):
                inner = f"{name}_2{'abc'[part]}"
                source = bottom if part == 0 else f"{name}_2{'abc'[part - 1]}"
                body += _normalised(inner, source, out, k, step, k // 2)
                body += [] if part == 2 else relu(f"{inner}_relu", inner)
            body += [Eltwise(name, [shortcut, f"{name}_2c"]), *relu(f"{name}_relu", name)]
            bottom = name
    body += mean("pool5", bottom)
    return KnownNet(body + dense("fc1000", "pool5", 1000), (3, 224, 224), (("fc1000", 1.0),))


def _normalised(name: str, bottom: str, out: int, k: int, stride: int = 1, pad: int = 0) -> Layers:
    """A convolution without a bias, then BatchNorm and Scale in place."""
    return [
        *conv(name, bottom, out, k, stride, pad, bias_term=False),
        BatchNorm(f"{name}_bn", name, top=name),
        Scale(f"{name}_scale", name, top=name, bias_term=True),
    ]


NETS: dict[str, Callable[[], KnownNet]] = {
    "lenet": lenet,
    "cifar10_quick": cifar10_quick,
    "cifar10_full": cifar10_full,
    "alexnet": alexnet,
    "caffenet": caffenet,
    "googlenet": googlenet,
    "resnet50": resnet50,
}


def training(net: KnownNet, batch: int) -> str:
    """The net with labels and a loss for each head."""
    losses = [
        SoftmaxWithLoss(f"loss_{scores}", [scores, "label"], loss_weight=weight)
        for scores, weight in net.heads
    ]
    inputs = [Input("data", shape=(batch, *net.image)), Input("label", shape=(batch,))]
    return Net("training", [*inputs, *net.body, *losses]).prototxt


def deploy(net: KnownNet, batch: int) -> str:
    """The net with the probabilities of its last head as `prob`."""
    data = Input("data", shape=(batch, *net.image))
    return Net("deploy", [data, *net.body, Softmax("prob", net.heads[-1][0])]).prototxt


def siamese(batch: int) -> Net:
    """Pairs of digits in two channels, two LeNets with shared tensors, and the pair's distance."""
    body = [Input("pair", shape=(batch, 2, 28, 28)), Input("sim", shape=(batch,))]
    body.append(Slice("halves", "pair", top=["data", "data_p"]))
    for end in ("", "_p"):
        for number, (bottom, out) in enumerate((("data", 20), ("pool1", 50)), 1):
            name = f"conv{number}"
            body += conv(name + end, bottom + end, out, 5, param=_shared(name))
            body += pool(f"pool{number}{end}", name + end, "MAX", 2, 2)
        body += dense(f"ip1{end}", f"pool2{end}", 500, param=_shared("ip1"))
        body += relu(f"relu{end}", f"ip1{end}")
        body += dense(f"ip2{end}", f"ip1{end}", 10, param=_shared("ip2"))
        body += dense(f"feat{end}", f"ip2{end}", 2, param=_shared("feat"))
    body.append(ContrastiveLoss("loss", ["feat", "feat_p", "sim"], margin=1.0))
    return Net("siamese", body)


def _shared(name: str) -> list[dict[str, Any]]:
    return [{"name": f"{name}_w", "lr_mult": 1.0}, {"name": f"{name}_b", "lr_mult": 2.0}]


def autoencoder(batch: int) -> Net:
    """Hinton and Salakhutdinov 2006: 784-1000-500-250-30 and back, with a loss of pixels."""
    body = [Input("data", shape=(batch, 1, 28, 28)), Flatten("flatdata", "data")]
    bottom, widths = "data", (1000, 500, 250, 30, 250, 500, 1000, 784)
    for number, width in enumerate(widths, 1):
        body += dense(f"ip{number}", bottom, width)
        bottom = f"ip{number}"
        if number not in {4, 8}:
            body.append(Sigmoid(f"sig{number}", bottom))
            bottom = f"sig{number}"
    body.append(SigmoidCrossEntropyLoss("cross", ["ip8", "flatdata"], loss_weight=1.0))
    body.append(Sigmoid("pixels", "ip8"))
    body.append(EuclideanLoss("apart", ["pixels", "flatdata"], loss_weight=0.0))
    return Net("autoencoder", body)


def captioning(time: int, batch: int) -> Net:
    """Words to words through an LSTM that also sees the image's features (Donahue et al. 2015)."""
    filler = {"weight_filler": {"type": "uniform", "min": -0.08, "max": 0.08}}
    body = [Input(name, shape=(time, batch)) for name in ("words", "cont", "target")]
    body += [
        Input("features", shape=(batch, 20)),
        Embed("embedded", "words", input_dim=50, num_output=12, bias_term=False, **filler),
        LSTM("lstm", ["embedded", "cont", "features"], num_output=16, **filler),
        InnerProduct("scores", "lstm", num_output=50, axis=2, **filler),
        SoftmaxWithLoss("loss", ["scores", "target"], ignore_label=-1, softmax_param={"axis": 2}),
    ]
    return Net("captioning", body)


def blob(name: str, *shape: int) -> str:
    """An input of a net, as text."""
    return Net("", [Input(name, shape=shape)]).prototxt.partition("\n")[2]
