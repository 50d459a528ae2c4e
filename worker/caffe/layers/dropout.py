"""Dropout."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import ClassVar

from cupy_kernels.ops import dropout
from cupy_kernels.ops.dropout.rng_keys import RngKey
from cupy_kernels.types import Array
from worker.caffe.layer import Layer, Shape, StepKey, SupportedFields, Unary


class Dropout(Unary):
    """Sets some activations to zero while training and scales the others up; no effect in tests."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {"dropout_param": frozenset({"dropout_ratio"})}

    def set_up(self) -> tuple[Shape, ...]:
        self._ratio = self.spec.dropout_param.dropout_ratio
        if not 0 <= self._ratio < 1:
            raise self.bad(f"expected a dropout_ratio in [0, 1), got {self._ratio:g}")
        self._number = number_of(self.key)
        self._drops = self.training and self._ratio > 0
        return super().set_up()

    def apply(self, x: Array, step_key: StepKey) -> Array:
        if not self._drops:
            return x
        draw = RngKey(step_key.seed, step_key.step, self._number)
        y, self._saved = dropout.forward(x, self._ratio, draw, self.work)
        return y

    def differentiate(self, dy: Array) -> Array:
        return dropout.backward(dy, self._saved, self.work) if self._drops else dy


def number_of(name: str) -> int:
    """The number of a layer for random draws, by its name."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


ROWS: Mapping[str, type[Layer]] = {"Dropout": Dropout}
