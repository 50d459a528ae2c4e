"""PyTorch's twin of a Caffe net: the same layers and weights, as a PyTorch user writes them.

Activations are rectified in place, a BatchNorm and the Scale behind it are one operation, and a
value is released after its last reader, as a local variable of a module is.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from worker.caffe.caffe_pb2 import LayerParameter, LRNParameter, PoolingParameter
from worker.caffe.text import parse_net
from worker.training.model import Batch

Tensor = Any  # PyTorch is not installed where types are checked


class Step(NamedTuple):
    """One operation: the blobs that it reads, the blob that it makes."""

    bottoms: tuple[str, ...]
    top: str
    run: Callable[..., Tensor]


class TorchNet:
    """A net for training, with the tensors of `tensors` by Caffe's names ("conv1/0", ...)."""

    def __init__(self, text: str, tensors: Mapping[str, np.ndarray]) -> None:
        self._tensors = {name: torch.from_numpy(np.array(t)) for name, t in tensors.items()}
        specs = [s for s in parse_net(text, "twin").layer if s.type != "Input"]
        statistics = {s.name for s in specs if s.type == "BatchNorm"}
        self.trained = {
            name: tensor.requires_grad_()
            for name, tensor in self._tensors.items()
            if name.split("/")[0] not in statistics
        }
        scales = {s.bottom[0]: s.name for s in specs if s.type == "Scale"}
        self._steps = [
            Step(tuple(s.bottom), s.top[0], self._batch_norm(s.name, scales[s.top[0]]))
            if s.type == "BatchNorm"
            else Step(tuple(s.bottom), s.top[0], self._operation(s))
            for s in specs
            if s.type != "Scale"
        ]
        self._last = {name: i for i, step in enumerate(self._steps) for name in step.bottoms}

    def gradient(self, batch: Batch) -> float:
        """One forward and backward pass; returns the loss, and leaves gradients in `trained`."""
        for tensor in self.trained.values():
            if tensor.grad is not None:
                tensor.grad.zero_()
        values = {name: torch.from_numpy(np.asarray(column)) for name, column in batch.items()}
        for number, step in enumerate(self._steps):
            found = [values[name] for name in step.bottoms]
            for name in set(step.bottoms):
                if self._last[name] == number:
                    del values[name]
            values[step.top] = step.run(*found)
            del found
        loss = sum(values.values())
        loss.backward()
        return float(loss.detach())

    def _operation(self, spec: LayerParameter) -> Callable[..., Tensor]:
        weights = [t for name, t in self._tensors.items() if name.startswith(f"{spec.name}/")]
        match spec.type:
            case "Convolution":
                p = spec.convolution_param
                step = (_first(p.stride, 1), _first(p.pad, 0), _first(p.dilation, 1), p.group)
                bias = weights[1] if len(weights) > 1 else None
                return lambda x: functional.conv2d(x, weights[0], bias, *step)
            case "InnerProduct":
                return lambda x: functional.linear(x.flatten(1), *weights)
            case "ReLU":
                return lambda x: x.relu_()
            case "Pooling":
                return _pooling(spec.pooling_param)
            case "LRN":
                return _normalisation(spec.lrn_param)
            case "Dropout":
                ratio = spec.dropout_param.dropout_ratio
                return lambda x: functional.dropout(x, ratio, training=True)
            case "Concat":
                return lambda *parts: torch.cat(parts, 1)
            case "Eltwise":
                return lambda x, y: x + y
            case "SoftmaxWithLoss":
                weight = spec.loss_weight[0] if spec.loss_weight else 1.0
                return lambda x, label: weight * functional.cross_entropy(x, label)
        raise NotImplementedError(f"a twin of {spec.type}")

    def _batch_norm(self, name: str, scale: str) -> Callable[..., Tensor]:
        mean, variance = self._tensors[f"{name}/0"], self._tensors[f"{name}/1"]
        weight, bias = self._tensors[f"{scale}/0"], self._tensors[f"{scale}/1"]
        return lambda x: functional.batch_norm(x, mean, variance, weight, bias, training=True)


def _pooling(p: PoolingParameter) -> Callable[..., Tensor]:
    if p.global_pooling:
        return lambda x: functional.adaptive_avg_pool2d(x, 1)
    kind = functional.max_pool2d if p.pool == PoolingParameter.MAX else functional.avg_pool2d
    return lambda x: kind(x, p.kernel_size, p.stride, p.pad, ceil_mode=True)


def _normalisation(p: LRNParameter) -> Callable[..., Tensor]:
    size, alpha, beta, k = p.local_size, p.alpha, p.beta, p.k
    if p.norm_region == LRNParameter.ACROSS_CHANNELS:
        return lambda x: functional.local_response_norm(x, size, alpha, beta, k)
    pad = size // 2
    return lambda x: x * (1 + alpha * functional.avg_pool2d(x * x, size, 1, pad)) ** -beta


def _first(given: Any, default: int) -> int:
    return given[0] if given else default
