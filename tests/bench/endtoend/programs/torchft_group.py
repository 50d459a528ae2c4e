"""A lighthouse and the managers of workers, for the programs of this folder that use torchft."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from tests.bench.endtoend.programs.task import Task

_TIMEOUT = timedelta(seconds=30)


def serve(task: Task, *, wait_s: float = 10.0) -> None:
    """Be the lighthouse, which lists the living members, until this process is ended.

    An exchange waits up to `wait_s` for a member that is alive and still at its steps.
    """
    bind = f"0.0.0.0:{task.hosts[0].rpartition(':')[2]}"
    wait_ms = round(wait_s * 1000)
    _lighthouse = LighthouseServer(bind=bind, min_replicas=1, join_timeout_ms=wait_ms)
    time.sleep(1e9)


def open_store(task: Task) -> TCPStore:
    """The store of one worker, through which others find it for as long as it is referred to."""
    host = task.hosts[2 + task.member].rpartition(":")[0]
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


def make_manager(
    task: Task,
    store: TCPStore,
    save: Callable[[], dict[str, Any]],
    restore: Callable[[dict[str, Any]], None],
    *,
    quorum_s: float = 30.0,
) -> Manager:
    """The manager of one worker, with the functions that give a joining one the state."""
    return Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        min_replica_size=1,
        use_async_quorum=False,
        load_state_dict=restore,
        state_dict=save,
        replica_id=f"worker{task.member}",
        store_addr=store.host,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{task.hosts[0]}",
        timeout=_TIMEOUT,
        quorum_timeout=timedelta(seconds=quorum_s),
    )
