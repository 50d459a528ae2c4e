"""How layers are wired into a network, and what a network refuses."""

from typing import Any

import numpy as np
import pytest

from shards.errors import BadInput
from tests.support.model_training import Trained
from tests.support.small_nets import DATA, SMALL, network, rows
from worker.caffe.model import CaffeModel
from worker.caffe.net import Description
from worker.caffe.phases import Phase
from worker.caffe.registry import LAYERS
from worker.strategies import Downpour, LocalSGD
from worker.training.model import Batch


def dense(name: str, bottom: str, top: str, settings: str = "", outputs: int = 4) -> str:
    return (
        f'layer {{ name: "{name}" type: "InnerProduct" bottom: "{bottom}" top: "{top}" {settings}'
        f' inner_product_param {{ num_output: {outputs} weight_filler {{ type: "xavier" }} }} }}\n'
    )


def loss(bottom: str, settings: str = "", name: str = "loss") -> str:
    return (
        f'layer {{ name: "{name}" type: "SoftmaxWithLoss" bottom: "{bottom}" bottom: "label"'
        f' top: "{name}" {settings} }}\n'
    )


def test_tensors_are_named_and_laid_out_as_in_caffe() -> None:
    """Weights (out, in, kh, kw), then the bias, layer after layer."""
    shapes = {tensor.name: tensor.shape for tensor in network(SMALL).table.tensors}
    assert list(shapes.items()) == [
        ("conv1/0", (3, 2, 3, 3)),
        ("conv1/1", (3,)),
        ("ip1/0", (4, 12)),
        ("ip1/1", (4,)),
    ]


def test_a_net_knows_its_blobs_inputs_and_outputs() -> None:
    """Shapes in Caffe's order; outputs are what no layer reads; the phase chooses the layers."""
    net = network(SMALL, Phase.TEST)
    assert net.blobs["conv1"] == (4, 3, 4, 4)
    assert net.blobs["pool1"] == (4, 3, 2, 2)
    assert net.inputs == ("data", "label")
    assert net.outputs == ("accuracy", "loss")
    assert network(SMALL, Phase.TRAIN).outputs == ("loss",)
    assert net.batch_size == 4


def test_what_training_changes() -> None:
    """Tensors with an lr_mult that a loss sends a gradient to, through layers without tensors."""
    every = {"conv1/0", "conv1/1", "ip1/0", "ip1/1"}
    assert network(SMALL).learnable_tensors == every
    frozen = SMALL.replace('top: "conv1"', 'top: "conv1" param { lr_mult: 0 }', 1)
    assert network(frozen).learnable_tensors == every - {"conv1/0"}
    cut = SMALL.replace('bottom: "pool1"', 'bottom: "pool1" propagate_down: false')
    assert network(cut).learnable_tensors == {"ip1/0", "ip1/1"}
    aside = SMALL + dense("aside", "pool1", "aside")
    assert network(aside).learnable_tensors == every
    assert (
        network(SMALL.replace('"SoftmaxWithLoss"', '"Accuracy"')).learnable_tensors == frozenset()
    )


def test_the_gradient_is_that_of_the_loss() -> None:
    """Along random directions, finite differences of the loss agree with the gradient."""
    model = CaffeModel(Description(SMALL))
    weights, out = model.initial(3), model.table.empty()
    model.gradient(weights, rows(), out, step=0, seed=0)
    rng, h = np.random.default_rng(8), np.float32(1e-2)
    for _ in range(5):
        direction = model.table.empty()
        for view in model.table.views(direction).values():
            view[...] = rng.standard_normal(view.shape)
        direction /= np.linalg.norm(direction)
        scratch = model.table.empty()
        above = model.gradient(weights + h * direction, rows(), scratch, step=0, seed=0)
        below = model.gradient(weights - h * direction, rows(), scratch, step=0, seed=0)
        slope = (above - below) / (2 * float(h))
        assert slope == pytest.approx(float(out @ direction), abs=2e-3)


def test_every_float_of_the_gradient_is_written_and_padding_is_zero() -> None:
    """The backward pass overwrites all previous contents of the arena."""
    model = CaffeModel(Description(SMALL))
    out = np.full(model.table.size, np.nan, np.float32)
    model.gradient(model.initial(3), rows(), out, step=0, seed=0)
    assert np.isfinite(out).all()
    inside = sum(int(np.count_nonzero(view)) for view in model.table.views(out).values())
    assert inside == np.count_nonzero(out) > 0


def test_a_gradient_repeats_bit_for_bit_and_leaves_the_weights_alone() -> None:
    """The same call gives the same bytes, from read-only weights, after other batches too."""
    model = CaffeModel(Description(SMALL))
    weights = model.initial(3)
    weights.flags.writeable = False
    first, second = model.table.empty(), model.table.empty()
    loss = model.gradient(weights, rows(4), first, step=0, seed=0)
    model.gradient(weights, rows(9), second, step=1, seed=0)
    assert model.gradient(weights, rows(4), second, step=0, seed=0) == loss
    np.testing.assert_array_equal(first, second)


def test_a_blob_read_twice_sums_its_gradients() -> None:
    """Two losses on one blob give twice the gradient of one; a loss_weight scales its part."""
    one = DATA + dense("ip", "data", "ip") + loss("ip")
    two = one + loss("ip", "loss_weight: 0.5", name="aux")
    arenas = []
    for text in (one, two):
        model = CaffeModel(Description(text))
        out = model.table.empty()
        arenas.append((model.gradient(model.initial(1), rows(), out, step=0, seed=0), out))
    assert arenas[1][0] == pytest.approx(1.5 * arenas[0][0], rel=1e-6)
    np.testing.assert_allclose(arenas[1][1], 1.5 * arenas[0][1], rtol=1e-5, atol=1e-7)


def test_an_in_place_layer_equals_one_with_a_top_of_its_own() -> None:
    """`bottom: x top: x` names the result x; gradients are the same as with a new name."""
    apart = SMALL.replace('bottom: "conv1" top: "conv1"', 'bottom: "conv1" top: "relu1"').replace(
        'bottom: "conv1" top: "pool1"', 'bottom: "relu1" top: "pool1"'
    )
    assert apart != SMALL
    found = []
    for text in (SMALL, apart):
        model = CaffeModel(Description(text))
        out = model.table.empty()
        found.append((model.gradient(model.initial(1), rows(), out, step=0, seed=0), out))
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_a_blob_that_was_read_before_a_relu_in_place_is_not_rectified_for_all() -> None:
    """The first reader sees negatives, the second one does not: as with a top of the ReLU's own."""
    relu = 'layer { name: "relu" type: "ReLU" bottom: "a" top: "a" }\n'
    ends = dense("c", "a", "c") + loss("b", name="first") + loss("c", name="second")
    early = DATA + dense("a", "data", "a") + dense("b", "a", "b") + relu + ends
    apart = early.replace('bottom: "a" top: "a"', 'bottom: "a" top: "r"').replace(
        'bottom: "a" top: "c"', 'bottom: "r" top: "c"'
    )
    found = []
    for text in (early, apart):
        model = CaffeModel(Description(text))
        out = model.table.empty()
        found.append((model.gradient(model.initial(1), rows(), out, step=0, seed=0), out))
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_a_frozen_tensor_has_no_gradient() -> None:
    """As in Caffe, lr_mult 0 computes no gradient; layers below still learn."""
    frozen = "param { lr_mult: 0 } param { lr_mult: 0 }"
    text = DATA + dense("a", "data", "a") + dense("b", "a", "b", frozen) + loss("b")
    model = CaffeModel(Description(text))
    out = model.table.empty()
    model.gradient(model.initial(1), rows(), out, step=0, seed=0)
    views = model.table.views(out)
    assert not views["b/0"].any()
    assert not views["b/1"].any()
    assert views["a/0"].any()


def test_propagate_down_stops_a_gradient() -> None:
    """Layers below a bottom with propagate_down false learn nothing."""
    stop = "propagate_down: false"
    text = DATA + dense("a", "data", "a") + dense("b", "a", "b", stop) + loss("b")
    model = CaffeModel(Description(text))
    out = model.table.empty()
    model.gradient(model.initial(1), rows(), out, step=0, seed=0)
    assert not model.table.views(out)["a/0"].any()
    assert model.table.views(out)["b/0"].any()


def test_features_need_only_the_columns_they_depend_on() -> None:
    """pool1 needs no label, and the returned blobs are copies."""
    model = CaffeModel(Description(SMALL, Phase.TEST))
    weights, batch = model.initial(1), rows()
    first = model.forward(weights, {"data": batch["data"]}, ["pool1", "ip1"])
    assert first["pool1"].shape == (4, 3, 2, 2)
    assert first["pool1"].flags.c_contiguous
    kept = first["pool1"].copy()
    model.forward(weights, rows(seed=2), ["pool1"])
    np.testing.assert_array_equal(first["pool1"], kept)


def test_outputs_measure_a_batch_of_any_size() -> None:
    """Loss and accuracy of 7 rows through a net that says 4."""
    model = CaffeModel(Description(SMALL, Phase.TEST))
    weights, batch = model.initial(1), rows(7)
    measured = model.outputs(weights, batch)
    scores = model.forward(weights, batch, ["ip1"])["ip1"]
    right = scores.argmax(axis=1) == batch["label"]
    assert measured == {"accuracy": pytest.approx(right.mean()), "loss": measured["loss"]}


def test_dropout_is_decided_by_step_and_seed() -> None:
    """A repeated step drops the same; another step or seed does not; a test phase drops nothing."""
    drop = 'layer { name: "drop" type: "Dropout" bottom: "a" top: "a" }\n'
    text = DATA + dense("a", "data", "a", outputs=64) + drop + dense("b", "a", "b") + loss("b")
    model, test = CaffeModel(Description(text)), CaffeModel(Description(text, Phase.TEST))
    weights, out = model.initial(1), model.table.empty()

    def at(step: int, seed: int) -> float:
        return model.gradient(weights, rows(), out, step=step, seed=seed)

    assert at(1, 1) == at(1, 1)
    assert len({at(1, 1), at(2, 1), at(1, 2)}) == 3
    assert test.outputs(weights, rows()) == test.outputs(weights, rows())


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (
            'layer { name: "n" type: "Bachnorm" bottom: "data" top: "n" }',
            r"net: layer n \(Bachnorm\): type not supported; .* of which BatchNorm is closest",
        ),
        (dense("a", "pixels", "a"), r"layer a \(InnerProduct\): no layer before .* bottom pixels"),
        (dense("a", "data", "a") + dense("a", "data", "b"), r"layer a .*: expected a unique name"),
        (dense("a", "data", "x") + dense("b", "data", "x"), "layer b .*: another layer makes"),
        (
            dense("a", "data", "a", 'param { name: "w" }')
            + dense("b", "a", "b", 'param { name: "w" }'),
            r"layer b .*: param w: expected the shape of a/0, \(4, 72\), got \(4, 4\)",
        ),
        (dense("a", "data", "a", "param {} param {} param {}"), "at most 2 param entries, got 3"),
        (dense("a", "data", "a", outputs=0), "layer a .*: expected a num_output of at least 1"),
        (
            dense("a", "data", "a", "pooling_param { kernel_size: 2 }"),
            "pooling_param is not supported here; expected inner_product_param",
        ),
        (
            dense("a", "data", "a", "loss_weight: 1 loss_weight: 2"),
            "expected a loss_weight for each of 1 tops, or none, got 2",
        ),
        (
            dense("a", "data", "a").replace('"xavier"', '"cauchy"'),
            "filler cauchy is not supported; expected one of constant, uniform, gaussian,",
        ),
        (
            (
                'layer { name: "p" type: "Pooling" bottom: "data" top: "p"'
                " pooling_param { pool: STOCHASTIC kernel_size: 2 pad: 1 } }"
            ),
            r"layer p \(Pooling\): expected no pad with pool STOCHASTIC",
        ),
        (
            (
                'layer { name: "p" type: "Pooling" bottom: "data" top: "p"'
                " pooling_param { kernel_size: 9 } }"
            ),
            r"layer p .*: kernel 9x9, .*: does not fit a bottom of shape \(4, 2, 6, 6\)",
        ),
        (
            (
                'layer { name: "c" type: "Convolution" bottom: "data" top: "c"'
                " convolution_param { num_output: 2 kernel_size: 7 } }"
            ),
            (
                r"layer c .*: kernel 7x7, stride 1x1, pad 0x0, dilation 1x1: does not fit a bottom"
                r" of shape \(4, 2, 6, 6\)"
            ),
        ),
        (
            (
                'layer { name: "c" type: "Convolution" bottom: "data" top: "c"'
                " convolution_param { num_output: 3 kernel_size: 3 group: 2 } }"
            ),
            "multiples of group, got num_output 3, group 2",
        ),
        (
            (
                'layer { name: "c" type: "Convolution" bottom: "data" top: "c"'
                " convolution_param { num_output: 3 kernel_size: 3 kernel_h: 3 } }"
            ),
            "expected kernel_size, or both kernel_h and kernel_w",
        ),
        (
            (
                'layer { name: "c" type: "Convolution" bottom: "label" top: "c"'
                " convolution_param { num_output: 3 kernel_size: 3 } }"
            ),
            r"expected a bottom of shape \(n, c, h, w\), got \(4,\)",
        ),
        (
            (
                'layer { name: "d" type: "Dropout" bottom: "data" top: "d"'
                " dropout_param { dropout_ratio: 1 } }"
            ),
            r"layer d .*: expected a dropout_ratio in \[0, 1\), got 1",
        ),
        (
            'layer { name: "r" type: "ReLU" bottom: "data" bottom: "label" top: "r" }',
            "expected 1 bottoms, got 2",
        ),
        (
            loss("data"),
            (
                r"expected a label for each of 144 rows of scores of shape \(4, 2, 6, 6\) \(data of"
                r" layer rows\), got labels of shape \(4,\) \(label of layer rows\)"
            ),
        ),
        (
            dense("a", "data", "a")
            + dense("b", "data", "b", outputs=5)
            + 'layer { name: "e" type: "Eltwise" bottom: "a" bottom: "b" top: "e" }',
            (
                r"layer e .* of one shape, got \(4, 4\) \(a of layer a\) and \(4, 5\)"
                r" \(b of layer b\)"
            ),
        ),
        (
            dense("a", "data", "a")
            + 'layer { name: "e" type: "Concat" bottom: "a" bottom: "data" top: "e" }',
            (
                r"of one shape apart from axis 1, got \(4, 4\) \(a of layer a\) and \(4, 2, 6, 6\)"
                r" \(data of layer rows\)"
            ),
        ),
        (
            'layer { name: "s" type: "Slice" bottom: "data" top: "a" top: "b" top: "c" }',
            r"expected axis 1 of \(4, 2, 6, 6\) \(data of layer rows\) to be a multiple of 3 tops",
        ),
        (
            'layer { name: "n" type: "LRN" bottom: "data" top: "n" lrn_param { local_size: 4 } }',
            "expected an odd local_size, got 4",
        ),
        (
            (
                'layer { name: "r" type: "Reshape" bottom: "data" top: "r"'
                " reshape_param { shape { dim: 0 dim: 71 } } }"
            ),
            r"expected the 288 numbers of \(4, 2, 6, 6\) \(data of layer rows\), got \(4, 71\)",
        ),
        (
            (
                'layer { name: "c" type: "Crop" bottom: "data" bottom: "data" top: "c"'
                " crop_param { offset: 1 } }"
            ),
            r"an offset of 1 and the size of .* do not fit axis 2 of \(4, 2, 6, 6\)",
        ),
        (
            'layer { name: "s" type: "Scale" bottom: "data" top: "s" scale_param { num_axes: 9 } }',
            r"expected num_axes that fit axis 1 of \(4, 2, 6, 6\) .*, got 9",
        ),
        (
            'layer { name: "x" type: "Exp" bottom: "data" top: "x" exp_param { base: 0 } }',
            "expected a base above 0 other than 1, or -1 for e, got 0",
        ),
        (
            (
                'layer { name: "r" type: "LSTM" bottom: "data" bottom: "label" top: "r"'
                " recurrent_param { num_output: 2 } }"
            ),
            r"expected a bottom \(time, batch, \.\.\.\) and its cont",
        ),
        (
            dense("a", "data", "a")
            + 'layer { name: "s" type: "Softmax" bottom: "a" top: "s" softmax_param { axis: 2 } }',
            r"axis 2 does not exist in a bottom of shape \(4, 4\)",
        ),
        (
            dense("a", "data", "a")
            + 'layer { name: "acc" type: "Accuracy" bottom: "a" bottom: "label" top: "acc"'
            " accuracy_param { top_k: 5 } }",
            r"expected a top_k in \[1, 4\], got 5",
        ),
    ],
)
def test_a_net_that_makes_no_sense_is_refused(layers: str, text: str) -> None:
    """The error names the file, the layer, its type, and what was expected."""
    with pytest.raises(BadInput, match=text) as caught:
        network(DATA + layers)
    assert str(caught.value).startswith("net: layer ")
    assert "\n" not in str(caught.value)


def test_a_wrong_arena_or_blob_is_refused() -> None:
    """An arena of another size, and a blob that is not there."""
    model = CaffeModel(Description(SMALL))
    weights, out = model.initial(1), model.table.empty()
    with pytest.raises(BadInput, match=r"net: expected an arena of \d+ float32, got shape"):
        model.gradient(weights[:-1], rows(), out, step=0, seed=0)
    with pytest.raises(BadInput, match="of float64"):
        model.gradient(weights.astype(np.float64), rows(), out, step=0, seed=0)
    with pytest.raises(BadInput, match="net: no blob fc7; expected among data, label, conv1"):
        model.forward(weights, rows(), ["fc7"])


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        ('"InnerProduct" inner_product_param { num_output: 2147483647', "top"),
        ('"InnerProduct" inner_product_param { num_output: 90000000', "tensor"),
        ('"Convolution" convolution_param { num_output: 2147483647 kernel_size: 1', "top"),
        ('"Convolution" convolution_param { num_output: 1 kernel_size: 1 pad: 4294967295', "top"),
        ('"Convolution" convolution_param { num_output: 1 kernel_size: 99999 pad: 50000', "tensor"),
        ('"Pooling" pooling_param { kernel_size: 4294967295 pad: 4294967294', "top"),
    ],
)
def test_a_net_that_no_memory_holds(layer: str, what: str) -> None:
    """Sizes are checked when the net is built, long before anything asks for the memory."""
    entry = layer.replace(" ", ' bottom: "data" top: "y" ', 1)
    with pytest.raises(BadInput, match=rf"expected at most 2147483647 numbers in a {what}, got"):
        network(DATA + f'layer {{ name: "big" type: {entry} }} }}')


def test_unsupported_types_are_named_at_once() -> None:
    """Those of the layers of this phase."""
    kinds = ("Axpy", "Python", "Axpy")
    layers = [f'layer {{ name: "l{at}" type: "{kind}" }}' for at, kind in enumerate(kinds)]
    line = r"net: 2 faults: layer l0 \(Axpy\) and 1 more: type .*; layer l1 \(Python\): type not"
    with pytest.raises(BadInput, match=line):
        network("".join(layers))
    with pytest.raises(
        BadInput, match=r"net: layer l1 \(Python\): type not supported: docs/how-to"
    ):
        network(layers[1] + layers[0].replace("type", "include { phase: TEST } type"))


def test_an_error_does_not_quote_a_net() -> None:
    """A name of 100,000 letters is shortened; the remedy stays."""
    with pytest.raises(BadInput) as caught:
        network(f'layer {{ name: "{"n" * 100_000}" type: "None" }}')
    assert len(str(caught.value)) < 2_100
    assert "(100000 characters)" in str(caught.value)
    assert "expected one of" in str(caught.value)


NORMALISED = (
    DATA
    + """
layer { name: "bn" type: "BatchNorm" bottom: "data" top: "bn"
        batch_norm_param { moving_average_fraction: 0.8 } }
layer { name: "ip" type: "InnerProduct" bottom: "bn" top: "ip"
        inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
)


@pytest.mark.parametrize(
    "more",
    [{}, {"strategy": Downpour(n_push=2)}, {"strategy": LocalSGD(h=2)}, {"clip": 1e-3}],
    ids=["plain", "n_push", "local", "clip"],
)
def test_the_shards_keep_the_statistics_of_a_batch_norm(more: dict[str, Any]) -> None:
    """They move although they have no gradient, unclipped and at a rate of 1, and tests use them.

    The data has mean 3 and variance 4: the sums over their weight are near these after 30 steps.
    """
    rng = np.random.default_rng(2)
    batches: list[Batch] = []
    for _ in range(30):
        pixels = 3 + 2 * rng.standard_normal((64, 2, 6, 6))
        batches.append({"data": pixels.astype(np.float32), "label": rng.integers(0, 4, 64)})
    model = CaffeModel(Description(NORMALISED))
    weights = Trained(model, batches, **more).weights
    mean, variance, factor = (model.table.views(weights)[f"bn/{i}"] for i in range(3))
    assert factor[0] > 3.9
    np.testing.assert_allclose(mean / factor, 3, atol=0.1)
    np.testing.assert_allclose(variance / factor, 4, atol=0.2)
    test = CaffeModel(Description(NORMALISED, Phase.TEST))
    seen = test.forward(weights, batches[0], ["bn"])["bn"]
    assert abs(seen.mean()) < 0.1
    assert abs(seen.std() - 1) < 0.05


def test_one_workers_statistics_are_caffes() -> None:
    """Step after step, with the recurrences of Caffe's BatchNorm: f*s + new, and the factor."""
    rng = np.random.default_rng(3)
    batches: list[Batch] = []
    for _ in range(5):
        pixels = rng.standard_normal((8, 2, 6, 6), np.float32)
        batches.append({"data": pixels, "label": rng.integers(0, 4, 8)})
    model = CaffeModel(Description(NORMALISED))
    weights = Trained(model, batches).weights
    sums, factor = np.zeros((2, 2)), 0.0
    for batch in batches:
        pixels = batch["data"].astype(float)
        moments = np.stack([pixels.mean(axis=(0, 2, 3)), pixels.var(axis=(0, 2, 3), ddof=1)])
        sums, factor = 0.8 * sums + moments, 0.8 * factor + 1
    views = model.table.views(weights)
    np.testing.assert_allclose(views["bn/0"], sums[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(views["bn/1"], sums[1], rtol=1e-4)
    np.testing.assert_allclose(views["bn/2"], factor, rtol=1e-5)


def test_a_loss_weight_on_any_top_adds_the_sum_of_its_numbers() -> None:
    """A hidden blob with a weight is a term of the loss, and its gradient that weight."""
    plain = DATA + dense("a", "data", "a") + loss("a")
    penalised = DATA + dense("a", "data", "a", "loss_weight: 0.01") + loss("a")
    found = []
    for text in (plain, penalised):
        model = CaffeModel(Description(text))
        weights, out = model.initial(1), model.table.empty()
        value = model.gradient(weights, rows(), out, step=0, seed=0)
        scores = model.forward(weights, rows(), ["a"])["a"]
        found.append((value, scores, model.table.views(out)["a/1"].copy()))
    assert found[1][0] == pytest.approx(found[0][0] + 0.01 * found[0][1].sum(), rel=1e-5)
    np.testing.assert_allclose(found[1][2], found[0][2] + 0.01 * 4, rtol=1e-4)


def test_shared_tensors_are_one() -> None:
    """Two layers with one matrix have the gradients of two layers with equal matrices, summed."""
    shared = 'param { name: "w" }'
    ends = loss("a", name="first") + loss("b", name="second")
    text = DATA + dense("a", "data", "a", shared) + dense("b", "data", "b", shared) + ends
    model = CaffeModel(Description(text))
    assert [t.name for t in model.table.tensors] == ["a/0", "a/1", "b/1"]
    apart = CaffeModel(Description(text.replace(shared, "")))
    weights, out = model.initial(1), model.table.empty()
    equal, other = apart.table.empty(), apart.table.empty()
    for view in ("a/0", "b/0"):
        apart.table.views(equal)[view][...] = model.table.views(weights)["a/0"]
    model.gradient(weights, rows(), out, step=0, seed=0)
    apart.gradient(equal, rows(), other, step=0, seed=0)
    views = apart.table.views(other)
    np.testing.assert_allclose(
        model.table.views(out)["a/0"], views["a/0"] + views["b/0"], rtol=1e-5, atol=1e-6
    )


def test_a_loosely_shared_tensor_may_have_another_shape() -> None:
    """With share_mode PERMISSIVE the number of floats counts: (6, 4) and (4, 6)."""
    strict = 'param { name: "w" }'
    text = DATA + dense("a", "data", "a", outputs=6) + dense("b", "a", "b", strict)
    text += dense("c", "b", "c", strict, outputs=6) + loss("c")
    with pytest.raises(BadInput, match=r"layer c .*: param w: expected the shape of b/0, \(4, 6\)"):
        network(text)
    model = CaffeModel(
        Description(text.replace(strict, 'param { name: "w" share_mode: PERMISSIVE }'))
    )
    out = model.table.empty()
    model.gradient(model.initial(1), rows(), out, step=0, seed=0)
    assert model.table.views(out)["b/0"].any()


SHAPES = [(), (4,), (4, 3), (4, 3, 2), (4, 3, 6, 6), (4, 3, 2, 2, 2), (1,) * 12]


@pytest.mark.parametrize("kind", sorted(LAYERS))
def test_any_bottoms_fit_or_are_refused(kind: str) -> None:
    """Up to four bottoms of any shapes, up to three tops, without settings and with odd ones."""
    sources = "".join(
        f'layer {{ name: "s{i}" type: "DummyData" top: "s{i}"'
        f" dummy_data_param {{ shape {{ {' '.join(f'dim: {n}' for n in shape)} }} }} }}\n"
        for i, shape in enumerate(SHAPES)
    )
    message = next(iter(LAYERS[kind].SUPPORTED_FIELDS), None)
    found = LAYERS[kind].SUPPORTED_FIELDS.get(message or "", frozenset())
    odd = [f"{field}: {value}" for field in sorted(found) for value in (-3, 0, 9, 2**31 - 1)]
    settings = ["", *(f"{message} {{ {text} }}" for text in odd)]
    rng, errors = np.random.default_rng(len(kind)), []
    for number in range(120):
        names = [f'bottom: "s{i}"' for i in rng.integers(0, len(SHAPES), number % 5)]
        names += [f'top: "t{i}"' for i in range(1 + number % 3)]
        entry = settings[number % len(settings)]
        text = f'layer {{ name: "L" type: "{kind}" {" ".join(names)} {entry} }}'
        try:
            network(sources + text)
        except BadInput as error:
            errors.append(str(error))
    assert errors, "all of them fit?"
    assert not any("\n" in error for error in errors)
