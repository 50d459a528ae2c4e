"""The settings of a training run, checked before anything is started.

The command line fills in the same class that `settings.json` in a run folder holds and `--resume`
reads back. Most of its options are declared in worker/job/options.py, those of the command line
here.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from ps import path_checks
from ps.durability import Durability
from ps.launch.launcher import Placement
from ps.replication.coordinator_server import SILENCE_S
from ps.snapshots import checked_json
from ps.transport.addresses import LAST_PORT
from ps.wal.autosave import ROLLBACK_S
from shards import argument_checks
from shards.errors import UNDECODABLE, BadInput
from worker.job.network import DriverNetwork
from worker.job.option_fields import Options, list_options, option
from worker.job.options import LONGEST_S, TrainOptions, foreign_options
from worker.training.evaluation import Target

DATA = (
    "IDX or Parquet files, an LMDB or LevelDB, an image list, a folder of images for each class, or"
    " HDF5 files."
)
"""Help text: the kinds of data that a command reads."""


class FeatureFormat(StrEnum):
    """The format of a file of features."""

    PARQUET = "parquet"
    JSON = "json"


def _place(subject: str, value: object) -> str:
    """A URI, or the absolute path of a folder."""
    text = argument_checks.text(subject, value, "a folder or a URI")
    scheme, separator, rest = text.partition("://")
    if not separator:
        return str(path_checks.path(subject, text).absolute())
    if not rest.strip("/"):
        raise BadInput(subject, expected=f"a place after {scheme}://", got="none")
    return text


def _target(label: str, value: object) -> object:
    Target.parse(label, value)
    return value


class RunFiles(Options):
    """The files and folders of a run, and what its tests may end. Paths are absolute."""

    solver: Path = option("The solver, a Caffe prototxt.")
    data: Path | None = option(DATA, default=None, shown="what the net's data layer names")
    out: Path = option("The run folder to make.")
    test_data: Path | None = option(
        "Data to test on.",
        default=None, shown="the test part of --data, or of what the test net names",
    )  # fmt: skip
    until: str | None = option(
        "End training once a test reaches this, as accuracy>=0.985 or loss<=0.1.",
        default=None, check=_target,
    )  # fmt: skip
    weights: Path | None = option(
        "Weights to start from, found by layer name: .caffemodel, .h5 or .safetensors.",
        default=None,
    )
    snapshots: str | None = option(
        "Where snapshots go: a folder, or a URI such as s3://bucket/run.",
        default=None, shown="the run folder", check=_place,
    )  # fmt: skip
    logs: Path | None = option(
        "The folder for the log of a shard, on the shard's own machine.",
        default=None, shown="the run folder",
    )  # fmt: skip
    updates_every_s: float = option(
        "Seconds after which the rows of updates.parquet can be read; a killed run loses those of"
        " its last part.",
        default=60.0, least=0.1, most=LONGEST_S,
    )  # fmt: skip


class Clusters(DriverNetwork):
    """The clusters that a run uses. None is an embedded one."""

    leave_s: float = option(
        "Seconds in which the run leaves after SIGTERM, with a snapshot if there is time.",
        default=20.0, least=1, most=LONGEST_S,
    )  # fmt: skip
    workers: int = option(
        "Workers: Spark tasks, each on its own part of the data.",
        default=2, least=1, most=LAST_PORT,
    )  # fmt: skip
    ray: str | None = option(
        "A running Ray: HOST:PORT, ray://HOST:PORT or auto.", default=None, shown="one of its own"
    )
    spark: str | None = option(
        "A running Spark: spark://HOST:PORT, yarn, k8s://HOST:PORT or sc://HOST:PORT; under"
        " spark-submit: submitted.",
        default=None, shown="one of its own",
    )  # fmt: skip


class TrainSettings(RunFiles, Clusters, TrainOptions):
    """The settings of one training run."""

    def check(self) -> None:
        for name, why in options_without_effect(self.asdict()).items():
            raise BadInput(f"{format_option(name, getattr(self, name))}: {why}")
        super().check()

    @classmethod
    def label_option(cls, name: str) -> str:
        return option_name(name)

    @staticmethod
    def load(path: Path) -> "TrainSettings":
        """Read `settings.json`; raises BadInput that names the file."""
        path_checks.refuse_pipe(path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise BadInput(f"settings {path}: {error.strerror}") from None
        try:
            return checked_json.decode(content, TrainSettings, dec_hook=_decode)
        except BadInput as error:
            raise error.within(f"settings {path}") from None
        except UNDECODABLE:
            raise BadInput(f"settings {path}: {_fault(content)}") from None

    @staticmethod
    def of_plain(plain: Mapping[str, Any]) -> "TrainSettings":
        """The settings that `plain` returned, or a part of them; raises BadInput."""
        return TrainSettings(**_check_names(plain))

    def plain(self) -> dict[str, object]:
        """These settings as JSON values."""
        plain: dict[str, object] = msgspec.to_builtins(self, enc_hook=str)
        return plain


def _check_names(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `plain`; raises BadInput for an option that does not exist, or that is missing."""
    options = list_options(TrainSettings)
    for name in plain.keys() - options.keys():
        wrong = option_name(name)[:80]
        raise BadInput(wrong, expected="an option that `downpour train --help` lists", got=wrong)
    for name, declaration in options.items():
        if declaration.is_required and name not in plain:
            raise BadInput(option_name(name), expected="a value", got="none")
    return plain


def _wrong_value(plain: Mapping[str, Any]) -> str:
    """The fault of options as JSON values of which one cannot be converted."""
    for name, declaration in list_options(TrainSettings).items():
        try:
            if name in plain:
                declaration.check_value(option_name(name), plain[name])
        except BadInput as error:
            return str(error)
    return "settings: expected options of downpour train, got values of other kinds"


def _fault(content: bytes) -> str:
    """The fault of the content of a settings file that cannot be decoded."""
    try:
        plain = msgspec.json.decode(content, type=dict[str, Any])
        plain.pop(checked_json.CHECK, None)
        return _wrong_value(_check_names(plain))
    except BadInput as error:
        return str(error)
    except UNDECODABLE:
        return "expected the options of a run as JSON, got a file that is damaged or no JSON"


def options_without_effect(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings, by name, that have no effect together with the others, each with the reason.

    A setting at its default is never among them.
    """
    durability, placement, out = settings["durability"], settings["shards_in"], {}
    if settings["ray"] is not None and placement is not Placement.RAY:
        out["ray"] = f"expected shards in Ray, got --shards-in {placement}"
    if settings["silence_s"] != SILENCE_S and durability is not Durability.REPLICATED:
        out["silence_s"] = f"expected --durability replicated, got {durability}"
    if settings["rollback_s"] != ROLLBACK_S and durability is not Durability.MEMORY:
        out["rollback_s"] = f"expected --durability memory, got {durability}"
    for name in ("coordinator_port", "copy_ports"):
        if settings[name] and durability is not Durability.REPLICATED:
            out[name] = f"expected --durability replicated, got {durability}"
    if settings["logs"] is not None and not durability.keeps_log:
        out["logs"] = f"expected --durability process or logged, got {durability}"
    out |= _idle_addresses(settings)
    foreign = foreign_options(settings["strategy"])
    return out | {name: why for name, why in foreign.items() if settings[name] is not None}


def _idle_addresses(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings of addresses and names that Ray and Spark have no use for, with the reason."""
    out = {}
    own, default = list_options(DriverNetwork), DriverNetwork()
    url = settings["spark"]
    for name in own.keys() - {"namespace", *(("app_name", "start_s") if url else ("app_name",))}:
        if settings[name] != getattr(default, name) and (url is None or url.startswith("sc://")):
            out[name] = "expected --spark with a master, " + (
                "got a Spark Connect server" if url else "got none"
            )
    if settings["namespace"] != default.namespace and settings["ray"] is None:
        out["namespace"] = "expected --ray, got none"
    return out


def option_name(name: str) -> str:
    """The command-line option of a setting, such as --max-iter."""
    return f"--{name.replace('_', '-')}"


def format_option(name: str, value: object) -> str:
    """A setting and its value as on the command line, such as --lease-s 10."""
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{option_name(name)} {argument_checks.hide_passwords(shown)}"


def _decode(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(kind)
