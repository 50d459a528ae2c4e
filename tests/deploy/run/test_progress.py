"""The display, rendered into memory: plain lines in a pipe, a redrawn display on a terminal."""

import io
import re
from collections.abc import Callable
from typing import Literal

import pytest
from rich.console import Console

from deploy.run.progress import Progress, clock_text, line, picture
from deploy.run.progress_model import Meter, Readings
from tests.support.run_records import records, status, worker
from worker.training.evaluation import Evaluation

WAITING = worker("w1", clock=12, step=12, waiting=True, loss=0.25)


class Time:
    """A clock that only advances when it is set."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def readings(workers: int = 3, bound: int | None = 4) -> Readings:
    """Two looks, ten seconds apart, at two shards and two workers, one of which waits."""
    meter = Meter(steps=100, workers=workers, bound=bound, started=0.0)
    meter.update([status(0), status(1)], [records(0), records(0)], 10.0)
    both = [worker("w0", clock=8, step=8), WAITING]
    counters = {"version": 20, "steps": 20, "samples": 12800, "bytes_in": 50_000_000}
    return meter.update(
        [status(0, both, **counters, max_clock_gap=4), status(1, both, **counters)],
        [records(20, staleness=3, loss=0.5), records(20, staleness=4)],
        20.0,
    )


def rendered(draw: Callable[[Console], None], width: int = 100, *, colour: bool = False) -> str:
    out = io.StringIO()
    system: Literal["standard"] | None = "standard" if colour else None
    draw(Console(file=out, width=width, force_terminal=colour, color_system=system))
    return out.getvalue()


def test_one_line_says_it_all() -> None:
    """Time, steps, loss, rate, speed, staleness and waiting workers, in one plain line."""
    assert line(readings()) == (
        "0:20  steps 20/300  loss 0.5  learning rate 0.01  1280 samples/s"
        "  staleness 3.5, max 4  waiting: w1"
    )


def test_a_picture_shows_everything() -> None:
    """The bar's numbers, a row per worker with its standing, a row per shard with its rates."""
    text = rendered(lambda console: console.print(picture(readings())))
    rows = [" ".join(row.split()) for row in text.splitlines()]
    assert rows[0].endswith("7% 20 of 300 steps 0:20 elapsed 2:20 left")
    assert rows[1:] == [
        "loss 0.5 1,280 samples/s staleness 3.5, max 4 clock gap max 4 of 5",
        "learning rate 0.01",
        "",
        "worker clock step loss goodput restarts standing",
        "w0 8 8 0.5000 - 0 runs",
        "w1 12 12 0.2500 - 0 waits at the bound",
        "+1 more to come",
        "",
        "shard version updates/s MB/s in MB/s out max gap",
        "0 20 2.0 5.0 0.0 4",
        "1 20 2.0 5.0 0.0 0",
        "",
    ]


def test_a_picture_shows_how_far_it_has_come() -> None:
    """The learning rate, passes over the data, and the last test of the weights."""
    meter = Meter(steps=100, workers=1, bound=4, started=0.0, rows=256)
    got = meter.update([status(rate=0.0375, samples=640)], [records(1)], 10.0)
    result = Evaluation(400, 25600, 9.0, {"accuracy": 0.9731, "loss": 0.0841})
    text = rendered(lambda console: console.print(picture(got, result)), width=80)
    row = "learning rate 0.0375   epoch 2.5   test at 400: accuracy 97.31%, loss 0.0841"
    assert row in [line.rstrip() for line in text.splitlines()]


def test_no_bound_is_said() -> None:
    """Without a bound, the gap has no limit to compare with."""
    text = rendered(lambda console: console.print(picture(readings(bound=None))))
    assert "clock gap max 4, no bound" in text


def test_of_many_workers_the_slowest_are_shown() -> None:
    """The table stays small: it shows the workers that hold others back, and counts the rest."""
    meter = Meter(steps=100, workers=50, bound=4, started=0.0)
    everyone = [worker(f"w{number}", clock=90 - number) for number in range(40)]
    got = meter.update([status(workers=everyone)], [records(0)], 0.0)
    text = rendered(lambda console: console.print(picture(got)))
    names = [row.split()[0] for row in text.splitlines() if row.startswith("w") and "runs" in row]
    assert names == [f"w{number}" for number in range(39, 23, -1)]
    assert "+24" in text
    assert "+10" in text


def test_eighty_columns_are_enough() -> None:
    """On a terminal of the usual width nothing is wrapped or cut; a narrower one is respected."""
    wide, usual, narrow = (
        [row.rstrip() for row in text.splitlines()]
        for text in (
            rendered(lambda console: console.print(picture(readings())), width=width)
            for width in (200, 80, 50)
        )
    )
    assert usual == wide
    assert max(map(len, narrow)) <= 50


def test_a_pipe_gets_plain_lines() -> None:
    """What is started, a line every five seconds, and the final state, without escape codes."""
    time = Time()

    def run(console: Console) -> None:
        with Progress(steps=10, workers=1, bound=4, console=console, clock=time) as progress:
            progress.starting("Ray")
            time.now += 3
            progress.starting("Spark")
            progress.update([status()], [records(0)])
            time.now += 2
            progress.note("a notice")
            for look in range(1, 25):
                time.now += 0.5
                steps = status(steps=look, samples=64 * look)
                progress.update([steps], [records(1, loss=0.5)])
            progress.starting("the test")
            time.now += 70

    rest = "loss 0.5  learning rate 0.01  128 samples/s  staleness 0.0, max 0  no worker waits"
    assert rendered(run).splitlines() == [
        "0:00  starting Ray",
        "0:03  starting Spark",
        "0:05  a notice",
        f"0:05  steps 1/10  {rest.replace('128', '26')}",
        f"0:10  steps 11/10  {rest.replace('128', '94')}",
        f"0:15  steps 21/10  {rest}",
        f"0:17  steps 24/10  {rest}",
        "0:17  starting the test",
    ]


def test_a_pipe_hears_how_far_the_test_is() -> None:
    """A line every five seconds, so none for a short test."""
    time = Time()

    def run(console: Console) -> None:
        with Progress(steps=10, workers=1, bound=4, console=console, clock=time) as progress:
            progress.starting("the test")
            for rows in range(100, 1200, 100):
                progress.show_test_progress(rows, 1100)
                time.now += 1

    assert rendered(run).splitlines() == [
        "0:00  starting the test",
        "0:05  tested 600 of 1100 rows",
        "0:10  tested 1100 of 1100 rows",
    ]


def test_a_terminal_shows_how_far_the_test_is() -> None:
    """The bar takes the place of the spinner, and goes with the test."""
    time = Time()

    def run(console: Console) -> None:
        with Progress(steps=10, workers=1, bound=4, console=console, clock=time) as progress:
            progress.starting("the test")
            progress.show_test_progress(25, 100)
            time.now += 7
            console.print(progress._draw())

    text = _without_escapes(rendered(run, colour=True))
    assert re.search(r" 25%\s+tested 25 of 100 rows\s+7 s", text)
    assert re.search(r"done  the test  7\.0 s", text)


def test_nothing_is_said_before_the_first_step() -> None:
    """No line is repeated: each reports something new."""
    time = Time()

    def run(console: Console) -> None:
        with Progress(steps=10, workers=1, bound=4, console=console, clock=time) as progress:
            for steps in (0, 0, 5, 5, 5):
                time.now += 10
                progress.update([status(steps=steps)], [records(0)])
            progress.starting("the test")

    (first, second) = rendered(run).splitlines()
    assert first.startswith("0:30  steps 5/10")
    assert second == "0:50  starting the test"


def test_lines_by_iteration() -> None:
    """With `display`, a line comes at each multiple of that many iterations, and not by the
    clock; the loss is the mean of `average_loss` iterations; a test has a line of its own."""
    time = Time()

    def run(console: Console) -> None:
        with Progress(
            steps=40, workers=2, bound=4, display=10, average_loss=2, console=console, clock=time
        ) as progress:
            for steps in range(0, 61, 6):
                time.now += 10
                now = status(steps=steps)
                progress.update([now], [records(6, loss=[9, 9, 1, 2, 3, 4])])
            progress.show_evaluation(Evaluation(30, 640, 9.0, {"loss": 0.5}))

    lines = rendered(run).splitlines()
    assert [line.split("  ")[1] for line in lines[:-1]] == [
        "steps 24/80",
        "steps 42/80",
        "steps 60/80",
    ]
    assert all("loss 2.5" in line for line in lines[:-1])
    assert lines[-1] == "1:50  test at iteration 30: loss 0.5"


def test_a_terminal_says_how_to_stop() -> None:
    """The hint is shown while the run trains, and not after its end."""

    def run(console: Console) -> None:
        with Progress(steps=10, workers=1, bound=4, console=console, clock=Time()) as progress:
            progress.update([status(steps=5, workers=[WAITING])], [records(1)])
            hints.append(rendered(lambda other: other.print(progress._draw())))

    hints: list[str] = []
    ended = _without_escapes(rendered(run, colour=True))
    hint = "Ctrl-C stops the run and saves a snapshot"
    assert hint in hints[0]
    assert hint not in ended[ended.rindex("5 of 10 steps") :]


def test_a_long_line_is_not_wrapped_in_a_pipe() -> None:
    """A log keeps one event on one line, whatever a terminal's width would be."""
    everyone = [worker(f"worker-of-a-long-name-{number}", waiting=True) for number in range(9)]

    def run(console: Console) -> None:
        with Progress(steps=10, workers=9, bound=4, console=console, clock=Time()) as progress:
            progress.update([status(steps=1, workers=everyone)], [records(0)])

    (only,) = rendered(run, width=40).splitlines()
    assert only.endswith("worker-of-a-long-name-8")


@pytest.mark.parametrize(("error", "word"), [(None, "done"), (KeyboardInterrupt, "stopped")])
def test_a_terminal_gets_a_picture(error: type[BaseException] | None, word: str) -> None:
    """What was started stays with the time it took, the last display stays below it, and the
    cursor returns, however the run ends."""
    time = Time()

    def run(console: Console) -> None:
        with Progress(steps=100, workers=1, bound=4, console=console, clock=time) as progress:
            progress.starting("Ray")
            time.now += 3.25
            progress.update([status(steps=50, workers=[WAITING])], [records(1, loss=0.125)])
            progress.starting("the test")
            time.now += 1
            if error is not None:
                raise error

    def caught(console: Console) -> None:
        if error is None:
            run(console)
        else:
            with pytest.raises(error):
                run(console)

    text = rendered(caught, colour=True)
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert text.count(hidden) == text.count(shown) > 0
    assert text.rindex(shown) > text.rindex(hidden)
    plain = [" ".join(row.split()) for row in _without_escapes(text).splitlines()]
    assert "done Ray 3.2 s" in plain
    assert f"{word} the test 1.0 s" in plain
    last = "\n".join(plain[plain.index(f"{word} the test 1.0 s") :])
    assert "50 of 100 steps" in last
    assert "w1 12 12 0.2500 - 0 waits at the bound" in last


def _without_escapes(text: str) -> str:
    from rich.text import Text

    return Text.from_ansi(text).plain


def test_nothing_is_shown_of_what_never_began() -> None:
    """A run refused before it started prints nothing."""

    def run(console: Console) -> None:
        with Progress(steps=1, workers=1, bound=None, console=console, clock=Time()):
            pass

    assert rendered(run) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0:00"), (7, "0:07"), (754.2, "12:34"), (3723, "1:02:03"), (360_000, "100:00:00")],
)
def test_time_is_told_as_a_clock_tells_it(seconds: float, text: str) -> None:
    """Minutes and seconds, and hours once there are some."""
    assert clock_text(seconds) == text


class Closed(io.StringIO):
    """A pipe that its reader has closed."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_pipe_that_is_closed_ends_no_training() -> None:
    """`downpour train | head` continues without being seen."""
    console = Console(file=Closed(), force_terminal=False)
    with Progress(steps=100, workers=1, bound=0, console=console) as progress:
        progress.starting("the shards and workers")
        progress.update([status(0, [WAITING])])
        progress.note("snapshot 4")
