"""Settings are checked at once, and are read back from the run folder unchanged."""

import json
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from cupy_kernels.types import Precision
from deploy.run.folder import RunFolder
from deploy.run.settings import TrainSettings
from ps.durability import Durability
from ps.launch.launcher import Placement
from ps.transport.transports import Transport
from shards.errors import BadInput
from worker.strategies import BSP, Downpour

EVERY = TrainSettings(
    solver=Path("/solver"),
    data=Path("/data"),
    out=Path("/out"),
    test_data=Path("/test"),
    until="accuracy>=0.985",
    weights=Path("/weights"),
    shards=3,
    workers=5,
    staleness=None,
    n_push=2,
    n_fetch=4,
    warm_steps=7,
    shuffle=False,
    seed=11,
    lease_s=2.5,
    max_iter=99,
    ray="h:1",
    spark="spark://h:2",
    bind="0.0.0.0",
    port=7000,
    plaintext=True,
    device="gpu:1",
    precision=Precision.TF32,
    link="rtt=100ms,rate=100Mbit",
    transport=Transport.TCP,
    compress="topk:0.01,zstd",
    compress_pull="bf16",
)


def told(**more: Any) -> TrainSettings:
    return TrainSettings(solver=Path("/s"), data=Path("/d"), out=Path("/o"), **more)


@pytest.mark.parametrize(
    "settings",
    [
        told(),
        told(strategy="bsp", staleness=0),
        told(shards_in=Placement.PROCESSES, durability=Durability.LOGGED),
        told(shards_in=Placement.PROCESSES, durability=Durability.LOGGED, bind="0.0.0.0"),
        told(shards_in=Placement.PROCESSES, durability=Durability.REPLICATED),
        told(durability=Durability.LOGGED),
        told(durability=Durability.PROCESS, logs=Path("/l")),
        told(durability=Durability.REPLICATED),
        told(durability=Durability.REPLICATED, bind="0.0.0.0"),
        told(durability=Durability.REPLICATED, silence_s=4.0, lease_s=4.5),
        told(durability=Durability.REPLICATED, bind="10.0.0.1", plaintext=True),
        EVERY,
    ],
)
def test_settings_survive_the_run_folder(settings: TrainSettings, tmp_path: Path) -> None:
    """What a run folder's settings.json holds reads back as the same settings."""
    with RunFolder.create(tmp_path / "run", settings.plain()) as folder:
        assert TrainSettings.load(folder.settings) == settings


def test_the_strategy_has_its_own_defaults() -> None:
    """An option that is not given is left to the strategy; one that is given reaches it."""
    assert told().build_strategy() == Downpour()
    assert EVERY.build_strategy() == Downpour(n_push=2, n_fetch=4, warm_steps=7)
    assert told(strategy="bsp", staleness=0).build_strategy() == BSP()


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"durability": Durability.REPLICATED, "port": 7400},
        "durability replicated: port: expected 0, for free ports, got 7400",
    ),
    (
        {
            "durability": Durability.REPLICATED,
            "shards_in": Placement.PROCESSES,
            "transport": Transport.SHM,
        },
        "durability replicated: transport: expected auto or tcp, got shm",
    ),
    (
        {
            "durability": Durability.REPLICATED,
            "shards_in": Placement.PROCESSES,
            "link": "rtt=10ms",
        },
        "--link: expected shards with one copy each, got replicated ones",
    ),
    (
        {"logs": "/l"},
        "--logs /l: expected --durability process or logged, got memory",
    ),
    ({"link": "rtt=1ms", "transport": "shm"}, "--link: expected --transport tcp or auto, got shm"),
    ({"link": "rtt=100"}, "link: expected a number with one of us, ms, s, got 'rtt=100'"),
    ({"compress": "int9"}, "and perhaps ,zstd, got 'int9'"),
    ({"compress_pull": "1bit"}, "compressed pull: expected none, fp16, bf16, int8, 4bit or topk"),
    ({"shards": 0}, "--shards: expected at least 1, got 0"),
    ({"workers": -2}, "--workers: expected at least 1, got -2"),
    ({"max_iter": 0}, "--max-iter: expected at least 1, got 0"),
    ({"n_push": 0}, "--n-push: expected at least 1, got 0"),
    ({"n_fetch": -1}, "--n-fetch: expected at least 1, got -1"),
    ({"warm_steps": -1}, "--warm-steps: expected at least 0, got -1"),
    ({"staleness": -1}, "--staleness: expected at least 0, got -1"),
    ({"n_push": 6, "staleness": 4}, "pushing every 6 steps needs at least 5, got 4"),
    (
        {"n_push": 5, "prefetch": True, "staleness": 4},
        "pushing every 5 steps with prefetch needs at least 5, got 4",
    ),
    ({"n_fetch": 2, "prefetch": True}, "every step, got downpour, which pulls every 2 steps"),
    ({"strategy": "down"}, "strategy: expected one of adag, asp, async_diloco, bsp, "),
    (
        {"strategy": "bsp", "staleness": 4},
        "strategy bsp: expected staleness bound 0, got 4",
    ),
    (
        {"strategy": "bsp", "staleness": 0, "n_push": 2},
        "--n-push 2: strategy bsp has no such option",
    ),
    ({"lease_s": 0.0}, "--lease-s: expected more than 0 s, up to 604800, got 0"),
    ({"lease_s": inf}, "--lease-s: expected more than 0 s, up to 604800, got inf"),
    ({"lease_s": nan}, "--lease-s: expected more than 0 s, up to 604800, got nan"),
    (
        {"durability": Durability.REPLICATED, "silence_s": 0.1},
        "a copy sends 4 beats, and less than the lease of a worker, 10 s, got 0.1",
    ),
    (
        {"durability": Durability.REPLICATED, "silence_s": 3.0, "lease_s": 3.0},
        "less than the lease of a worker, 3 s, got 3",
    ),
    (
        {"durability": Durability.LOGGED, "silence_s": 2.0},
        "--silence-s 2: expected --durability replicated, got logged",
    ),
    (
        {"durability": Durability.LOGGED, "rollback_s": 5.0},
        "--rollback-s 5: expected --durability memory, got logged",
    ),
    (
        {"rollback_s": -1.0},
        "--rollback-s: expected at least 0, got -1",
    ),
    ({"rollback_s": inf}, "--rollback-s: expected at most 604800, got inf"),
    ({"port": -1}, "--port: expected 0 to 65535, got -1"),
    ({"port": 65535, "shards": 2}, "--port: expected 0 to 65534, got 65535"),
    (
        {"ray": "h:1", "shards_in": Placement.PROCESSES},
        "--ray h:1: expected shards in Ray, got --shards-in processes",
    ),
    ({"bind": "::1", "plaintext": True}, "--bind: expected an IPv4 address, got '::1'"),
]


@pytest.mark.parametrize(("options", "line"), WRONG, ids=[line[:40] for _, line in WRONG])
def test_wrong_settings_are_refused_however_they_come(
    options: dict[str, Any], line: str, tmp_path: Path
) -> None:
    """Given directly, over an earlier run's settings, and from a file, which is then named."""
    with pytest.raises(BadInput) as by_hand:
        told(**options)
    assert line in str(by_hand.value)
    with pytest.raises(BadInput) as over:
        told().replace(**options)
    assert str(over.value) == str(by_hand.value)
    if {nan, inf}.isdisjoint(options.values()):  # JSON has neither
        path = tmp_path / "settings.json"
        path.write_text(json.dumps(told().plain() | options))
        with pytest.raises(BadInput) as out_of_file:
            TrainSettings.load(path)
        assert str(out_of_file.value) == f"settings {path}: {by_hand.value}"


@pytest.mark.parametrize("bind", ["127.0.0.1", "127.0.0.5", "localhost"])
def test_loopback_needs_no_consent(bind: str) -> None:
    """Traffic within the machine may be unencrypted."""
    assert told(bind=bind).bind == bind


def test_a_port_for_every_shard() -> None:
    """The last shard may have the last port."""
    assert told(port=65534, shards=2).port == 65534


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "No such file"),
        ("{", "damaged or no JSON"),
        ('{"spark": "\udcff"}', "damaged or no JSON"),
        ('{"solver": "/s", "data": "/d"}', "--out: expected a value, got none"),
        (
            '{"solver": "/s", "data": "/d", "out": "/o", "shards": "x"}',
            "--shards: expected a whole number",
        ),
    ],
)
def test_a_settings_file_that_is_none(content: str | None, line: str, tmp_path: Path) -> None:
    """The error names the file and what is wrong with it."""
    path = tmp_path / "settings.json"
    if content is not None:
        path.write_text(content, errors="surrogateescape")
    with pytest.raises(BadInput, match=f"^settings {path}: .*{line}"):
        TrainSettings.load(path)


@pytest.mark.parametrize(("text", "bound"), [("0", 0), ("12", 12), ("inf", None)])
def test_staleness_as_people_write_it(text: str, bound: int | None) -> None:
    """A whole number of steps, or inf for no bound."""
    assert told(staleness=text).staleness == bound


@pytest.mark.parametrize("text", ["-1", "1.5", "none", ""])
def test_staleness_that_is_none(text: str) -> None:
    """Anything else is refused."""
    with pytest.raises(BadInput, match=f"expected a whole number of steps or inf, got {text!r}$"):
        told(staleness=text)


@pytest.mark.parametrize(
    ("bind", "guarded"),
    [("127.0.0.1", False), ("127.8.0.9", False), ("localhost", False)]
    + [(bind, True) for bind in ("0.0.0.0", "10.0.0.1", "this-host", "localhost.evil.org")],
)
def test_keys_wherever_others_can_reach(bind: str, guarded: bool) -> None:
    """Off by default on this host, on by default elsewhere; `plaintext` turns it off there."""
    assert told(bind=bind).uses_curve is guarded
    assert told(bind=bind, plaintext=True).uses_curve is False
