"""The compression of what travels between a worker and the shards: an option of the worker.

    Compression.parse("int8")                     one byte per gradient value, 0.26 of the bytes
    Compression.parse("topk:0.01,zstd", "bf16")   the largest hundredth; weights as halves

Each worker chooses the encoding of its own pushes and pulls; a shard reads all encodings.
"""

import contextlib
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from shards import argument_checks, row_codecs
from shards.delta_pulls import KINDS as CHANGES
from shards.errors import BadInput
from shards.messages import Kind
from shards.named_fields import NamedFields
from shards.payloads import ROUNDED
from shards.pull_encodings import KINDS, MAX_SHARE
from shards.tables import Layout

NONE = "none"


class Rounded(msgspec.Struct, frozen=True, tag="rounded"):
    """Every value in fewer bits: half precision, or integers with one scale for each 256 values."""

    kind: Kind

    def __post_init__(self) -> None:
        if self.kind not in ROUNDED:
            raise BadInput("compression", expected=f"one of {', '.join(NAMES)}", got=self.kind)


class TopK(msgspec.Struct, frozen=True, tag="topk"):
    """The largest `share` of the values of each key range (Lin et al. 2018, section 3).

    `momentum` is kept at the worker, before the selection, and then requires plain SGD at the
    shards; `clip` bounds a gradient's norm (0: no bound); over the first `warm_up` pushes the share
    falls from a quarter to `share`.
    """

    share: float
    momentum: float = 0.0
    clip: float = 0.0
    warm_up: int = 0

    def __post_init__(self) -> None:
        argument_checks.number("topk: share", self.share, expected="a share above 0, up to 0.5")
        if not 0 < self.share <= MAX_SHARE:
            raise BadInput("topk", expected="a share above 0, up to 0.5", got=f"{self.share:g}")
        _demand(self)

    def share_at(self, seq: int) -> float:
        """The share of push `seq`, which counts from 1."""
        if self.share >= _FIRST_SHARE or seq > self.warm_up:
            return self.share
        # Geometric: a straight line would send large shares for most of the warm-up.
        return float(_FIRST_SHARE * (self.share / _FIRST_SHARE) ** ((seq - 1) / self.warm_up))


class Threshold(msgspec.Struct, frozen=True, tag="threshold"):
    """The values beyond `tau`, up to half of each key range; the other fields are as in TopK."""

    tau: float
    momentum: float = 0.0
    clip: float = 0.0

    def __post_init__(self) -> None:
        argument_checks.number("threshold: tau", self.tau, expected="more than 0, and finite")
        if not 0 < self.tau < _LARGEST:
            raise BadInput(
                "threshold: tau", expected="more than 0, and finite", got=f"{self.tau:g}"
            )
        _demand(self)


_FIRST_SHARE = 0.25
_LARGEST = 3e38  # float32 ends at 3.4e38, and what is compared with it is float32
_MAX_PUSHES = 1 << 31

Sparse = TopK | Threshold
Writing = Rounded | TopK | Threshold

NAMES = {
    "fp16": Kind.FP16,
    "bf16": Kind.BF16,
    "int8": Kind.INT8,
    "4bit": Kind.INT4,
    "1bit": Kind.SIGN,
}
_SPARSE: dict[str, tuple[type[Sparse], str]] = {
    "topk": (TopK, "share"),
    "threshold": (Threshold, "tau"),
}
ROW_PUSHES = f"{NONE}, bf16 or int8"
PUSHES = f"{', '.join(NAMES)}, topk:SHARE or threshold:TAU"
_PULLS = {NONE: Kind.F4} | {n: k for n, k in NAMES.items() if k in KINDS + CHANGES}
PULLS = f"{', '.join(_PULLS)} or topk:SHARE"


class Compression(msgspec.Struct, frozen=True, kw_only=True, metaclass=NamedFields):
    """The encoding of a worker's pushes (None: plain floats) and the kind of its pulls.

    Pulls are either whole weights, plain or in half precision, or changes to the weights that the
    worker has: rounded, or, as SPARSE, the largest `pull_share` of them. With `zstd` pushes and
    pulls are compressed once more, which needs the package zstandard at both ends.
    """

    push: Writing | None = None
    pull: Kind = Kind.F4
    pull_share: float = 0.0
    zstd: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.push, str):
            raise argument_checks.wrong(
                "compression: push", "Compression.parse for a text", self.push
            )
        if self.push is not None:
            expected = "Rounded, TopK or Threshold"
            argument_checks.instance("compression: push", self.push, Writing, expected)  # type: ignore[arg-type]
        argument_checks.number(
            "compressed pull: pull_share",
            self.pull_share,
            expected=f"a share above 0, up to {MAX_SHARE:g}",
        )
        argument_checks.flag("compression: zstd", self.zstd)
        if self.pull not in KINDS + CHANGES:
            raise argument_checks.wrong("compressed pull", PULLS, self.pull)
        if self.pull is Kind.SPARSE and not 0 < self.pull_share <= MAX_SHARE:
            raise BadInput(
                "compressed pull", expected="a share above 0, up to 0.5", got=f"{self.pull_share:g}"
            )

    @property
    def push_kind(self) -> Kind:
        """The kind of the payloads of pushes."""
        if self.push is None:
            return Kind.F4
        return self.push.kind if isinstance(self.push, Rounded) else Kind.SPARSE

    @property
    def pulls_changes(self) -> bool:
        """True if the shards keep a view of this worker's weights."""
        return self.pull in CHANGES

    @staticmethod
    def parse(push: str = NONE, pull: str = NONE) -> "Compression":
        """Parse a user's text, such as `int8` or `topk:0.01,momentum=0.9,zstd`; raises BadInput."""
        push = argument_checks.text("compression", push, f"{NONE}, {PUSHES}")
        pull = argument_checks.text("compressed pull", pull, PULLS)
        name, *options = (part.strip() for part in push.split(","))
        settings = [option for option in options if option != "zstd"]
        kind, share = _parse_pull(pull)
        return Compression(
            push=_writing(name, settings), pull=kind, pull_share=share, zstd="zstd" in options
        )


def compression_of(argument: str, value: object) -> Compression:
    """The Compression for `value`: itself, None for no compression, or a text for pushes.

    Raises BadInput for anything else.
    """
    if value is None:
        return Compression()
    if isinstance(value, str):
        return Compression.parse(value)
    return argument_checks.instance(
        argument, value, Compression, f"{NONE}, {PUSHES}, or a Compression"
    )


def compression_of_rows(argument: str, value: object) -> Compression:
    """The Compression for `value` as `compression_of`; raises BadInput for one that rows lack.

    What is left out of a push would need a residual of every row that a worker ever pushed.
    """
    choice = compression_of(argument, value)
    # Zstandard would gain little: ids are random, and rounded rows hardly repeat.
    if choice.push_kind not in row_codecs.PUSHED or choice.zstd:
        expected = f"{ROW_PUSHES} for pushes of rows, without zstd"
        got = f"{choice.push_kind}{',zstd' if choice.zstd else ''}"
        raise BadInput(argument, expected=expected, got=got)
    if choice.pull not in row_codecs.PULLED:
        raise BadInput(argument, expected="none or bf16 for pulls of rows", got=choice.pull)
    return choice


def by_table(
    value: Compression | str | Mapping[str, Compression | str] | None, layout: Layout
) -> dict[str, Compression]:
    """The Compression of each table: one for all dense ones, or one for each that is named.

    Raises BadInput for a table that `layout` does not have, for one of rows that cannot be
    compressed so, and for one choice for all where all tables are sparse.
    """
    # A choice for all leaves rows as they are: what they lose by rounding is not sent later.
    rows = {table.name for table in layout.sparse}
    if not isinstance(value, Mapping):
        if value and not layout.tables:
            names = ", ".join(layout.all_names)
            raise BadInput(
                "compression", expected=f"a dict by table, of {names}", got="one for all"
            )
        named: Mapping[str, Compression | str] = {}
        default = compression_of("compression", value)
    else:
        named, default = value, Compression()
        for name in named.keys() - rows:
            if name not in layout.names:
                known = ", ".join(layout.all_names)
                raise BadInput("compression", expected=f"tables among {known}", got=f"{name!r}")
    chosen = {
        name: compression_of("compression", named.get(name, default)) for name in layout.names
    }
    return chosen | {
        table.name: compression_of_rows(f"compression: {table.name}", named.get(table.name))
        for table in layout.sparse
    }


def _writing(name: str, options: list[str]) -> Writing | None:
    word, colon, number = name.partition(":")
    if word in _SPARSE and colon:
        kind, field = _SPARSE[word]
        plain: dict[str, Any] = {field: number}
        for option in options:
            key, _, value = option.partition("=")
            plain[key] = value
        # msgspec ignores unknown fields, and a mistyped option must not be lost.
        if unknown := plain.keys() - set(kind.__struct_fields__):
            raise BadInput(f"compression {word}: no such option: {min(unknown)}")
        try:
            return msgspec.convert(plain, kind, strict=False)
        except msgspec.ValidationError as error:
            key = str(error).rpartition("$.")[2].rstrip("`")
            expected = "a whole number" if key == "warm_up" else "a number"
            raise BadInput(
                f"compression {word}: {key}", expected=expected, got=f"{plain[key]!r}"
            ) from None
    if (name not in NAMES and name != NONE) or options:
        raise BadInput(
            "compression",
            expected=f"{NONE}, {PUSHES}, and perhaps ,zstd",
            got=f"{','.join([name, *options])!r}",
        )
    return Rounded(NAMES[name]) if name != NONE else None


def _parse_pull(pull: str) -> tuple[Kind, float]:
    if pull in _PULLS:
        return _PULLS[pull], 0.0
    word, _, number = pull.partition(":")
    with contextlib.suppress(ValueError):  # a share that is no number is named below
        if word == "topk":
            return Kind.SPARSE, float(number)
    raise argument_checks.wrong("compressed pull", PULLS, pull)


def _demand(sparse: Sparse) -> None:
    name = sparse.__struct_config__.tag
    argument_checks.number(f"{name}: momentum", sparse.momentum, expected="[0, 1)")
    argument_checks.number(f"{name}: clip", sparse.clip, expected="0 or more")
    if isinstance(sparse, TopK):
        argument_checks.whole(f"{name}: warm_up", sparse.warm_up)
    if not 0 <= sparse.momentum < 1:
        raise BadInput(f"{name}: momentum", expected="[0, 1)", got=f"{sparse.momentum:g}")
    if not 0 <= sparse.clip < _LARGEST:
        raise BadInput(f"{name}: clip", expected="0 or more", got=f"{sparse.clip:g}")
    if isinstance(sparse, TopK) and not 0 <= sparse.warm_up < _MAX_PUSHES:
        raise BadInput(f"{name}: warm_up", expected=f"0 to {_MAX_PUSHES - 1}", got=sparse.warm_up)


assert set(get_args(Sparse)) == {kind for kind, _ in _SPARSE.values()}
