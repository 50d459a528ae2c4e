"""Servers in Ray actors, from both sides: the one file of this package that imports Ray.

An actor hosts a server loop in a thread of its own, so Ray's calls stay quick while ZeroMQ carries
the data. Ray places the actors and tells when one dies; it never sees a gradient, and starts none
again: by then its backup serves, or its host has started another where its log is, or the job has
ended.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ps.compatibility import build_id
from ps.launch import coordinator_process, copy_process, shard_process
from ps.launch.child_protocol import CoordinatorLaunch, CopyLaunch, ShardLaunch
from ps.launch.launcher import check_build
from ps.launch.restart import ExitReason, Stranded
from ps.server.server import ShardServer
from ps.transport.server_thread import ServerThread
from shards.errors import BadInput, DownpourError, GiveUp

_END_S = 5.0
_CALLS = 3  # at once: one waits for the loop's end all the while, another may wait for it to stop

T = TypeVar("T")


class _Serving:
    """A server loop in an actor. Its constructor takes values only."""

    def __init__(
        self, order: bytes, kind: type[T], make: Callable[[T, str], tuple[ServerThread, str]]
    ) -> None:
        told = self._as_here(msgspec.msgpack.decode(order, type=kind))
        server, self._endpoint = make(told, ray.util.get_node_ip_address())
        self._empty = server.empty
        self._server = server.start()

    def _as_here(self, order: T) -> T:
        """The order as it reads on this node."""
        return order

    def describe(self) -> tuple[str, str, int, str, bool]:
        """Where it listens, the build it runs, its process, the node that this is, and whether it
        was started as a shard without weights."""
        node = ray.get_runtime_context().get_node_id()
        return self._endpoint, build_id(), os.getpid(), node, self._empty

    def lived(self) -> None:
        """Return when the server loop has ended; raises what ended it."""
        self._server.wait()
        self._server.check()

    def stop(self, forget: bool = False, last: bool = False) -> None:
        """End the loop; `forget` what is on this node's disk for a next job, `last`: no other actor
        takes this one's place.
        """
        self._server.stop()


class ShardActor(_Serving):
    """One shard, the only copy. Its log or its saves, if it has any, lie on this node."""

    _log: Path | None

    def __init__(self, order: bytes) -> None:
        # Of keys it is given public ones alone: its own secret one is made here and never leaves.
        super().__init__(order, ShardLaunch, shard_process.make)

    def _as_here(self, order: T) -> T:
        assert isinstance(order, ShardLaunch)
        self._log = None if order.log_folder is None else Path(order.log_folder)
        if self._log is not None and order.seen and not self._log.is_dir():
            raise BadInput(
                f"shard {order.spec.shard} on node {ray.util.get_node_ip_address()}: expected the"
                f" folder for its log, {self._log}, there; that is another machine: name a folder"
                " that each node has to itself (--logs)"
            )
        return order

    def stop(self, forget: bool = False, last: bool = False) -> None:
        assert isinstance(self._server, ShardServer)
        self._server.forgets = last
        super().stop()
        if forget and self._log is not None:
            shutil.rmtree(self._log, ignore_errors=True)
            with suppress(OSError):  # another shard's log lies there, too
                self._log.parent.rmdir()


class CopyActor(_Serving):
    """A copy of a replicated shard."""

    def __init__(self, order: bytes) -> None:
        super().__init__(order, CopyLaunch, copy_process.make)


class CoordinatorActor(_Serving):
    """The coordinator; its record, told as a path without a root, lies among temporary files.

    So another one on this node finds it. `stop` removes it.
    """

    _record: Path

    def __init__(self, order: bytes) -> None:
        super().__init__(order, CoordinatorLaunch, coordinator_process.make)

    def _as_here(self, order: T) -> T:
        assert isinstance(order, CoordinatorLaunch)
        self._record = Path(tempfile.gettempdir()) / order.record
        self._record.parent.mkdir(mode=0o700, exist_ok=True)
        return msgspec.structs.replace(order, record=str(self._record))

    def stop(self, forget: bool = True, last: bool = True) -> None:
        try:
            super().stop()
        finally:
            shutil.rmtree(self._record.parent, ignore_errors=True)


class Actor:
    """One actor, from its host's side; `name` is what it is called in errors.

    Where it `forgets`, what it keeps on its node's disk goes when it is asked to end.
    """

    deaths = 0  # it has but one life
    forgets = False

    def __init__(
        self,
        name: str,
        kind: type[_Serving],
        order: msgspec.Struct,
        *,
        gpus: int = 0,
        node: str | None = None,
        elsewhere: bool = True,
    ) -> None:
        """Start it, on the node with that id; where that is gone, `elsewhere` or not at all.

        Without a `node` Ray spreads such actors over all.
        """
        self.name = name
        self.empty = False
        place = "SPREAD" if node is None else NodeAffinitySchedulingStrategy(node, soft=elsewhere)
        options = {"num_cpus": 0, "num_gpus": gpus, "max_restarts": 0, "max_concurrency": _CALLS}
        actor_class = ray.remote(kind).options(scheduling_strategy=place, **options)
        self._actor = actor_class.remote(msgspec.msgpack.encode(order))
        self._told = self._actor.told.remote()
        self._lived = self._actor.lived.remote()
        self._stopped: Any = None
        self._pid: int | None = None
        self._node = node
        self._bound = node is not None and not elsewhere

    def endpoint(self, until: float) -> str:
        """Where it listens; waits until `until` on the monotonic clock.

        Raises Stranded when the node that it must be on is gone.
        """
        left_s = max(0.0, until - time.monotonic())
        try:
            endpoint, build, self._pid, self._node, self.empty = ray.get(self._told, timeout=left_s)
        except GetTimeoutError:
            self._check_node()
            raise GiveUp(
                f"{self.name} did not start within {left_s:.0f} s: has Ray room?"
            ) from None
        except RayError as error:
            if BadInput.__name__ in str(error):
                raise BadInput(_cause(error)) from None
            self._check_node()
            raise GiveUp(f"{self.name} did not start: {_cause(error)}") from None
        check_build(self.name, build)
        return str(endpoint)

    @property
    def pid(self) -> int | None:
        """Its process id on its node; None until it has told."""
        self._learn()
        return self._pid

    @property
    def node(self) -> str | None:
        """The node where it is, as far as is known, or else where it should be."""
        self._learn()
        return self._node

    def _learn(self) -> None:
        if self._pid is None and _ready(self._told):
            try:
                _, _, self._pid, self._node, self.empty = ray.get(self._told)
            except RayError:
                pass  # It did not start.

    @property
    def alive(self) -> bool:
        """Whether it has not ended, as far as Ray knows by now."""
        return not _ready(self._lived)

    def check(self) -> None:
        """Raise GiveUp with how it ended, if it has."""
        if not self.alive:
            raise GiveUp(f"{self.name} has {self.wait().text}")

    def wait(self) -> ExitReason:
        """Return when it has ended, with how."""
        try:
            ray.get(self._lived)
        except RayActorError:
            return ExitReason("died: its Ray actor is gone", told=False)
        except RayError as error:
            return ExitReason(f"failed: {_cause(error)}", told=True)
        return ExitReason("ended", told=True)

    def ask_to_end(self) -> None:
        self._ask_to_end(last=True)

    def _ask_to_end(self, *, last: bool) -> None:
        if self._stopped is None:
            self._stopped = self._actor.stop.remote(self.forgets, last)

    def end(self) -> None:
        self.stop()

    def stop(self) -> None:
        """Wait until it has ended; kill it when that takes long."""
        try:
            self._ask_to_end(last=False)  # whoever wants no other has asked before
            ray.get(self._stopped, timeout=_END_S)
        except (RayError, DownpourError, TimeoutError):
            pass  # It is to be gone, and killing it next makes sure.
        self.close()

    def close(self) -> None:
        """Make sure that it has ended: Ray may take one for dead that it has lost sight of."""
        ray.kill(self._actor)

    def _check_node(self) -> None:
        """Raise Stranded when it had to be on a node that is gone."""
        if self._bound and self._node not in nodes():
            where = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
            raise Stranded(
                f"{self.name} cannot go on: node {where.get(self._node, self._node)} of Ray is gone"
            )


def own_node() -> str:
    """The id of the node that this process is connected to; through Ray's client, the head's."""
    return str(ray.get_runtime_context().get_node_id())


def nodes() -> list[str]:
    """The ids of the nodes that live, as far as Ray knows by now."""
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def gpus() -> float:
    """How many GPUs this Ray has."""
    return float(ray.cluster_resources().get("GPU", 0))


def _ready(ref: Any) -> bool:
    return bool(ray.wait([ref], timeout=0)[0])


def _cause(error: RayError) -> str:
    """What happened: the last line of a remote traceback, without our own error's class."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    last = lines[-1].strip() if lines else type(error).__name__
    name, _, text = last.partition(": ")
    return text if name.startswith(f"{DownpourError.__module__}.") else last
