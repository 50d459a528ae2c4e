"""torchft's DiLoCo: synchronous exchanges of the learners that are alive, over gloo."""

from typing import Any

from torch.optim import SGD, AdamW
from torchft.local_sgd import DiLoCo

from deploy.examples.gpt_torch import RATE, loss_of
from tests.bench.endtoend.programs.gpt import (
    OUTER_MOMENTUM,
    OUTER_RATE,
    PERIOD,
    Learner,
    LossRecord,
    make_gpt,
)
from tests.bench.endtoend.programs.task import Task, read_task
from tests.bench.endtoend.programs.torchft_group import make_manager, open_store, serve

_SLOWEST_S = 120.0


def train(task: Task) -> None:
    """Be a learner; the first of those that are alive tests the model after exchanges."""
    model, record = make_gpt(), LossRecord(task)
    inner = AdamW(model.parameters(), lr=RATE)
    outer = SGD(model.parameters(), lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "inner": inner.state_dict()}

    def restore(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    store, exchanges = open_store(task), 0
    manager = make_manager(task, store, save, restore, quorum_s=2 * _SLOWEST_S)
    with DiLoCo(manager, [model], inner, outer, sync_every=PERIOD):
        for batch in Learner(task, task.member).draw_batches():
            loss_of(model, batch).backward()
            inner.step()
            inner.zero_grad()
            if manager.current_step() > exchanges and manager.participating_rank() == 0:
                exchanges = manager.current_step()
                record.test(model, manager.batches_committed() * PERIOD)


def main() -> None:
    task = read_task()
    if task.role == "server":
        serve(task, wait_s=_SLOWEST_S)
    elif task.role == "worker":  # nobody leads
        train(task)


if __name__ == "__main__":
    main()
