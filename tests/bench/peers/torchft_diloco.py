"""torchft's DiLoCo on the CPU: its lighthouse, a manager a learner, gloo, the small GPT.

As its own examples have it: synchronous exchanges of all learners that are alive. Its wheel lives
in an environment of its own (`make bench B=peers`).
"""

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.optim import SGD, AdamW

from deploy.examples.gpt_torch import BATCH, CONTEXT, RATE, SPEEDS, draw_batches, loss_of
from tests.bench.peers.gpt_rival import Race, load, report, setting


def learn(race: Race, number: int, lighthouse: str, incarnation: int, began: float) -> None:
    """Take the steps of one learner; the fastest reports the loss after each exchange."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    torch.set_num_threads(1)
    model, rows, tested = load(race)
    inner = AdamW(model.parameters(), lr=RATE)
    outer = SGD(model.parameters(), lr=0.7, momentum=0.5, nesterov=True)

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "inner": inner.state_dict()}

    def restore(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=1,
        use_async_quorum=False,
        load_state_dict=restore,
        state_dict=save,
        replica_id=f"w{number}-{incarnation}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=timedelta(seconds=30),
        quorum_timeout=timedelta(seconds=120),
    )
    pace_s = race.pace_s * max(SPEEDS.values()) / SPEEDS[f"w{number}"]
    with DiLoCo(manager, [model], inner, outer, sync_every=race.period):
        for step, batch in enumerate(draw_batches(rows, 1 << 30, number, pace_s), 1):
            loss_of(model, batch).backward()
            inner.step()
            inner.zero_grad()
            if number == 0 and step % race.period == 0:
                tokens = manager.batches_committed() * race.period * BATCH * CONTEXT
                report(began, tokens, model, tested)


def main() -> None:
    """Run the learners, kill one in the middle, and start it again."""
    from torchft.coordination import LighthouseServer

    race, began = setting(), time.monotonic()
    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=60_000)
    spawn = multiprocessing.get_context("spawn")

    def start(number: int, incarnation: int) -> Any:
        arguments = race, number, server.address(), incarnation, began
        process = spawn.Process(target=learn, args=arguments, daemon=True)
        process.start()
        return process

    learners = [start(number, 0) for number in range(len(SPEEDS))]
    time.sleep(race.kill_s)
    os.kill(learners[1].pid, signal.SIGKILL)
    time.sleep(race.down_s)
    learners[1] = start(1, 1)
    time.sleep(max(0.0, began + race.seconds - time.monotonic()))
    for learner in learners:
        learner.kill()
    server.shutdown()


if __name__ == "__main__":
    main()
