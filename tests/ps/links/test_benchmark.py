"""The prober's figures match the link; and a shard's answers to probes."""

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

import ps
from ps.job_spec import shard_specs
from ps.launch.threads import local_shards
from ps.links.benchmark import LinkFigures, measure_link
from ps.transport.link_emulator import LinkEmulator
from ps.transport.link_model import LinkModel, parse_link
from ps.transport.shard_sockets import Links
from shards import wire_format
from shards.errors import BadMessage
from shards.messages import MAX_PROBE_BYTES, PROTOCOL, Probe, Probed, Refusal
from shards.schema_digest import SCHEMA
from shards.shard import Shard
from tests.support.eventually import eventually

_TABLE = ps.DenseTable("far", (ps.TensorSpec("w", (1000,)),))


@pytest.fixture(scope="module")
def cluster() -> Iterator[ps.Cluster]:
    with local_shards(shard_specs(_TABLE, shards=2)) as cluster:
        yield cluster


def measured(cluster: ps.Cluster, model: LinkModel) -> LinkFigures:
    with closing(LinkEmulator(cluster.endpoints, model)) as slow:
        return measure_link(cluster, 1, slow.endpoints, patience_s=20.0)


# A busy machine is slower than a link: what one measurement misses, another finds, some time.
TRIES_S = 240.0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("text", ["rtt=100ms,rate=100Mbit", "rtt=60ms,rate=20Mbit"])
def test_a_link_is_found_as_it_is(cluster: ps.Cluster, text: str) -> None:
    """Round trip and both rates are within 15 % of the link's, perhaps not at the first try; the
    clock skew is zero, because there is only one clock.
    """
    model = parse_link(text)
    truth = {"rtt_s": model.rtt_s, "up": model.rate, "down": model.rate}
    tries = list[LinkFigures]()
    far, skewed = set(truth), True

    def met() -> bool:
        nonlocal far, skewed
        tries.append(found := measured(cluster, model))
        far = {n for n in far if getattr(found, n) != pytest.approx(truth[n], rel=0.15)}
        skewed = skewed and abs(found.skew_s) >= model.rtt_s
        return not (far or skewed)

    eventually(met, because=lambda: f"{sorted(far)} of {tries} for {model}", within_s=TRIES_S)
    found = tries[-1]
    assert (found.shard, found.protocol, found.schema) == (1, PROTOCOL, SCHEMA)
    assert min(found.own_cpu_s_per_gb, found.shard_cpu_s_per_gb) > 0


@pytest.mark.timeout(300)
def test_a_short_window_is_found(cluster: ps.Cluster) -> None:
    """Where a connection's window limits it, several together are measured as faster."""
    model, doubled = parse_link("rtt=25ms,rate=200Mbit,window=160KB"), (False, False)

    def both_doubled() -> bool:
        nonlocal doubled
        found = measured(cluster, model)
        assert max(found.up, found.down) < 0.5 * model.rate
        up, down = found.striped_up > 2 * found.up, found.striped_down > 2 * found.down
        doubled = doubled[0] or up, doubled[1] or down
        return all(doubled)

    eventually(both_doubled, because="several connections double both rates", within_s=TRIES_S)


def test_a_silent_shard_is_named(cluster: ps.Cluster) -> None:
    """When patience ends, the error has the shard's number and its own address."""
    silent = ["tcp://127.0.0.1:1"] * 2
    with pytest.raises(ps.Unreachable, match=rf"shard 1 at {cluster.endpoints[1]} .* for 0.3 s"):
        measure_link(cluster, 1, silent, patience_s=0.3)


def test_a_lost_probe_goes_out_again(cluster: ps.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that broke lost a message: that delays the prober, and no more."""
    monkeypatch.setattr("ps.links.benchmark._REPEAT_S", 0.2)
    send, lost = Links.send, list[object]()

    def unsteady(self: Links, *message: Any) -> None:
        if lost:
            send(self, *message)
        else:
            lost.append(message)

    monkeypatch.setattr(Links, "send", unsteady)
    found = measure_link(cluster, 1, cluster.endpoints, patience_s=20.0)
    assert lost
    assert found.shard == 1


def probe(job: str, payload_bytes: int = 5) -> Probe:
    return Probe(7, job, payload_bytes)


def test_a_probe_is_answered_with_what_it_asks() -> None:
    """The answer has as many bytes as requested, and counts those received."""
    (spec,) = shard_specs(_TABLE)
    shard = Shard(spec, boot=3)
    asked = probe(spec.job)
    out = shard.answer_probe(b"me", asked, [b"ab", b"cde"], unix_s=12.5, cpu_s=0.25)
    assert out.message == Probed(7, 0, 3, PROTOCOL, SCHEMA, 12.5, 0.25, 5)
    assert (out.to, out.frames) == (b"me", (bytes(5),))
    assert (shard.version, shard.metrics.bytes_in) == (0, 0), "nothing has changed"


def test_a_stranger_is_told_nothing() -> None:
    """Without the job's id a client gets no build, no clock and no bytes."""
    (spec,) = shard_specs(_TABLE)
    out = Shard(spec, boot=3).answer_probe(b"me", probe("other"), [], unix_s=12.5, cpu_s=0.25)
    assert isinstance(out.message, Refusal)
    assert spec.job not in out.message.text
    assert out.frames == ()


def test_no_probe_asks_for_much() -> None:
    """A header that requests more than the limit is rejected."""
    header = wire_format.encode(probe("job", MAX_PROBE_BYTES))
    assert wire_format.decode_client_message(header) == probe("job", MAX_PROBE_BYTES)
    with pytest.raises(BadMessage, match="payload_bytes"):
        wire_format.decode_client_message(wire_format.encode(probe("job", MAX_PROBE_BYTES + 1)))


def test_a_server_tells_its_clock(cluster: ps.Cluster) -> None:
    """The answer has the host's own clock and CPU time, not values from the shard."""
    before = time.time()
    found = measure_link(cluster, 0, cluster.endpoints, patience_s=20.0)
    assert abs(found.skew_s) < 1 + time.time() - before
