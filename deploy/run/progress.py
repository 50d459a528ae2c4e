"""The progress display of a run.

On a terminal: what is being started and for how long, then a display that is redrawn in place. In a
pipe or a log file: plain lines without escape codes, one for each thing that is started, one for
each test, and one every few seconds or iterations, of the training and of the final test. All
numbers of the training come from deploy/run/progress_model.py; this module only formats them.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from deploy.run.progress_model import Meter, Readings, ShardReading, WorkerReading
from shards.shard_status import ShardStatus
from worker.training.evaluation import Evaluation, in_words
from worker.training.figures import Rows
from worker.training.loss_line import Milestones

LINE_EVERY_S = 5.0
_MAX_ROWS = 16
_UNKNOWN = "-"
_HINT = "Ctrl-C stops the run and saves a snapshot to resume from."


class Progress:
    """The display of one run; a context manager.

    Call `starting` for each thing that takes a while, and `update` with each set of statuses of the
    shards. `steps`: the steps of each worker; `bound`: the staleness bound (None: no bound);
    `rows`: the rows of the training data. `display`: iterations between plain lines (0: one every
    few seconds). `average_loss`: iterations over which the loss is averaged.
    """

    def __init__(
        self,
        *,
        steps: int,
        workers: int,
        bound: int | None,
        rows: int | None = None,
        display: int = 0,
        average_loss: int | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(file=_lasting(sys.stdout), highlight=False)
        self._clock = clock
        self._started = clock()
        self._meter = Meter(
            steps=steps,
            workers=workers,
            bound=bound,
            started=self._started,
            rows=rows,
            average=average_loss * workers if average_loss else None,
        )
        self._workers = workers
        self._milestones = Milestones(display) if display else None
        self._last_test: Evaluation | None = None
        self._trains = False
        self._readings: Readings | None = None
        self._activity: str | None = None
        self._activity_since = self._started
        self._tested: tuple[int, int] | None = None
        self._spinner = Spinner("dots" if not self._console.options.ascii_only else "line")
        self._line_at = self._started
        self._unsaid, self._said = False, 0
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console, get_renderable=self._draw, refresh_per_second=8
            )

    def starting(self, subject: str) -> None:
        """Show that `subject` ("Spark", "the test") starts, until the next call or an update."""
        self._end_activity("done")
        self._activity, self._activity_since = subject, self._clock()
        if self._live is None:
            if self._unsaid:
                self._say_readings()
            self._say(f"{clock_text(self._activity_since - self._started)}  starting {subject}")

    def update(self, statuses: Sequence[ShardStatus], records: Sequence[Rows] = ()) -> None:
        """Show one status per shard, and the records of its updates since the last call.

        This ends the display of what was being started.
        """
        now = self._clock()
        self._end_activity("done")
        self._readings = self._meter.update(statuses, records, now)
        self._trains = True
        # Lines accumulate in a log, so print one only if there are new steps to report.
        self._unsaid |= self._readings.steps > self._said
        if not self._unsaid:
            return
        if self._live is None and self._line_is_due(self._readings.steps, now):
            self._say_readings()
            self._line_at = now + LINE_EVERY_S

    def show_test_progress(self, rows: int, of: int) -> None:
        """Show how many rows of the final test are done, until the next call of `starting`."""
        now = self._clock()
        if self._tested is None:
            self._line_at = now + LINE_EVERY_S  # a short test needs no lines
        self._tested = rows, of
        if self._live is None and now >= self._line_at:
            self._say(f"{clock_text(now - self._started)}  tested {rows} of {of} rows")
            self._line_at = now + LINE_EVERY_S

    def show_evaluation(self, result: Evaluation) -> None:
        """Show the result of a test of the weights."""
        self._last_test = result
        if self._live is not None:
            self._console.print(Text(str(result)))
        else:
            self._say(f"{clock_text(self._clock() - self._started)}  {result}")

    def note(self, text: str) -> None:
        """Show a message that must not be lost when the display is redrawn."""
        if self._live is not None:
            self._console.print(Text(text, style="yellow"))
        else:
            self._say(f"{clock_text(self._clock() - self._started)}  {text}")

    def options_changed(self, text: str, changed: Mapping[str, object]) -> None:
        """Show in words that an operator has `changed` these options, by name."""
        self.note(text)

    @property
    def readings(self) -> Readings | None:
        """The figures shown last; None before the first update."""
        return self._readings

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end_activity("done" if kind is None else "stopped")
        self._trains = False
        if self._live is not None:
            self._live.stop()
        elif self._unsaid:
            self._say_readings()

    def _line_is_due(self, steps: int, now: float) -> bool:
        if self._milestones is None:
            return now >= self._line_at
        return self._milestones.passes(steps // self._workers)

    def _end_activity(self, how: str) -> None:
        subject, self._activity, self._tested = self._activity, None, None
        if subject is not None and self._live is not None:
            took = self._clock() - self._activity_since
            self._console.print(
                Text.assemble((f"{how:>7}", _COLOURS[how]), f"  {subject}  {took:.1f} s")
            )

    def _say(self, line: str) -> None:
        # Not through the console, which would wrap lines although a pipe has no width.
        with suppress(OSError):  # The reader is gone or the disk is full: the training continues.
            self._console.file.write(line + "\n")
            self._console.file.flush()

    def _say_readings(self) -> None:
        if self._readings is not None:
            self._say(line(self._readings))
            self._said, self._unsaid = self._readings.steps, False

    def _draw(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._readings is not None:
            parts.append(picture(self._readings, self._last_test))
        if self._activity is not None:
            took = self._clock() - self._activity_since
            if self._tested is None:
                self._spinner.update(text=f"starting {self._activity}  {took:.0f} s")
                parts.append(self._spinner)
            else:
                parts.append(_test_bar(*self._tested, took))
        elif self._trains:
            parts.append(Text(_HINT, style="dim"))
        return Group(*parts)


class _Lasting:
    """A stream that drops what it cannot write, for example because its reader has closed it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _lasting(stream: TextIO) -> TextIO:
    return cast(TextIO, _Lasting(stream))


_COLOURS = {"done": "green", "stopped": "yellow"}


# --- from readings to text ------------------------------------------------------------------------


def line(readings: Readings) -> str:
    """The readings in one plain line."""
    waiting = readings.waiting
    return "  ".join(
        (
            clock_text(readings.elapsed_s),
            f"steps {readings.steps}/{readings.planned}",
            f"loss {_number(readings.loss, '.4g')}",
            f"learning rate {readings.rate:.4g}",
            f"{_number(readings.samples_per_s, '.0f')} samples/s",
            staleness_text(readings),
            f"waiting: {' '.join(waiting[:_MAX_ROWS])}" if waiting else "no worker waits",
        )
    )


def picture(readings: Readings, last_test: Evaluation | None = None) -> Group:
    """The readings as a bar, two lines of numbers, and tables of the workers and the shards."""
    numbers = (_numbers(readings), _progress(readings, last_test))
    return Group(_bar(readings), *numbers, "", _workers(readings), "", _shards(readings), "")


def _test_bar(rows: int, of: int, took_s: float) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_row(
        _progress_bar(rows, of),
        Text(f"{rows / of if of else 1.0:4.0%}", style="bold"),
        f"tested {rows} of {of} rows",
        f"{took_s:.0f} s",
    )
    return grid


def _progress_bar(done: int, of: int) -> ProgressBar:
    return ProgressBar(
        total=max(1, of),
        completed=done,
        width=32,
        complete_style="cyan",
        finished_style="green",
    )


def _bar(readings: Readings) -> RenderableType:
    done = readings.steps / readings.planned if readings.planned else 1.0
    remaining = "" if not readings.remaining_s else f"{clock_text(readings.remaining_s)} left"
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_row(
        _progress_bar(readings.steps, readings.planned),
        Text(f"{done:4.0%}", style="bold"),
        f"{readings.steps:,} of {readings.planned:,} steps",
        f"{clock_text(readings.elapsed_s)} elapsed",
        remaining,
    )
    return grid


def _numbers(readings: Readings) -> Text:
    return Text("   ").join(
        (
            Text.assemble("loss ", (_number(readings.loss, ".4g"), "bold")),
            Text.assemble((_number(readings.samples_per_s, ",.0f"), "bold"), " samples/s"),
            Text(staleness_text(readings)),
            Text(gap_text(readings)),
        )
    )


def _progress(readings: Readings, last_test: Evaluation | None) -> Text:
    """The learning rate, the epoch and the last test."""
    parts = [Text(f"learning rate {readings.rate:.4g}")]
    if readings.epoch is not None:
        parts.append(Text(f"epoch {readings.epoch:.1f}"))
    if last_test is not None:
        figures = (in_words(last_test.figures), "bold")
        parts.append(Text.assemble(f"test at {last_test.iteration:,}: ", figures))
    return Text("   ").join(parts)


def _workers(readings: Readings) -> Table:
    table = _table("worker", "clock", "step", "loss", "goodput", "restarts")
    table.add_column("standing", justify="left")
    shown = readings.workers
    if len(shown) > _MAX_ROWS:
        # Of many workers, show those that hold the others back.
        shown = tuple(sorted(shown, key=lambda worker: worker.clock)[:_MAX_ROWS])
    for worker in shown:
        table.add_row(*_worker_row(worker), style="yellow" if worker.waits else "")
    for count, text in (
        (len(readings.workers) - len(shown), "more are ahead of these"),
        (readings.absent, "more to come"),
    ):
        if count:
            table.add_row(f"+{count}", "", "", "", "", "", text, style="dim")
    return table


def _worker_row(worker: WorkerReading) -> tuple[str, ...]:
    return (
        worker.name,
        f"{worker.clock:,}",
        f"{worker.step:,}",
        _number(worker.loss, ".4f"),
        _number(worker.goodput, ".0%"),
        str(worker.restarts),
        worker.standing,
    )


def _shards(readings: Readings) -> Table:
    table = _table("shard", "version", "updates/s", "MB/s in", "MB/s out", "max gap")
    for shard in readings.shards[:_MAX_ROWS]:
        table.add_row(*_shard_row(shard))
    if len(readings.shards) > _MAX_ROWS:
        table.add_row(f"+{len(readings.shards) - _MAX_ROWS}", style="dim")
    return table


def _shard_row(shard: ShardReading) -> tuple[str, ...]:
    return (
        str(shard.shard),
        f"{shard.version:,}",
        _number(shard.updates_per_s, ",.1f"),
        _number(shard.bytes_in_per_s, ",.1f", 1e6),
        _number(shard.bytes_out_per_s, ",.1f", 1e6),
        str(shard.max_clock_gap),
    )


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def staleness_text(readings: Readings) -> str:
    """The mean and maximum of the staleness so far."""
    if readings.staleness_mean is None:
        return f"staleness {_UNKNOWN}"
    return f"staleness {readings.staleness_mean:.1f}, max {readings.staleness_max}"


def gap_text(readings: Readings) -> str:
    """The largest clock gap so far, and the largest that the bound allows."""
    if readings.bound is None:
        return f"clock gap max {readings.max_clock_gap}, no bound"
    return f"clock gap max {readings.max_clock_gap} of {readings.bound + 1}"


def clock_text(seconds: float) -> str:
    """Format seconds like a clock: 0:07, 12:34, 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return _UNKNOWN if value is None else format(value / unit, form)
