"""Which layers a state keeps, and how older forms of a net are converted."""

import pytest

from shards.errors import BadInput
from worker.caffe.caffe_pb2 import LayerParameter, V0LayerParameter, V1LayerParameter
from worker.caffe.legacy import type_name, upgrade
from worker.caffe.legacy_v0 import EVERYWHERE, FIELDS
from worker.caffe.net import Description, Network
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


def test_version_0_layers_become_present_ones() -> None:
    """Every setting goes where it is now; a padding layer becomes the pad of the next layer."""
    old = parse_net("""
        layers { top: "data" top: "label"
                 layer { name: "d" type: "data" source: "db" meanfile: "m" batchsize: 5
                         cropsize: 2 mirror: true scale: 0.5 } }
        layers { bottom: "data" top: "pad" layer { name: "pad" type: "padding" pad: 2 } }
        layers { bottom: "pad" top: "c"
                 layer { name: "c" type: "conv" num_output: 3 kernelsize: 5 stride: 2 group: 3
                         biasterm: false weight_filler { type: "xavier" } blobs_lr: 1 blobs_lr: 2
                         weight_decay: 1 weight_decay: 0 } }
        layers { bottom: "c" top: "p"
                 layer { name: "p" type: "pool" pool: AVE kernelsize: 3 stride: 2 } }
        layers { bottom: "p" top: "n"
                 layer { name: "n" type: "lrn" local_size: 3 alpha: 0.1 beta: 0.5 } }
        layers { bottom: "n" top: "f"
                 layer { name: "f" type: "innerproduct" num_output: 4 } }
        layers { bottom: "f" top: "f" layer { name: "o" type: "dropout" dropout_ratio: 0.2 } }
        layers { bottom: "f" bottom: "label" layer { name: "l" type: "softmax_loss" } }
    """)
    new = parse_net("""
        layer { name: "d" type: "Data" top: "data" top: "label"
                data_param { source: "db" batch_size: 5 }
                transform_param { mean_file: "m" crop_size: 2 mirror: true scale: 0.5 } }
        layer { name: "c" type: "Convolution" bottom: "data" top: "c"
                param { lr_mult: 1 decay_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
                convolution_param { num_output: 3 kernel_size: 5 stride: 2 group: 3 pad: 2
                                    bias_term: false weight_filler { type: "xavier" } } }
        layer { name: "p" type: "Pooling" bottom: "c" top: "p"
                pooling_param { pool: AVE kernel_size: 3 stride: 2 } }
        layer { name: "n" type: "LRN" bottom: "p" top: "n"
                lrn_param { local_size: 3 alpha: 0.1 beta: 0.5 } }
        layer { name: "f" type: "InnerProduct" bottom: "n" top: "f"
                inner_product_param { num_output: 4 } }
        layer { name: "o" type: "Dropout" bottom: "f" top: "f"
                dropout_param { dropout_ratio: 0.2 } }
        layer { name: "l" type: "SoftmaxWithLoss" bottom: "f" bottom: "label" }
    """)
    assert upgrade(old, "net") == new


def test_a_setting_that_a_version_0_layer_does_not_read_is_left_out() -> None:
    """As Caffe leaves it out."""
    old = parse_net("""layers { bottom: "a" top: "r"
        layer { name: "r" type: "relu" num_output: 3 new_num: 2 } }""")
    new = parse_net('layer { name: "r" type: "ReLU" bottom: "a" top: "r" }')
    assert upgrade(old, "net") == new


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ("ceil_mode: false", "FLOOR"),
        ("ceil_mode: true", "CEIL"),
        ("ceil_mode: false round_mode: FLOOR", "FLOOR"),
        ("ceil_mode: true round_mode: CEIL", "CEIL"),
    ],
)
def test_ceil_mode_is_round_mode(settings: str, mode: str) -> None:
    """In a layer of any version; the file's own layers are left alone."""
    plain = parse_net(f'layer {{ type: "Pooling" pooling_param {{ round_mode: {mode} }} }}')
    for entry in ('layer { type: "Pooling"', "layers { type: POOLING"):
        forked = parse_net(f"{entry} pooling_param {{ {settings} }} }}")
        new = upgrade(forked, "net")
        new.layer[0].ClearField("name")
        assert new == plain
        assert "ceil_mode" in str(forked)


def test_an_input_without_dims_is_dropped() -> None:
    """As in Caffe: an Input layer makes the blob, or its first reader is refused."""
    made = """layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 } } }
              layer { name: "r" type: "ReLU" bottom: "x" top: "r" }"""
    assert upgrade(parse_net(f'input: "x" {made}'), "net") == parse_net(made)
    lacking = 'input: "x" layer { name: "r" type: "ReLU" bottom: "x" top: "r" }'
    with pytest.raises(BadInput, match=r"layer r \(ReLU\): no layer before .* makes its bottom x"):
        Network(Description(lacking))


def test_every_setting_of_version_0_has_its_place() -> None:
    """Its fields are in the table, apart from those that every type has, or that none reads."""
    unread = {"new_num", "new_channels"}
    names = {field.name for field in V0LayerParameter.DESCRIPTOR.fields}
    assert names == {*FIELDS, *EVERYWHERE} | unread
    for name, (present, messages) in FIELDS.items():
        for kind, message in messages.items():
            described = LayerParameter.DESCRIPTOR.fields_by_name[message].message_type
            assert described is not None
            assert present in described.fields_by_name, (name, kind)


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
        ('layers { name: "x" }', "layer x: expected a type, got none"),
        (
            'layers { layer { name: "x" type: "convolve" } }',
            "layer x: expected a type among .*'convolve'",
        ),
        (
            (
                'layer { name: "p" type: "Pooling"'
                " pooling_param { ceil_mode: true round_mode: FLOOR } }"
            ),
            r"layer p \(Pooling\): .* got ceil_mode: true and round_mode: FLOOR",
        ),
        (
            (
                'layers { name: "p" type: POOLING'
                " pooling_param { ceil_mode: false round_mode: CEIL } }"
            ),
            r"layer p \(Pooling\): .* got ceil_mode: false and round_mode: CEIL",
        ),
        (
            'layers { bottom: "a" layer { name: "p" type: "padding" } }',
            "layer p: expected one bottom and one top",
        ),
        (
            """layers { bottom: "a" top: "p" layer { name: "p" type: "padding" pad: 1 } }
            layers { bottom: "p" top: "r" layer { name: "r" type: "relu" } }""",
            "layer r: expected a conv or a pool layer .* got type 'relu'",
        ),
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
