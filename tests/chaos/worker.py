"""A worker's life: pull, push integers, write down what was acknowledged, until told to end.

It is the SDK as anybody uses it. A life that follows a killed one greets with a higher incarnation,
is told what its predecessor had applied, and checks that against the record: a shard that knows
less than was acknowledged has lost something, and one that knows more than was sent made it up.
"""

import signal
import sys
import time
from pathlib import Path

import msgspec

from ps import Client, Cluster
from tests.chaos.record import Record, gradient

PATIENCE_S = 90.0
"""How long a silent shard is waited for: longer than any fault lasts."""


class Life(msgspec.Struct, frozen=True):
    """What a life is told: who it is, where everything lies, and its pace.

    `burst` pushes go out before their acknowledgements are waited for; then it rests `rest_s`.
    `space` is a process whose network namespace it lives in, None for the harness's own.
    """

    number: int
    workers: int
    incarnation: int
    folder: str
    cluster: str
    transport: str = "auto"
    burst: int = 1
    rest_s: float = 0.002
    retry_s: float = 0.1
    space: int | None = None

    @property
    def name(self) -> str:
        return f"w{self.number}"


class _Ending:
    """Whether SIGTERM has asked for the end."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True


def live(life: Life) -> int:
    """Work until SIGTERM; returns the exit status, 0 when all was acknowledged and left."""
    ending = _Ending()
    record = Record(Path(life.folder), life.name)
    cluster = Cluster.load(Path(life.cluster))
    with Client(
        cluster,
        worker=life.name,
        incarnation=life.incarnation,
        transport=life.transport,
        retry_s=life.retry_s,
        patience_s=PATIENCE_S,
        in_flight=life.burst,
    ) as client:
        if not record.acknowledged <= client.seq <= record.sent:
            print(
                f"{life.name}: taken over at push {client.seq}: expected {record.acknowledged}"
                f" (acknowledged) to {record.sent} (sent)",
                file=sys.stderr,
            )
            return 3
        while not ending.asked:
            client.pull()
            for _ in range(life.burst):
                seq = client.seq + 1
                array = client.empty()
                gradient(array, life.number, life.workers, seq)
                record.sends(seq)
                client.push(array, loss=1.0)
            client.flush()
            record.hears(client.seq, time.monotonic())
            time.sleep(life.rest_s)
    return 0
