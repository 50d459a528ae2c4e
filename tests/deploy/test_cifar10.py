"""CIFAR-10 for Caffe, from a package of PNG strips."""

from pathlib import Path

import numpy as np
import pytest

from deploy.examples import cifar10
from shards.errors import BadInput
from tests.support.cifar_package import write_package
from worker.data.sources import Split, open_source


def test_a_package_becomes_two_databases(tmp_path: Path) -> None:
    """Each line of a strip is an image with the label of its place; OpenCV wrote the strips."""
    digest, images = write_package(tmp_path / "c.tgz")
    cifar10.write(cifar10.read(tmp_path / "c.tgz", digest), tmp_path / "cifar10")
    parts: tuple[tuple[Split, int], ...] = (("train", 20), ("test", 4))
    for part, rows in parts:
        source = open_source(tmp_path / "cifar10", part, classes=10)
        assert (source.rows, source.shape) == (rows, (3, 32, 32))
        batch = next(source.batches())
        assert batch["label"].to_pylist() == [0, 1, 2, 3] * (rows // 4)
        pixels = np.frombuffer(b"".join(batch["data"].to_pylist()), np.uint8)
        np.testing.assert_array_equal(pixels.reshape(rows, 3, 32, 32)[:4], images)


def test_another_package_is_refused(tmp_path: Path) -> None:
    """By its digest, which the message names."""
    digest, _ = write_package(tmp_path / "c.tgz")
    with pytest.raises(BadInput, match=rf"c\.tgz: expected SHA-256 {cifar10.SHA256}, got {digest}"):
        cifar10.read(tmp_path / "c.tgz")
