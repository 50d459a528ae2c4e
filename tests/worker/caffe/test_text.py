"""Prototxt from outside is bounded, and every failure is one line that says where."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.errors import BadInput
from worker.caffe import text

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
            "f.prototxt:1: layer c: CoSDataParameter has no field chanels; .* which channels, ",
        ),
        ('layer { name: "b"', "f.prototxt:1: "),
        ("layer { name: 3 }", "f.prototxt:1: "),
        (POOL, 'f.prototxt:1: .*PoolMethod" has no value named MEDIAN'),
        ('name: "a" name: "b"', "f.prototxt:1: "),
        ("\n\n}", "f.prototxt:3: "),
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
    """The wrong kind of file fails on its first field that the other kind lacks."""
    with pytest.raises(BadInput, match="s:1: NetParameter has no field base_lr"):
        text.parse_net("base_lr: 0.1", "s")
    with pytest.raises(BadInput, match="n:1: SolverParameter has no field layer"):
        text.parse_solver('layer { name: "x" }', "n")


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
