"""A job that trains in seconds, as files: 8x8 images of three classes, a small net, a solver.

Each class is a bright band of the image, so that a hundred steps tell them apart.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

CLASSES = 3
BATCH = 8

NET = """
name: "tiny"
layer { name: "rows" type: "MemoryData" top: "data" top: "label"
        memory_data_param { batch_size: 8 channels: 1 height: 8 width: 8 }
        transform_param { scale: 0.00390625 } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
        convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "ip1" type: "InnerProduct" bottom: "conv" top: "ip1"
        inner_product_param { num_output: 16 weight_filler { type: "xavier" } } }
layer { name: "ip2" type: "InnerProduct" bottom: "ip1" top: "ip2"
        inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "accuracy" type: "Accuracy" bottom: "ip2" bottom: "label" top: "accuracy"
        include { phase: TEST } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip2" bottom: "label" top: "loss" }
"""


def image_table(count: int, seed: int = 1) -> pa.Table:
    """`count` noisy images of the classes in turn, with columns label, image."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % CLASSES
    images = rng.integers(0, 96, (count, 8, 8), np.uint8)
    for row, label in enumerate(labels):
        images[row, 2 * label : 2 * label + 3] += 120
    return pa.table({"label": labels, "image": [image.tobytes() for image in images]})


def write_job(folder: Path, *, max_iter: int = 100, extra: str = "") -> Path:
    """Write net, solver and data (200 images to train, 50 to test) there; returns the solver."""
    (folder / "net.prototxt").write_text(NET)
    solver = folder / "solver.prototxt"
    solver.write_text(
        f'net: "net.prototxt" base_lr: 0.1 max_iter: {max_iter} test_iter: 7 {extra}\n'
    )
    data = folder / "data"
    data.mkdir()
    pq.write_table(image_table(200), data / "train.parquet")
    pq.write_table(image_table(50, seed=2), data / "test.parquet")
    return solver
