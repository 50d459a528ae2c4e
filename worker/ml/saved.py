"""Stages of `worker.ml` on any filesystem of Spark's: metadata as Spark ML has it, and weights.

    PATH/metadata   one line of JSON: class, uid, the parameters that are set, format, facts
    PATH/weights    Parquet: pieces of tensors, little-endian, float32, or uint64 for ids of rows

Spark itself writes and reads both, so this works on a classic session and over Spark Connect, with
every filesystem that the cluster has. Nothing is pickled. `format` rises when an older version
could not read what is written; a reader refuses a higher one.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.errors import PySparkException
from pyspark.ml.param import Params
from pyspark.ml.util import MLReadable, MLReader, MLWriter
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from shards.errors import BadInput
from worker.spark import reason

FORMAT = 2
_PIECE = 1 << 20  # values
_SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("type", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("piece", pa.int32()),
        ("values", pa.binary()),
    ]
)

_TYPES = ("<f4", "<u8")

Arrays = Mapping[str, NDArray[Any]]

Stage = TypeVar("Stage", bound=MLReadable[Any])


class StageWriter(MLWriter):
    """Saves a stage: `write().save(path)`, and `write().overwrite().save(path)`."""

    def __init__(
        self, stage: Params, facts: Mapping[str, Any], weights: Arrays | None = None
    ) -> None:
        """`facts` are plain values that its class needs to make it again."""
        super().__init__()
        self._stage = stage
        self._facts = facts
        self._weights = weights

    def save(self, path: str) -> None:
        """Write to a new path, or over what a stage has saved there; raises BadInput."""
        session = self.sparkSession
        if self._weights is not None:
            self._put(session.createDataFrame(_table(self._weights)), path, "weights", "parquet")
        line = json.dumps(self._metadata(session.version), separators=(",", ":"))
        # Last, because a stage without metadata is none.
        self._put(session.createDataFrame([(line,)], "value string"), path, "metadata", "text")

    def _put(self, df: DataFrame, path: str, name: str, kind: str) -> None:
        mode = "overwrite" if self.shouldOverwrite else "error"
        try:
            df.coalesce(1).write.format(kind).mode(mode).save(f"{path}/{name}")
        except PySparkException as error:
            raise BadInput(f"{path}: cannot be written: {reason(error)}") from None

    def _metadata(self, version: str) -> dict[str, Any]:
        stage = self._stage
        return {
            "class": f"worker.ml.{type(stage).__name__}",
            "timestamp": int(time.time() * 1000),
            "sparkVersion": version,
            "uid": stage.uid,
            "paramMap": {
                param.name: stage.getOrDefault(param)
                for param in stage.params
                if stage.isSet(param)
            },
            "defaultParamMap": {},
            "format": FORMAT,
            "facts": self._facts,
        }


class StageReader(MLReader[Stage], Generic[Stage]):
    """Loads a stage that a `StageWriter` saved."""

    def __init__(
        self,
        kind: type[Stage],
        make: Callable[[Mapping[str, Any], Arrays], Stage],
        *,
        weights: bool = True,
    ) -> None:
        """`make` makes it of its facts and its weights, which are empty without `weights`."""
        super().__init__()
        self._kind = kind
        self._make = make
        self._weights = weights

    def load(self, path: str) -> Stage:
        """The stage at a path; raises BadInput for none, or one of another class or format."""
        session = self.sparkSession
        try:
            row = session.read.text(f"{path}/metadata").first()
            metadata = json.loads(row[0]) if row is not None else {}
            expected = f"worker.ml.{self._kind.__name__}"
            if metadata.get("class") != expected:
                got = metadata.get("class", "nothing")
                raise BadInput(path, expected=f"a saved {expected}", got=got)
            if metadata["format"] > FORMAT:
                raise BadInput(
                    path,
                    expected=f"format {FORMAT} or less",
                    got=f"{metadata['format']}: a newer version of this project has saved it",
                )
            weights: Arrays = {}
            if self._weights:
                pieces = session.read.parquet(f"{path}/weights")
                weights = _tensors(pieces.orderBy(F.col("name"), F.col("piece")).toArrow())
        except PySparkException as error:
            raise BadInput(f"{path}: cannot be read: {reason(error)}") from None
        except json.JSONDecodeError:
            raise BadInput(f"{path}/metadata", expected="JSON", got="something else") from None
        stage = self._make(metadata["facts"], weights)
        params: Any = stage
        params._resetUid(metadata["uid"])
        for name, value in metadata["paramMap"].items():
            if not params.hasParam(name):
                raise BadInput(f"{path}: {expected} has no parameter {name}")
            params.set(params.getParam(name), value)
        return stage


def _table(weights: Arrays) -> pa.Table:
    """Tensors as rows, in pieces."""
    rows = []
    for name, tensor in weights.items():
        kind = next(kind for kind in _TYPES if np.dtype(kind) == tensor.dtype)
        flat = np.ascontiguousarray(tensor, kind).reshape(-1)
        for piece, first in enumerate(range(0, max(1, flat.size), _PIECE)):
            values = flat[first : first + _PIECE].tobytes()
            row = {"name": name, "type": kind, "shape": tensor.shape, "piece": piece}
            rows.append({**row, "values": values})
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


def _tensors(table: pa.Table) -> Arrays:
    """The tensors of such rows, in order; raises BadInput if a piece is missing."""
    pieces: dict[str, list[bytes]] = {}
    types: dict[str, tuple[str, tuple[int, ...]]] = {}
    for row in table.to_pylist():
        types[row["name"]] = row.get("type", "<f4"), tuple(row["shape"])  # format 1 has no type
        pieces.setdefault(row["name"], []).append(row["values"])
    tensors: dict[str, NDArray[Any]] = {}
    for name, parts in pieces.items():
        kind, shape = types[name]
        if kind not in _TYPES:
            raise BadInput(f"weights: {name}", expected=f"a type among {_TYPES}", got=kind)
        flat = np.frombuffer(b"".join(parts), kind).astype(np.dtype(kind).newbyteorder("="))
        if flat.size != int(np.prod(shape)):
            raise BadInput(f"weights: {name}", expected=shape, got=f"{flat.size} values")
        tensors[name] = flat.reshape(shape)
    return tensors
