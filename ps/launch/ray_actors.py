"""Both sides of servers in Ray actors; the only file of this package that imports Ray.

An actor runs a server loop in a thread of its own, so Ray's calls stay quick while ZeroMQ carries
the data. Ray places the actors and reports deaths; it never sees a gradient, and restarts no actor:
after a death the backup serves, or the launcher starts another actor where the WAL is, or the job
ends.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray._private import state as ray_state
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ps import logs
from ps.build_id import build_id
from ps.launch.child_main import log_fields, make_server
from ps.launch.child_protocol import (
    CoordinatorLaunch,
    CopyLaunch,
    Launch,
    RefusalLaunch,
    ShardLaunch,
)
from ps.launch.process_handle import ExitReason, ProcessHandle, Stranded
from ps.server.server import ShardServer
from ps.server.sockets import CannotListen
from ps.wal.autosave import delete_autosaves
from shards.errors import BadInput, DownpourError, GiveUp

_END_S = 5.0
_CALLS = 3  # at once: `wait_for_end` always waits, `stop` may wait, and one more must get through


class _Serving:
    """A server loop in an actor; the constructor takes plain values only."""

    def __init__(self, order: bytes) -> None:
        # The order holds public keys only: a secret key is made here and stays here.
        settings: logs.LogSettings
        launch: Launch
        settings, launch = msgspec.msgpack.decode(order, type=tuple[logs.LogSettings, Launch])
        logs.set_up(settings, **log_fields(launch))
        server, self._endpoint = make_server(self._localize(launch), ray.util.get_node_ip_address())
        self._empty = server.empty
        self._server = server.start()

    def _localize(self, order: Launch) -> Launch:
        """The order with its paths resolved on this node."""
        return order

    def describe(self) -> tuple[str, str, int, str, bool]:
        """The endpoint, the build, the process id, the node id, and whether the server started as a
        shard without weights."""
        node = ray.get_runtime_context().get_node_id()
        return self._endpoint, build_id(), os.getpid(), node, self._empty

    def wait_for_end(self) -> None:
        """Wait until the server loop has ended; raises the error that ended it."""
        self._server.wait()
        self._server.check()

    def stop(self, forget: bool = False, last: bool = False) -> None:
        """End the loop.

        `forget`: delete this node's files for resuming the job. `last`: no other actor replaces
        this one.
        """
        self._server.stop()


class ShardActor(_Serving):
    """One shard, the only copy. Its WAL or its autosaves, if any, are stored on this node."""

    _log: Path | None
    _saves: Path | None

    def _localize(self, order: Launch) -> Launch:
        assert isinstance(order, ShardLaunch)
        self._log = order.folder if order.saves is None else None
        self._saves = order.folder if order.saves is not None else None
        if self._log is not None and order.seen and not self._log.is_dir():
            raise BadInput(
                f"{order.name} on node {ray.util.get_node_ip_address()}: the node lacks the folder"
                f" for its log, {self._log}, so it is another machine: name a folder that each"
                " node has locally (--logs)"
            )
        return order

    def stop(self, forget: bool = False, last: bool = False) -> None:
        assert isinstance(self._server, ShardServer)
        self._server.forgets = last
        super().stop()
        if last and self._saves is not None:
            delete_autosaves(self._saves)
        if forget and self._log is not None:
            shutil.rmtree(self._log, ignore_errors=True)
            with suppress(OSError):  # another shard's WAL may be in there
                self._log.parent.rmdir()


class RefusalActor(_Serving):
    """Answers in place of a shard that has died for good; at its end it removes what that left."""

    _folder: Path | None

    def _localize(self, order: Launch) -> Launch:
        assert isinstance(order, RefusalLaunch)
        self._folder = None if order.shard.saves is None else order.shard.folder
        return order

    def stop(self, forget: bool = False, last: bool = False) -> None:
        super().stop()
        if last and self._folder is not None:
            delete_autosaves(self._folder)


class CopyActor(_Serving):
    """A copy of a replicated shard."""


class CoordinatorActor(_Serving):
    """The coordinator; its record is stored among this node's temporary files, at a relative path.

    So a restarted coordinator on this node finds it. `stop` removes it.
    """

    _record: Path

    def _localize(self, order: Launch) -> Launch:
        assert isinstance(order, CoordinatorLaunch)
        self._record = Path(tempfile.gettempdir()) / order.record
        self._record.parent.mkdir(mode=0o700, exist_ok=True)
        return msgspec.structs.replace(order, record=str(self._record))

    def stop(self, forget: bool = True, last: bool = True) -> None:
        try:
            super().stop()
        finally:
            shutil.rmtree(self._record.parent, ignore_errors=True)


_KINDS: Mapping[type[Launch], type[_Serving]] = {
    ShardLaunch: ShardActor,
    RefusalLaunch: RefusalActor,
    CopyLaunch: CopyActor,
    CoordinatorLaunch: CoordinatorActor,
}


class Actor(ProcessHandle):
    """The launcher's side of one actor."""

    def __init__(
        self, order: Launch, *, gpus: int = 0, node: str | None = None, soft: bool = True
    ) -> None:
        """Start an actor on the node with id `node`, or on another if that is gone and `soft`.

        Without a `node` Ray spreads the actors over all nodes.
        """
        self.name = order.name
        self._forgets = False
        strategy = "SPREAD" if node is None else NodeAffinitySchedulingStrategy(node, soft=soft)
        options = {"num_cpus": 0, "num_gpus": gpus, "max_restarts": 0, "max_concurrency": _CALLS}
        actor_class = ray.remote(_KINDS[type(order)]).options(
            scheduling_strategy=strategy, **options
        )
        self._actor = actor_class.remote(msgspec.msgpack.encode((logs.current(), order)))
        self._description = self._actor.describe.remote()
        self._end = self._actor.wait_for_end.remote()
        self._stopped: Any = None
        self._pid: int | None = None
        self._node = node
        self._bound = node is not None and not soft

    def endpoint(self, until: float) -> str:
        left_s = max(0.0, until - time.monotonic())
        try:
            endpoint, build, self._pid, self._node, self.empty = ray.get(
                self._description, timeout=left_s
            )
        except GetTimeoutError:
            self._check_node()
            raise GiveUp(
                f"{self.name} did not start within {left_s:.0f} s: check that Ray has room for it"
            ) from None
        except RayError as error:
            if any(kind.__name__ in str(error) for kind in (BadInput, CannotListen)):
                raise BadInput(_cause(error)) from None
            self._check_node()
            raise GiveUp(f"{self.name} did not start: {_cause(error)}") from None
        self.check_build(build)
        return str(endpoint)

    @property
    def pid(self) -> int | None:
        self._learn()
        return self._pid

    @property
    def node(self) -> str | None:
        """The id of the node where the actor runs, or should run as long as that is unknown."""
        self._learn()
        return self._node

    def _learn(self) -> None:
        if self._pid is None and _ready(self._description):
            try:
                _, _, self._pid, self._node, self.empty = ray.get(self._description)
            except RayError:
                pass  # it did not start; `endpoint` raises the cause

    @property
    def alive(self) -> bool:
        return not _ready(self._end)

    def wait(self) -> ExitReason:
        try:
            ray.get(self._end)
        except RayActorError:
            return ExitReason("died: its Ray actor is gone", reported=False)
        except RayError as error:
            return ExitReason(f"failed: {_cause(error)}", reported=True)
        return ExitReason("ended", reported=True)

    def ask_to_end(self) -> None:
        self._ask_to_end(last=True)

    def _ask_to_end(self, *, last: bool) -> None:
        if self._stopped is None:
            self._stopped = self._actor.stop.remote(self._forgets, last)

    def stop(self) -> None:
        try:
            self._ask_to_end(last=False)  # no effect if `ask_to_end` came first, with last=True
            ray.get(self._stopped, timeout=_END_S)
        except (RayError, DownpourError, TimeoutError):
            pass  # `close` kills it in any case
        self.close()

    def close(self) -> None:
        """Kill the actor: one that Ray has lost contact with counts as dead, but may still run."""
        ray.kill(self._actor)

    def delete_logs(self) -> None:
        self._forgets = True

    def _check_node(self) -> None:
        """Raise Stranded if the actor had to run on a node that is gone, or drains."""
        if self._bound and self._node not in nodes():
            table = {node["NodeID"]: node for node in ray.nodes()}
            entry = table.get(self._node, {})
            where, alive = entry.get("NodeManagerAddress", self._node), entry.get("Alive")
            raise Stranded(
                f"{self.name} cannot continue: node {where} of Ray"
                f" {'drains' if alive else 'is gone'}"
            )


def check_connected() -> None:
    """Raise BadInput unless this process is connected to Ray; Ray would start one of its own."""
    if not ray.is_initialized():
        raise BadInput(
            "shards in Ray",
            expected="a process that is connected to Ray",
            got=('one that is not: call ray.init() first, or start them with on="processes"'),
        )


def own_node() -> str:
    """The id of the node that this process is connected to; with Ray's client, the head node."""
    return str(ray.get_runtime_context().get_node_id())


def nodes() -> list[str]:
    """The ids of the nodes that live and take actors, as far as Ray knows by now.

    Ray starts nothing on a node that drains: a copy that is meant for it would come to be anywhere,
    such as with its primary. A client of ray:// cannot ask which nodes these are.
    """
    is_client = ray.util.client.ray.is_connected()
    draining = {} if is_client else ray_state.state.get_draining_nodes()
    return [
        node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in draining
    ]


def gpus() -> float:
    """The number of GPUs of the connected Ray cluster."""
    return float(ray.cluster_resources().get("GPU", 0))


def _ready(ref: Any) -> bool:
    return bool(ray.wait([ref], timeout=0)[0])


def _cause(error: RayError) -> str:
    """The last line of a remote traceback, without the class name of our own errors."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    last = lines[-1].strip() if lines else type(error).__name__
    name, _, text = last.partition(": ")
    own_modules = DownpourError.__module__, CannotListen.__module__
    return text if name.rpartition(".")[0] in own_modules else last
