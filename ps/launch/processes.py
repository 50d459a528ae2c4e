"""Runs shards as plain processes of this machine: no Ray, nothing but the base install.

    with process_shards(specs) as hosts, AdminClient(hosts.cluster) as admin:
        admin.install(weights)
        ...

Each shard, copy of a shard, and coordinator is a child process (child_main.py) with pipes to its
parent. The children are in process groups of their own, so Ctrl-C in the terminal reaches only the
parent, which may want to save the shards' state first. They end with their parent, even if it is
killed.
"""

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Unpack
from weakref import WeakSet

from ps.durability import Durability
from ps.launch.child_main import make_refusing_server
from ps.launch.child_protocol import (
    CoordinatorLaunch,
    CopyLaunch,
    Failed,
    Launch,
    Listening,
    RefusalLaunch,
    receive,
    send,
)
from ps.launch.launch_plan import LaunchOptions, LaunchPlan, plan_of
from ps.launch.process_handle import ExitReason, ProcessHandle
from ps.launch.replica_supervisor import ReplicatedShards, supervise
from ps.launch.single_copies import SingleCopies, single_copies
from ps.logs import LogRelay
from ps.replication.coordinator_store import RECORD
from ps.shared_memory.shm_files import temporary_folder
from ps.transport.addresses import check_listen
from shards.errors import BadInput, GiveUp
from shards.spec import ShardSpec

_END_S = 10.0
_CHILDREN: "WeakSet[ChildProcess]" = WeakSet()  # of this process
_FROM_OUTSIDE = frozenset((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))


def process_shards(
    specs: Sequence[ShardSpec], **options: Unpack[LaunchOptions]
) -> AbstractContextManager[SingleCopies]:
    """Start one process per spec; end them on leaving. The options are those of `LaunchPlan`.

    Each shard listens on `host`; 0.0.0.0 is every address of this machine, and workers are then
    given the machine's own address. On a GPU, all shards use the first one that this process may
    see. The children import from the same paths as this process.

    With a `durability` that keeps a WAL (docs/explanation/durability.md), each shard has a folder
    below `logs`. If that holds a WAL of a job with exactly these specs, the shard resumes from its
    end. A shard that dies is restarted on the same endpoint (restart.py). The same holds for
    `memory` with a `rollback_s`: each shard then saves its state every `rollback_s` seconds among
    this machine's temporary files, and a restart loses the updates since the last autosave.

    Raises BadInput when a port cannot be bound, no GPU answers, a WAL is damaged or another job's,
    some shards' WALs hold weights and others' none, or `rollback_s` does not apply, GiveUp with the
    cause when a shard does not start within a minute, WrongBuild when it runs other code.
    """
    plan = plan_of(specs, options)
    if plan.durability is Durability.REPLICATED:
        raise BadInput(
            "durability replicated", expected="`process_replicas`", got="`process_shards`"
        )
    return start_single(plan)


def process_replicas(
    specs: Sequence[ShardSpec], **options: Unpack[LaunchOptions]
) -> AbstractContextManager[ReplicatedShards]:
    """Start a coordinator and two processes per spec; end them on leaving.

    Returns when each shard has a backup. All listen on free ports of `host`; if that is 0.0.0.0,
    they are published under this machine's own address. If other hosts can reach them, all links
    use CURVE and admit only holders of `cluster.access`, unless `secure` says otherwise. A copy
    counts as dead after `silence_s` of silence, or at once if its connection breaks.

    Raises BadInput when an address is unavailable, GiveUp with the cause when a process does not
    start within minutes, WrongBuild when it runs other code.
    """
    return start_replicated(plan_of(specs, {**options, "durability": Durability.REPLICATED}))


def start_single(plan: LaunchPlan) -> AbstractContextManager[SingleCopies]:
    """`process_shards` of a plan."""
    _check_host(plan)
    return single_copies(
        plan, lambda order, _: ChildProcess(order), _refuse_in_thread, on_this_machine=True
    )


def _refuse_in_thread(order: RefusalLaunch, _: ProcessHandle) -> Callable[[], None]:
    """Answer in place of a dead shard from a thread of this process, which is there at once."""
    return make_refusing_server(order).start().stop


@contextmanager
def start_replicated(plan: LaunchPlan) -> Iterator[ReplicatedShards]:
    """`process_replicas` of a plan."""
    _check_host(plan)
    with (
        temporary_folder("record") as folder,
        supervise(plan, _ThisMachine(), str(folder / RECORD)) as shards,
    ):
        yield shards


def _check_host(plan: LaunchPlan) -> None:
    """Raise BadInput, before anything starts, for an address of another machine."""
    try:
        check_listen(plan.host, ())
    except BadInput as error:
        raise error.within("host") from None


class _ThisMachine:
    """Starts copies as children of this process, all on this machine."""

    def coordinator(self, order: CoordinatorLaunch) -> "ChildProcess":
        return ChildProcess(order)

    def copy(self, order: CopyLaunch, apart_from: Collection[int]) -> "ChildProcess":
        return ChildProcess(order)

    def same_machine(self, boot: int, other: int) -> bool:
        return True

    def has_other_machine(self, boot: int) -> bool:
        return False


def _reason_of(failed: Failed) -> ExitReason:
    return ExitReason(f"failed: {failed.text}", reported=not failed.retryable)


class ChildProcess(ProcessHandle):
    """The parent's side of a child process (child_main.py)."""

    def __init__(self, order: Launch) -> None:
        """Start the process and send it its order. Raises GiveUp."""
        self.name = order.name
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # `end` closes it
        self._fate: ExitReason | None = None
        self._relay = LogRelay(self.name)
        try:
            self.process = subprocess.Popen(
                # -P: the working directory must not come first in the child's import path.
                [sys.executable, "-P", "-m", "ps.launch.child_main", self.name],
                env=os.environ | {"PYTHONPATH": _import_path()} | self._relay.environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                process_group=0,
                pass_fds=(self._relay.descriptor,),
            )
        except OSError as error:
            raise GiveUp(f"{self.name} did not start: {error.strerror}") from None
        finally:
            self._relay.begin()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._orders, self._answers = self.process.stdin, self.process.stdout
        _CHILDREN.add(self)
        with suppress(BrokenPipeError):  # it has died already; `endpoint` raises the cause
            send(self._orders.fileno(), order)

    def endpoint(self, until: float) -> str:
        left_s = max(0.0, until - time.monotonic())
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            if not selector.select(left_s):
                raise GiveUp(f"{self.name} did not start within {left_s:.0f} s")
        answer = self._receive()
        match answer:
            case Listening(endpoint, build, empty):
                self.check_build(build)
                self.empty = empty
                return endpoint
            case Failed(text):
                self._fate = _reason_of(answer)
                raise (
                    BadInput(text)
                    if answer.mendable
                    else GiveUp(f"{self.name} did not start: {text}")
                )
        self.process.wait()
        raise GiveUp(f"{self.name} did not start: {self._ending()}")

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait(self) -> ExitReason:
        self.process.wait()
        if self._fate is None:
            match self._receive():
                case Failed() as failed:
                    self._fate = _reason_of(failed)
                case _:
                    killed = -self.process.returncode in _FROM_OUTSIDE
                    self._fate = ExitReason(
                        f"died: {self._ending()}", reported=False, killed=killed
                    )
        return self._fate

    def ask_to_end(self) -> None:
        # Closing the pipe is not enough: a process that C code forked off may hold it open, too.
        with suppress(BrokenPipeError):
            self._orders.write(b".")
            self._orders.flush()

    def stop(self) -> None:
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        self._relay.close()
        for pipe in (self._orders, self._answers, self._stderr):
            with suppress(BrokenPipeError):
                pipe.close()

    def _receive(self) -> Listening | Failed | None:
        return receive(self._answers.fileno(), Listening | Failed)  # type: ignore[arg-type]

    def _ending(self) -> str:
        """The exit status of the process, and its last line of output."""
        status = self.process.returncode
        if status < 0:
            return f"its process was ended by signal {-status} ({signal.strsignal(-status)})"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").split("\n")
        last = next(
            (line.strip() for line in reversed(lines) if line.strip()), "it printed nothing"
        )
        return f"its process ended with status {status}: {last}"


def _drop_pipes() -> None:
    """Let go of the children's pipes in a forked process: they must end with their parent."""
    null = os.open(os.devnull, os.O_RDWR)
    for child in _CHILDREN:
        with suppress(ValueError):  # it is closed
            os.dup2(null, child._orders.fileno(), inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_drop_pipes)


def _import_path() -> str:
    """The import path of this process; an empty entry is the working directory."""
    return os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
