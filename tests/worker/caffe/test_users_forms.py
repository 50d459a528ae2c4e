"""Forms that published prototxt files have, beyond the plain ones: what Caffe takes, or refuses."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from shards.errors import BadInput
from worker.caffe.net import Description, Network
from worker.caffe.net_data import data_of, with_files
from worker.caffe.phases import Phase
from worker.caffe.python_nets import load_net
from worker.caffe.registry import LAYERS, UNSUPPORTED
from worker.caffe.solver import read_solver

IMAGES = """
    layer { name: "data" type: "Input" top: "data"
            input_param { shape { dim: 2 dim: 4 dim: 8 dim: 8 } } }
"""
SCORES = """
    layer { name: "label" type: "Input" top: "label" input_param { shape { dim: 2 } } }
    layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
            inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
"""


def built(text: str, phase: Phase = Phase.TRAIN) -> Network:
    return Network(Description(text, phase))


def batch(net: Network) -> dict[str, np.ndarray]:
    dice = np.random.default_rng(1)
    return {
        name: np.array([2, 0]) if name == "label" else dice.random(net.blobs[name], np.float32)
        for name in net.inputs
    }


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ("kernel_h: 3 kernel_w: 1 pad_h: 1", (8, 8)),
        ("kernel_h: 1 kernel_w: 3 pad_w: 1", (8, 8)),
        ("kernel_size: 3 pad_h: 2", (10, 6)),
        ("kernel_size: 3 kernel_size: 1 pad: 1 pad: 0 stride: 2 stride: 1", (4, 8)),
        ("kernel_size: 3 dilation: 2 dilation: 1", (4, 6)),
    ],
)
def test_a_convolutions_sizes_by_direction(settings: str, size: tuple[int, int]) -> None:
    """A pad in one direction is none in the other; a list has one entry for each direction."""
    layer = f"""layer {{ name: "c" type: "Convolution" bottom: "data" top: "c"
                convolution_param {{ num_output: 5 {settings} }} }}"""
    assert built(IMAGES + layer).blobs["c"] == (2, 5, *size)


@pytest.mark.parametrize("kind", ["SoftmaxWithLoss", "HingeLoss"])
def test_a_loss_without_a_top(kind: str) -> None:
    """It counts, under the layer's name, as one with a top does."""
    losses = []
    for top in ("", 'top: "loss"'):
        layer = f'layer {{ name: "loss" type: "{kind}" bottom: "ip" bottom: "label" {top} }}'
        net = built(IMAGES + SCORES + layer)
        net.forward(net.initial(3), batch(net))
        assert net.outputs == net.figures == ("loss",)
        losses.append(net.loss())
    assert losses[0] == losses[1] > 0


def test_a_loss_without_a_top_may_have_the_name_of_a_blob() -> None:
    """The blob keeps its name."""
    layer = 'layer { name: "ip" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" }'
    net = built(IMAGES + SCORES + layer)
    assert net.blobs["ip"] == (2, 3)
    assert net.figures == ("ip (loss)",)


def test_layers_of_one_name_draw_differently() -> None:
    """Layers without tensors may share a name; two Dropout layers still drop different numbers."""
    drop = 'layer { name: "drop" type: "Dropout" bottom: "data" top: "%s" }'
    net = built(IMAGES + drop % "a" + drop % "b")
    net.forward(net.initial(1), batch(net))
    kept = [net.blob(name) != 0 for name in "ab"]
    assert 0.3 < (kept[0] == kept[1]).mean() < 0.7


def test_layers_may_have_no_name() -> None:
    """Caffe asks for none."""
    layers = """layer { type: "ReLU" bottom: "data" top: "a" }
                layer { type: "TanH" bottom: "a" top: "b" }"""
    net = built(IMAGES + layers)
    assert net.outputs == ("b",)


def test_a_dropout_of_nothing_keeps_everything() -> None:
    """Forward and backward."""
    layer = """layer { name: "d" type: "Dropout" bottom: "data" top: "d"
               dropout_param { dropout_ratio: 0 } }"""
    net = built("force_backward: true" + IMAGES + layer)
    given, nothing = batch(net), net.table.empty()
    net.forward(nothing, given)
    np.testing.assert_array_equal(net.blob("d"), given["data"])
    found = net.backward(nothing, nothing, {"d": given["data"]})
    np.testing.assert_array_equal(found["data"], given["data"])


def test_dummy_data_with_sizes_for_all_tops_and_for_each() -> None:
    """Each of num, channels, height and width has one entry, or one for each top."""
    layer = """layer { name: "d" type: "DummyData" top: "a" top: "b"
               dummy_data_param { num: 3 num: 5 channels: 2 height: 1 width: 1 } }"""
    assert built(layer).blobs == {"a": (3, 2, 1, 1), "b": (5, 2, 1, 1)}


def test_a_field_with_its_default_is_accepted() -> None:
    """It asks for nothing that does not exist here."""
    layer = """layer { name: "d" type: "Data" top: "data"
               data_param { source: "x" batch_size: 2 rand_skip: %d } }"""
    assert Network(Description(layer % 0, data_shape=(1, 2, 2))).blobs["data"] == (2, 1, 2, 2)
    with pytest.raises(BadInput, match=r"data_param\.rand_skip is not supported"):
        Network(Description(layer % 5, data_shape=(1, 2, 2)))


STAGED = """
    state { stage: "wide" level: 2 }
    layer { name: "r" type: "ReLU" bottom: "data" top: "r"
            include { stage: "wide" min_level: 2 } }
    layer { name: "s" type: "Sigmoid" bottom: "data" top: "s" include { stage: "other" } }
"""


def test_a_net_states_its_own_stages(tmp_path: Path) -> None:
    """They count with those of the solver, in every use of the net."""
    net = IMAGES + STAGED
    assert built(net).outputs == ("r",)
    both = Network(Description(net, stages=("other",)))
    assert both.outputs == ("r", "s")
    (tmp_path / "net.prototxt").write_text(net)
    assert Network(load_net(tmp_path / "net.prototxt").description()).outputs == ("r",)
    source = """state { stage: "db" }
        layer { name: "d" type: "Data" top: "x" include { stage: "db" }
                data_param { source: "there" batch_size: 1 } }"""
    assert data_of(Description(source)).source == Path("there")


def test_columns_by_name_from_a_data_frame() -> None:
    """A CoSData layer that names no source still reads the columns of its tops' names."""
    layer = """layer { name: "d" type: "CoSData" top: "pic" top: "lab" cos_data_param {
        batch_size: 2 top { name: "pic" type: ENCODED_IMAGE channels: 1 height: 4 width: 4 }
        top { name: "lab" type: INT sample_num_axes: 0 } } }"""
    wanted = data_of(Description(layer)).options
    assert (wanted.tops, wanted.encoded, wanted.colour) == (("pic", "lab"), ("pic",), False)


def test_a_reshape_to_a_number_of_rows_says_how_to_take_fewer() -> None:
    """The last batch of a test may be smaller than the prototxt's."""
    net = built(
        IMAGES
        + """layer { name: "r" type: "Reshape" bottom: "data" top: "r"
             reshape_param { shape { dim: 2 dim: 256 } } }"""
    )
    images = np.zeros((1, 4, 8, 8), np.float32)
    with pytest.raises(BadInput, match=r"in a batch of shape \(1, 4, 8, 8\), .* a dim of 0 copies"):
        net.forward(net.initial(1), {"data": images})


def test_a_net_for_the_other_phase_is_refused(tmp_path: Path) -> None:
    """By the file that says so, before anything is built."""
    (tmp_path / "net.prototxt").write_text("state { phase: TEST }" + IMAGES)
    (tmp_path / "solver.prototxt").write_text('net: "net.prototxt" base_lr: 1 max_iter: 1')
    with pytest.raises(BadInput, match=r"net\.prototxt: state: phase: expected TRAIN"):
        read_solver(tmp_path / "solver.prototxt")


@pytest.mark.parametrize(
    ("layer", "error"),
    [
        (
            'type: "ReLU" bottom: "data" top: "a" propagate_down: true propagate_down: false',
            "expected a propagate_down for each of 1 bottoms, or none, got 2",
        ),
        (
            'type: "DummyData" top: "a" dummy_data_param { num: 1 shape { dim: 1 } }',
            "expected shapes, or num, channels, height and width, got both",
        ),
        (
            'type: "DummyData" top: "a" dummy_data_param { num: 1 num: 2 channels: 1 }',
            "num: expected 1 for 1 tops, got 2",
        ),
        ('type: "DummyData" top: "a"', "shape: expected 1 for 1 tops, got 0"),
        (
            'type: "Python" bottom: "data" top: "a" python_param { module: "m" layer: "L" }',
            "type not supported: docs/how-to/extending.md shows how to write a layer in Python",
        ),
        (
            'type: "HDF5Output" bottom: "data" hdf5_output_param { file_name: "x" }',
            "type not supported: downpour features writes any blob",
        ),
    ],
)
def test_what_caffe_refuses_or_only_caffe_has(layer: str, error: str) -> None:
    """One line, which names the layer."""
    with pytest.raises(BadInput, match=rf"^net: layer x \(\w+\): {error}$"):
        built(IMAGES + f'layer {{ name: "x" {layer} }}')


def test_the_page_names_the_unsupported_types() -> None:
    """All of them, each with what to use in its place."""
    page = (Path(__file__).parents[3] / "docs" / "reference" / "layers.md").read_text()
    for kind, instead in UNSUPPORTED.items():
        assert kind not in LAYERS
        assert f"| `{kind}` | {instead} |" in page


def test_paths_that_were_written_on_windows(tmp_path: Path) -> None:
    """Of a solver's net and of a net's data."""
    (tmp_path / "nets").mkdir()
    (tmp_path / "list.txt").write_text("a.png 0")
    (tmp_path / "nets" / "n.prototxt").write_text(
        """layer { name: "d" type: "ImageData" top: "data"
           image_data_param { source: "..\\\\list.txt" batch_size: 1 } }"""
    )
    (tmp_path / "s.prototxt").write_text('net: ".\\\\nets\\\\n.prototxt" base_lr: 1')
    source = data_of(read_solver(tmp_path / "s.prototxt").train).source
    assert source is not None
    assert source.resolve() == (tmp_path / "list.txt").resolve()


def test_a_file_that_is_not_there_is_named_in_the_folder_of_the_net(tmp_path: Path) -> None:
    """That is where it is expected first, whatever the working directory is."""
    layer = """layer {{ name: "d" type: "ImageData" top: "data"
               image_data_param {{ source: "gone.txt" batch_size: 1 {size} }}
               transform_param {{ {mean} }} }}"""
    net = Description(layer.format(size="", mean=""), file=str(tmp_path / "net.prototxt"))
    assert data_of(net).source == tmp_path / "gone.txt"
    half = replace(net, prototxt=layer.format(size="new_height: 4", mean=""))
    with pytest.raises(
        BadInput, match=r"net\.prototxt: layer d: expected new_height and new_width"
    ):
        data_of(half)
    mean = replace(net, prototxt=layer.format(size="", mean='mean_file: "m.binaryproto"'))
    with pytest.raises(
        BadInput, match=rf"layer d .*: {tmp_path}/m\.binaryproto: cannot be read: No"
    ):
        with_files(mean)
