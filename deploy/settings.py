"""The settings of a training run, checked before anything is started, and their defaults.

The command line fills in the same struct that `settings.json` in a run folder holds and `--resume`
reads back.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from cupy_kernels.types import Precision
from ps.durability import Durability
from ps.launch.launch_plan import ShardDevice, check_replicable, check_rollback, check_silence
from ps.launch.launcher import Placement
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
from worker.strategies import Strategy, strategy_named, strategy_of

NO_BOUND = "inf"
_LAST_PORT = 65535
_STRATEGY_OPTIONS = {"n_push", "n_fetch", "warm_steps"}
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
_MOST_DIGITS = 100  # longer numbers are rejected as text, before int() spends time on them
LONGEST_S = 7 * 86400.0  # in milliseconds, this still fits into the system's 32-bit timeouts
_LONGEST_TIME_S = 1e9
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class TrainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one training run. Paths are absolute.

    - `staleness`: the bound in steps; None: no bound. The options of a strategy (`n_push`,
      `n_fetch`, `warm_steps`) are None for the strategy's default; `seed`, `max_iter` and `device`
      are None for the solver's.
    - `workers`: the number of partitions of the data, each trained by one worker.
    - `ray`, `spark`: addresses of running clusters; None: embedded ones.
    - `shards_in`: whether shards run in Ray or in processes of this machine. They listen on the
      host `bind`, from `port` upwards (0: any free port). Where other hosts can reach them, they
      are encrypted and closed to strangers unless `plaintext` is set.
    - `device`: what workers compute on ("auto", "cpu", "gpu", "gpu:N"), a GPU with products in
      `precision`; `shard_device`: what shards compute on.
    - `link`: an emulated slow link for each worker; `transport`: what carries the data within one
      host; `compress`, `compress_pull`: the encoding of pushes and weights.
    - `durability`: what survives the death of a shard. `silence_s`: seconds of silence after which
      a copy of a replicated shard counts as dead. `rollback_s`: seconds of pushes that a shard at
      `memory` may lose when it dies (0: its death ends the run). `logs`: the folder on a shard's
      machine for its log, if it keeps one; None: in the run folder.
    - `snapshots`: a path or URI; None: the run folder. `snapshot_every`: iterations ("500") or a
      time ("30s"); None: as the solver says. `snapshot_aligned`: whether to quiesce the shards.
      `snapshot_keep` snapshots are kept, for the time `snapshot_keep_for`; the newest always is.
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
        """Whether shards use CURVE: other hosts can reach them, and `plaintext` is not set."""
        return not on_this_host(self.bind) and not self.plaintext

    def _check_durability(self) -> None:
        """Raise BadInput for settings that the durability level does not support."""
        check_rollback(self.rollback_s, Durability.MEMORY, "--rollback-s")
        if self.durability is Durability.REPLICATED:
            check_replicable(self.port, self.transport, self.shard_device)
            check_silence(self.silence_s, self.lease_s, "--silence-s")
            if self.link is not None:
                raise BadInput("--link: expected shards with one copy each, got replicated ones")

    def build_strategy(self) -> Strategy:
        """Build the strategy that these settings name; raises BadInput for an unknown one."""
        strategy = strategy_of("--strategy", self.strategy)
        options = {name: getattr(self, name) for name in _STRATEGY_OPTIONS}
        given = {name: value for name, value in options.items() if value is not None}
        return msgspec.structs.replace(strategy, **given)

    def build_device(self, solver_device: str) -> DeviceRequest:
        """The device that workers compute on: the one that is set, else the solver's."""
        return parse_device(solver_device if self.device is None else self.device)

    def build_link(self) -> LinkModel | None:
        """The emulated link of the workers; raises BadInput for an invalid description."""
        return parse_link(self.link) if self.link is not None else None

    def build_compression(self) -> Compression:
        """The encodings of pushes and pulls; raises BadInput for an unknown one."""
        return Compression.parse(self.compress, self.compress_pull)

    def build_interval(self) -> tuple[int | None, float]:
        """Iterations between snapshots (None: as the solver says), and seconds (0: not by time).

        Raises BadInput if `snapshot_every` is neither a count nor a time.
        """
        every = self.snapshot_every
        if every is None:
            return None, 0.0
        if _is_count(every):
            _check_range("snapshot_every", int(every), 0, _MOST)
            return int(every), 0.0
        return 0, parse_time("--snapshot-every", every, "iterations, as 500, or ")

    def build_keep(self) -> Retention:
        """Which snapshots are kept; raises BadInput for an invalid time."""
        keep_for = self.snapshot_keep_for
        seconds = parse_time("--snapshot-keep-for", keep_for) if keep_for is not None else None
        return Retention(self.snapshot_keep, seconds)

    @staticmethod
    def load(path: Path) -> "TrainSettings":
        """Read `settings.json`; raises BadInput that names the file."""
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
    """Raise BadInput for a setting outside [least, most]; None, its default, passes."""
    if value is None or least <= value <= most:
        return
    limit, how = (most, "at most") if value > most else (least, "at least")
    raise BadInput(f"{option(name)}: expected {how} {_plain(limit)}, got {_plain(value)}")


def _plain(number: float) -> str:
    return str(number).removesuffix(".0")


def misplaced(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings, by name, that have no effect together with the others, each with the reason.

    A setting at its default is never among them.
    """
    durability, strategy = settings["durability"], settings["strategy"]
    placement, out = settings["shards_in"], {}
    if settings["ray"] is not None and placement is not Placement.RAY:
        out["ray"] = f"expected shards in Ray, got --shards-in {placement}"
    if settings["silence_s"] != SILENCE_S and durability is not Durability.REPLICATED:
        out["silence_s"] = f"expected --durability replicated, got {durability}"
    if settings["rollback_s"] != ROLLBACK_S and durability is not Durability.MEMORY:
        out["rollback_s"] = f"expected --durability memory, got {durability}"
    if settings["logs"] is not None and not durability.keeps_log:
        out["logs"] = f"expected --durability process or logged, got {durability}"
    for name in sorted(_STRATEGY_OPTIONS - set(strategy_named(strategy).__struct_fields__)):
        if settings[name] is not None:
            out[name] = f"strategy {strategy} has no such option"
    return out


def option(name: str) -> str:
    """The command-line option of a setting, such as --max-iter."""
    return f"--{name.replace('_', '-')}"


def written(name: str, value: object) -> str:
    """A setting and its value as on the command line, such as --lease-s 10."""
    return f"{option(name)} {value:g}" if isinstance(value, float) else f"{option(name)} {value}"


def parse_staleness(text: str) -> int | None:
    """Parse a staleness bound: a whole number of steps, or `inf` for no bound (None)."""
    if text == NO_BOUND:
        return None
    if not _is_count(text):
        raise BadInput(
            f"--staleness: expected a whole number of steps or {NO_BOUND}, got {text[:80]!r}"
        )
    return int(text)


def _is_count(text: str) -> bool:
    """Whether `text` is a whole number of fewer than `_MOST_DIGITS` digits."""
    return text.isascii() and text.isdecimal() and len(text) < _MOST_DIGITS


def parse_time(option: str, text: str, other: str = "") -> float:
    """Parse a time such as 30s, 5m, 12h or 7d into seconds; raises BadInput naming the option."""
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
