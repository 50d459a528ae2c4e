"""A server in a process or Ray actor of its own, as its supervisor sees it: it may die."""

from abc import ABC, abstractmethod
from typing import NamedTuple

from ps.build_id import build_id
from shards.errors import GiveUp, WrongBuild


class Stranded(GiveUp):
    """The machine on which a process would have to restart is gone; retrying is useless."""


class ExitReason(NamedTuple):
    """The cause of an end: `reported` if the process gave it itself, `killed` if from outside."""

    text: str
    reported: bool
    killed: bool = False


class ProcessHandle(ABC):
    """One process of a job, running its server; making a handle starts it, with its order.

    The process dies once; its supervisor then starts another, with a handle of its own (restart.py,
    replica_supervisor.py). Only `endpoint`, `wait` and `stop` block.
    """

    name: str
    """What the process is in errors, as `shard 0`."""

    empty = False
    """Whether it is a shard that started without weights; known once it listens."""

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The process id on the machine where it runs; None until the process has reported it."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """True if the process still runs, as far as this machine knows by now."""

    @abstractmethod
    def endpoint(self, until: float) -> str:
        """The endpoint of the process; waits until `until` on the monotonic clock.

        Raises a DownpourError with the cause if this process does not serve, Stranded if no other
        could either, WrongBuild if it runs other code.
        """

    @abstractmethod
    def wait(self) -> ExitReason:
        """Wait until the process has ended; returns how."""

    @abstractmethod
    def ask_to_end(self) -> None: ...

    @abstractmethod
    def stop(self) -> None:
        """Wait until the process has ended; kill it if that takes too long."""

    @abstractmethod
    def close(self) -> None:
        """Release the pipes or references to a process that has ended."""

    def end(self) -> None:
        """`stop`, then `close`."""
        self.stop()
        self.close()

    def check(self) -> None:
        """Raise GiveUp with the exit reason if the process has ended."""
        if not self.alive:
            raise GiveUp(f"{self.name} has {self.wait().text}")

    def check_build(self, build: str) -> None:
        """Raise WrongBuild if `build`, which the process reported, is not this process's build."""
        if build != build_id():
            raise WrongBuild(f"{self.name}: expected build {build_id()} where it runs, got {build}")

    def delete_logs(self) -> None:  # noqa: B027  # most keep nothing on other machines
        """Delete what the process keeps on another machine's disk, when it is asked to end."""
