"""Caffe's arrays in files: the blobs of a .caffemodel, and files of one blob (.binaryproto)."""

from math import prod
from pathlib import Path

import numpy as np
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from ps.path_checks import refuse_pipe
from ps.whole_files import whole_file
from shards.errors import BadInput
from worker.caffe.caffe_pb2 import BlobProto
from worker.data.text_files import locate

Floats = NDArray[np.float32]

MAX_BYTES = 2**31 - 1  # protobuf's own limit


def read_limited(path: Path) -> bytes:
    """The file's bytes, at most `MAX_BYTES`; raises BadInput."""
    refuse_pipe(path)
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= MAX_BYTES else b""
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    if size > MAX_BYTES:
        raise BadInput(path, expected=f"at most {MAX_BYTES} bytes", got=size)
    return data


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file atomically; after an error the old file is unchanged. Raises BadInput."""
    try:
        with whole_file(path) as partial:
            partial.write_bytes(content)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from None


def read_blob(path: Path) -> Floats:
    """The array in a file of one blob; raises BadInput."""
    return parse_blob(read_limited(path), str(path))


def parse_blob(data: bytes, where: str) -> Floats:
    """The array in the bytes of one blob; `where` names them in errors."""
    blob = BlobProto()
    try:
        blob.ParseFromString(data)
    except DecodeError:
        raise BadInput(where, expected="one blob", got=f"{len(data)} other bytes") from None
    return array_of(blob, where)


def write_blob(path: Path, array: Floats) -> None:
    """Write a file of one blob with the older shape of four axes, as Caffe's tools do.

    `array` has at most four axes; raises BadInput.
    """
    shape = (1,) * (4 - array.ndim) + array.shape
    num, channels, height, width = shape
    blob = BlobProto(num=num, channels=channels, height=height, width=width)
    blob.data.extend(array.reshape(-1).tolist())
    try:
        path.write_bytes(blob.SerializeToString())
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from None


def beside(name: str, file: str) -> Path:
    """The file that `file` calls `name`: in its own folder, or, as in Caffe, the working one.

    A name may have the backslashes of Windows. The file is in neither folder if the result does not
    exist.
    """
    folder = Path(file).parent
    return locate(name, folder, Path.exists) or folder / name


def array_of(blob: BlobProto, where: str) -> Floats:
    """A blob's numbers in the shape that it states; `where` names it in errors."""
    legacy = (blob.num, blob.channels, blob.height, blob.width)
    shape = tuple(blob.shape.dim) if blob.HasField("shape") else legacy
    values = np.array(blob.double_data or blob.data, np.float32)
    if min(shape, default=1) < 0 or prod(shape) != values.size:
        raise BadInput(f"{where}: a blob states shape {shape} and holds {values.size} numbers")
    return values.reshape(shape)


def add_blob(blobs: RepeatedCompositeFieldContainer[BlobProto], array: Floats) -> None:
    """Append an array to a message's blobs."""
    blob = blobs.add()
    blob.shape.dim.extend(array.shape)
    blob.MergeFromString(_pack(array))


def _pack(tensor: Floats) -> bytes:
    """The field `data` of a blob as bytes; many times faster than a list of Python floats."""
    content = np.ascontiguousarray(tensor, "<f4").tobytes()
    number, length = BlobProto.DESCRIPTOR.fields_by_name["data"].number, len(content)
    header = bytearray([number << 3 | 2])  # a field of bytes: tag, length, content
    while length > 127:
        header.append(length & 127 | 128)
        length >>= 7
    return bytes([*header, length]) + content
