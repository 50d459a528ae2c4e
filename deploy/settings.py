"""What a training run is told, checked before anything is started. Defaults live here alone.

The same struct is what the command line fills in, what `settings.json` in a run folder holds, and
what `--resume` reads back.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from cupy_kernels.types import Precision
from ps.durability import Durability
from ps.launch.launcher import (
    Placement,
    ShardDevice,
    check_replicable,
    check_rollback,
    check_silence,
)
from ps.replication.coordinator_server import SILENCE_S
from ps.session.compression import NONE, Compression
from ps.snapshots import checked_json
from ps.snapshots.catalog import Retention
from ps.transport.addresses import on_this_host
from ps.transport.link_model import LinkModel, parse_link
from ps.transport.local_sockets import Transport
from ps.wal.autosave import ROLLBACK_S
from shards.errors import UNDECODABLE, BadInput
from worker.device_selection import DeviceRequest, parse_device
from worker.strategies import Strategy, strategy_named

NO_BOUND = "inf"
_LAST_PORT = 65535
_STRATEGYS = {"n_push", "n_fetch", "warm_steps"}
_MOST = 2**31 - 1
_RANGES = {
    "shards": (1, _LAST_PORT),
    "workers": (1, _LAST_PORT),
    "max_iter": (1, _MOST),
    "snapshot_keep": (1, _MOST),
    "n_push": (1, _MOST),
    "n_fetch": (1, _MOST),
    "warm_steps": (0, _MOST),
    "staleness": (0, _MOST),
    "seed": (-(2**63), 2**63 - 1),  # a column of updates.parquet
}
_MOST_DIGITS = 100  # that are still read as a number, to say that it is too large
LONGEST_S = 7 * 86400.0  # in milliseconds this still fits into what the system waits for
_LONGEST_TIME_S = 1e9
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class TrainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One training run. Paths are absolute; `staleness` None is no bound.

    The options of a strategy are None where its own default holds, `seed`, `max_iter` and `device`
    where the solver's holds. `ray` and `spark` are addresses
    of running clusters (None: embedded ones); `workers` is the number of partitions the data is
    trained in. Shards live in Ray or in processes of this machine, as `shards_in` says, and listen
    on the host `bind`, from `port` upwards (0: wherever is free), encrypted and closed to strangers
    where other hosts can reach them, unless `plaintext`. WorkerRequests compute on a `device`
    ("auto", "cpu", "gpu", "gpu:N"), a GPU with products in `precision`; shards on a
    `shard_device`. `link` describes a slow link to put
    each worker behind; `transport` carries the data on one host; `compress` and `compress_pull` say
    how pushes and weights travel; `durability` is what survives the death of a shard, `silence_s`
    how long a copy of a replicated one may be silent before it counts as dead, `rollback_s` how
    much a shard at `memory` takes back when it dies (0: its death ends the run), and `logs` where
    on a shard's machine its log lies, if it keeps one (None: in the run folder). Snapshots go
    to `snapshots`, a path or URI (None: the run folder), every `snapshot_every` ("500" iterations,
    or a time as "30s"; None: as the solver says), `snapshot_aligned` or not; `snapshot_keep` of
    them stay, and for `snapshot_keep_for`, a time; the newest stays in any case.
    """

    solver: Path
    data: Path
    out: Path
    test_data: Path | None = None
    weights: Path | None = None
    shards: int = 1
    workers: int = 2
    staleness: int | None = 4
    strategy: str = "downpour"
    n_push: int | None = None
    n_fetch: int | None = None
    warm_steps: int | None = None
    prefetch: bool = False
    shuffle: bool = True
    seed: int | None = None
    lease_s: float = 10.0
    max_iter: int | None = None
    shards_in: Placement = Placement.RAY
    shard_device: ShardDevice = ShardDevice.CPU
    ray: str | None = None
    spark: str | None = None
    bind: str = "127.0.0.1"
    port: int = 0
    plaintext: bool = False
    device: str | None = None
    precision: Precision = Precision.FP32
    link: str | None = None
    transport: Transport = Transport.AUTO
    compress: str = NONE
    compress_pull: str = NONE
    durability: Durability = Durability.MEMORY
    silence_s: float = SILENCE_S
    rollback_s: float = ROLLBACK_S
    logs: Path | None = None
    snapshots: str | None = None
    snapshot_every: str | None = None
    snapshot_aligned: bool = False
    snapshot_keep: int | None = None
    snapshot_keep_for: str | None = None

    def __post_init__(self) -> None:
        for name, why in misplaced(asdict(self)).items():
            raise BadInput(f"{written(name, getattr(self, name))}: {why}")
        for name, (least, most) in _RANGES.items():
            _check_range(name, getattr(self, name), least, most)
        if not 0 < self.lease_s <= LONGEST_S:
            raise BadInput(
                f"--lease-s: expected more than 0 s, up to {LONGEST_S:g}, got {self.lease_s:g}"
            )
        _check_range("rollback_s", self.rollback_s, 0, LONGEST_S)
        last = _LAST_PORT + 1 - self.shards
        if not 0 <= self.port <= last:
            raise BadInput(f"--port: expected 0 to {last}, got {self.port}")
        if ":" in self.bind or not self.bind.strip():
            raise BadInput(f"--bind: expected an IPv4 address, got {self.bind!r}")
        if self.link is not None and self.transport not in (Transport.AUTO, Transport.TCP):
            raise BadInput(f"--link: expected --transport tcp or auto, got {self.transport}")
        where = self.snapshots or ""
        if "://" in where and not where.partition("://")[2].strip("/"):
            raise BadInput(f"--snapshots: expected a place after {where}, got none")
        self._check_durability()
        if self.device is not None:
            parse_device(self.device)
        self.build_link()
        self.build_compression()
        self.build_interval()
        self.build_keep()
        self.build_strategy().check(self.staleness, self.prefetch)

    @property
    def guarded(self) -> bool:
        """Whether shards speak CURVE: others than this host can reach them, and nobody said not."""
        return not on_this_host(self.bind) and not self.plaintext

    def _check_durability(self) -> None:
        """Raise BadInput for what the level cannot have."""
        check_rollback(self.rollback_s, Durability.MEMORY, "--rollback-s")
        if self.durability is Durability.REPLICATED:
            check_replicable(self.port, self.transport, self.shard_device)
            check_silence(self.silence_s, self.lease_s, "--silence-s")
            if self.link is not None:
                raise BadInput("--link: expected shards with one copy each, got replicated ones")

    def build_strategy(self) -> Strategy:
        """The strategy these settings name; raises BadInput for one that does not exist."""
        kind = strategy_named(self.strategy)
        options = {name: getattr(self, name) for name in _STRATEGYS}
        return kind(**{name: value for name, value in options.items() if value is not None})

    def build_device(self, solvers: str) -> DeviceRequest:
        """The device that workers compute on: as set, else as the solver says."""
        return parse_device(solvers if self.device is None else self.device)

    def build_link(self) -> LinkModel | None:
        """The link that workers are put behind; raises BadInput for what describes none."""
        return parse_link(self.link) if self.link is not None else None

    def build_compression(self) -> Compression:
        """How pushes and pulls travel; raises BadInput for what describes nothing."""
        return Compression.parse(self.compress, self.compress_pull)

    def build_interval(self) -> tuple[int | None, float]:
        """Iterations between snapshots (None: as the solver says), and seconds (0: not by time).

        Raises BadInput for what is neither.
        """
        told = self.snapshot_every
        if told is None:
            return None, 0.0
        if _is_count(told):
            _check_range("snapshot_every", int(told), 0, _MOST)
            return int(told), 0.0
        return 0, parse_time("--snapshot-every", told, "iterations, as 500, or ")

    def build_keep(self) -> Retention:
        """Which snapshots stay; raises BadInput for a time that is none."""
        told = self.snapshot_keep_for
        seconds = parse_time("--snapshot-keep-for", told) if told is not None else None
        return Retention(self.snapshot_keep, seconds)

    @staticmethod
    def load(path: Path) -> "TrainSettings":
        """Read `settings.json`; raises BadInput naming it."""
        try:
            return checked_json.decode(path.read_bytes(), TrainSettings, dec_hook=_decode)
        except OSError as error:
            raise BadInput(f"settings {path}: {error.strerror}") from None
        except (*UNDECODABLE, BadInput) as error:
            raise BadInput(f"settings {path}: {error}") from None

    def plain(self) -> dict[str, object]:
        """These settings as JSON values."""
        plain: dict[str, object] = msgspec.to_builtins(self, enc_hook=str)
        return plain


def _check_range(name: str, value: float | None, least: float, most: float) -> None:
    """Raise BadInput for a setting outside [least, most]; None is its default."""
    if value is None or least <= value <= most:
        return
    limit, how = (most, "at most") if value > most else (least, "at least")
    raise BadInput(f"{option(name)}: expected {how} {_plain(limit)}, got {_plain(value)}")


def _plain(number: float) -> str:
    return str(number).removesuffix(".0")


def misplaced(told: Mapping[str, Any]) -> dict[str, str]:
    """Of settings by name, those that mean nothing beside the others, and why.

    Defaults mean nothing anywhere, and are none of them.
    """
    durability, home, strategy = told["durability"], told["shards_in"], told["strategy"]
    out = {}
    if told["ray"] is not None and home is not Placement.RAY:
        out["ray"] = f"expected shards in Ray, got --shards-in {home}"
    if told["silence_s"] != SILENCE_S and durability is not Durability.REPLICATED:
        out["silence_s"] = f"expected --durability replicated, got {durability}"
    if told["rollback_s"] != ROLLBACK_S and durability is not Durability.MEMORY:
        out["rollback_s"] = f"expected --durability memory, got {durability}"
    if told["logs"] is not None and not durability.keeps_log:
        out["logs"] = f"expected --durability process or logged, got {durability}"
    for name in sorted(_STRATEGYS - set(strategy_named(strategy).__struct_fields__)):
        if told[name] is not None:
            out[name] = f"strategy {strategy} has no such option"
    return out


def option(name: str) -> str:
    """A setting as the command line has it."""
    return f"--{name.replace('_', '-')}"


def written(name: str, value: object) -> str:
    """A setting and its value as the command line has them."""
    return f"{option(name)} {value:g}" if isinstance(value, float) else f"{option(name)} {value}"


def parse_staleness(text: str) -> int | None:
    """A staleness bound as people write it: a whole number of steps, or `inf` for none."""
    if text == NO_BOUND:
        return None
    if not _is_count(text):
        raise BadInput(
            f"--staleness: expected a whole number of steps or {NO_BOUND}, got {text[:80]!r}"
        )
    return int(text)


def _is_count(text: str) -> bool:
    """Whether it is a whole number of a length that counts have."""
    return text.isascii() and text.isdecimal() and len(text) < _MOST_DIGITS


def parse_time(option: str, text: str, other: str = "") -> float:
    """Seconds as people write them, 30s, 5m, 12h or 7d; raises BadInput naming the option."""
    number, unit = text[:-1], text[-1:]
    try:
        seconds = float(number) * _SECONDS[unit]
    except (KeyError, ValueError):
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_TIME_S:
        raise BadInput(
            f"{option}: expected {other}a time, as 30s, 5m, 12h or 7d, got {text[:80]!r}"
        )
    return seconds


def _decode(kind: type, value: object) -> object:
    if kind is Path:
        return Path(str(value))
    raise TypeError(kind)
