"""Which layers a state keeps, and how older forms of a net are converted."""

import pytest

from shards.errors import BadInput
from worker.caffe.caffe_pb2 import V1LayerParameter
from worker.caffe.legacy import type_name, upgrade
from worker.caffe.phases import NetState, Phase, layers_kept
from worker.caffe.registry import LAYERS
from worker.caffe.text import parse_net

TRAIN, TEST = NetState(Phase.TRAIN), NetState(Phase.TEST)


@pytest.mark.parametrize(
    ("rules", "state", "stays"),
    [
        ("", TRAIN, True),
        ("include { phase: TRAIN }", TRAIN, True),
        ("include { phase: TRAIN }", TEST, False),
        ("exclude { phase: TRAIN }", TRAIN, False),
        ("exclude { phase: TRAIN }", TEST, True),
        ("include { phase: TEST } include { stage: 'a' }", NetState(Phase.TRAIN, ("a",)), True),
        ("include { phase: TEST stage: 'a' }", NetState(Phase.TRAIN, ("a",)), False),
        ("include { stage: 'a' stage: 'b' }", NetState(Phase.TEST, ("a",)), False),
        ("include { stage: 'a' stage: 'b' }", NetState(Phase.TEST, ("b", "a")), True),
        ("include { not_stage: 'a' }", NetState(Phase.TEST, ("a",)), False),
        ("include { not_stage: 'a' }", NetState(Phase.TEST, ("b",)), True),
        ("exclude { stage: 'a' } exclude { stage: 'b' }", NetState(Phase.TEST, ("b",)), False),
        ("include { min_level: 2 }", NetState(Phase.TEST, (), 1), False),
        ("include { min_level: 2 }", NetState(Phase.TEST, (), 2), True),
        ("include { max_level: 2 }", NetState(Phase.TEST, (), 3), False),
        ("include { min_level: 1 max_level: 2 }", NetState(Phase.TEST, (), 2), True),
        ("include { }", TEST, True),
    ],
)
def test_rules_are_held_against_the_state(rules: str, state: NetState, stays: bool) -> None:
    """A rule holds if all its conditions do; one include suffices, and so does one exclude."""
    net = parse_net(f'layer {{ name: "a" type: "ReLU" {rules} }}')
    assert bool(layers_kept(net, state, "net")) is stays


def test_include_and_exclude_do_not_mix() -> None:
    """Caffe refuses it too."""
    net = parse_net('layer { name: "a" include { phase: TRAIN } exclude { stage: "b" } }')
    with pytest.raises(BadInput, match="net: layer a: has include and exclude rules"):
        layers_kept(net, TRAIN, "net")


def test_version_1_layers_become_present_ones() -> None:
    """Types, multipliers, shared names, settings and rules carry over."""
    old = parse_net("""
        layers { name: "c" type: CONVOLUTION bottom: "x" top: "c" include { phase: TEST }
                 blobs_lr: 1 blobs_lr: 2 weight_decay: 1 weight_decay: 0 param: "w"
                 convolution_param { num_output: 3 kernel_size: 5 } }
        layers { name: "l" type: SOFTMAX_LOSS bottom: "c" bottom: "y" top: "l" loss_weight: 0.5 }
    """)
    new = parse_net("""
        layer { name: "c" type: "Convolution" bottom: "x" top: "c" include { phase: TEST }
                param { name: "w" lr_mult: 1 decay_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
                convolution_param { num_output: 3 kernel_size: 5 } }
        layer { name: "l" type: "SoftmaxWithLoss" bottom: "c" bottom: "y" top: "l"
                loss_weight: 0.5 }
    """)
    assert upgrade(old, "net") == new
    assert len(old.layers) == 2, "the net passed in is left alone"


def test_a_net_without_old_forms_is_itself() -> None:
    """Nothing is copied where nothing changes."""
    net = parse_net('layer { name: "a" type: "ReLU" }')
    assert upgrade(net, "net") is net


@pytest.mark.parametrize(
    "inputs",
    [
        'input: "a" input: "b" input_dim: [1, 2, 3, 4, 5, 6, 7, 8]',
        'input: "a" input: "b" input_shape { dim: [1, 2, 3, 4] } input_shape { dim: [5, 6, 7, 8] }',
    ],
)
def test_inputs_at_the_top_become_layers(inputs: str) -> None:
    """Both ways of saying an input's shape; the inputs come before the layers."""
    net = upgrade(parse_net(f'layer {{ name: "r" type: "ReLU" }} {inputs}'), "net")
    assert [layer.name for layer in net.layer] == ["a", "b", "r"]
    assert [list(layer.input_param.shape[0].dim) for layer in net.layer[:2]] == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
    ]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('input: "a" input_dim: [1, 2, 3]', "a shape .* for each of 1 inputs, got 0"),
        ('input: "a" input: "b" input_shape { dim: 1 }', "for each of 2 inputs, got 1"),
        ("layers { type: RELU } layer { }", "has both `layer` and older `layers` entries"),
        ('layers { name: "x" }', "layer x: has no type; version-0 nets are not supported"),
    ],
)
def test_an_older_form_that_makes_no_sense_is_refused(text: str, error: str) -> None:
    """One line that names the file."""
    with pytest.raises(BadInput, match=f"net: .*{error}"):
        upgrade(parse_net(text), "net")


def test_old_type_names_are_known_to_the_registry() -> None:
    """Each type of version 1 is registered by its present name, but those named here."""
    names = {type_name(kind) for kind in V1LayerParameter.LayerType.values()}
    files = {"HDF5Output", "WindowData"}
    assert names - set(LAYERS) == files | {"Im2col", "None"}
