"""Compression parsed from a user's text, and as a value."""

from itertools import pairwise

import msgspec
import pytest

from ps import Compression
from ps.session.compression import NAMES, Rounded, Threshold, TopK
from shards.errors import BadInput
from shards.messages import Kind


@pytest.mark.parametrize(
    ("push", "pull", "meant"),
    [
        ("none", "none", Compression()),
        ("int8", "none", Compression(push=Rounded(Kind.INT8))),
        ("none", "int8", Compression(pull=Kind.INT8)),
        ("none", "topk:0.02", Compression(pull=Kind.SPARSE, pull_share=0.02)),
        ("4bit", "fp16", Compression(push=Rounded(Kind.INT4), pull=Kind.FP16)),
        ("1bit,zstd", "none", Compression(push=Rounded(Kind.SIGN), zstd=True)),
        ("none, zstd", "bf16", Compression(pull=Kind.BF16, zstd=True)),
        ("topk:0.01", "bf16", Compression(push=TopK(0.01), pull=Kind.BF16)),
        (
            "topk:0.001,momentum=0.9,zstd,clip=2,warm_up=400",
            "none",
            Compression(push=TopK(0.001, 0.9, 2.0, 400), zstd=True),
        ),
        ("threshold:1e-3,clip=0.5", "none", Compression(push=Threshold(1e-3, clip=0.5))),
    ],
)
def test_a_compression_as_people_write_it(push: str, pull: str, meant: Compression) -> None:
    """Names, numbers and options are parsed into the value, and the value survives JSON."""
    assert Compression.parse(push, pull) == meant
    assert msgspec.json.decode(msgspec.json.encode(meant), type=Compression) == meant


@pytest.mark.parametrize(
    ("push", "pull", "complaint"),
    [
        (
            "int9",
            "none",
            r"expected none, fp16, .* or threshold:TAU, and perhaps ,zstd, got 'int9'",
        ),
        ("int8,zstandard", "none", "got 'int8,zstandard'"),
        ("none,momentum=1", "none", "got 'none,momentum=1'"),
        ("", "none", "got ''"),
        ("topk", "none", "got 'topk'"),
        ("topk:", "none", "compression topk: share: "),
        ("topk:lots", "none", "compression topk: share: "),
        ("topk:0", "none", "topk: expected a share above 0, up to 0.5, got 0"),
        ("topk:0.6", "none", "got 0.6"),
        ("topk:nan", "none", "got nan"),
        ("topk:0.1,speed=9", "none", "compression topk: no such option: speed"),
        ("topk:0.1,momentum=1", "none", r"topk: momentum: expected \[0, 1\), got 1"),
        ("topk:0.1,clip=-1", "none", "topk: clip: expected 0 or more, got -1"),
        ("topk:0.1,warm_up=-1", "none", "topk: warm_up: expected 0 to 2147483647, got -1"),
        ("topk:0.1,warm_up=0.5", "none", "compression topk: warm_up: "),
        ("threshold:0", "none", "threshold: tau: expected more than 0, and finite, got 0"),
        ("threshold:inf", "none", "got inf"),
        ("threshold:1,warm_up=3", "none", "compression threshold: no such option: warm_up"),
        (
            "int8",
            "1bit",
            "pull: expected none, fp16, bf16, int8, 4bit or topk:SHARE, got",
        ),
        ("int8", "topk", "got 'topk'"),
        ("int8", "topk:0.7", "compressed pull: expected a share above 0, up to 0.5, got 0.7"),
    ],
)
def test_what_is_no_compression(push: str, pull: str, complaint: str) -> None:
    """The error is one line that states what was expected and what was found."""
    with pytest.raises(BadInput, match=complaint) as caught:
        Compression.parse(push, pull)
    assert "\n" not in str(caught.value)


def test_a_value_is_checked_too() -> None:
    """Kinds that cannot be pushed or pulled are refused however the value is made."""
    with pytest.raises(BadInput, match="got f4"):
        Rounded(Kind.F4)
    with pytest.raises(BadInput, match=r"up to 0\.5, got 0"):
        Compression(pull=Kind.SPARSE)
    with pytest.raises(BadInput, match="got 'sign'"):
        Compression(pull=Kind.SIGN)
    assert [Rounded(kind).kind for kind in NAMES.values()] == list(NAMES.values())


def test_the_share_comes_down_over_the_warm_up() -> None:
    """The share falls from a quarter in equal ratios, and then stays."""
    shares = [TopK(0.001, warm_up=4).share_at(seq) for seq in range(1, 8)]
    assert shares[0] == 0.25
    assert shares[4:] == [0.001] * 3
    ratios = [after / before for before, after in pairwise(shares[:5])]
    assert ratios == pytest.approx([ratios[0]] * 4)
    assert TopK(0.3, warm_up=4).share_at(1) == 0.3
    assert TopK(0.001).share_at(1) == 0.001
