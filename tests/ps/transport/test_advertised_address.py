"""The address that a server's clients are given, on hosts of every kind."""

import sys

import pytest

from ps.launch.launch_plan import LaunchPlan, bind_again
from ps.transport.addresses import on_this_host
from ps.transport.advertised_address import (
    VARIABLE,
    Advertised,
    advertise,
    network_id,
    own_address,
    parse_advertised,
)
from shards.errors import BadInput
from tests.chaos.namespaces import missing
from tests.support.hosts import Host, hosts
from tests.support.sample_job import specs_of

_ON_HOSTS = pytest.mark.skipif(missing() is not None, reason=str(missing()))
_START = """
import sys
import numpy as np, ps
from ps.launch.processes import process_replicas
from shards.errors import DownpourError
from tests.support.sample_job import specs_of
options = eval(sys.argv[1])
try:
    if "copy_ports" in options:
        with process_replicas(specs_of(1), **options) as shards:
            print(shards.cluster.endpoints[0].rpartition("@")[2])
            print(shards.cluster.coordinator.rpartition("@")[2])
    else:
        with ps.start({"w": np.zeros(4)}, on="processes", **options) as job:
            print(job.address.rpartition("@")[2])
except DownpourError as error:
    print(type(error).__name__, error)
"""


def _addresses(host: Host, options: dict[str, object], **environ: str) -> list[str]:
    """The addresses of a job that is started on a host with these options, or its error."""
    words = (sys.executable, "-c", _START, repr(options))
    done = host.run(*words, environ=environ, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@_ON_HOSTS
@pytest.mark.timeout(600)
def test_no_default_route() -> None:
    """Without a default route a job that listens everywhere is refused in one line.

    It does not give out 127.0.0.1. The address to give out is an option, or a variable of the host.
    """
    with hosts("driver") as lab:
        driver = lab["driver"]
        (line,) = _addresses(driver, {"host": "0.0.0.0"})
        assert line == (
            "BadInput shard 0: listening on every address of driver: expected one that other hosts"
            " can reach, got 127.0.0.1 only, as there is no default route; give --bind ADDRESS, or"
            f" --advertise, or set {VARIABLE} on that host"
        )
        driver.name_host("nat.example", driver.address)
        (given,) = _addresses(driver, {"host": "0.0.0.0", "advertise": "nat.example"})
        assert given.startswith("nat.example:")
        (from_host,) = _addresses(driver, {"host": "0.0.0.0:7400"}, **{VARIABLE: "10.88.0.1"})
        assert from_host == "10.88.0.1:7400"
        (bound,) = _addresses(driver, {"host": "10.88.0.1:7400"})
        assert bound == "10.88.0.1:7400"


@_ON_HOSTS
@pytest.mark.timeout(600)
def test_replicated_shards_in_ranges() -> None:
    """The coordinator listens on its port and copies within their range, at what is advertised."""
    options = {
        "host": "0.0.0.0",
        "advertise": "10.88.0.1",
        "coordinator_port": 7390,
        "copy_ports": "7500-7505",
    }
    with hosts("driver") as lab:
        shard, coordinator = _addresses(lab["driver"], options)
        assert coordinator == "10.88.0.1:7390"
        address, _, port = shard.rpartition(":")
        assert address == "10.88.0.1"
        assert 7500 <= int(port) <= 7505


@_ON_HOSTS
def test_the_address_towards_the_peer() -> None:
    """Without a default route a host gives out the address from which it reaches the peer."""
    script = "from ps.transport.advertised_address import *; print(own_address({!r}))"
    with hosts("driver", "master") as lab:
        done = lab["driver"].python(script.format(lab["master"].address))
        assert done.stdout == f"{lab['driver'].address}\n"
        assert lab["driver"].python(script.format("203.0.113.7")).stdout == "None\n"
        assert lab["driver"].python(script.format("127.0.0.1")).stdout == "None\n"


@_ON_HOSTS
def test_loopback_is_given_to_no_other_host() -> None:
    """A server on loopback is refused where the launcher is on another host, and only there."""
    launcher = f"Advertised(network={network_id()!r})"
    script = (
        "from ps.transport.advertised_address import *\n"
        "from shards.errors import BadInput\n"
        "try: print(advertise('tcp://127.0.0.1:7', {}))\n"
        "except BadInput as error: print(error)"
    )
    with hosts("node") as lab:
        assert (
            lab["node"]
            .python(script.format(launcher))
            .stdout.startswith(
                "listening on 127.0.0.1 of node: expected an address that this job's driver, on"
                " another host, can reach"
            )
        )
        own = script.format("Advertised(network=network_id())")
        assert lab["node"].python(own).stdout == "tcp://127.0.0.1:7\n"
    assert advertise("tcp://127.0.0.1:7", Advertised(network=network_id())) == "tcp://127.0.0.1:7"


def test_the_order_of_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's option comes before the host's variable, the bound address, and Ray's."""
    key = "ab" * 32
    every, bound = f"curve://{key}@0.0.0.0:7", f"curve://{key}@10.0.0.9:7"
    monkeypatch.setenv(VARIABLE, "10.0.0.2")
    assert advertise(every, Advertised("10.0.0.1", 70)) == f"curve://{key}@10.0.0.1:70"
    assert advertise(bound, Advertised()) == f"curve://{key}@10.0.0.2:7"
    assert advertise("tcp://127.0.0.1:7", Advertised()) == "tcp://127.0.0.1:7"
    monkeypatch.delenv(VARIABLE)
    assert advertise(bound, Advertised(), "10.0.0.3") == bound
    assert advertise(every, Advertised(), "10.0.0.3") == f"curve://{key}@10.0.0.3:7"
    if (own := own_address()) is not None:
        assert advertise(every, Advertised(), "127.0.0.2") == f"curve://{key}@{own}:7"
        assert not on_this_host(own)
    assert advertise("ipc://@x", Advertised("10.0.0.1")) == "ipc://@x"


@pytest.mark.parametrize("text", ["", ":7", "h:0", "h:65536", "h:x", "0.0.0.0", "a b", "h:1:2"])
def test_what_cannot_be_advertised(text: str) -> None:
    """An address that nobody could connect to is refused, quoted in one line."""
    expected = r"^--advertise: expected HOST or HOST:PORT, as other hosts reach it, got "
    with pytest.raises(BadInput, match=expected):
        parse_advertised("--advertise", text)


def test_ports_of_a_plan() -> None:
    """Advertised ports count up as bound ones do; a restart binds the port that was bound."""
    specs = specs_of(shards=2)
    plan = LaunchPlan(specs=specs, host="0.0.0.0", port=7400, advertise="nat.example:9000")
    assert [plan.advertised(shard).port for shard in (0, 1)] == [9000, 9001]
    assert bind_again("tcp://0.0.0.0:7401", "tcp://nat.example:9001") == "tcp://0.0.0.0:7401"
    assert bind_again("tcp://0.0.0.0:*", "tcp://10.0.0.1:5123") == "tcp://0.0.0.0:5123"
    assert bind_again("tcp://h:7500-7505", "tcp://10.0.0.1:7503") == "tcp://h:7503"
    with pytest.raises(BadInput, match=r"^advertise nat:9000: expected port, too"):
        LaunchPlan(specs=specs, host="0.0.0.0", advertise="nat:9000")
    with pytest.raises(BadInput, match=r"^copy_ports: expected at least 12 ports"):
        LaunchPlan(specs=specs, copy_ports="7500-7510")
