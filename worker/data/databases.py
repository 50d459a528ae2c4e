"""Databases of Datum messages, as Caffe's tools wrote them: LMDB and LevelDB."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from msgspec.structs import replace

from shards.errors import BadInput
from worker.caffe.caffe_pb2 import Datum
from worker.data.leveldb_files import LevelDbReader, is_leveldb
from worker.data.lmdb_file import LmdbReader, is_lmdb
from worker.data.read_options import ReadOptions
from worker.data.source import Sample, Source

__all__ = ["DatabaseSource", "datum_bytes", "datum_row", "is_leveldb", "is_lmdb"]

_CHEAP_BYTES = 1 << 27  # of a database of which every label is checked before training
_MAX_VALUES = 1 << 30


class DatabaseSource(Source):
    """The records of a database, in the order of their keys; each is a Datum."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        self._rows = self._open().rows

    @property
    def rows(self) -> int:
        return self._rows

    def read(self, start: int, stop: int) -> Iterator[Sample]:
        for key, value in self._open().records(start, stop):
            name = f"record {key.decode(errors='backslashreplace')}"
            yield replace(datum_row(value, f"{self.path}: {name}"), name=name)

    def labels(self) -> Iterator[tuple[str, int]]:
        size = sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())
        if size <= _CHEAP_BYTES:
            for row in self.read(0, self.rows):
                yield row.name, row.label

    def _open(self) -> LmdbReader | LevelDbReader:
        return LmdbReader(self.path) if is_lmdb(self.path) else LevelDbReader(self.path)


def datum_row(value: bytes, where: str) -> Sample:
    """The row in a serialised Datum; raises BadInput, which begins with `where`."""
    datum = Datum()
    try:
        datum.ParseFromString(value)
    except DecodeError:
        raise BadInput(where, expected="a Datum", got=f"{len(value)} other bytes") from None
    if datum.encoded:
        return Sample(datum.label, datum.data)
    shape = (datum.channels, datum.height, datum.width)
    shown = "x".join(map(str, shape))
    size = datum.channels * datum.height * datum.width
    if min(shape) < 1 or size > _MAX_VALUES:
        raise BadInput(
            f"{where}: fields channels, height, width", expected="extents of at least 1", got=shown
        )
    field = "float_data" if datum.float_data else "data"
    got = len(datum.float_data) or len(datum.data)
    if got != size:
        raise BadInput(f"{where}: field {field}", expected=f"{size} values for {shown}", got=got)
    if not datum.float_data:
        return Sample(datum.label, np.frombuffer(datum.data, np.uint8).reshape(shape))
    values = np.array(datum.float_data, np.float32)
    if not np.isfinite(values).all():
        raise BadInput(f"{where}: field float_data", expected="finite numbers")
    return Sample(datum.label, values.reshape(shape))


def datum_bytes(label: int, image: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> bytes:
    """A Datum with an image (channels, height, width), uint8 or float32, serialised."""
    channels, height, width = image.shape
    datum = Datum(channels=channels, height=height, width=width, label=label)
    if image.dtype == np.uint8:
        datum.data = image.tobytes()
    else:
        datum.float_data.extend(image.reshape(-1).tolist())
    return datum.SerializeToString()
