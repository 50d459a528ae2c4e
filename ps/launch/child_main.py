"""The child's side of a server in a process of its own: `python -m ps.launch.child_main NAME`.

processes.py has the parent's side. The child reads its order from standard input, and writes to
standard output where it listens, or why it does not. It ends when its parent asks for that or has
ended, even if killed: the kernel then closes the parent's pipe. NAME has no effect; it identifies
the child in lists of processes.
"""

import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from ps.build_id import build_id
from ps.launch.child_protocol import (
    CoordinatorLaunch,
    CopyLaunch,
    Failed,
    Launch,
    Listening,
    RefusalLaunch,
    ShardLaunch,
    receive,
    send,
)
from ps.launch.launch_plan import place_of
from ps.logs import send_to_parent
from ps.replication.coordinator_server import CoordinatorServer
from ps.replication.replica_server import ReplicaServer
from ps.security.keys import KeyPair, load_or_create_keys
from ps.server.refusing_server import RefusingServer
from ps.server.server import ShardServer
from ps.transport.advertised_address import advertise
from ps.transport.server_thread import ServerThread
from ps.wal.autosave import Autosaves
from ps.wal.writer import WriteAheadLog
from shards.errors import BadInput, DownpourError


def make_server(order: Launch, node: str | None = None) -> tuple[ServerThread, str]:
    """Make the server for an order, without starting it; returns it and its endpoint for others.

    `node` is the address by which Ray knows this host.
    """
    match order:
        case ShardLaunch():
            shard = make_shard(order)
            return shard, _endpoint_of(order, shard.endpoint, node)
        case RefusalLaunch():
            refusing = make_refusing_server(order)
            return refusing, _endpoint_of(order.shard, refusing.endpoint, node)
        case CopyLaunch():
            copy = ReplicaServer(
                order.spec,
                order.boot,
                order.coordinator,
                order.bind,
                order.admission,
                plaintext=order.admission is None,
                advertised=order.advertised,
                node=node,
            )
            return copy, copy.endpoint
        case CoordinatorLaunch():
            coordinator = CoordinatorServer(
                order.job,
                order.shards,
                Path(order.record),
                bind=order.bind,
                silence_s=order.silence_s,
                admission=order.admission,
                plaintext=order.admission is None,
            )
            return coordinator, _endpoint_of(order, coordinator.endpoint, node)


def _endpoint_of(order: ShardLaunch | CoordinatorLaunch, bound: str, node: str | None) -> str:
    try:
        return advertise(bound, order.advertised, node)
    except BadInput as error:
        raise error.within(order.name) from None


def make_shard(order: ShardLaunch) -> ShardServer:
    """Make a server for a shard of one copy; its boot number is the time in microseconds.

    It recovers from its WAL or its last autosave, if it has either. A restarted shard proves its
    identity by the same key as the process before it.
    """
    boot, backend, folder = time.time_ns() // 1000, place_of(order.device), order.folder
    log = saves = None
    if folder is not None and order.durability.keeps_log:
        log = WriteAheadLog(folder, order.durability)
    elif folder is not None and order.rollback_s:
        saves = Autosaves(folder, order.rollback_s)
    return ShardServer(
        order.spec,
        boot,
        order.bind,
        order.transport,
        backend,
        order.admission,
        plaintext=order.admission is None,
        keys=_keys_of(order),
        log=log,
        saves=saves,
    )


def make_refusing_server(order: RefusalLaunch) -> RefusingServer:
    """Make a server that refuses in place of a shard, and proves the shard's identity."""
    shard = order.shard
    return RefusingServer(
        shard.spec, shard.bind, order.reason, shard.transport, shard.admission, _keys_of(shard)
    )


def _keys_of(order: ShardLaunch) -> KeyPair | None:
    """The keys in the shard's folder, which every process in its place proves; None if it has none.

    The first process creates them.
    """
    if order.folder is None or order.admission is None:
        return None
    order.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return load_or_create_keys(order.folder)


def log_fields(order: Launch) -> dict[str, Any]:
    """The job of an order, and its shard, for what its process logs."""
    match order:
        case CoordinatorLaunch(job=job):
            return {"job": job}
        case RefusalLaunch(shard=ShardLaunch(spec=spec)):
            return {"job": spec.job, "shard": spec.shard}
        case ShardLaunch(spec=spec) | CopyLaunch(spec=spec):
            return {"job": spec.job, "shard": spec.shard}


def main() -> int:
    """Read the order, make its server, and serve; returns the exit status."""
    answers = os.dup(1)
    os.dup2(2, 1)  # Otherwise what a library prints would be read as an answer.
    order: Launch | None = receive(0, Launch)  # type: ignore[arg-type]  # a union of types
    if order is None:
        return 0
    send_to_parent(**log_fields(order))
    try:
        server, endpoint = make_server(order)
        with server:
            send(answers, Listening(endpoint, build_id(), server.empty))
            threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
            server.wait()
    except Exception as error:  # noqa: BLE001  # whatever it is, the parent reports it
        traceback.print_exc()
        is_own_error = isinstance(error, DownpourError)
        text = str(error) if is_own_error else f"{type(error).__name__}: {error}"
        retryable = isinstance(error, DownpourError) and error.retryable
        send(answers, Failed(text, isinstance(error, BadInput), retryable))
        return 1
    return 0


def _end_with_parent(server: ServerThread) -> None:
    os.read(0, 1)  # returns with a byte, or at the end of the pipe
    server.end()


if __name__ == "__main__":
    sys.exit(main())
