"""Everything about a training job but its data, as a value."""

from collections.abc import Callable

import msgspec

from ps import Compression
from ps.durability import Durability
from ps.hosts.hosting import Home, ShardDevice
from ps.logs.saves import ROLLBACK_S
from ps.replicas.coordinator_server import SILENCE_S
from ps.storage.shelf import EVERYTHING, Keep
from ps.wire.link_model import LinkModel
from ps.wire.reach import on_this_host
from ps.wire.transport import Transport
from shards.rules import Decay, Rule
from shards.schedules import Schedule
from worker.model import Model
from worker.placement import ANY, Wanted
from worker.replica import Plan


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A training job, whatever its data.

    `model` builds the network, in this process and in every task; `plan` is each worker's;
    `workers` is the number of partitions the data is trained in; `shape` is that of one row of
    `data` (None: as the columns say, worker/columns.py); `bound` is the staleness bound in
    steps (None: none). A snapshot is taken every `snapshot_every` iterations, an iteration being
    one step of every worker, and every `snapshot_every_s` seconds (0: not by that), and at the end;
    `keep` says which stay, `snapshot_aligned` that the shards stand still for one. The shards live
    at `shards_in`, hold their weights on `shard_device`, and listen on `bind` and `port`
    (ps/hosts/hosting.py): where others than this host can reach them, they speak CURVE and let in
    this job's workers alone, unless `plaintext`. If their logs are `logs_apart`, each node has a
    folder to itself for them. Each worker is put behind a `link` of this kind, to try one out, and
    computes on a `device` as `worker.placement` says. `transport` carries the data. A copy of a
    replicated shard that is silent for `silence_s` counts as dead. At durability `memory` a shard
    that dies takes back what it applied in the last `rollback_s`; with 0 its death ends the job.
    """

    model: Callable[[], Model]
    plan: Plan
    rule: Rule
    schedule: Schedule
    decay: Decay
    batch_size: int
    workers: int
    shape: tuple[int, ...] | None = None
    shards: int = 1
    bound: int | None = 0
    shuffle: bool = True
    lease_s: float = 10.0
    snapshot_every: int = 0
    snapshot_every_s: float = 0.0
    snapshot_aligned: bool = False
    keep: Keep = EVERYTHING
    shards_in: Home = Home.RAY
    shard_device: ShardDevice = ShardDevice.CPU
    bind: str = "127.0.0.1"
    port: int = 0
    plaintext: bool = False
    link: LinkModel | None = None
    transport: Transport = Transport.AUTO
    compression: Compression = Compression()
    device: Wanted = ANY
    durability: Durability = Durability.MEMORY
    silence_s: float = SILENCE_S
    rollback_s: float = ROLLBACK_S
    logs_apart: bool = False

    @property
    def guarded(self) -> bool:
        """Whether the shards let in this job's workers alone."""
        return not self.plaintext and not on_this_host(self.bind)

    @property
    def keeps_residuals(self) -> bool:
        """Whether workers keep something back of what they push."""
        return self.compression.push is not None

    @property
    def rule_name(self) -> str:
        """The kind of its rule, as snapshots tell it."""
        return str(self.rule.__struct_config__.tag)
