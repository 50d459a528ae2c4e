"""TensorFlowOnSpark: a cluster of nodes that are fed rows.

Nodes are threads of this process. As in the original, rows reach a node one by one through a queue,
`None` marks the end of a partition, and `next_batch` makes a list of each mapped column, whose
order is that of the columns' names.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Queue
from typing import Any


class DataFeed:
    """The rows of a node."""

    def __init__(self, rows: "Queue[Any]", input_mapping: dict[str, str] | None) -> None:
        self._rows = rows
        self._tensors = [name for _, name in sorted((input_mapping or {}).items())]
        self._done = False

    def should_stop(self) -> bool:
        return self._done

    def next_batch(self, size: int) -> Any:
        taken: list[Any] = []
        while len(taken) < size and not self._done:
            row = self._rows.get()
            if row is None:
                self._done = True
            else:
                taken.append(row)
        if not self._tensors:
            return taken
        return {name: [row[at] for row in taken] for at, name in enumerate(self._tensors)}


class NodeContext:
    """What a node's `main_fun` is given."""

    def __init__(self, number: int, rows: "Queue[Any]") -> None:
        self.task_index = number
        self.job_name = "chief" if number == 0 else "worker"
        self._rows = rows

    def get_data_feed(self, input_mapping: dict[str, str] | None = None) -> DataFeed:
        return DataFeed(self._rows, input_mapping)


class Nodes:
    """A running cluster."""

    def __init__(self, main_fun: Callable[[Any, Any], None], args: Any, nodes: int) -> None:
        self._queues: list[Queue[Any]] = [Queue() for _ in range(nodes)]
        self._pool = ThreadPoolExecutor(nodes)
        self._ends: list[Future[None]] = [
            self._pool.submit(main_fun, args, NodeContext(number, rows))
            for number, rows in enumerate(self._queues)
        ]

    def train(self, rdd: Any, num_epochs: int = 1) -> None:
        rows = rdd.collect()
        for _ in range(num_epochs):
            for at, row in enumerate(rows):
                self._queues[at % len(self._queues)].put(row)

    def shutdown(self) -> None:
        for queue in self._queues:
            queue.put(None)
        for end in self._ends:
            end.result()
        self._pool.shutdown()


def run(sc: Any, main_fun: Any, args: Any, num_executors: int, num_ps: int) -> Nodes:
    assert num_executors > num_ps
    return Nodes(main_fun, args, num_executors - num_ps)


MODULES: dict[str, dict[str, Any]] = {"tensorflowonspark.TFCluster": {"run": run}}
