"""Prototxt from outside is bounded, and every failure is one line that says where."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.errors import BadInput
from worker.caffe import text
from worker.caffe.caffe_pb2 import LayerParameter, NetParameter
from worker.caffe.net import Description, Network

POOL = "layer { pooling_param { pool: MEDIAN } }"


@pytest.mark.parametrize(
    ("prototxt", "error"),
    [
        (
            'name: "a"\nlayer {\n  nam: "b"\n}',
            "f.prototxt:3: LayerParameter has no field nam; expected one of .*, of which name, ",
        ),
        (
            'layer { lrn_param { size: 3 } name: "a" } layer { name: "b" }',
            "f.prototxt:1: layer a: LRNParameter has no field size; expected .*local_size",
        ),
        (
            'layer { name: "a"\nlayer { name: "b" }',
            "f.prototxt:2: layer a: expected its closing brace before the next layer",
        ),
        (
            'layers { name: "c" cos_data_param { top { chanels: 3 } } }',
            "f.prototxt:1: layer c: V1LayerParameter has no field cos_data_param",
        ),
        (
            'layer { name: "c" cos_data_param { top { chanels: 3 } } }',
            "f.prototxt:1: layer c: TopBlob has no field chanels; .* which channels, ",
        ),
        (
            'layer { name: "c" convolution_param { hole: 2 } }',
            "f.prototxt:1: layer c: ConvolutionParameter has no field hole: write dilation$",
        ),
        (
            'layer { name: "c" blobs_lr: 1 }',
            r"f.prototxt:1: layer c: LayerParameter has no field blobs_lr: write param { lr_mult: ",
        ),
        (
            'layer { name: "c" pooling_param { pool: 9 } }',
            "f.prototxt:1: layer c: pool: expected one of MAX, AVE, STOCHASTIC, got 9",
        ),
        (
            f'layer {{ name: "c" pooling_param {{ pad: {"1" * 5000} }} }}',
            "f.prototxt:1: layer c: pad: expected a whole number in ",
        ),
        ('layer { name: "b"\n\n', "f.prototxt:1: layer b: expected its closing brace, got the end"),
        ("layer { name: 3 }", "f.prototxt:1: layer 3: name: expected a text in quotes, got 3"),
        (POOL, "f.prototxt:1: pool: expected one of MAX, AVE, STOCHASTIC, got MEDIAN"),
        (
            'layer { name: "c" convolution_param { pad: -1 } }',
            r"1: layer c: pad: .* in \[0, 4294967295",
        ),
        ("input_dim: 1.5", "f.prototxt:1: input_dim: expected a whole number, got 1.5"),
        ("force_backward: yes", "f.prototxt:1: force_backward: expected true or false, got yes"),
        ("name: net", "f.prototxt:1: name: expected a text in quotes, got net"),
        ('name "net"', 'f.prototxt:1: name: expected a colon, got "net"'),
        ('name: "net', 'f.prototxt:1: expected a text that ends on its line, got "net'),
        ("state: 3", "f.prototxt:1: state: expected a block in braces, got 3"),
        ("name { }", "f.prototxt:1: name: expected a text in quotes, got an opening brace"),
        ('name: "a"\n{ }', "f.prototxt:2: expected the name of a field, got an opening brace"),
        ("[1, 2]", "f.prototxt: expected a prototxt, got JSON"),
        ('{ "layers": [ ] }', "f.prototxt: expected a prototxt, got JSON"),
        ("layers:\n  - name: conv", "f.prototxt: expected a prototxt, got YAML"),
        ("<!DOCTYPE html>\n<html>", "f.prototxt: expected a prototxt, got HTML or XML"),
        ('name: "a" name: "b"', "f.prototxt:1: name: expected one value, got a second one"),
        ("\n\n}", "f.prototxt:3: expected the name of a field, got }"),
        (
            "layer { clip_param { min: 1 } }",
            r"f.prototxt: expected a value for layer\[0\].clip_param.max",
        ),
    ],
)
def test_a_mistake_is_named_with_its_line(prototxt: str, error: str) -> None:
    """Unknown fields, wrong types, unknown values, repetitions, braces: one line each."""
    with pytest.raises(BadInput, match=error) as caught:
        text.parse_net(prototxt, "f.prototxt")
    assert "\n" not in str(caught.value)


def test_a_solver_is_no_net() -> None:
    """The wrong kind of file is named by its first field that the other kind lacks."""
    with pytest.raises(BadInput, match="s:2: expected a net, got a solver: it has base_lr"):
        text.parse_net("\nbase_lr: 0.1", "s")
    with pytest.raises(BadInput, match="n:1: expected a solver, got a net: it has layer"):
        text.parse_solver('layer { name: "x" }', "n")


FORK = """name: "detector"
layer { name: "data" type: "AnnotatedData" top: "data" # a fork's
        transform_param { resize_param { prob: 1 } }
        annotated_data_param { batch_sampler { max_sample: 1 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
        convolution_param { num_output: 3 kernel_size: 3 dilated: true } }
layer { permute_param { order: 0 order: 2 } name: "p1" type: "Permute" bottom: "conv" top: "p1" }
layer { name: "p2" type: "Permute" bottom: "conv" top: "p2" permute_param: < order: [0, 2] > }
layer { name: "prior" type: "PriorBox" bottom: "p2" top: "prior" prior_box_param { size: 30 } }
layer { name: "d" type: "Data" top: "x" transform_param { resize_param { prob: 1 } } }
"""


def test_everything_that_only_a_fork_has_is_named_at_once() -> None:
    """Layers by their types, with their lines; and the fields of layers that exist here."""
    with pytest.raises(BadInput) as caught:
        text.parse_net(FORK, "f")
    assert str(caught.value) == (
        "f: 5 faults: line 2: layer data (AnnotatedData): type not supported;"
        " line 6: layer conv (Convolution): ConvolutionParameter has no field dilated;"
        " line 7: layer p1 (Permute) and 1 more: type not supported;"
        " line 9: layer prior (PriorBox): type not supported;"
        " line 10: layer d (Data): TransformationParameter has no field resize_param;"
        " docs/reference/layers.md lists what exists"
    )
    with pytest.raises(BadInput, match=r"^s: 2 faults: .* eval_type; .* no field ap_version; docs"):
        text.parse_solver('base_lr: 0.1 eval_type: "detection" ap_version: "11point"', "s")


@pytest.mark.parametrize(
    ("settings", "version"),
    [("bn_param { bn_mode: INFERENCE }", 2), ("bn_param { }", 1), ("", 1), ("", 2)],
)
def test_a_layer_of_a_fork_is_named_by_its_type(settings: str, version: int) -> None:
    """With settings of its own and without, in the older form, too."""
    entry = 'layer { type: "BN"' if version == 2 else "layers { type: BN"
    with pytest.raises(BadInput, match=r"layer b \(BN\): type not supported; .*layers\.md$"):
        Network(Description(f'{entry} name: "b" top: "b" {settings} }}'))


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("relu", "type not supported; .*, of which ReLU is closest"),
        ("INNER_PRODUCT", "type not supported; .*, of which InnerProduct is closest"),
        ("SOFTMAX_LOSS", "type not supported; .*, of which SoftmaxWithLoss, Softmax are closest"),
        ("", "expected a type, got none"),
    ],
)
def test_a_type_that_is_written_otherwise(kind: str, hint: str) -> None:
    """The error names the type, whatever its case."""
    with pytest.raises(BadInput, match=hint):
        Network(Description(f'layer {{ name: "a" type: "{kind}" top: "a" }}'))


@pytest.mark.parametrize(
    "written",
    [
        "iter_size: 2;",
        "iter_size: 2,",
        "iter_size : 0x2",
        "iter_size: 2# \u4e2d\r\n",
        "\x0citer_size:\t2\x0b",
        "iter_size: +2 stepvalue: [1, 2] test_state: [{ level: 1 }, < level: 2 >];",
        "iter_size: 2 solver_mode: 1 test_initialization: f net: 'a' \"b\" random_seed: -1",
        "iter_size: 2 base_lr: .5 momentum: 1. gamma: 1E-3 power: 0.5f",
        "iter_size: 2 random_seed: - 1 gamma: -\t.5 net: '- 1' # - 1",
    ],
)
def test_what_protobuf_reads_is_read(written: str) -> None:
    """Separators, brackets, numbers for values of enums, odd white space."""
    assert text.parse_solver(written).iter_size == 2


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfname: 'a'\r\n",
        "name: 'a'\n".encode("utf-16"),
        "name: 'a' # \u4e2d\u6587\n".encode("gbk"),
        b"# caf\xe9 'b'\n\rname: 'a'",
    ],
    ids=["mark", "UTF-16", "GBK", "Latin-1"],
)
def test_a_file_from_any_editor(tmp_path: Path, content: bytes) -> None:
    """A byte order mark and UTF-16 are understood; a comment may be in any encoding."""
    (tmp_path / "net.prototxt").write_bytes(content)
    assert text.parse_net(text.read_text(tmp_path / "net.prototxt")).name == "a"


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "expected a prototxt, got an empty file"),
        (b" \n\t", "expected a prototxt, got an empty file"),
        (bytes(40), "expected a prototxt, got a binary file"),
        (b"\x89HDF\r\n\x1a\n", "expected a prototxt, got an HDF5 file; give weights as --weights"),
        (
            NetParameter(layer=[LayerParameter(name="a")]).SerializeToString(),
            r"expected a prototxt, got a binary net, such as a \.caffemodel; give it as --weights",
        ),
    ],
    ids=["empty", "blank", "zeros", "HDF5", "caffemodel"],
)
def test_a_file_of_another_kind(tmp_path: Path, content: bytes, error: str) -> None:
    """One line says what it is."""
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(BadInput, match=f"file: {error}"):
        text.read_text(tmp_path / "file")


def test_nesting_bytes_and_layers_are_bounded(tmp_path: Path) -> None:
    """Too deep, too long and too many layers are refused, not parsed."""
    deep = "layer {" * 40 + "}" * 40
    with pytest.raises(BadInput, match=r"f:1: expected at most 32 nested messages, got more"):
        text.parse_net(deep, "f")
    with pytest.raises(BadInput, match="f: expected at most 4096 layers, got 5000"):
        text.parse_net("layer { }" * 5000, "f")
    long = tmp_path / "long.prototxt"
    long.write_bytes(b"#" * (text.MAX_BYTES + 1))
    with pytest.raises(BadInput, match="expected at most 8388608 bytes of prototxt, got more"):
        text.read_text(long)


def test_braces_in_strings_and_comments_nest_nothing() -> None:
    """What only looks like nesting passes."""
    braces = "{" * 50
    assert text.parse_net(f'name: "{braces}" # {braces}\n', "f").name == braces
    assert text.parse_net(f"name: '\\'{braces}'", "f").name == "'" + braces


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Missing, a folder, or not UTF-8."""
    with pytest.raises(BadInput, match=r"none\.prototxt: cannot be read: No such file"):
        text.read_text(tmp_path / "none.prototxt")
    with pytest.raises(BadInput, match="cannot be read: Is a directory"):
        text.read_text(tmp_path)
    (tmp_path / "latin").write_bytes(b'name: "caf\xe9"')
    with pytest.raises(BadInput, match="latin: expected UTF-8 text, got byte 0xe9 at offset 10"):
        text.read_text(tmp_path / "latin")


FRAGMENTS = st.lists(
    st.sampled_from(
        ["layer", "{", "}", "<", ">", ":", '"', "'", "#", "\n", "name", "1e9", "\\", ","]
    )
    | st.text(max_size=3),
    max_size=30,
)


@given(FRAGMENTS)
@settings(max_examples=300)
def test_any_text_parses_or_is_refused(fragments: list[str]) -> None:
    """Nothing but BadInput comes out of text from outside."""
    said = "f"
    try:
        text.parse_net(" ".join(fragments), "f")
    except BadInput as error:
        said = str(error)
    assert said.startswith("f")
    assert "\n" not in said


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    ("before", "after", "field"),
    [
        ('layer { name: "a" param { } param { lr_mult: ', " } }", "layer a: param: lr_mult"),
        ('layer { name: "a" loss_weight: 1 loss_weight: ', " }", "layer a: loss_weight"),
        (
            'layer { name: "a" convolution_param { weight_filler { std: ',
            " } } }",
            "layer a: convolution_param: weight_filler: std",
        ),
        ('layers { name: "a" blobs_lr: ', " }", "layers a: blobs_lr"),
    ],
)
def test_a_number_that_is_not_finite_is_named(
    value: str, before: str, after: str, field: str
) -> None:
    """Wherever it stands in a net; it would be in every weight in the end."""
    with pytest.raises(BadInput) as caught:
        text.parse_net(before + value + after, "f")
    assert str(caught.value) == f"f: {field}: expected a finite number, got {value}"


def test_a_solver_that_says_nan() -> None:
    """The same, whichever field."""
    with pytest.raises(BadInput, match=r"^s: base_lr: expected a finite number, got nan$"):
        text.parse_solver("base_lr: nan", "s")


@pytest.mark.parametrize(
    "bad",
    [
        "x" * 2_000_000,
        "layer { type: " + "x" * 2_000_000,
        'layer { phase: "' + "x" * 2_000_000 + '" }',
        "layer { num: " + "9" * 4_000,
        'name: "' + "x" * 2_000_000,
    ],
)
def test_an_error_quotes_little(bad: str) -> None:
    """However long the piece that is wrong, the error is one line of less than 500 characters."""
    with pytest.raises(BadInput) as caught:
        text.parse_net(bad, "f")
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)
