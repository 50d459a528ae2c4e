"""Lives of workers at a millisecond each: a process that has imported the SDK, and forks.

Started anew, a worker spends most of a second importing. This process imports once, opens no socket
and has no thread, so that what it forks is a process as good as fresh, and 200 kills take seconds.

    python -m tests.chaos.fork_server [MUTANT]     orders come on standard input, as lines of JSON

With a known bug's name (tests/mutants) the lives have it, which the oracle must then detect.
It answers each order with a pid, and tells of each process that ended, and how. What it forked dies
with it, and it dies with its parent.
"""

import os
import selectors
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import msgspec

from ps import Cluster
from tests.chaos.forks import die_with_parent
from tests.chaos.hostile_clients import bother
from tests.chaos.namespaces import enter, keep_space
from tests.chaos.schedule import Kind
from tests.chaos.worker import Life, live


class Space(msgspec.Struct, frozen=True, tag=True):
    """Order: a process that holds a network namespace of its own."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Order: a life; what it says goes to the end of `log`."""

    life: Life
    log: str


class Visit(msgspec.Struct, frozen=True, tag=True):
    """Order: strangers that bother the shards in the way of `kind`."""

    kind: Kind
    cluster: str
    seed: int
    log: str


Order = Space | Begin | Visit


class Forked(msgspec.Struct, frozen=True, tag=True):
    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A process has ended: its exit status, or minus the signal."""

    pid: int
    status: int


class Zygote:
    """The other end: orders lives, and hears how they ended."""

    def __init__(self, mutant: str = "") -> None:
        self.ended: dict[int, int] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.fork_server", *filter(None, [mutant])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            process_group=0,
        )

    def begin(self, life: Life, log: Path) -> int:
        """Start a life; returns its pid."""
        return self._ask(Begin(life, str(log)))

    def visit(self, kind: Kind, cluster: Path, seed: int, log: Path) -> int:
        """Send strangers, until they are killed; returns their pid."""
        return self._ask(Visit(kind, str(cluster), seed, str(log)))

    def space(self) -> int:
        """A process that holds a new network namespace; returns its pid."""
        return self._ask(Space())

    def hear(self) -> dict[int, int]:
        """The exit status of every process that has ended by now."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while selector.select(0):
                self._note(self._line())
        return self.ended

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> "Zygote":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, order: Order) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
        while (pid := self._note(self._line())) is None:
            pass
        return pid

    def _line(self) -> Forked | Ended:
        assert self._process.stdout is not None
        line = self._unbuffered()
        assert line, f"the zygote ended with status {self._process.wait()}"
        return msgspec.json.decode(line, type=Forked | Ended)

    def _unbuffered(self) -> bytes:
        """One line, and nothing of the next, which `select` would not see."""
        assert self._process.stdout is not None
        line = bytearray()
        while not line.endswith(b"\n"):
            byte = os.read(self._process.stdout.fileno(), 1)
            if not byte:
                return b""
            line += byte
        return bytes(line)

    def _note(self, said: Forked | Ended) -> int | None:
        if isinstance(said, Forked):
            return said.pid
        self.ended[said.pid] = said.status
        return None


def main(mutant: str = "") -> None:
    """Fork at each line of standard input; lives have the bug of this name, if one is given."""
    die_with_parent()
    if mutant:
        from tests.mutants import catalogue, patching  # here alone: it loads the simulator

        catalogue.find(mutant).plant(patching.Patch())
    hear, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(hear, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if hear in ready:
                os.read(hear, 4096)
                _reap()
            if 0 in ready:
                line = sys.stdin.buffer.readline()
                if not line:
                    return
                _tell(Forked(_fork(msgspec.json.decode(line, type=Order))))


def _fork(order: Order) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent()
        status = _become(order)
    except BaseException:  # noqa: BLE001  # it must never return into the zygote's loop
        traceback.print_exc()
    finally:
        os._exit(status)


def _become(order: Order) -> int:
    if isinstance(order, Space):
        keep_space()
    log = os.open(order.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if isinstance(order, Visit):
        bother(order.kind, Cluster.load(Path(order.cluster)), order.seed)
    if order.life.space is not None:
        enter(order.life.space)
    status = live(order.life)
    sys.stderr.flush()
    return status


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _tell(Ended(pid, os.waitstatus_to_exitcode(status)))


def _tell(said: Forked | Ended) -> None:
    os.write(1, msgspec.json.encode(said) + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
