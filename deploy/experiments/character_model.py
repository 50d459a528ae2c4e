"""A small language model: the next character of a text, from the 16 before it, in NumPy.

The text is the language reference that every Python has in `pydoc_data`, so nothing needs to be
packaged. It differs a little between versions of Python; its digest is part of a trial's id.
"""

from collections.abc import Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

from deploy.experiments.problem import BLOCK, Batch, Measurement, Places, cross_entropy
from shards.tables import DenseTable, TensorSpec
from worker.strategies.base import Floats

SYMBOLS = 96
"""The printable ASCII characters and the end of a line; others are read as spaces."""

_CONTEXT, _EMBEDDED, _HIDDEN = 16, 16, 160
_TESTED_SHARE = 0.1


class CharacterModel:
    """Characters embedded in 16 dimensions, a hidden layer of 160 with tanh, softmax and its loss.

    58,112 weights. The last tenth of the text is for tests: `tested` places spread over it are
    measured. With `held_out` they are of the tenth before it, which is then not trained with. The
    error is the share of characters guessed wrong, the loss in nats a character.
    """

    worst_error = 100.0

    def __init__(self, batch: int = 4, tested: int = 10_000, *, held_out: bool = False) -> None:
        self.batch = batch
        shapes = {
            "embedding": (SYMBOLS, _EMBEDDED),
            "hidden": (_CONTEXT * _EMBEDDED, _HIDDEN),
            "hidden_bias": (_HIDDEN,),
            "output": (_HIDDEN, SYMBOLS),
            "output_bias": (SYMBOLS,),
        }
        tensors = tuple(TensorSpec(name, shape) for name, shape in shapes.items())
        self.table = DenseTable("charlm", tensors)
        self._views = Places(self.table).views
        text = text_read()
        cut = int(len(text) * (1 - _TESTED_SHARE))
        if held_out:
            cut, text = int(len(text) * (1 - 2 * _TESTED_SHARE)), text[:cut]
        self._windows = np.lib.stride_tricks.sliding_window_view(text[:cut], _CONTEXT + 1)
        tests = np.lib.stride_tricks.sliding_window_view(text[cut:], _CONTEXT + 1)
        self._tests = tests[np.linspace(0, len(tests) - 1, tested).astype(np.int64)]
        self._range = np.arange(batch)

    def start(self, seed: int) -> Floats:
        arena = self.table.empty()
        dice = np.random.default_rng((seed, 3))
        for name, view in self._views(arena).items():
            if name == "embedding":
                view[...] = dice.standard_normal(view.shape, np.float32)
            elif view.ndim == 2:
                scale = np.float32(view.shape[0] ** -0.5)
                view[...] = scale * dice.standard_normal(view.shape, np.float32)
        return arena

    def batches(self, seed: int, worker: int) -> Iterator[Batch]:
        dice = np.random.default_rng((seed, worker, 2))
        while True:
            yield from dice.integers(len(self._windows), size=(BLOCK, self.batch))

    def gradient(self, weights: Floats, batch: Batch, out: Floats) -> float:
        with np.errstate(over="ignore", invalid="ignore"):  # a diverging run overflows
            return self._gradient(weights, self._windows[batch], out)

    def _gradient(self, weights: Floats, windows: NDArray[np.uint8], out: Floats) -> float:
        parts, slopes = self._views(weights), self._views(out)
        before, after = windows[:, :-1], windows[:, -1]
        embedded = parts["embedding"][before].reshape(self.batch, -1)
        hidden = np.tanh(embedded @ parts["hidden"] + parts["hidden_bias"])
        scores = hidden @ parts["output"] + parts["output_bias"]
        loss, slope = cross_entropy(scores, self._range, after)
        out[:] = 0
        np.matmul(hidden.T, slope, out=slopes["output"])
        slope.sum(0, out=slopes["output_bias"])
        slope = slope @ parts["output"].T
        slope *= 1 - hidden * hidden
        np.matmul(embedded.T, slope, out=slopes["hidden"])
        slope.sum(0, out=slopes["hidden_bias"])
        back = (slope @ parts["hidden"].T).reshape(-1, _EMBEDDED)
        # A product with the one-hot rows adds up what np.add.at would, many times as fast.
        chosen = np.zeros((SYMBOLS, before.size), np.float32)
        chosen[before.ravel(), np.arange(before.size)] = 1
        np.matmul(chosen, back, out=slopes["embedding"])
        return loss

    def measure(self, weights: Floats) -> Measurement:
        if not np.isfinite(weights).all():
            return Measurement(float("nan"), self.worst_error)
        parts = self._views(weights)
        before, after = self._tests[:, :-1], self._tests[:, -1]
        with np.errstate(over="ignore", invalid="ignore"):
            embedded = parts["embedding"][before].reshape(len(before), -1)
            hidden = np.tanh(embedded @ parts["hidden"] + parts["hidden_bias"])
            scores = (hidden @ parts["output"] + parts["output_bias"]).astype(np.float64)
            scores -= scores.max(1, keepdims=True)
            losses = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(after)), after]
        wrong = float((scores.argmax(1) != after).mean())
        return Measurement(float(losses.mean()), 100 * wrong)


@cache
def text_read() -> NDArray[np.uint8]:
    """The text, as numbers of symbols."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics))
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8)
    symbols = np.where((codes >= 32) & (codes < 127), codes - 32, 0).astype(np.uint8)
    symbols[codes == ord("\n")] = SYMBOLS - 1
    return symbols
