"""The options of a training run: one frozen class a subject, each option declared in one line.

`TrainOptions` has those that the command line and `worker.train` share. Both add their own, such as
the files to read (deploy/run/settings.py, worker/job/train.py). To add an option, add a field to
its subject; `make docs` writes the tables of the documentation from the fields.
"""

from msgspec.structs import fields, replace

from cupy_kernels.types import Precision
from ps.durability import Durability
from ps.launch.launch_plan import (
    ShardDevice,
    check_copy_ports,
    check_replicable,
    check_silence,
    parse_port_range,
)
from ps.launch.launcher import Placement
from ps.replication.coordinator_server import SILENCE_S
from ps.session.compression import NONE, PULLS, PUSHES, Compression
from ps.snapshots.catalog import Retention
from ps.transport.addresses import LAST_PORT, on_this_host
from ps.transport.link_model import LinkModel, parse_link
from ps.transport.transports import Transport
from ps.wal.autosave import ROLLBACK_S
from shards import argument_checks
from shards.aggregation import Round, StaleLimit, stale_limit_of
from shards.errors import BadInput
from shards.live_settings import check_factor
from worker.data.read_options import MAX_SKIPPED
from worker.job.network import ShardNetwork
from worker.job.option_fields import Options, Parsed, option
from worker.strategies import (
    STRATEGIES,
    Downpour,
    Strategy,
    options_set,
    strategy_named,
    strategy_of,
)
from worker.strategies.base import USUAL
from worker.training.device_selection import DeviceRequest, parse_device
from worker.training.training_loop import SEEDS

DEFAULT_SEED = 1
"""The seed of a run for which none is given."""
NO_BOUND = "inf"
MAX_COUNT = 2**31 - 1
"""The largest count of anything that an option accepts."""
LONGEST_S = 7 * 86400.0
"""The longest wait: in milliseconds, it still fits into the system's 32-bit timeouts."""

_LONGEST_TIME_S = 1e9
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MAX_DIGITS = 100  # longer numbers are rejected as text, before int() spends time on them
_DOWNPOUR = {field.name: str(field.default) for field in fields(Downpour)}


def staleness_bound(label: str, value: object) -> int | str | None:
    """A bound in steps, also as text; `inf` and None are no bound. USUAL stays as it is."""
    if value == USUAL:
        return USUAL
    if isinstance(value, str) and value != NO_BOUND:
        if not _is_count(value):
            expected = f"a whole number of steps or {NO_BOUND}"
            raise BadInput(label, expected=expected, got=f"{value[:80]!r}")
        value = int(value)
    if isinstance(value, int) and value > MAX_COUNT:
        raise argument_checks.wrong(label, f"at most {MAX_COUNT}", value)
    return argument_checks.staleness_bound(label, value)


def _strategy(label: str, value: object) -> Strategy | str:
    """A strategy, or a text that may name one."""
    return value if isinstance(value, str) else strategy_of(label, value)


def _wait(label: str, value: object) -> float:
    """A time in seconds that a process may wait for."""
    expected = f"more than 0 s, up to {LONGEST_S:g}"
    seconds = argument_checks.number(label, value, expected=expected)
    if not 0 < seconds <= LONGEST_S:
        raise argument_checks.wrong(label, expected, seconds)
    return seconds


def _every(label: str, value: object) -> str:
    """A number of iterations, or a time such as 30s."""
    text = (
        value if isinstance(value, str) else str(argument_checks.whole(label, value, 0, MAX_COUNT))
    )
    if not _is_count(text):
        parse_time(label, text, "iterations, as 500, or ")
    elif int(text) > MAX_COUNT:
        raise argument_checks.wrong(label, f"at most {MAX_COUNT}", int(text))
    return text


def _keep_for(label: str, value: object) -> str:
    parse_time(label, argument_checks.text(label, value, "a time, as 12h or 7d"))
    return str(value)


def _is_count(text: str) -> bool:
    """Return whether `text` is a whole number of fewer than `_MAX_DIGITS` digits."""
    return text.isascii() and text.isdecimal() and len(text) < _MAX_DIGITS


def parse_time(label: str, text: str, other: str = "") -> float:
    """Parse a time such as 30s, 5m, 12h or 7d into seconds; raises BadInput naming `label`."""
    number, unit = text[:-1], text[-1:]
    try:
        seconds = float(number) * _SECONDS[unit]
    except (KeyError, ValueError):
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_TIME_S:
        raise BadInput(
            label, expected=f"{other}a time, as 30s, 5m, 12h or 7d", got=f"{text[:80]!r}"
        )
    return seconds


class TrainingPlan(Options):
    """The training of the workers. None for an option of the strategy is the strategy's default."""

    staleness: Parsed[int | None, float | str] = option(
        f"Steps the fastest worker may be ahead of the slowest, {NO_BOUND} or {USUAL}.",
        default=USUAL, shown="usual: of most strategies 4, in rounds 0",
        check=staleness_bound, is_text=True,
    )  # fmt: skip
    rate_factor: float | None = option(
        "A factor on the learning rates of all schedules.",
        default=None, shown="1", check=check_factor,
    )  # fmt: skip
    on_stale: Parsed[StaleLimit | None, str] = option(
        "What shards do with a push more than N updates stale: wait, scale:N or drop:N.",
        default=None, shown="wait", check=stale_limit_of, is_text=True,
    )  # fmt: skip
    strategy: Strategy | str = option(
        f"One of {', '.join(sorted(STRATEGIES))}, with options as in diloco:h=50.",
        default="downpour",
        check=_strategy,
    )
    n_push: int | None = option(
        "Steps a worker accumulates before it pushes.",
        default=None, shown=_DOWNPOUR["n_push"], least=1, most=MAX_COUNT,
    )  # fmt: skip
    n_fetch: int | None = option(
        "Steps between a worker's fetches.",
        default=None, shown=_DOWNPOUR["n_fetch"], least=1, most=MAX_COUNT,
    )  # fmt: skip
    warm_steps: int | None = option(
        "Steps one worker takes alone at first.",
        default=None, shown=_DOWNPOUR["warm_steps"], least=0, most=MAX_COUNT,
    )  # fmt: skip
    prefetch: bool = option("Pull the next weights while computing, for slow links.", default=False)
    shuffle: bool = option("Shuffle every epoch, by the seed.", default=True)
    skip_images: int = option(
        "The most images that one reader leaves out because they cannot be decoded.",
        default=MAX_SKIPPED, least=0, most=MAX_COUNT,
    )  # fmt: skip
    seed: int | None = option(
        "The seed of everything random.",
        default=None, shown=f"the solver's random_seed, or {DEFAULT_SEED}",
        least=SEEDS[0], most=SEEDS[1],
    )  # fmt: skip
    max_iter: int | None = option(
        "Steps of each worker.",
        default=None,
        shown="the solver's max_iter",
        least=1,
        most=MAX_COUNT,
    )

    def check(self) -> None:
        super().check()
        strategy = self.build_strategy()
        staleness: object = self.staleness
        if staleness == USUAL:
            object.__setattr__(self, "staleness", strategy.suitable_bound(self.prefetch))
        strategy.check(self.staleness, self.prefetch)
        if self.rate_factor is not None and strategy.own_rate:
            raise BadInput(
                self.label_option("rate_factor"),
                expected=(
                    f"none, as strategy {strategy.name} has a rate of its own among its options"
                ),
                got=f"{self.rate_factor:g}",
            )
        if self.on_stale is not None and isinstance(strategy.server(1).merge, Round):
            raise BadInput(self.label_option("on_stale"), expected="wait for a strategy in rounds")

    def build_strategy(self) -> Strategy:
        """The strategy with its options.

        Raises BadInput for an unknown name, for an option that the strategy does not have, and for
        one that the text of the strategy sets to another value.
        """
        chosen = {name: getattr(self, name) for name in STRATEGY_OPTIONS}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        for name, why in foreign_options(self.strategy).items():
            if name in chosen:
                raise BadInput(f"{self.label_option(name)} {chosen[name]}: {why}")
        strategy = strategy_of(self.label_option("strategy"), self.strategy)
        for name in options_set(self.strategy):
            stated = getattr(strategy, name)
            if chosen.get(name, stated) != stated:
                raise BadInput(
                    self.label_option(name),
                    expected=f"{stated}, as {self.label_option('strategy')} has it, or none",
                    got=chosen[name],
                )
        return replace(strategy, **chosen)


STRATEGY_OPTIONS = ("n_fetch", "n_push", "warm_steps")
"""The options that belong to a strategy, and that another may lack."""


def foreign_options(strategy: Strategy | str) -> dict[str, str]:
    """The options that a strategy lacks, with the reason to refuse each.

    Raises BadInput for a name that no strategy has.
    """
    kind = strategy_named(strategy) if isinstance(strategy, str) else type(strategy)
    why = f"strategy {kind.__struct_config__.tag} has no such option"
    return {name: why for name in STRATEGY_OPTIONS if name not in kind.__struct_fields__}


class WorkerRuntime(Options):
    """The device of the workers; `device` is None for the solver's `solver_mode`."""

    device: str | None = option(
        "What each worker computes on: cpu, gpu (one of its own), gpu:N, or auto (a GPU where one"
        " answers).",
        default=None, shown="auto; cpu with the solver's solver_mode: CPU",
    )  # fmt: skip
    precision: Parsed[Precision, str] = option(
        "What a GPU rounds the factors of products to: fp32 (not at all), tf32 or bf16.",
        default=Precision.FP32,
    )

    def check(self) -> None:
        super().check()
        self.build_device("auto")

    def build_device(self, otherwise: str) -> DeviceRequest:
        """The device that workers compute on: the one that is set, or else `otherwise`."""
        return parse_device(otherwise if self.device is None else self.device)


class ShardRuntime(ShardNetwork):
    """The shards: how many, where, what they store their weights on, and what they survive.

    Where other hosts can reach them, they use CURVE and admit only this job's workers, unless
    `plaintext` is set.
    """

    shards: int = option("Parameter servers.", default=1, least=1, most=LAST_PORT)
    shards_in: Parsed[Placement, str] = option(
        "Where the shards run: ray (in Ray actors), or processes (on this machine).",
        default=Placement.RAY,
    )
    shard_device: Parsed[ShardDevice, str] = option(
        "What stores the shards' weights and updates them: cpu or gpu.", default=ShardDevice.CPU
    )
    plaintext: bool = option(
        "Leave out encryption and keys where --bind is beyond loopback.", default=False
    )
    lease_s: float = option(
        "Seconds after which the other workers no longer wait for a silent one.",
        default=10.0, check=_wait,
    )  # fmt: skip
    durability: Parsed[Durability, str] = option(
        "What survives the death of a shard. memory: its last autosave; process: every"
        " acknowledged push; logged: the same, also after a power failure; replicated: every"
        " acknowledged push, without a pause, thanks to a second copy. `process` and `logged` write"
        " logs.",
        default=Durability.MEMORY,
    )
    silence_s: float = option(
        "Seconds of silence after which a copy of a replicated shard counts as dead; give more on a"
        " machine that sometimes stalls.",
        default=SILENCE_S, check=_wait,
    )  # fmt: skip
    rollback_s: float = option(
        "Seconds of pushes that a shard at durability memory loses at most when it dies; 0: its"
        " death ends the run.",
        default=ROLLBACK_S, least=0, most=LONGEST_S,
    )  # fmt: skip

    @property
    def uses_curve(self) -> bool:
        """True if shards use CURVE: other hosts can reach them, and `plaintext` is not set."""
        return not on_this_host(self.bind) and not self.plaintext

    @property
    def autosave_s(self) -> float:
        """Seconds between a shard's autosaves; 0 if it makes none."""
        return self.rollback_s if self.durability is Durability.MEMORY else 0.0

    def check(self) -> None:
        super().check()
        last = LAST_PORT + 1 - self.shards
        if not 0 <= self.port <= last:
            raise BadInput(self.label_option("port"), expected=f"0 to {last}", got=self.port)
        if self.durability is Durability.REPLICATED:
            check_silence(self.silence_s, self.lease_s, self.label_option("silence_s"))
            if self.copy_ports is not None:
                label = self.label_option("copy_ports")
                first, last = parse_port_range(label, self.copy_ports)
                check_copy_ports(label, last + 1 - first, self.shards)
        else:
            for name in ("coordinator_port", "copy_ports"):
                if getattr(self, name):
                    raise BadInput(
                        f"{self.label_option(name)} {getattr(self, name)}",
                        expected=f"{self.label_option('durability')} replicated",
                        got=self.durability,
                    )


class LinkOptions(Options):
    """The links that carry data between workers and shards."""

    transport: Parsed[Transport, str] = option(
        "What carries weights and gradients within one host: shm (shared memory), ipc (a Unix"
        " socket), tcp, or auto (the best that works).",
        default=Transport.AUTO,
    )
    link: str | None = option(
        "Put each worker behind an emulated slow link, such as rtt=100ms,rate=1Gbit; also"
        " jitter=10ms, loss=0.1% and outage=2s/60s.",
        default=None,
    )
    compress: str = option(
        f"Compression of pushes: {PUSHES}; append ,zstd to add zstd.", default=NONE
    )
    compress_pull: str = option(f"Compression of pulled weights: {PULLS}.", default=NONE)

    def check(self) -> None:
        super().check()
        if self.link is not None and self.transport not in (Transport.AUTO, Transport.TCP):
            expected = f"{self.label_option('transport')} tcp or auto"
            raise BadInput(self.label_option("link"), expected=expected, got=self.transport)
        self.build_link()
        self.build_compression()

    def build_link(self) -> LinkModel | None:
        """The emulated link of the workers; raises BadInput for an invalid description."""
        return parse_link(self.link) if self.link is not None else None

    def build_compression(self) -> Compression:
        """The encodings of pushes and pulls; raises BadInput for an unknown one."""
        return Compression.parse(self.compress, self.compress_pull)


class SnapshotPolicy(Options):
    """When snapshots are taken, and which of them are kept."""

    snapshot_every: Parsed[str | None, int] = option(
        "Iterations between snapshots, such as 500, or a time, such as 30s or 5m.",
        default=None, shown="the solver's snapshot", check=_every,
    )  # fmt: skip
    snapshot_aligned: bool = option(
        "Quiesce the shards for a snapshot, so that all hold the same pushes.", default=False
    )
    snapshot_keep: int | None = option(
        "How many of the newest snapshots to keep.",
        default=None,
        shown="all",
        least=1,
        most=MAX_COUNT,
    )
    snapshot_keep_for: str | None = option(
        "How long to keep snapshots, such as 12h or 7d; the newest is always kept.",
        default=None, shown="for ever", check=_keep_for,
    )  # fmt: skip

    def interval(self) -> tuple[int, float]:
        """Iterations between snapshots and seconds between them; 0 for not by this measure."""
        if self.snapshot_every is None:
            return 0, 0.0
        if _is_count(self.snapshot_every):
            return int(self.snapshot_every), 0.0
        return 0, parse_time("snapshot_every", self.snapshot_every)

    def retention(self) -> Retention:
        """Which snapshots are kept."""
        text = self.snapshot_keep_for
        seconds = None if text is None else parse_time("snapshot_keep_for", text)
        return Retention(self.snapshot_keep, seconds)


class TrainOptions(TrainingPlan, ShardRuntime, WorkerRuntime, LinkOptions, SnapshotPolicy):
    """The options that every way to train has."""

    def check(self) -> None:
        if self.durability is Durability.REPLICATED:
            check_replicable(self.port, self.transport, self.shard_device)
            if self.link is not None:
                expected = "shards with one copy each, got replicated ones"
                raise BadInput(self.label_option("link"), expected=expected)
        super().check()
