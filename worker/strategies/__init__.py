"""Training strategies: each is a value, and has one file.

A strategy decides when a worker pulls and pushes, what happens to its local weights in between, and
what the shards do with its pushes. A new one is a class in a file here, and an entry in `Strategy`.
"""

from enum import StrEnum
from typing import Any, TypeVar, cast, get_args

import msgspec

from shards import argument_checks
from shards.aggregation import ServerHalf
from shards.errors import BadInput
from worker.strategies.adag import ADAG
from worker.strategies.asp import ASP
from worker.strategies.async_diloco import AsyncDiLoCo
from worker.strategies.base import Base, Local
from worker.strategies.bsp import BSP
from worker.strategies.dc_asgd import DCASGD
from worker.strategies.decoupled_diloco import DecoupledDiLoCo
from worker.strategies.diloco import DiLoCo
from worker.strategies.downpour import Downpour
from worker.strategies.dynsgd import DynSGD
from worker.strategies.eamsgd import EAMSGD
from worker.strategies.easgd import EASGD
from worker.strategies.fedbuff import FedBuff
from worker.strategies.heloco import AsyncHeLoCo
from worker.strategies.local_sgd import LocalSGD
from worker.strategies.mla import MLA
from worker.strategies.softsync import Softsync
from worker.strategies.sparknet import SparkNet
from worker.strategies.ssp import SSP
from worker.strategies.stale_rate import StaleRate
from worker.strategies.streaming_diloco import StreamingDiLoCo

Strategy = (
    Downpour
    | BSP
    | SSP
    | ASP
    | StaleRate
    | Softsync
    | DynSGD
    | ADAG
    | DCASGD
    | EASGD
    | EAMSGD
    | SparkNet
    | LocalSGD
    | DiLoCo
    | AsyncDiLoCo
    | MLA
    | AsyncHeLoCo
    | StreamingDiLoCo
    | DecoupledDiLoCo
    | FedBuff
)

Kind = TypeVar("Kind", bound=Base)

STRATEGIES: dict[str, type[Strategy]] = {
    str(kind.__struct_config__.tag): kind for kind in get_args(Strategy)
}


def strategy_named(name: str) -> type[Strategy]:
    """The strategy class called `name`, which may be followed by options; raises BadInput."""
    name = name.partition(":")[0]
    try:
        return STRATEGIES[name]
    except KeyError:
        raise BadInput(
            "strategy", expected=f"one of {', '.join(sorted(STRATEGIES))}", got=f"{name!r}"
        ) from None


def strategy_of(label: str, value: object) -> Strategy:
    """`value` if it is a strategy, or the strategy that a text names: diloco, or diloco:h=50.

    Options follow the name: `diloco:h=50,outer_lr=0.7`; the others have their defaults. Raises
    BadInput naming `label`.
    """
    if isinstance(value, Base):  # a strategy of this project or of the user
        return cast(Strategy, value)
    if not isinstance(value, str) or value.partition(":")[0].lower() not in STRATEGIES:
        raise argument_checks.wrong(
            label, f"{', '.join(STRATEGIES)}, or a strategy such as BSP()", value
        )
    name, _, options = value.partition(":")
    kind = strategy_named(name.lower())
    return strategy_with_options(label, kind, options)


def options_set(value: object) -> list[str]:
    """The options that a text such as diloco:h=50,outer_lr=0.7 sets; none for a strategy."""
    options = value.partition(":")[2] if isinstance(value, str) else ""
    return [field for field, _, _ in _assignments(options)]


def strategy_with_options(label: str, kind: type[Kind], text: str) -> Kind:
    """The strategy with the options in a text such as h=50,outer_lr=0.7; "" has none.

    Raises BadInput naming `label`.
    """
    known, values = kind.__struct_fields__, dict[str, Any]()
    name = kind.__struct_config__.tag
    kinds = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for field, equals, value in _assignments(text):
        if field not in known:
            takes = f"its options are {', '.join(known)}" if known else "it has no options"
            raise BadInput(
                f"{label} {name}: unknown option {argument_checks.describe_value(field)}; {takes}"
            )
        if not equals or field in values:
            got = f"{field}{equals}{value}"
            raise BadInput(f"{label} {name}: {field}", expected=f"{field}=VALUE once", got=got)
        values[field] = _by_worker(value) if field == "speeds" else value
        if isinstance(of_field := kinds[field], type) and issubclass(of_field, StrEnum):
            argument_checks.choice(f"{label} {name}: {field}", value, of_field)
    try:
        return msgspec.convert(values | {"strategy": name}, kind, strict=False)
    except msgspec.ValidationError as error:
        message, _, field = str(error).partition(" - at `$.")
        if field:
            wrong = field.rstrip("`")
            message = f"{wrong}: {message[0].lower()}{message[1:]}, {values.get(wrong)!r}"
        raise BadInput(f"{label} {name}: {message.removeprefix(f'strategy {name}: ')}") from None


def _assignments(text: str) -> list[tuple[str, str, str]]:
    """The name, the sign and the value of each option in a text such as h=50,outer_lr=0.7."""
    return [option.partition("=") for option in text.split(",")] if text else []


def _by_worker(text: str) -> dict[str, str]:
    """The values in a text such as worker-0/1+worker-1/2."""
    return {name: value for name, _, value in (part.rpartition("/") for part in text.split("+"))}


__all__ = [
    "ADAG",
    "ASP",
    "BSP",
    "DCASGD",
    "EAMSGD",
    "EASGD",
    "MLA",
    "SSP",
    "STRATEGIES",
    "AsyncDiLoCo",
    "AsyncHeLoCo",
    "Base",
    "DecoupledDiLoCo",
    "DiLoCo",
    "Downpour",
    "DynSGD",
    "FedBuff",
    "Local",
    "LocalSGD",
    "ServerHalf",
    "Softsync",
    "SparkNet",
    "StaleRate",
    "Strategy",
    "StreamingDiLoCo",
    "strategy_named",
    "strategy_of",
]
