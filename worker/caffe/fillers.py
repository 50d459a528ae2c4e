"""Initial weights: Caffe's fillers, each a function of a generator, a shape and its settings.

The generator is keyed by the seed and the tensor's name, so a tensor's initial values do not depend
on other tensors or on the order in which they are drawn.
"""

from collections.abc import Callable
from hashlib import blake2b
from math import ceil, prod, sqrt

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from shards.errors import BadInput
from worker.caffe.caffe_pb2 import FillerParameter

Shape = tuple[int, ...]
Floats = NDArray[np.float32]
Filler = Callable[[Generator, Shape, FillerParameter], NDArray[np.floating]]


def fill(tensor: Floats, name: str, filler: FillerParameter, seed: int) -> None:
    """Overwrite `tensor`, called `name`, with the values `filler` draws for `seed`."""
    tensor[...] = FILLERS[filler.type](generator(seed, name), tensor.shape, filler)


def generator(seed: int, name: str) -> Generator:
    """A separate counter-based generator for each seed and name."""
    key = blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    return Generator(Philox(key=np.frombuffer(key, np.uint64)))


def check(filler: FillerParameter, shape: Shape, where: str) -> None:
    """Raise BadInput, prefixed with `where`, for a filler that does not exist or does not fit."""
    if filler.type not in FILLERS:
        raise BadInput(
            f"{where}: filler {filler.type} is not supported; expected one of {', '.join(FILLERS)}"
        )

    if filler.type == "bilinear" and len(shape) != 4:
        raise BadInput(f"{where}: filler bilinear", expected="a tensor of four axes", got=shape)
    if filler.type == "uniform" and filler.min > filler.max:
        raise BadInput(
            f"{where}: filler uniform",
            expected="a min of at most max",
            got=f"{filler.min:g} and {filler.max:g}",
        )
    if filler.type == "gaussian" and filler.std < 0:
        raise BadInput(
            f"{where}: filler gaussian", expected="a std of at least 0", got=f"{filler.std:g}"
        )


def _constant(_: Generator, shape: Shape, filler: FillerParameter) -> NDArray[np.floating]:
    return np.full(shape, filler.value)


def _uniform(rng: Generator, shape: Shape, filler: FillerParameter) -> NDArray[np.floating]:
    return rng.uniform(filler.min, filler.max, shape)


def _gaussian(rng: Generator, shape: Shape, filler: FillerParameter) -> NDArray[np.floating]:
    """Normal; with `sparse`, each weight is kept with probability sparse / outputs."""
    values = rng.normal(filler.mean, filler.std, shape)
    if filler.sparse >= 0:
        values *= rng.random(shape) < filler.sparse / _outputs(shape)
    return values


def _positive_unitball(rng: Generator, shape: Shape, _: FillerParameter) -> NDArray[np.floating]:
    """Uniform in [0, 1), each output's weights divided by their sum."""
    rows = rng.random((_outputs(shape), prod(shape[1:])))
    rows /= rows.sum(axis=1, keepdims=True)
    return rows.reshape(shape)


def _xavier(rng: Generator, shape: Shape, filler: FillerParameter) -> NDArray[np.floating]:
    """Uniform with variance 1/n (Glorot and Bengio 2010)."""
    limit = sqrt(3 / _fan(shape, filler))
    return rng.uniform(-limit, limit, shape)


def _msra(rng: Generator, shape: Shape, filler: FillerParameter) -> NDArray[np.floating]:
    """Normal with variance 2/n (He et al. 2015)."""
    return rng.normal(0, sqrt(2 / _fan(shape, filler)), shape)


def _bilinear(_: Generator, shape: Shape, __: FillerParameter) -> NDArray[np.floating]:
    """The symmetric kernel that interpolates between grid points, the same for every channel."""
    lines = []
    for size in shape[-2:]:
        factor = ceil(size / 2)
        centre = (size - 1) / (2 * factor)
        lines.append(1 - np.abs(np.arange(size) / factor - centre))
    return np.broadcast_to(np.outer(*lines), shape)


def _outputs(shape: Shape) -> int:
    """The number of outputs of a tensor; 1 for one without axes."""
    return shape[0] if shape else 1


def _fan(shape: Shape, filler: FillerParameter) -> float:
    inputs = prod(shape) / _outputs(shape)
    outputs = prod(shape) / (shape[1] if len(shape) > 1 else 1)
    match filler.variance_norm:
        case FillerParameter.FAN_OUT:
            return outputs
        case FillerParameter.AVERAGE:
            return (inputs + outputs) / 2
        case _:
            return inputs


FILLERS: dict[str, Filler] = {
    "constant": _constant,
    "uniform": _uniform,
    "gaussian": _gaussian,
    "positive_unitball": _positive_unitball,
    "xavier": _xavier,
    "msra": _msra,
    "bilinear": _bilinear,
}
