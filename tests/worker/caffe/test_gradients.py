"""Every layer's gradient against finite differences of its forward pass, for random settings; and
its passes in kernels against those on the host.

The slope of a weighted sum of the tops, along a random direction of inputs and tensors, is measured
over a small step each way. Inputs are spread so that no step crosses a kink of a maximum or of a
rectifier. A step's random numbers are the same each time.
"""

import shutil
from math import prod
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import Phase as HypothesisPhase
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_kernels.backends import HOST, EmulatorBackend, as_host, copy_to
from cupy_kernels.emulator import Emulator
from cupy_kernels.types import AnyArray
from tests.support.caffe_nets import blob
from worker.caffe.layer import SourceLayer
from worker.caffe.net import Description, Network
from worker.caffe.phases import Phase
from worker.caffe.registry import LAYERS

STEP = 4e-3
KERNELS = EmulatorBackend(Emulator())
KINKS = (0.0, -1.0, 1.0, 0.5)  # of rectifiers, hinges and Clip
WITHOUT_GRADIENT = {"Accuracy", "ArgMax", "Silence", "Threshold"}


class Setting(NamedTuple):
    """A layer's settings, the shapes of its bottoms, the labels among them, and its tops."""

    text: str
    shapes: tuple[tuple[int, ...], ...]
    classes: dict[int, int] = {}  # noqa: RUF012  # the number of classes of each bottom of labels
    tops: int = 1
    low: float = -2.0
    phase: Phase = Phase.TRAIN


small = st.integers(1, 4)
images = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(3, 6), st.integers(3, 6))
arrays = st.lists(st.integers(1, 4), min_size=2, max_size=5).map(tuple)


def plain(text: str = "", low: float = -2.0) -> st.SearchStrategy[Setting]:
    return arrays.map(lambda shape: Setting(text, (shape,), low=low))


@st.composite
def convolutions(draw: st.DrawFn) -> Setting:
    group, n = draw(st.integers(1, 2)), draw(small)
    shape = (n, group * draw(st.integers(1, 2)), draw(st.integers(5, 7)), draw(st.integers(5, 7)))
    text = f"num_output: {group * draw(st.integers(1, 3))} group: {group}"
    text += f" kernel_h: {draw(st.integers(1, 3))} kernel_w: {draw(st.integers(1, 3))}"
    text += f" stride: {draw(st.integers(1, 2))} pad: {draw(st.integers(0, 1))}"
    text += f" dilation: {draw(st.integers(1, 2))} bias_term: {str(draw(st.booleans())).lower()}"
    return Setting(f"convolution_param {{ {text} }}", (shape,))


@st.composite
def deconvolutions(draw: st.DrawFn) -> Setting:
    found = draw(convolutions())
    n, c, _, _ = found.shapes[0]
    return found._replace(shapes=((n, c, draw(st.integers(3, 4)), draw(st.integers(3, 4))),))


@st.composite
def poolings(draw: st.DrawFn) -> Setting:
    kind, k = draw(st.sampled_from(["MAX", "AVE"])), draw(st.integers(1, 3))
    text = f"kernel_size: {k} stride: {draw(st.integers(1, k))} pad: {draw(st.integers(0, k - 1))}"
    text += f" round_mode: {draw(st.sampled_from(['CEIL', 'FLOOR']))}"
    if draw(st.booleans()):
        text = "global_pooling: true"
    return Setting(f"pooling_param {{ pool: {kind} {text} }}", (draw(images),))


@st.composite
def norms(draw: st.DrawFn) -> Setting:
    text = f"local_size: {draw(st.sampled_from([1, 3, 5]))} alpha: {draw(st.floats(0.1, 1)):.2f}"
    text += f" beta: {draw(st.sampled_from([0.5, 0.75]))} k: {draw(st.floats(0.5, 2)):.2f}"
    region = draw(st.sampled_from(["ACROSS_CHANNELS", "WITHIN_CHANNEL"]))
    return Setting(f"lrn_param {{ {text} norm_region: {region} }}", (draw(images),))


@st.composite
def batch_norms(draw: st.DrawFn) -> Setting:
    shape = (draw(st.integers(3, 5)), *draw(st.lists(st.integers(2, 3), min_size=1, max_size=3)))
    return Setting("batch_norm_param { eps: 0.1 }", (shape,), phase=draw(st.sampled_from(Phase)))


@st.composite
def inner_products(draw: st.DrawFn) -> Setting:
    shape = draw(arrays)
    text = f"num_output: {draw(small)} axis: {draw(st.integers(1, len(shape) - 1))}"
    text += f" transpose: {str(draw(st.booleans())).lower()}"
    return Setting(f"inner_product_param {{ {text} }}", (shape,))


@st.composite
def broadcasts(draw: st.DrawFn, message: str, more: str = "") -> Setting:
    shape = draw(arrays)
    axis = draw(st.integers(0, len(shape) - 1))
    count = draw(st.integers(0, len(shape) - axis))
    if draw(st.booleans()) and count:
        return Setting(f"{message} {{ axis: {axis} {more} }}", (shape, shape[axis : axis + count]))
    return Setting(f"{message} {{ axis: {axis} num_axes: {count} {more} }}", (shape,))


@st.composite
def eltwises(draw: st.DrawFn) -> Setting:
    shape, count = draw(arrays), draw(st.integers(2, 4))
    operation = draw(st.sampled_from(["SUM", "PROD", "MAX"]))
    text = f"operation: {operation}"
    if operation == "SUM" and draw(st.booleans()):
        text += "".join(f" coeff: {draw(st.floats(-2, 2)):.2f}" for _ in range(count))
    return Setting(f"eltwise_param {{ {text} }}", (shape,) * count)


@st.composite
def concats(draw: st.DrawFn) -> Setting:
    shape = draw(arrays)
    axis = draw(st.integers(0, len(shape) - 1))
    sizes = draw(st.lists(small, min_size=1, max_size=3))
    shapes = tuple((*shape[:axis], size, *shape[axis + 1 :]) for size in sizes)
    return Setting(
        f"concat_param {{ axis: {axis - draw(st.sampled_from([0, len(shape)]))} }}", shapes
    )


@st.composite
def slices(draw: st.DrawFn) -> Setting:
    shape = draw(arrays)
    axis = draw(st.integers(0, len(shape) - 1))
    sizes = draw(st.lists(small, min_size=1, max_size=3))
    points = " ".join(f"slice_point: {end}" for end in np.cumsum(sizes)[:-1])
    whole = (*shape[:axis], sum(sizes), *shape[axis + 1 :])
    return Setting(f"slice_param {{ axis: {axis} {points} }}", (whole,), tops=len(sizes))


@st.composite
def flattens(draw: st.DrawFn) -> Setting:
    shape = draw(arrays)
    axis = draw(st.integers(0, len(shape) - 1))
    end = draw(st.integers(axis, len(shape) - 1))
    return Setting(f"flatten_param {{ axis: {axis} end_axis: {end} }}", (shape,))


@st.composite
def crops(draw: st.DrawFn) -> Setting:
    shape = draw(arrays)
    axis = draw(st.integers(0, len(shape) - 1))
    like = tuple(size if i < axis else draw(st.integers(1, size)) for i, size in enumerate(shape))
    offsets = [draw(st.integers(0, a - b)) for a, b in list(zip(shape, like, strict=True))[axis:]]
    text = " ".join(f"offset: {offset}" for offset in offsets)
    return Setting(f"crop_param {{ axis: {axis} {text} }}", (shape, like))


@st.composite
def tiles(draw: st.DrawFn) -> Setting:
    shape = draw(arrays)
    axis = draw(st.integers(0, len(shape) - 1))
    return Setting(f"tile_param {{ axis: {axis} tiles: {draw(st.integers(1, 3))} }}", (shape,))


@st.composite
def reductions(draw: st.DrawFn) -> Setting:
    shape = draw(arrays)
    operation = draw(st.sampled_from(["SUM", "ASUM", "SUMSQ", "MEAN"]))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    return Setting(
        f"reduction_param {{ operation: {operation} axis: {axis} coeff: 1.5 }}", (shape,)
    )


@st.composite
def labelled(draw: st.DrawFn, text: str = "", low: float = -2.0) -> Setting:
    rows, classes = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    return Setting(text, ((rows, classes), (rows,)), {1: classes}, low=low)


@st.composite
def softmax_losses(draw: st.DrawFn) -> Setting:
    n, classes, h, w = draw(images)
    mode = draw(st.sampled_from(["FULL", "VALID", "BATCH_SIZE", "NONE"]))
    text = f"loss_param {{ normalization: {mode} ignore_label: 1 }}"
    return Setting(text, ((n, classes, h, w), (n, 1, h, w)), {1: classes}, tops=draw(st.just(1)))


@st.composite
def infogains(draw: st.DrawFn) -> Setting:
    rows, classes = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    return Setting("", ((rows, classes), (rows,), (classes, classes)), {1: classes})


@st.composite
def sigmoid_losses(draw: st.DrawFn) -> Setting:
    shape, mode = draw(arrays), draw(st.sampled_from(["FULL", "VALID", "BATCH_SIZE", "NONE"]))
    return Setting(
        f"loss_param {{ normalization: {mode} ignore_label: 0 }}", (shape, shape), {1: 2}
    )


@st.composite
def contrastives(draw: st.DrawFn) -> Setting:
    n, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    text = f"margin: 3.3 legacy_version: {str(draw(st.booleans())).lower()}"
    return Setting(f"contrastive_loss_param {{ {text} }}", ((n, width), (n, width), (n,)), {2: 2})


@st.composite
def embeds(draw: st.DrawFn) -> Setting:
    text = f"input_dim: 5 num_output: {draw(small)} bias_term: {str(draw(st.booleans())).lower()}"
    shape = tuple(draw(st.lists(small, min_size=1, max_size=3)))
    return Setting(f"embed_param {{ {text} }}", (shape,), {0: 5})


@st.composite
def recurrents(draw: st.DrawFn, states: int) -> Setting:
    time, batch, outputs = draw(st.integers(1, 4)), draw(small), draw(small)
    shapes: list[tuple[int, ...]] = [(time, batch, draw(small)), (time, batch)]
    if draw(st.booleans()):
        shapes.append((batch, draw(small)))
    exposed = draw(st.booleans())
    shapes += [(1, batch, outputs)] * (states * exposed)
    text = f"num_output: {outputs} expose_hidden: {str(exposed).lower()}"
    return Setting(
        f"recurrent_param {{ {text} }}", tuple(shapes), {1: 2}, tops=1 + states * exposed
    )


SETTINGS: dict[str, st.SearchStrategy[Setting]] = {
    **{name: plain() for name in ("AbsVal", "BNLL", "ELU", "Exp", "Sigmoid", "Swish", "TanH")},
    "ReLU": st.floats(0, 1).flatmap(lambda s: plain(f"relu_param {{ negative_slope: {s:.2f} }}")),
    "PReLU": st.sampled_from(["true", "false"]).flatmap(
        lambda shared: plain(f"prelu_param {{ channel_shared: {shared} }}")
    ),
    "Clip": plain("clip_param { min: -1 max: 0.5 }"),
    "Power": st.sampled_from([0, 1, 2, -1.5]).flatmap(
        lambda power: plain(f"power_param {{ power: {power} scale: 0.7 shift: 0.4 }}", low=0.5)
    ),
    "Log": plain("log_param { base: 2 scale: 0.5 shift: 0.7 }", low=0.5),
    "Dropout": plain("dropout_param { dropout_ratio: 0.3 }"),
    "Convolution": convolutions(),
    "Deconvolution": deconvolutions(),
    "Pooling": poolings(),
    "SPP": images.flatmap(
        lambda shape: st.sampled_from(["MAX", "AVE"]).map(
            lambda kind: Setting(
                f"spp_param {{ pyramid_height: 2 pool: {kind} }}", ((*shape[:2], 4, 6),)
            )
        )
    ),
    "InnerProduct": inner_products(),
    "Embed": embeds(),
    "LRN": norms(),
    "BatchNorm": batch_norms(),
    "MVN": st.booleans().map(
        lambda across: Setting(
            f"mvn_param {{ across_channels: {str(across).lower()} eps: 0.1 }}", ((2, 2, 3, 4),)
        )
    ),
    "Scale": broadcasts("scale_param", "bias_term: true"),
    "Bias": broadcasts("bias_param"),
    "Concat": concats(),
    "Slice": slices(),
    "Split": arrays.map(lambda shape: Setting("", (shape,), tops=3)),
    "Eltwise": eltwises(),
    "Flatten": flattens(),
    "Reshape": small.map(
        lambda n: Setting("reshape_param { shape { dim: 0 dim: -1 dim: 2 } }", ((n, 4, 3, 2),))
    ),
    "Crop": crops(),
    "Tile": tiles(),
    "Reduction": reductions(),
    "Filter": st.integers(2, 4).map(lambda n: Setting("", ((n, 3), (n, 2), (n,)), {2: 2}, tops=2)),
    "BatchReindex": st.integers(2, 4).map(lambda n: Setting("", ((n, 3), (5,)), {1: n})),
    "Softmax": arrays.map(lambda shape: Setting("softmax_param { axis: 1 }", (shape,))),
    "SoftmaxWithLoss": softmax_losses(),
    "EuclideanLoss": arrays.flatmap(
        lambda shape: st.sampled_from([shape, (shape[0], prod(shape[1:]))]).map(
            lambda other: Setting("", (shape, other))
        )
    ),
    "HingeLoss": st.sampled_from(["L1", "L2"]).flatmap(
        lambda norm: labelled(f"hinge_loss_param {{ norm: {norm} }}")
    ),
    "MultinomialLogisticLoss": labelled(low=0.5),
    "InfogainLoss": infogains(),
    "SigmoidCrossEntropyLoss": sigmoid_losses(),
    "ContrastiveLoss": contrastives(),
    "LSTM": recurrents(2),
    "RNN": recurrents(1),
}


def spread(rng: np.random.Generator, size: int, low: float) -> AnyArray:
    """Different numbers in [low, low + 4], in random order, none near a kink."""
    grid = low + 4 * (np.arange(size) + 0.5) / max(size, 1)
    for kink in KINKS:
        grid[np.abs(grid - kink) < 2 * STEP] += 5 * STEP
    return rng.permutation(grid).astype(np.float32)


def inputs(setting: Setting, rng: np.random.Generator) -> dict[str, AnyArray]:
    """Columns b0, b1, ...; the last label of each column is not 0, all other numbers differ."""
    sizes = [
        0 if number in setting.classes else int(np.prod(shape))
        for number, shape in enumerate(setting.shapes)
    ]
    parts = np.split(spread(rng, sum(sizes), setting.low), np.cumsum(sizes)[:-1])
    found: dict[str, AnyArray] = {}
    for number, (shape, part) in enumerate(zip(setting.shapes, parts, strict=True)):
        if number in setting.classes:
            labels = rng.integers(0, setting.classes[number], shape)
            labels.reshape(-1)[-1] = setting.classes[number] - 1
            part = labels.astype(np.float32)
        found[f"b{number}"] = part.reshape(shape)
    return found


class Built(NamedTuple):
    """A net of one layer, its inputs and tensors, and the generator that drew them."""

    net: Network
    batch: dict[str, AnyArray]
    weights: AnyArray
    rng: np.random.Generator


def built(name: str, setting: Setting) -> Built:
    """A net of a layer with these settings; all tensors in [0.3, 1]."""
    text = "force_backward: true\n"
    text += "".join(blob(f"b{i}", *shape) for i, shape in enumerate(setting.shapes))
    names = [f'bottom: "b{i}"' for i in range(len(setting.shapes))]
    names += [f'top: "t{i}"' for i in range(setting.tops)]
    text += f'layer {{ name: "L" type: "{name}" {" ".join(names)} {setting.text} }}'
    net = Network(Description(text, setting.phase))
    rng = np.random.default_rng(len(text))
    batch, weights = inputs(setting, rng), net.table.empty()
    for view in net.table.views(weights).values():
        view[...] = rng.uniform(0.3, 1, view.shape)
    return Built(net, batch, weights, rng)


@pytest.mark.parametrize("name", sorted(SETTINGS))
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_gradient_is_the_slope(name: str, data: st.DataObject) -> None:
    """Within 1 % of the size of the terms, which float32 and the step's curvature allow."""
    setting = data.draw(SETTINGS[name])
    net, batch, weights, rng = built(name, setting)
    out, text = net.table.empty(), net.description.prototxt

    net.forward(weights, batch)
    exposed = 1 if name in {"LSTM", "RNN"} else setting.tops  # their last state gives no gradient
    tops = {f"t{i}": net.blob(f"t{i}") for i in range(exposed)}
    factors = {top: rng.uniform(0.5, 1, x.shape).astype(np.float32) for top, x in tops.items()}
    found = net.backward(weights, out, factors)

    ways = {blob: rng.choice([-1.0, 1.0], x.shape) for blob, x in batch.items() if blob in found}
    tensors = net.table.views(rng.choice([-1.0, 1.0], weights.shape).astype(np.float32))
    trained = net.learnable_tensors | {t.name for t in net.table.tensors if t.lr_mult}
    expected, size = 0.0, 0.0
    for blob_name, way in ways.items():
        terms = found[blob_name] * way
        expected, size = expected + terms.sum(dtype=float), size + np.abs(terms).sum(dtype=float)
    for tensor in trained:
        terms = net.table.views(out)[tensor] * tensors[tensor]
        expected, size = expected + terms.sum(dtype=float), size + np.abs(terms).sum(dtype=float)

    def measured(sign: float) -> float:
        moved, columns = weights.copy(), dict(batch)
        for tensor in trained:
            net.table.views(moved)[tensor][...] += np.float32(sign * STEP) * tensors[tensor]
        for blob_name, way in ways.items():
            columns[blob_name] = (batch[blob_name] + sign * STEP * way).astype(np.float32)
        net.reset()
        net.forward(moved, columns)
        return sum(float((net.blob(top).astype(float) * f).sum()) for top, f in factors.items())

    slope = (measured(1) - measured(-1)) / (2 * STEP)
    value = max(abs(measured(0)), 1.0)
    assert abs(slope - expected) <= 1e-2 * size + 1e-6 * value / STEP, (slope, expected, size, text)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")
@pytest.mark.parametrize("name", sorted(SETTINGS))
@settings(max_examples=3, derandomize=True, phases=[HypothesisPhase.generate])
@given(data=st.data())
def test_kernels_compute_what_the_host_computes(name: str, data: st.DataObject) -> None:
    """Tops, and gradients of inputs and tensors, to within 2e-5 of the largest number of each."""
    setting, found = data.draw(SETTINGS[name]), []
    net, batch, weights, rng = built(name, setting)
    factors: dict[str, AnyArray] = {}
    for place in (HOST, KERNELS):
        arena, out = copy_to(weights, place), copy_to(0 * weights, place)
        net.reset()
        net.forward(arena, batch)
        tops = {f"t{i}": net.blob(f"t{i}") for i in range(setting.tops)}
        for top, x in tops.items():
            factors.setdefault(top, rng.uniform(0.5, 1, x.shape).astype(np.float32))
        slopes = net.backward(arena, out, factors)
        found.append(tops | slopes | net.table.views(as_host(out)))
    for what, expected in found[0].items():
        share = 2e-5 * float(np.abs(expected).max(initial=0))
        np.testing.assert_allclose(found[1][what], expected, rtol=0, atol=share, err_msg=what)


def test_every_layer_is_checked() -> None:
    """All types but sources of data, and those that have no gradient."""
    sources = {name for name, layer in LAYERS.items() if issubclass(layer, SourceLayer)}
    assert set(SETTINGS) == set(LAYERS) - sources - WITHOUT_GRADIENT
