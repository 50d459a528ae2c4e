"""Nets written in Python: every type of the registry, every field, and errors that name them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shards.errors import BadInput
from tests.support.small_nets import SMALL, rows
from worker.caffe import python_nets
from worker.caffe.caffe_pb2 import LayerParameter, NetParameter
from worker.caffe.layer import COMMON_FIELDS
from worker.caffe.model import CaffeModel
from worker.caffe.net import Description, Network
from worker.caffe.phases import Phase
from worker.caffe.python_nets import (
    Accuracy,
    Convolution,
    Data,
    Input,
    Net,
    Pooling,
    ReLU,
    Silence,
    SoftmaxWithLoss,
    load_net,
    load_solver,
    make_layer,
)
from worker.caffe.registry import LAYERS
from worker.caffe.text import parse_net


def entry(text: str) -> LayerParameter:
    """The only layer of a prototxt."""
    (layer,) = parse_net(f"layer {{ {text} }}").layer
    return layer


@pytest.mark.parametrize("kind", sorted(LAYERS))
def test_every_type_is_a_function_of_its_name(kind: str) -> None:
    """It is exported, and its settings are the fields that the type honours."""
    assert kind in python_nets.__all__
    function = getattr(python_nets, kind)
    made = function("a", ["b", "c"], top="d")
    assert made == entry(f'name: "a" type: "{kind}" bottom: "b" bottom: "c" top: "d"')
    fields = {field for own in LAYERS[kind].SUPPORTED_FIELDS.values() for field in own}
    with pytest.raises(BadInput) as caught:
        function("a", "b", nothing=1)
    known = ", ".join(sorted(fields | COMMON_FIELDS - {"name", "type", "bottom", "top", "blobs"}))
    assert str(caught.value) == (f"layer a ({kind}): expected settings among {known}, got nothing")


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (ReLU("r", "c", top="c"), 'name: "r" type: "ReLU" bottom: "c" top: "c"'),
        (ReLU("r", "c"), 'name: "r" type: "ReLU" bottom: "c" top: "r"'),
        (Silence("s", "c"), 'name: "s" type: "Silence" bottom: "c"'),
        (
            Input("x", shape=(2, 3)),
            'name: "x" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 } }',
        ),
        (
            Input("x", top=["x", "y"], shape=[(2, 3), (2,)]),
            """name: "x" type: "Input" top: "x" top: "y"
            input_param { shape { dim: 2 dim: 3 } shape { dim: 2 } }""",
        ),
        (
            Convolution(
                "c", "x", num_output=np.int64(4), kernel_size=[3, 5], bias_term=False,
                weight_filler={"type": "gaussian", "std": 0.5}, param=[{"lr_mult": 2, "name": "w"}],
                loss_weight=0.5, include={"phase": "TRAIN", "stage": ["a", "b"]},
            ),
            """name: "c" type: "Convolution" bottom: "x" top: "c" loss_weight: 0.5
            param { lr_mult: 2 name: "w" } include { phase: TRAIN stage: "a" stage: "b" }
            convolution_param { num_output: 4 kernel_size: 3 kernel_size: 5 bias_term: false
                                weight_filler { type: "gaussian" std: 0.5 } }""",
        ),
        (
            Convolution("c", "x", weight_filler="xavier", bias_filler=0.1),
            """name: "c" type: "Convolution" bottom: "x" top: "c" convolution_param {
            weight_filler { type: "xavier" } bias_filler { type: "constant" value: 0.1 } }""",
        ),
        (
            Data("d", top=["data", "label"], source="db", batch_size=4, scale=0.5, mean_value=3),
            """name: "d" type: "Data" top: "data" top: "label" transform_param { scale: 0.5
            mean_value: 3 } data_param { source: "db" batch_size: 4 }""",
        ),
        (
            SoftmaxWithLoss("l", ["x", "y"], ignore_label=-1, softmax_param={"axis": 2}),
            """name: "l" type: "SoftmaxWithLoss" bottom: "x" bottom: "y" top: "l"
            loss_param { ignore_label: -1 } softmax_param { axis: 2 }""",
        ),
    ],
)  # fmt: skip
def test_a_layer_is_its_prototxt(made: LayerParameter, text: str) -> None:
    """Settings go into the message that has them; fillers and shapes have short forms."""
    assert made == entry(text)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"pool": "MEAN"}, "pool: expected one of MAX, AVE, STOCHASTIC, got 'MEAN'"),
        ({"pool": 1}, "pool: expected one of MAX, AVE, STOCHASTIC, got 1"),
        ({"kernel_size": -1}, "kernel_size: expected a whole number, got -1"),
        ({"kernel_size": 1.5}, r"kernel_size: expected a whole number, got 1\.5"),
        ({"kernel_size": True}, "kernel_size: expected a whole number, got True"),
        ({"global_pooling": 1}, "global_pooling: expected True or False, got 1"),
        ({"param": 3}, "param: expected a dictionary of name, share_mode, .*, got 3"),
        ({"param": {"lr": 1}}, "param: expected fields among name, .*, got lr"),
        ({"param": {"lr_mult": "x"}}, "param: lr_mult: expected a number, got 'x'"),
        ({"top": 3}, "top: expected names of blobs, got 3"),
        ({"top": [3]}, "top: expected a text, got 3"),
        ({"blobs": []}, "expected settings among .*, got blobs"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any], error: str) -> None:
    """The line has the layer, its type, the setting, what was expected and what was found."""
    with pytest.raises(BadInput, match=rf"^layer p \(Pooling\): {error}"):
        Pooling("p", "x", **wrong)


def test_names_are_checked() -> None:
    """Those of layers, types and nets."""
    with pytest.raises(BadInput, match="Pooling: name: expected a text, got 3"):
        Pooling(3, "x")
    with pytest.raises(BadInput, match=r"layer p: expected a type among .*, got Pool"):
        make_layer("Pool", "p", "x")
    with pytest.raises(BadInput, match="Net n: layer 0: expected a layer, got 'x'"):
        Net("n", ["x"])  # type: ignore[list-item]
    with pytest.raises(
        AttributeError, match=r"module worker\.caffe\.python_nets has no attribute Pool"
    ):
        _ = python_nets.Pool


def test_a_net_computes_what_its_prototxt_computes(tmp_path: Path) -> None:
    """A net of the layers of a file, with the same name, has the same gradient."""
    path = tmp_path / "net.prototxt"
    path.write_text(SMALL)
    loaded = load_net(path)
    net = Net(loaded.name, loaded.layers)
    assert (net.prototxt, repr(net)) == (loaded.prototxt, f"Net('small', {len(net.layers)} layers)")
    models = [CaffeModel(net.description()), CaffeModel(Description(SMALL))]
    found = []
    for model in models:
        found.append(model.table.empty())
        model.gradient(model.initial(1), rows(), found[-1], step=0, seed=0)
    np.testing.assert_array_equal(found[0], found[1])
    assert net.save(tmp_path / "again.prototxt").read_text() == net.prototxt
    net.layers[0].name = "changed"
    assert net.layers[0].name != "changed"


def test_force_backward_gives_the_inputs_gradients() -> None:
    """Without it an input has none; a file's setting is kept."""
    layers = [
        Input("data", shape=(2, 3)),
        Input("label", shape=(2,)),
        make_layer("InnerProduct", "ip", "data", num_output=2, weight_filler="xavier"),
        SoftmaxWithLoss("loss", ["ip", "label"]),
    ]
    batch = {"data": np.ones((2, 3), np.float32), "label": np.array([0, 1])}
    for force in (False, True):
        net = Network(Net("n", layers, force_backward=force).description())
        weights = net.initial(1)
        net.forward(weights, batch)
        assert list(net.backward(weights, net.table.empty())) == ["data"] * force


DATA = """
layer { name: "d" type: "Data" top: "data" top: "label" include { phase: TRAIN }
        transform_param { scale: 0.5 } data_param { source: "db" batch_size: 9 } }
layer { name: "d" type: "Data" top: "data" top: "label" include { phase: TEST stage: "deep" }
        data_param { source: "db" batch_size: 9 } }
layer { name: "e" type: "MemoryData" top: "more"
        memory_data_param { batch_size: 9 channels: 9 height: 9 width: 9 } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
        inner_product_param { num_output: 2 } }
"""


def test_data_layers_are_replaced() -> None:
    """Sizes are the new ones in each phase; names, tops, rules and transforms stay."""
    sizes = {"train_batch": 4, "test_batch": 5, "channels": 1, "height": 3, "width": 2}
    net = Net("n", parse_net(DATA).layer).replace_data_layers(**sizes)
    first, second, *more, ip = net.layers
    assert {layer.type for layer in (first, second, *more)} == {"MemoryData"}
    assert first.transform_param.scale == 0.5
    assert list(second.include[0].stage) == ["deep"]
    assert ip == parse_net(DATA).layer[-1]
    train = Network(net.description())
    assert train.blobs["data"] == train.blobs["more"] == (4, 1, 3, 2)
    test = Network(net.description(Phase.TEST, stages=("deep",)))
    assert test.blobs["data"] == test.blobs["more"] == (5, 1, 3, 2)
    with pytest.raises(BadInput, match="replace_data_layers: width: expected at least 1, got 0"):
        net.replace_data_layers(**sizes | {"width": 0})


def test_a_solver_for_a_net_of_ones_own(tmp_path: Path) -> None:
    """The net replaces the one in the file, for training and for tests."""
    (tmp_path / "net.prototxt").write_text(SMALL)
    path = tmp_path / "solver.prototxt"
    path.write_text('net: "net.prototxt" base_lr: 0.1 max_iter: 2 test_iter: 3')
    plain = load_solver(path)
    assert CaffeModel(plain.train).table == CaffeModel(Description(SMALL)).table
    own = [
        Input("data", shape=(2, 3)),
        Input("label", shape=(2,)),
        make_layer("InnerProduct", "own", "data", num_output=2),
        SoftmaxWithLoss("loss", ["own", "label"], include={"phase": "TRAIN"}),
        Accuracy("right", ["own", "label"], include={"phase": "TEST"}),
    ]
    solver = load_solver(path, Net("own", own))
    assert [tensor.name for tensor in CaffeModel(solver.train).table.tensors] == ["own/0", "own/1"]
    assert Network(solver.tests[0].net).outputs == ("right",)
    assert (solver.rule, solver.max_iter, solver.file) == (plain.rule, 2, str(path))


def test_older_nets_are_loaded(tmp_path: Path) -> None:
    """As present ones, `force_backward` included."""
    path = tmp_path / "old.prototxt"
    path.write_text('force_backward: true input: "x" input_dim: [1, 1, 2, 2] layers { name: "r"'
                    ' type: RELU bottom: "x" top: "r" }')  # fmt: skip
    net = load_net(path)
    assert [layer.type for layer in net.layers] == ["Input", "ReLU"]
    message = NetParameter()
    message.CopyFrom(parse_net(net.prototxt))
    assert message.force_backward
