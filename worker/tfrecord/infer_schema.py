"""The schema of TFRecord files, from the features of many records."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from shards.errors import BadInput
from worker.tfrecord.columns import ARROW, NAMES, FeatureKind
from worker.tfrecord.decode import parse
from worker.tfrecord.framing import Block

_KINDS = {
    "bytes_list": FeatureKind.BYTES,
    "float_list": FeatureKind.FLOAT,
    "int64_list": FeatureKind.INT64,
}


class _Seen(NamedTuple):
    """The kind and depth of a feature, and the first record that has it."""

    kind: FeatureKind
    depth: int
    record: str

    @property
    def words(self) -> str:
        return f"a feature list of {NAMES[self.kind]}" if self.depth == 2 else NAMES[self.kind]


def infer_schema(files: Iterable[tuple[str, Iterable[Block]]], sample: int) -> Any:
    """The Arrow schema of files by `sample` records of each, with columns in the names' order.

    A file is its name and its blocks. A feature with one value in all records is a scalar, with
    another number in one of them an array; a feature list is an array of arrays. Raises BadInput if
    a feature has two kinds, which names the records of both, and where no record has a feature.
    """
    features: dict[str, _Seen] = {}
    where = "TFRecord"
    for where, blocks in files:
        for label, record in _first(where, blocks, sample):
            for name, kind, depth in _features(parse(record, label)):
                seen = features.get(name)
                new = _Seen(kind, depth, label)
                if seen and (seen.kind is not kind or (seen.depth == 2) != (depth == 2)):
                    raise BadInput(
                        f"feature {name}",
                        expected=f"{seen.words} as in {seen.record}",
                        got=f"{new.words} in {label}",
                    )
                if not seen or depth > seen.depth:
                    features[name] = new
    if not features:
        raise BadInput(where, expected="a schema, or records with features", got="neither")
    return pa.schema([(name, _type(*features[name][:2])) for name in sorted(features)])


def _first(where: str, blocks: Iterable[Block], sample: int) -> Iterator[tuple[str, bytes]]:
    for block in blocks:
        for n, (i, j) in enumerate(zip(block.starts, block.ends, strict=True), block.first):
            if n == sample:
                return
            yield f"{where}: record {n}", block.data[i:j]


def _features(message: Any) -> Iterator[tuple[str, FeatureKind, int]]:
    for name, feature in message.context.feature.items():
        if kind := feature.WhichOneof("kind"):
            yield name, _KINDS[kind], int(len(getattr(feature, kind).value) != 1)
    for name, steps in message.feature_lists.feature_list.items():
        for feature in steps.feature:
            if kind := feature.WhichOneof("kind"):
                yield name, _KINDS[kind], 2


def _type(kind: FeatureKind, depth: int) -> Any:
    arrow_type = ARROW[kind]
    for _ in range(depth):
        arrow_type = pa.list_(arrow_type)
    return arrow_type
