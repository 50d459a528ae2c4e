"""A small network that several tests share, and how to build one from text."""

import numpy as np

from worker.caffe.net import Description, Network
from worker.caffe.phases import Phase
from worker.training.model import Batch

DATA = """
layer { name: "rows" type: "MemoryData" top: "data" top: "label"
        memory_data_param { batch_size: 4 channels: 2 height: 6 width: 6 } }
"""

SMALL = f"""
name: "small"
{DATA}
layer {{ name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
         convolution_param {{ num_output: 3 kernel_size: 3
           weight_filler {{ type: "xavier" }} bias_filler {{ type: "constant" value: 0.1 }} }} }}
layer {{ name: "relu1" type: "ReLU" bottom: "conv1" top: "conv1" }}
layer {{ name: "pool1" type: "Pooling" bottom: "conv1" top: "pool1"
         pooling_param {{ pool: MAX kernel_size: 2 stride: 2 }} }}
layer {{ name: "ip1" type: "InnerProduct" bottom: "pool1" top: "ip1"
         inner_product_param {{ num_output: 4 weight_filler {{ type: "gaussian" std: 0.2 }} }} }}
layer {{ name: "accuracy" type: "Accuracy" bottom: "ip1" bottom: "label" top: "accuracy"
         include {{ phase: TEST }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip1" bottom: "label" top: "loss" }}
"""


def network(text: str, phase: Phase = Phase.TRAIN) -> Network:
    """A net from text, called "net" in errors."""
    return Network(Description(text, phase))


def rows(count: int = 4, seed: int = 1) -> Batch:
    """A batch for SMALL."""
    rng = np.random.default_rng(seed)
    return {
        "data": rng.standard_normal((count, 2, 6, 6), np.float32),
        "label": rng.integers(0, 4, count),
    }
