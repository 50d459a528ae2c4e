"""Shards as plain processes of this machine: no Ray, nothing but the base install.

    with ps.process_shards(specs) as hosts, ps.Console(hosts.cluster) as console:
        console.install(weights)
        ...

Each shard is a child, shard_process.py, with pipes to it. The children are in process groups of
their own, so that a Ctrl-C in the terminal leaves them to their parent, who may want to save what
they hold; and they end with their parent, even one that is killed.
"""

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from ps import paths
from ps.durability import Durability
from ps.job_spec import make_cluster
from ps.launch.child_protocol import Failed, Listening, ShardLaunch, receive, send
from ps.launch.launcher import (
    ShardDevice,
    bind_address,
    check_build,
    check_place,
    check_rollback,
    keys_for,
)
from ps.launch.restart import ExitReason
from ps.launch.single_copies import SingleCopies, saves_of, serving
from ps.transport.local_sockets import Transport, transport_named
from shards import arguments
from shards.errors import BadInput, GiveUp
from shards.spec import ShardSpec

_END_S = 10.0
_FROM_OUTSIDE = frozenset((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))


class ProcessShards(SingleCopies["ChildProcess"]):
    """The processes of one job, and the cluster they form."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Each shard's process id; it changes when the process is started again."""
        return tuple(child.pid for child in self._present())

    def delete_logs(self) -> None:
        """Nothing: they are on this machine, and whoever named their folder removes it."""


@contextmanager
def process_shards(
    specs: Sequence[ShardSpec],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    transport: Transport | str = Transport.AUTO,
    device: ShardDevice | str = ShardDevice.CPU,
    secure: bool | None = None,
    durability: Durability | str = Durability.MEMORY,
    logs: str | Path | None = None,
    rollback_s: float = 0.0,
) -> Iterator[ProcessShards]:
    """Start one process a spec; end them on leaving.

    Each listens on `host`, which for 0.0.0.0 is every address of this machine, and is told to
    workers as its own one. Shard i's port is `port + i`; 0 picks free ones. `transport` is what
    workers on this host are offered beside TCP. `device` says what holds the weights; on a GPU, it
    is the first that this process may see, for all of them. Shards that other hosts can reach speak
    CURVE and let in only who holds `cluster.access`, unless `secure` says otherwise. The children
    import from where this process does.

    With a `durability` that keeps a log (docs/explanation/durability.md), each shard has a folder
    below `logs`. Where one lies there already, of a job with these very specs, the shard goes on
    from its end. One that dies is started again on the same endpoint (restart.py). So it is at
    `memory` with a `rollback_s`: each then saves its state so often among this machine's temporary
    files, and its next life has forgotten what came after the last save.

    Raises BadInput when a port cannot be bound, no GPU answers, a log is damaged or another job's,
    some shards' logs hold weights and others' none, or `rollback_s` has no place, GiveUp with the
    cause when a shard does not start within a minute, WrongBuild when it runs other code.
    """
    check_place(specs, host, port, secure)
    durability = arguments.choice("durability", durability, Durability)
    transport = transport_named(transport)
    device = arguments.choice("device", device, ShardDevice)
    root = None if logs is None else paths.path("logs", logs)
    check_rollback(rollback_s, durability)
    if durability is Durability.REPLICATED:
        raise BadInput("durability replicated: expected `replicated_shards`, got `process_shards`")
    access, admission = keys_for(specs, host, secure)
    told = transport, device, admission, durability
    with saves_of(specs, rollback_s, here=True) as saves:
        orders = [
            ShardLaunch(
                spec,
                bind_address(host, port, spec.shard),
                *told,
                durability.folder_for(root, spec.shard),
                saves=folder,
                rollback_s=rollback_s,
            )
            for spec, folder in zip(specs, saves, strict=True)
        ]
        with serving(orders, _start) as (endpoints, children):
            cluster = make_cluster(specs, endpoints, access)
            yield ProcessShards(cluster, children, rolls_back=rollback_s > 0)


def _start(order: ShardLaunch, _former: "ChildProcess | None") -> "ChildProcess":
    return ChildProcess(f"shard {order.spec.shard}", "ps.launch.shard_process", order)


class ChildProcess:
    """One process, from its parent's side; `name` is what it is called in errors."""

    deaths = 0  # it has but one life

    def __init__(self, name: str, module: str, order: msgspec.Struct) -> None:
        """Start `module` (child_main.py) and give it its order. Raises GiveUp."""
        self.name = name
        self.empty = False
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # `end` closes it
        self._fate: ExitReason | None = None
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                env=os.environ | {"PYTHONPATH": _import_path()},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                process_group=0,
            )
        except OSError as error:
            raise GiveUp(f"{self.name} did not start: {error.strerror}") from None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._orders, self._answers = self.process.stdin, self.process.stdout
        with suppress(BrokenPipeError):  # It has died already; `endpoint` says of what.
            send(self._orders.fileno(), order)

    def endpoint(self, until: float) -> str:
        """Where it listens; waits until `until` on the monotonic clock."""
        left_s = max(0.0, until - time.monotonic())
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            if not selector.select(left_s):
                raise GiveUp(f"{self.name} did not start within {left_s:.0f} s")
        answer = self._receive()
        match answer:
            case Listening(endpoint, build, empty):
                check_build(self.name, build)
                self.empty = empty
                return endpoint
            case Failed(text, mendable=True):
                self._fate = ExitReason(f"failed: {text}", told=True)
                raise BadInput(text)
            case Failed(text):
                self._fate = ExitReason(f"failed: {text}", told=True)
                raise GiveUp(f"{self.name} did not start: {text}")
        self.process.wait()
        raise GiveUp(f"{self.name} did not start: {self._ending()}")

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def check(self) -> None:
        if not self.alive:
            raise GiveUp(f"{self.name} has {self.wait().text}")

    def wait(self) -> ExitReason:
        """Return when it has ended, with how."""
        self.process.wait()
        if self._fate is None:
            match self._receive():
                case Failed(text):
                    self._fate = ExitReason(f"failed: {text}", told=True)
                case _:
                    killed = -self.process.returncode in _FROM_OUTSIDE
                    self._fate = ExitReason(f"died: {self._ending()}", told=False, killed=killed)
        return self._fate

    def ask_to_end(self) -> None:
        # A byte, and not the closing alone: a process forked off this one may hold the pipe, too.
        with suppress(BrokenPipeError):
            self._orders.write(b".")
            self._orders.flush()

    def end(self) -> None:
        self.stop()
        self.close()

    def stop(self) -> None:
        """Wait until it has ended; kill it when that takes long."""
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        """Let go of its pipes."""
        for pipe in (self._orders, self._answers, self._said):
            with suppress(BrokenPipeError):
                pipe.close()

    def _receive(self) -> Listening | Failed | None:
        return receive(self._answers.fileno(), Listening | Failed)  # type: ignore[arg-type]

    def _ending(self) -> str:
        """How its process ended, and the last it said."""
        status = self.process.returncode
        if status < 0:
            return f"its process was ended by signal {-status} ({signal.strsignal(-status)})"
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return f"its process ended with status {status}: {last}"


def _import_path() -> str:
    """Where this process imports from; an empty entry is the working directory."""
    return os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
