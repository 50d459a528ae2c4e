"""The small GPT of deploy/examples/gpt_torch.py: its learners' text and paces, and its losses."""

import argparse
import copy
import os
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from deploy.examples.gpt_torch import (
    BATCH,
    CONTEXT,
    GPT,
    SPEEDS,
    draw_batches,
    loss_of,
    make_model,
    read_rows,
)
from tests.bench.endtoend.programs.task import Task, note_process, write_line, write_loss

PERIOD, OUTER_RATE, OUTER_MOMENTUM = 12, 0.7, 0.5
"""Steps between exchanges, and the outer optimiser: those of the example, for all programs."""
_TESTED = 100


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pace", type=float, default=0.25, help="of the fastest, seconds a step")
    parser.add_argument("--small", action="store_true", help="36 thousand weights")
    parser.add_argument("--test-every", type=float, default=5.0, help="seconds")
    return parser.parse_known_args()[0]


def make_gpt() -> GPT:
    """The model that the options ask for, with the same weights in every process."""
    torch.set_num_threads(1)
    return make_model("small" if _read_options().small else "1M")


class Learner:
    """The text of one learner, at its own pace; `incarnation` counts its earlier starts."""

    def __init__(self, task: Task, number: int) -> None:
        self._task, self._number = task, number
        self._rows, _ = read_rows(Path(task.data))
        starts = Path(f"{task.record}.{number}.starts")
        with starts.open("a") as file:
            file.write(f"{os.getpid()}\n")
        self.incarnation = len(starts.read_text().splitlines()) - 1

    def draw_batches(self) -> Iterator[Any]:
        """Batches without end. The process may be killed from the second one on."""
        pace_s = _read_options().pace * max(SPEEDS.values()) / SPEEDS[f"w{self._number}"]
        seed = self._number + len(SPEEDS) * self.incarnation
        for step, batch in enumerate(draw_batches(self._rows, 1 << 30, seed, pace_s)):
            if step == 1:
                note_process(self._task, self._number)
                write_line(self._task, None)
            yield batch


class LossRecord:
    """Tests of a model on text that no learner reads, every few seconds.

    A test takes as long as several steps, so a thread does it with a copy of the weights.
    """

    def __init__(self, task: Task) -> None:
        self._task, self._every_s = task, _read_options().test_every
        self._tested = read_rows(Path(task.data))[1][:_TESTED]
        self._thread, self._due = Thread(), 0.0

    def test(self, model: GPT, steps: int) -> None:
        """Test the model after this number of steps of all learners, if it is time to."""
        if time.monotonic() < self._due or self._thread.is_alive():
            return
        self._due = time.monotonic() + self._every_s
        arguments = copy.deepcopy(model), steps * BATCH * CONTEXT, time.time()
        self._thread = Thread(target=self._write, args=arguments, daemon=True)
        self._thread.start()

    def _write(self, model: GPT, tokens: int, at: float) -> None:
        with torch.no_grad():
            loss = loss_of(model, self._tested).item()
        write_loss(self._task, loss, tokens, at)
