"""Runs shards as plain processes of this machine: no Ray, nothing but the base install.

    with ps.process_shards(specs) as hosts, ps.AdminClient(hosts.cluster) as admin:
        admin.install(weights)
        ...

Each shard is a child process (shard_process.py) with pipes to its parent. The children are in
process groups of their own, so Ctrl-C in the terminal reaches only the parent, which may want to
save what they hold first. They end with their parent, even if it is killed.
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
from ps.logs import LogRelay
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
        """Do nothing: the WALs are on this machine, in a folder that the caller owns."""


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

    Each shard listens on `host`; 0.0.0.0 is every address of this machine, and workers are then
    given the machine's own address. Shard i's port is `port + i`; 0 picks free ones. Workers on
    this host are offered `transport` as well as TCP. `device` holds the weights; on a GPU, all
    shards use the first one that this process may see. Shards that other hosts can reach use CURVE
    and admit only holders of `cluster.access`, unless `secure` says otherwise. The children import
    from the same paths as this process.

    With a `durability` that keeps a WAL (docs/explanation/durability.md), each shard has a folder
    below `logs`. If that holds a WAL of a job with exactly these specs, the shard resumes from its
    end. A shard that dies is restarted on the same endpoint (restart.py). The same holds for
    `memory` with a `rollback_s`: each shard then saves its state every `rollback_s` seconds among
    this machine's temporary files, and a restart loses the updates since the last autosave.

    Raises BadInput when a port cannot be bound, no GPU answers, a WAL is damaged or another job's,
    some shards' WALs hold weights and others' none, or `rollback_s` does not apply, GiveUp with the
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
    common = transport, device, admission, durability
    with saves_of(specs, rollback_s, here=True) as saves:
        orders = [
            ShardLaunch(
                spec,
                bind_address(host, port, spec.shard),
                *common,
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
    """The parent's side of a child process; `name` identifies it in errors."""

    deaths = 0  # a process dies once; RestartingProcess counts deaths

    def __init__(self, name: str, module: str, order: msgspec.Struct) -> None:
        """Start `module` (child_main.py) and send it its order. Raises GiveUp."""
        self.name = name
        self.empty = False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # `end` closes it
        self._fate: ExitReason | None = None
        self._relay = LogRelay(name)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
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
        with suppress(BrokenPipeError):  # it has died already; `endpoint` raises the cause
            send(self._orders.fileno(), order)

    def endpoint(self, until: float) -> str:
        """The endpoint of the child; waits until `until` on the monotonic clock.

        Raises GiveUp or BadInput with the cause if it does not serve, WrongBuild if it runs other
        code.
        """
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
        """Wait until the process has ended; returns how."""
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
        # Closing the pipe is not enough: a process forked off this one may hold it open, too.
        with suppress(BrokenPipeError):
            self._orders.write(b".")
            self._orders.flush()

    def end(self) -> None:
        self.stop()
        self.close()

    def stop(self) -> None:
        """Wait until the process has ended; kill it if that takes too long."""
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        """Close the pipes to the process, which has ended."""
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


def _import_path() -> str:
    """The import path of this process; an empty entry is the working directory."""
    return os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
