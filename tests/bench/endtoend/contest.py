"""The contenders, and how one of their programs is run, watched and ended.

A program is started as its own system's documentation says, under runner/subreaper.py, so that no
process of it is left behind, and its CPU time is that of everything that it has started.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import NamedTuple

from deploy.clusters.java import spark_environment
from deploy.runner import subreaper
from tests.support.fresh_clone import ROOT

PROGRAMS = Path(__file__).parent / "programs"
ENVIRONMENTS = ROOT / ".venv-peers"
_POLL_S = 0.1
_LOOPBACK = "lo"


class Contender(NamedTuple):
    """A program, and with what it is started."""

    program: str
    package: str
    """The package on PyPI that it needs."""
    launcher: Sequence[str] = ()
    """The words between the interpreter and the program; {workers} stands for their number."""
    environment: str | None = None
    """The folder of .venv-peers with its interpreter; None: this interpreter."""
    on_spark: bool = False
    options: Sequence[str] = ()
    workers: int | None = None
    """How many workers it has, whatever is asked for."""

    @property
    def python(self) -> Path:
        if self.environment is None:
            return Path(sys.executable)
        return ENVIRONMENTS / self.environment / "bin" / "python"

    def read_version(self) -> str:
        """The package with its version; empty if it or the interpreter is not installed."""
        if not self.python.exists():
            return ""
        asked = f"from importlib.metadata import version; print(version({self.package!r}))"
        answer = subprocess.run(
            [self.python, "-c", asked], capture_output=True, text=True, check=False
        ).stdout.strip()
        return answer and f"{self.package} {answer}"

    def command(self, options: Sequence[str], workers: int) -> list[str]:
        launcher = [word.format(workers=self.workers or workers) for word in self.launcher]
        program = str(PROGRAMS / self.program)
        return [str(self.python), *launcher, program, *self.options, *options]


_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node={workers}")
CONTENDERS = {
    "downpour, PyTorch on Spark": Contender("downpour_torch.py", "downpour-sgd", on_spark=True),
    "downpour train": Contender("downpour_caffe.py", "downpour-sgd", on_spark=True),
    "plain PyTorch": Contender("plain.py", "torch", workers=1),
    "PyTorch DDP": Contender("ddp.py", "torch", (*_TORCHRUN, "--max-restarts=100")),
    "TorchDistributor": Contender("torch_distributor.py", "pyspark", on_spark=True),
    "Ray Train": Contender("ray_train.py", "ray"),
    "Elephas, asynchronous": Contender(
        "elephas_keras.py", "elephas", environment="elephas", on_spark=True
    ),
    "Elephas, synchronous": Contender(
        "elephas_keras.py",
        "elephas",
        environment="elephas",
        on_spark=True,
        options=("--mode", "synchronous"),
    ),
}


class Trial(NamedTuple):
    """One run: the options of `programs/task.py`, and what is done to it.

    `kill_every_s`: how often a worker is killed. `cold`: as on a fresh machine, without bytecode
    and without numba's cache.
    """

    target: float = 0.985
    workers: int = 4
    batch: int = 64
    between: int = 12_800
    slow: float = 1.0
    kill_every_s: float | None = None
    cold: bool = False
    seed: int = 1
    rate: float = 0.05
    momentum: float = 0.0

    def options(self) -> list[str]:
        of_the_contest = {"kill_every_s", "cold"}
        options = {name: v for name, v in self._asdict().items() if name not in of_the_contest}
        return [word for name, value in options.items() for word in (f"--{name}", str(value))]


class Outcome(NamedTuple):
    """What came of a run; seconds count from its start, with the imports and the JVM."""

    seconds: float | None
    """Until the target was reached; None if it was not."""
    first_step_s: float | None
    cpu_s: float
    link_bytes: int
    """Over the loopback device, each byte once."""
    kills: int
    curve: list[tuple[float, float]]
    """Seconds and accuracy of each test."""
    output: str
    """The last lines that the program printed."""


def run_trial(contender: Contender, trial: Trial, limit_s: float) -> Outcome:
    """Run one program until the target is reached, it ends, or `limit_s` is over."""
    with tempfile.TemporaryDirectory(prefix="endtoend-") as folder:
        record, output = Path(folder) / "record", Path(folder) / "output"
        command = contender.command([*trial.options(), "--record", str(record)], trial.workers)
        began, bytes_before = time.time(), count_link_bytes()
        killer = Killer(record, trial)
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", subreaper.__file__, *command],
                cwd=folder,
                env=make_environment(contender, Path(folder) / "caches" if trial.cold else None),
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        try:
            while time.time() < began + limit_s and not reached(record, trial.target):
                if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    break
                killer.act()
                time.sleep(_POLL_S)
            link_bytes = count_link_bytes() - bytes_before
        finally:
            cpu_s = end_program(process)
        lines = read_record(record)
        curve = [(at - began, accuracy) for at, accuracy in lines if accuracy is not None]
        return Outcome(
            next((at for at, accuracy in curve if accuracy >= trial.target), None),
            next((at - began for at, accuracy in lines if accuracy is None), None),
            cpu_s,
            link_bytes,
            killer.kills,
            curve,
            "\n".join(output.read_text(errors="replace").splitlines()[-20:]),
        )


def make_environment(contender: Contender, caches: Path | None) -> dict[str, str]:
    """The variables with which Spark has the contender's Python, and every process this folder.

    `caches`: where bytecode and compiled loops are looked for, if not beside their files.
    """
    python = str(contender.python)
    pythons = {"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python}
    spark = spark_environment({**os.environ, **pythons})
    folders = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    names = ("PYTHONPYCACHEPREFIX", "NUMBA_CACHE_DIR") if caches is not None else ()
    own = {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    return {**os.environ, **spark, **own, **dict.fromkeys(names, str(caches))}


def end_program(process: subprocess.Popen[bytes]) -> float:
    """End the command below a subreaper, which then ends the rest; returns their CPU seconds."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    with suppress(OSError):  # it may be over
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGKILL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


def read_record(path: Path) -> list[tuple[float, float | None]]:
    """The time and accuracy of each line; that of a first step has no accuracy."""
    if not path.exists():
        return []
    whole_lines = [line for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"]
    parsed = map(json.loads, whole_lines)
    return [(line["time"], line["accuracy"]) for line in parsed]


def reached(record: Path, target: float) -> bool:
    return any(accuracy is not None and accuracy >= target for _, accuracy in read_record(record))


def count_link_bytes() -> int:
    """The bytes that the loopback device has carried."""
    return int(Path(f"/sys/class/net/{_LOOPBACK}/statistics/tx_bytes").read_text())


class Killer:
    """Ends a random worker's process as often as a trial asks, from its first step on."""

    def __init__(self, record: Path, trial: Trial) -> None:
        self.kills = 0
        self._record, self._every_s = record, trial.kill_every_s
        self._dice, self._next = Random(trial.seed), 0.0

    def act(self) -> None:
        """Kill one, if it is time to."""
        if self._every_s is None:
            return
        if not self._record.exists():
            self._next = time.time() + self._every_s
        elif time.time() >= self._next:
            self._next += self._every_s
            pids = [path.read_text() for path in self._record.parent.glob("record.*.pid")]
            alive = sorted(int(pid) for pid in pids if Path(f"/proc/{pid}").exists())
            if alive:
                os.kill(self._dice.choice(alive), signal.SIGKILL)
                self.kills += 1
