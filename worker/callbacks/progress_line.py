"""A line about how far a run is, on a terminal or in a notebook: `progress=True`.

It is redrawn in place. Where Spark draws a bar of its own on the same terminal, each would
overwrite the other; there a new line is printed every few seconds instead. Output that goes to a
file or a pipe gets none. After each drawing the cursor is at the start of the line, so that a
message that is logged meanwhile replaces the line and does not continue it.
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from cupy_kernels.ops.updates import compiles_first
from worker.callbacks.base import Callback, Parameters, RunStatus, WatchedRun
from worker.spark import DataFrame, shows_progress
from worker.training.evaluation import Evaluation, in_words

_EVERY_S = 5.0  # between lines that are not redrawn in place
_BAR = 20  # characters
_NOTEBOOK_COLUMNS = 100
COMPILES_FIRST = "compiling the kernels, once on this machine, which takes up to a minute"


class ProgressLine(Callback):
    """Draws the line; `steps` are those of each worker, None where the run has no set end."""

    def __init__(
        self,
        file: TextIO,
        *,
        steps: int | None,
        in_place: bool,
        columns: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file
        self._steps = steps
        self._in_place = in_place
        self._columns = columns
        self._clock = clock
        self._began = clock()
        self._drawn_at = -_EVERY_S
        self._loss: float | None = None
        self._first: RunStatus | None = None  # of those with rows, for the speed
        self._test = ""
        self._text = "starting"
        self._draw()

    def started(self, run: WatchedRun) -> None:
        """The shards are there; Spark starts the workers."""
        waits = compiles_first(net=True, rows=bool(run.cluster.layout.sparse))
        first = f"; {COMPILES_FIRST}" if waits else ""
        self._text = f"waiting for {run.workers} workers{first}"
        self._draw()

    def progressed(self, status: RunStatus) -> None:
        """Draw the figures once there is a step."""
        if status.samples:
            self._first = self._first or status
            self._loss = self._loss if status.loss is None else status.loss
            self._text = "  ".join(filter(None, self._figures(status)))
        self._draw()

    def evaluated(self, result: Evaluation, parameters: Parameters) -> None:
        """Show the figures of the newest test."""
        self._test = in_words(result.figures)

    def ended(self, parameters: Parameters | None) -> None:
        """Leave the last line as it is, and begin a new one."""
        self._draw(last=True)

    def _figures(self, status: RunStatus) -> list[str]:
        assert self._first is not None
        seconds = status.seconds - self._first.seconds
        rows = status.samples - self._first.samples
        return [
            _bar(status.iteration, self._steps),
            "" if self._loss is None else f"loss {self._loss:.4g}",
            self._test,
            f"{rows / seconds:,.0f} rows/s" if seconds > 0 else "",
        ]

    def _draw(self, *, last: bool = False) -> None:
        now = self._clock()
        if not self._in_place and not last and now < self._drawn_at + _EVERY_S:
            return
        self._drawn_at = now
        line = f"{_time(now - self._began)}  {self._text}"[: self._columns - 1]
        end = "\r" if self._in_place and not last else "\n"
        with suppress(OSError, ValueError):  # the terminal may be closed; the training continues
            self._file.write(f"\r{line.ljust(self._columns - 1)}{end}")
            self._file.flush()


def progress_of(df: DataFrame, steps: int | None, *, enabled: bool) -> tuple[ProgressLine, ...]:
    """The line of a run over `df`, to watch it; empty unless it is `enabled` and somebody sees it.

    Of several runs at a time, in threads, only that of the main thread has one.
    """
    if not enabled or threading.current_thread() is not threading.main_thread():
        return ()
    file = sys.stdout
    notebook = type(file).__module__.startswith("ipykernel.")
    if not notebook and not file.isatty():
        return ()
    columns = _NOTEBOOK_COLUMNS if notebook else shutil.get_terminal_size().columns
    in_place = notebook or not shows_progress(df)
    return (ProgressLine(file, steps=steps, in_place=in_place, columns=columns),)


def _bar(iteration: int, steps: int | None) -> str:
    """The iterations done, with a bar where their number is known."""
    if steps is None:
        return f"iteration {iteration:,}"
    filled = min(_BAR, _BAR * iteration // max(1, steps))
    return f"[{'=' * filled}{' ' * (_BAR - filled)}] {iteration:,} of {steps:,}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02}"
