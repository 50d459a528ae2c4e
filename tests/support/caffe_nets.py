"""The networks that Caffe is known for, as prototxt, from a few functions.

Each net reads the column `data` and ends in scores; `training` adds labels and losses, and `deploy`
probabilities. Sizes are those of the papers; the batch and the image may be smaller.
"""

from collections.abc import Callable
from typing import NamedTuple


class Net(NamedTuple):
    """A net's body, the shape of an image, and its scores with the weights of their losses."""

    body: str
    image: tuple[int, int, int]
    heads: tuple[tuple[str, float], ...]


def layer(kind: str, name: str, bottoms: str, settings: str = "", top: str | None = None) -> str:
    """An entry; `bottoms` are names with spaces between them."""
    listed = " ".join(f'bottom: "{bottom}"' for bottom in bottoms.split())
    return f'layer {{ name: "{name}" type: "{kind}" {listed} top: "{top or name}" {settings} }}\n'


def conv(  # as many as a convolution has settings
    name: str, bottom: str, out: int, k: int, stride: int = 1, pad: int = 0, group: int = 1,
    more: str = "", rate: str = "",
) -> str:  # fmt: skip
    settings = f"num_output: {out} kernel_size: {k} stride: {stride} pad: {pad} group: {group}"
    filler = 'weight_filler { type: "msra" } bias_filler { type: "constant" value: 0.1 }'
    return layer(
        "Convolution", name, bottom, f"{rate} convolution_param {{ {settings} {filler} {more} }}"
    )


def relu(name: str, blob: str) -> str:
    return layer("ReLU", name, blob, top=blob)


def pool(name: str, bottom: str, kind: str, k: int, stride: int, pad: int = 0) -> str:
    settings = f"pool: {kind} kernel_size: {k} stride: {stride} pad: {pad}"
    return layer("Pooling", name, bottom, f"pooling_param {{ {settings} }}")


def norm(name: str, bottom: str, size: int = 5, alpha: float = 1e-4, more: str = "") -> str:
    settings = f"local_size: {size} alpha: {alpha} beta: 0.75 {more}"
    return layer("LRN", name, bottom, f"lrn_param {{ {settings} }}")


def dense(name: str, bottom: str, out: int, rate: str = "") -> str:
    filler = 'weight_filler { type: "xavier" } bias_filler { type: "constant" value: 0.1 }'
    return layer(
        "InnerProduct", name, bottom, f"{rate} inner_product_param {{ num_output: {out} {filler} }}"
    )


def drop(name: str, blob: str, ratio: float = 0.5) -> str:
    return layer("Dropout", name, blob, f"dropout_param {{ dropout_ratio: {ratio} }}", blob)


def lenet() -> Net:
    body = conv("conv1", "data", 20, 5) + pool("pool1", "conv1", "MAX", 2, 2)
    body += conv("conv2", "pool1", 50, 5) + pool("pool2", "conv2", "MAX", 2, 2)
    body += dense("ip1", "pool2", 500) + relu("relu1", "ip1") + dense("ip2", "ip1", 10)
    return Net(body, (1, 28, 28), (("ip2", 1.0),))


def cifar10_quick() -> Net:
    body = conv("conv1", "data", 32, 5, pad=2) + pool("pool1", "conv1", "MAX", 3, 2)
    body += relu("relu1", "pool1")
    for number, (bottom, out) in enumerate((("pool1", 32), ("pool2", 64)), 2):
        body += conv(f"conv{number}", bottom, out, 5, pad=2) + relu(f"r{number}", f"conv{number}")
        body += pool(f"pool{number}", f"conv{number}", "AVE", 3, 2)
    body += dense("ip1", "pool3", 64) + dense("ip2", "ip1", 10)
    return Net(body, (3, 32, 32), (("ip2", 1.0),))


def cifar10_full() -> Net:
    within = "norm_region: WITHIN_CHANNEL"
    body = conv("conv1", "data", 32, 5, pad=2) + pool("pool1", "conv1", "MAX", 3, 2)
    body += relu("relu1", "pool1") + norm("norm1", "pool1", 3, 5e-5, within)
    body += conv("conv2", "norm1", 32, 5, pad=2) + relu("relu2", "conv2")
    body += pool("pool2", "conv2", "AVE", 3, 2) + norm("norm2", "pool2", 3, 5e-5, within)
    body += conv("conv3", "norm2", 64, 5, pad=2) + relu("relu3", "conv3")
    body += pool("pool3", "conv3", "AVE", 3, 2) + dense("ip1", "pool3", 10)
    return Net(body, (3, 32, 32), (("ip1", 1.0),))


def _krizhevsky(*, norm_first: bool) -> Net:
    """AlexNet, and CaffeNet, which pools before it normalises."""
    body, bottom = "", "data"
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
    return Net(body + dense("fc8", bottom, 1000), (3, 227, 227), (("fc8", 1.0),))


def alexnet() -> Net:
    return _krizhevsky(norm_first=True)


def caffenet() -> Net:
    return _krizhevsky(norm_first=False)


def googlenet() -> Net:
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
    body += layer("Pooling", "pool5", bottom, "pooling_param { pool: AVE global_pooling: true }")
    body += drop("drop5", "pool5", 0.4) + dense("scores", "pool5", 1000)
    return Net(body, (3, 224, 224), (("aux4a", 0.3), ("aux4d", 0.3), ("scores", 1.0)))


def _inception(name: str, bottom: str, widths: tuple[int, ...]) -> str:
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
    rectified = "".join(relu(f"{end}_relu", end) for end in ends)
    return "".join(parts) + rectified + layer("Concat", name, " ".join(ends))


def _auxiliary(name: str, bottom: str) -> str:
    return (
        pool(f"{name}_pool", bottom, "AVE", 5, 3)
        + conv(f"{name}_conv", f"{name}_pool", 128, 1)
        + relu(f"{name}_relu", f"{name}_conv")
        + dense(f"{name}_fc", f"{name}_conv", 1024)
        + relu(f"{name}_relu2", f"{name}_fc")
        + drop(f"{name}_drop", f"{name}_fc", 0.7)
        + dense(name, f"{name}_fc", 1000)
    )


def resnet50() -> Net:
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
                body += "" if part == 2 else relu(f"{inner}_relu", inner)
            body += layer("Eltwise", name, f"{shortcut} {name}_2c") + relu(f"{name}_relu", name)
            bottom = name
    body += layer("Pooling", "pool5", bottom, "pooling_param { pool: AVE global_pooling: true }")
    return Net(body + dense("fc1000", "pool5", 1000), (3, 224, 224), (("fc1000", 1.0),))


def _normalised(name: str, bottom: str, out: int, k: int, stride: int = 1, pad: int = 0) -> str:
    """A convolution without a bias, then BatchNorm and Scale in place."""
    return (
        conv(name, bottom, out, k, stride, pad, more="bias_term: false")
        + layer("BatchNorm", f"{name}_bn", name, top=name)
        + layer("Scale", f"{name}_scale", name, "scale_param { bias_term: true }", name)
    )


NETS: dict[str, Callable[[], Net]] = {
    "lenet": lenet,
    "cifar10_quick": cifar10_quick,
    "cifar10_full": cifar10_full,
    "alexnet": alexnet,
    "caffenet": caffenet,
    "googlenet": googlenet,
    "resnet50": resnet50,
}


def blob(name: str, *shape: int) -> str:
    """An input of the net."""
    dims = " ".join(f"dim: {size}" for size in shape)
    entry = f'layer {{ name: "{name}" type: "Input" top: "{name}"'
    return f"{entry} input_param {{ shape {{ {dims} }} }} }}\n"


def training(net: Net, batch: int) -> str:
    """The net with labels and a loss for each head."""
    losses = "".join(
        layer("SoftmaxWithLoss", f"loss_{scores}", f"{scores} label", f"loss_weight: {weight}")
        for scores, weight in net.heads
    )
    return blob("data", batch, *net.image) + blob("label", batch) + net.body + losses


def deploy(net: Net, batch: int) -> str:
    """The net with the probabilities of its last head as `prob`."""
    return blob("data", batch, *net.image) + net.body + layer("Softmax", "prob", net.heads[-1][0])


def siamese(batch: int) -> str:
    """Pairs of digits in two channels, two LeNets with shared tensors, and the pair's distance."""
    halves = 'layer { name: "halves" type: "Slice" bottom: "pair" top: "data" top: "data_p" }\n'
    body = blob("pair", batch, 2, 28, 28) + blob("sim", batch) + halves
    for end in ("", "_p"):
        for number, (bottom, out) in enumerate((("data", 20), ("pool1", 50)), 1):
            body += conv(f"conv{number}{end}", bottom + end, out, 5, rate=_shared(f"conv{number}"))
            body += pool(f"pool{number}{end}", f"conv{number}{end}", "MAX", 2, 2)
        body += dense(f"ip1{end}", f"pool2{end}", 500, _shared("ip1"))
        body += relu(f"relu{end}", f"ip1{end}")
        body += dense(f"ip2{end}", f"ip1{end}", 10, _shared("ip2"))
        body += dense(f"feat{end}", f"ip2{end}", 2, _shared("feat"))
    margin = "contrastive_loss_param { margin: 1 }"
    return body + layer("ContrastiveLoss", "loss", "feat feat_p sim", margin)


def _shared(name: str) -> str:
    return f'param {{ name: "{name}_w" lr_mult: 1 }} param {{ name: "{name}_b" lr_mult: 2 }}'


def autoencoder(batch: int) -> str:
    """Hinton and Salakhutdinov 2006: 784-1000-500-250-30 and back, with a loss of pixels."""
    body = blob("data", batch, 1, 28, 28) + layer("Flatten", "flatdata", "data")
    bottom, widths = "data", (1000, 500, 250, 30, 250, 500, 1000, 784)
    for number, width in enumerate(widths, 1):
        body += dense(f"ip{number}", bottom, width)
        bottom = f"ip{number}"
        if number not in {4, 8}:
            body += layer("Sigmoid", f"sig{number}", bottom)
            bottom = f"sig{number}"
    body += layer("SigmoidCrossEntropyLoss", "cross", "ip8 flatdata", "loss_weight: 1")
    body += layer("Sigmoid", "pixels", "ip8")
    return body + layer("EuclideanLoss", "apart", "pixels flatdata", "loss_weight: 0")


def captioning(time: int, batch: int) -> str:
    """Words to words through an LSTM that also sees the image's features (Donahue et al. 2015)."""
    settings = "embed_param { input_dim: 50 num_output: 12 bias_term: false"
    weights = 'weight_filler { type: "uniform" min: -0.08 max: 0.08 }'
    body = blob("words", time, batch) + blob("cont", time, batch) + blob("target", time, batch)
    body += blob("features", batch, 20)
    body += layer("Embed", "embedded", "words", f"{settings} {weights} }}")
    body += layer(
        "LSTM", "lstm", "embedded cont features",
        f"recurrent_param {{ num_output: 16 {weights} }}",
    )  # fmt: skip
    body += layer(
        "InnerProduct", "scores", "lstm",
        f"inner_product_param {{ num_output: 50 axis: 2 {weights} }}",
    )  # fmt: skip
    return body + layer(
        "SoftmaxWithLoss", "loss", "scores target",
        "loss_param { ignore_label: -1 } softmax_param { axis: 2 }",
    )  # fmt: skip
