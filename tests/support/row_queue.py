"""A queue of rows between two processes, as TensorFlowOnSpark feeds a node.

A Spark task puts the rows of its partition into a queue of a manager process, one by one. The node,
another process, takes them out one by one and makes arrays of each minibatch.
"""

from collections.abc import Iterable, Iterator
from multiprocessing import JoinableQueue, get_context
from multiprocessing.managers import BaseManager
from typing import Any

import numpy as np

SIZE = 64


class RowManager(BaseManager):
    """The process that has the queues."""


_queues: dict[str, Any] = {}


def _queue(name: str) -> Any:
    return _queues.setdefault(name, JoinableQueue())


RowManager.register("queue", callable=_queue)


def fed(rows: Iterable[Any]) -> Iterator[int]:
    """Feed the rows of a partition to a node; yields the number that the node has counted."""
    with RowManager(ctx=get_context("fork")) as manager:
        queue, counts = manager.queue("rows"), manager.queue("counts")  # type: ignore[attr-defined]
        node = get_context("fork").Process(target=_node, args=(queue, counts))
        node.start()
        for row in rows:
            queue.put(row, block=True)
        queue.put(None)
        queue.join()
        yield counts.get()
        node.join()


def _node(queue: Any, counts: Any) -> None:
    """Take minibatches until the end."""
    found, ended = 0, False
    while not ended:
        batch: list[Any] = []
        while len(batch) < SIZE and not ended:
            row = queue.get(block=True)
            ended = row is None
            if row is not None:
                batch.append(row[0])
            queue.task_done()
        found += len(np.array(batch, np.float32))
    counts.put(found)
