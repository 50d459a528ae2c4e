"""The contenders, and how one of their programs is run, watched and ended.

A program is started as its own system's documentation says, under runner/subreaper.py, so that no
process of it is left behind, and its CPU time is that of everything that it has started.
"""

import ast
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import NamedTuple

from deploy.clusters.java import spark_environment
from deploy.runner import subreaper
from tests.bench.endtoend.caretaker import Caretaker, end_command
from tests.bench.endtoend.clusters import Kind, list_parts, place_of
from tests.bench.endtoend.places import Line, Place, make_places
from tests.support.cpu_seconds import count_with_ended
from tests.support.fresh_clone import ROOT

PROGRAMS = Path(__file__).parent / "programs"
ENVIRONMENTS = ROOT / ".venv-peers"
_POLL_S = 0.1
_START_S = 600.0
_LOOPBACK = "lo"
_TURN_S = 0.05
_CACHES = ("PYTHONPYCACHEPREFIX", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME")


class Contender(NamedTuple):
    """A program, and with what it is started."""

    program: str
    packages: tuple[str, ...]
    """The packages on PyPI that it needs."""
    kind: Kind = Kind.ALONE
    environment: str | None = None
    """The folder of .venv-peers with its interpreter; None: this interpreter."""
    options: Sequence[str] = ()
    on_link: Sequence[str] = ()
    """Further options on a slow link."""
    on_slow: Sequence[str] = ()
    """Further options with a slow worker."""
    works: Sequence[str] = ("lenet", "cifar", "adult")
    workers: int | None = None
    """How many workers it has, whatever is asked for."""
    rests: bool = True
    """Its slow worker rests by itself; else its process is stopped and continued."""
    parts: Sequence[str] = ()
    """Other programs of the folder that a user of this one writes as well."""

    @property
    def python(self) -> Path:
        if self.environment is None:
            return Path(sys.executable)
        return ENVIRONMENTS / self.environment / "bin" / "python"

    def read_versions(self) -> str:
        """Its packages with their versions; empty if one or the interpreter is not installed."""
        if not self.python.exists():
            return ""
        asked = f"from importlib.metadata import version as v; print(*map(v, {self.packages!r}))"
        answer = subprocess.run(
            [self.python, "-c", asked], capture_output=True, text=True, check=False
        ).stdout.split()
        return ", ".join(map(" ".join, zip(self.packages, answer, strict=False)))

    def count_lines(self) -> int:
        """The lines of code of the program, in one layout, without comments and docstrings."""
        return sum(count_lines(PROGRAMS / name) for name in (self.program, *self.parts))

    def command(self, options: Sequence[str]) -> list[str]:
        """The program with its options, without the interpreter."""
        return [str(PROGRAMS / self.program), *options, *self.options]


_DDP = ("ddp.py",)
_OURS = ("downpour-sgd", "pyspark")
_LOCAL_STEPS = ("--tau", "25")
"""For a slow link: as many local steps as torchft's program takes."""
_NO_BOUND = ("--staleness", "inf")
"""For a slow worker: under a bound all others would have its pace."""
_ELEPHAS = ("elephas", "pyspark", "tensorflow")
CONTENDERS = {
    "downpour, PyTorch on Spark": Contender(
        "downpour_torch.py",
        (*_OURS, "torch"),
        Kind.SPARK,
        on_link=_LOCAL_STEPS,
        on_slow=_NO_BOUND,
    ),
    "downpour train": Contender(
        "downpour_caffe.py",
        _OURS,
        Kind.SPARK,
        on_link=_LOCAL_STEPS,
        on_slow=_NO_BOUND,
        works=("lenet",),
    ),
    "plain PyTorch": Contender("plain.py", ("torch",), workers=1),
    "PyTorch DDP": Contender("ddp.py", ("torch",), Kind.TORCHRUN),
    "TorchDistributor": Contender(
        "torch_distributor.py", ("pyspark", "torch"), Kind.SPARK, parts=_DDP
    ),
    "Ray Train": Contender("ray_train.py", ("ray", "torch"), Kind.RAY, parts=_DDP),
    "torchft LocalSGD": Contender(
        "torchft_local.py",
        ("torchft", "torch"),
        Kind.ROLES,
        environment="torchft",
        parts=("torchft_group.py",),
    ),
    "TensorFlow PS": Contender(
        "tensorflow_ps.py",
        ("tensorflow-cpu", "tf-keras"),
        Kind.ROLES,
        environment="tensorflow_ps",
        rests=False,
    ),
    "Elephas, asynchronous": Contender(
        "elephas_keras.py", _ELEPHAS, Kind.SPARK, environment="elephas", rests=False
    ),
    "Elephas, synchronous": Contender(
        "elephas_keras.py",
        _ELEPHAS,
        Kind.SPARK,
        environment="elephas",
        options=("--mode", "synchronous"),
        rests=False,
    ),
}


class Trial(NamedTuple):
    """One run: the options of `programs/task.py`, and what is done to it.

    `data`: the file of `works.prepare`. `kill_every_s`: how often a worker is killed; with
    `kill_of_all`, only while all workers have taken a step since their last start. `cold`: as on a
    fresh machine, without bytecode and without numba's cache. `line`: that of each place.
    """

    work: str = "lenet"
    data: str = ""
    target: float = 0.985
    workers: int = 4
    batch: int = 64
    between: int = 12_800
    slow: float = 1.0
    kill_every_s: float | None = None
    kill_of_all: bool = False
    cold: bool = False
    line: Line | None = None
    seed: int = 1
    rate: float = 0.05
    momentum: float = 0.0

    def options(self) -> list[str]:
        of_the_contest = {"kill_every_s", "kill_of_all", "cold", "line"}
        options = {name: v for name, v in self._asdict().items() if name not in of_the_contest}
        return [word for name, value in options.items() for word in (f"--{name}", str(value))]


class Outcome(NamedTuple):
    """What came of a run; seconds count from its start, with the imports and the JVM."""

    seconds: float | None
    """Until the target was reached; None if it was not."""
    first_step_s: float | None
    cpu_s: float
    link_bytes: int
    """Over the loopback device or the lines, each byte once."""
    kills: int
    curve: list[tuple[float, float]]
    """Seconds and accuracy of each test."""
    output: str
    """The last lines that the program printed."""
    lasted_s: float
    """Until it was over, or was ended."""
    late: bool
    """Whether it was ended at its limit."""

    @property
    def longest_pause_s(self) -> float:
        """The longest time from one test to the next: what a stall or a restart costs."""
        times = [at for at, _ in self.curve]
        return max((later - sooner for sooner, later in pairwise(times)), default=0.0)


def run_trial(contender: Contender, trial: Trial, limit_s: float) -> Outcome:
    """Run one program until the target is reached, it ends, or `limit_s` is over.

    Raises OSError if the places cannot be made. If a cluster does not start, the run has failed.
    """
    with ExitStack() as stack:
        caretaker = stack.enter_context(Caretaker())
        places: list[Place] = []
        if trial.line is not None:
            places = stack.enter_context(make_places(trial.workers + 1, trial.line))
        run = Run(contender, trial, places, caretaker)
        failure = ""
        try:
            run.start()
            run.watch(limit_s)
        except ClusterError as error:
            failure = str(error)
        finally:
            cpu_s = run.end()
        lines = read_record(run.record)
        curve = [(at - run.began, accuracy) for at, accuracy in lines if accuracy is not None]
        return Outcome(
            next((at for at, accuracy in curve if accuracy >= trial.target), None),
            next((at - run.began for at, accuracy in lines if accuracy is None), None),
            cpu_s,
            run.link_bytes,
            run.killer.kills,
            curve,
            failure or run.read_output(20),
            run.lasted_s,
            run.late,
        )


class ClusterError(Exception):
    """A Spark or a Ray did not start."""


class Run:
    """The processes of one run."""

    def __init__(
        self, contender: Contender, trial: Trial, places: Sequence[Place], caretaker: Caretaker
    ) -> None:
        self._contender, self._trial, self._places = contender, trial, places
        self._caretaker = caretaker
        self._folder = caretaker.make_folder("endtoend-")
        if _OURS[0] in contender.packages:
            caretaker.add("segments", ROOT)
        self.record = self._folder / "record"
        # Beyond one machine, the nodes of a Ray refuse each other without a token.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._token = token if places and contender.kind is Kind.RAY else {}
        self.killer = Killer(self.record, trial)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.began, self.lasted_s, self.link_bytes, self.late = 0.0, 0.0, 0, False

    def start(self) -> None:
        """Start what has to be up, then the program's own processes; `began` is between them."""
        contender, trial = self._contender, self._trial
        on_link = contender.on_link if self._places else ()
        on_slow = contender.on_slow if trial.slow > 1 else ()
        program = contender.command(
            [*trial.options(), "--record", str(self.record), *on_link, *on_slow]
        )
        workers = contender.workers or trial.workers
        parts = list_parts(
            contender.kind, contender.python, program, workers, self._places, self._folder
        )
        for number, part in enumerate(parts):
            if part.ready is None and not self.began:
                self.began, self._bytes_before = time.time(), self.count_bytes()
            place = place_of(number, contender.kind, self._places)
            self._spawn(part.command if place is None else place.wrap(part.command))
            if part.ready is not None:
                # One at a time: busy daemons that start together miss limits of their own.
                self._await(number, part.ready)

    def _spawn(self, command: list[str]) -> None:
        caches = self._folder / "caches" if self._trial.cold else None
        with self._output(len(self.processes)).open("w") as file:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-I", "-S", subreaper.__file__, *command],
                    cwd=self._folder,
                    env=make_environment(self._contender, caches) | self._token,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
        self._caretaker.add("reaper", self.processes[-1].pid)

    def _output(self, number: int) -> Path:
        return self._folder / f"output.{number}"

    def _await(self, number: int, words: str) -> None:
        """Wait until a process has printed its words."""
        until = time.time() + _START_S
        while words not in self._output(number).read_text(errors="replace"):
            if time.time() > until or has_ended(self.processes[number]):
                kind = self._contender.kind.value
                raise ClusterError(f"{kind} did not start: {self.read_output(3)}")
            time.sleep(_POLL_S)

    def watch(self, limit_s: float) -> None:
        """Wait until the target is reached, the last process has ended, or time is over."""
        with pace(self.record, 1.0 if self._contender.rests else self._trial.slow):
            while not (reached(self.record, self._trial.target) or has_ended(self.processes[-1])):
                self.late = time.time() >= self.began + limit_s
                if self.late:
                    break
                self.killer.act()
                time.sleep(_POLL_S)
        self.lasted_s = time.time() - self.began
        self.link_bytes = self.count_bytes() - self._bytes_before

    def end(self) -> float:
        """End all processes; returns their CPU seconds."""
        return sum(end_program(process) for process in reversed(self.processes))

    def count_bytes(self) -> int:
        """The bytes that the places have sent; without places, those of the loopback device."""
        if self._places:
            return sum(place.count_bytes() for place in self._places)
        return int(Path(f"/sys/class/net/{_LOOPBACK}/statistics/tx_bytes").read_text())

    def read_output(self, lines: int) -> str:
        """The last lines of each process."""
        texts = (self._output(n).read_text(errors="replace") for n in range(len(self.processes)))
        return "\n".join(line for text in texts for line in text.splitlines()[-lines:])


def make_environment(contender: Contender, caches: Path | None) -> dict[str, str]:
    """The variables with which Spark has the contender's Python, and every process this folder.

    `caches`: where bytecode, compiled loops and Spark's classes are looked for, if not beside their
    files and in the user's cache.
    """
    python = str(contender.python)
    pythons = {"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python}
    spark = {"JAVA_HOME": spark_environment()["JAVA_HOME"], **pythons}
    folders = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    names = _CACHES if caches is not None else ()
    own = {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    return {**os.environ, **spark, **own, **dict.fromkeys(names, str(caches))}


def count_lines(path: Path) -> int:
    """The lines of code of a file, as Python lays them out, without comments and docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [line for line in body if not is_text(line)]  # type: ignore[attr-defined]
    return sum(bool(line.strip()) for line in ast.unparse(tree).splitlines())


def is_text(line: ast.AST) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a child has ended, without taking its status."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def end_program(process: subprocess.Popen[bytes]) -> float:
    """End the command below a subreaper, which then ends the rest; returns their CPU seconds."""
    while_alive_s = count_with_ended(process.pid)
    end_command(str(process.pid))
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    # Spark's daemon ignores SIGCHLD: the seconds of its workers are lost when they end.
    return max(while_alive_s, usage.ru_utime + usage.ru_stime)


def read_record(path: Path) -> list[tuple[float, float | None]]:
    """The time and accuracy of each line; that of a first step has no accuracy."""
    if not path.exists():
        return []
    whole_lines = [line for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"]
    parsed = map(json.loads, whole_lines)
    return [(line["time"], line["accuracy"]) for line in parsed]


def reached(record: Path, target: float) -> bool:
    return any(accuracy is not None and accuracy >= target for _, accuracy in read_record(record))


@contextmanager
def pace(record: Path, slow: float) -> Iterator[None]:
    """Stop the process of worker 0 for all but 1/`slow` of the time, as `cpulimit` does."""
    note, over = Path(f"{record}.0.pid"), Event()

    def signal_in_turn() -> None:
        while not over.wait(_TURN_S):
            with suppress(OSError, ValueError):  # it has not come yet, or has gone
                pid = int(note.read_text())
                os.kill(pid, signal.SIGSTOP)
                over.wait(_TURN_S * (slow - 1))
                os.kill(pid, signal.SIGCONT)

    thread = Thread(target=signal_in_turn)
    if slow > 1:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread.is_alive():
            thread.join()


class Killer:
    """Ends a random worker's process as often as a trial asks, from its first step on."""

    def __init__(self, record: Path, trial: Trial) -> None:
        self.kills = 0
        self._record, self._every_s = record, trial.kill_every_s
        self._least = trial.workers if trial.kill_of_all else 1
        self._dice, self._next = Random(trial.seed), 0.0

    def act(self) -> None:
        """Kill one, if it is time to."""
        if self._every_s is None:
            return
        if not self._next or not self._record.exists():
            self._next = time.time() + self._every_s
        elif time.time() >= self._next:
            pids = [path.read_text() for path in self._record.parent.glob("record.*.pid")]
            written = filter(None, pids)  # one may be empty at this moment
            alive = sorted(int(pid) for pid in written if Path(f"/proc/{pid}").exists())
            if len(alive) >= self._least:
                self._next = time.time() + self._every_s
                with suppress(ProcessLookupError):  # it has just ended by itself
                    os.kill(self._dice.choice(alive), signal.SIGKILL)
                    self.kills += 1
