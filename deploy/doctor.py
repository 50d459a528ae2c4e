"""`downpour doctor`: the links to a job's shards, measured, and what to set for them, in words.

The measuring is `ps.links.benchmark`'s, the reckoning `ps.links.advisor`'s; here is what a person
reads.
"""

import socket
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

from deploy.run_folder import CLUSTER, SUMMARY, writer_of
from deploy.settings import NO_BOUND
from ps.cluster import Cluster
from ps.compatibility import build_id
from ps.links.advisor import Advice, advise, remarks
from ps.links.benchmark import LinkFigures, measure_link
from ps.security.enrolment import operator_key
from ps.security.keys import address_of
from ps.session.compression import NONE, Compression
from ps.session.events import Unreachable
from ps.transport.link_emulator import LinkEmulator
from ps.transport.link_model import LinkModel
from ps.transport.primary_resolver import as_led
from shards.errors import BadInput, DownpourError
from shards.job_ids import short_id

_FLOAT_BYTES = 4


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What was found: figures of the shards that answered, and what is amiss with the others.

    `advice` is None unless all answered. `amiss` and `failed` are lines for people.
    """

    job: str
    bound: int | None
    endpoints: tuple[str, ...]
    step_bytes: int
    links: tuple[LinkFigures, ...]
    failed: tuple[str, ...]
    amiss: tuple[str, ...]
    advice: Advice | None

    @property
    def healthy(self) -> bool:
        """Whether workers could train from here."""
        return not self.failed and all(link.build == build_id() for link in self.links)

    def json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self)).decode()


def diagnose(
    path: Path, *, compute_s: float, link: LinkModel | None = None, patience_s: float = 10.0
) -> Diagnosis:
    """Measure the links to the job of a cluster file, or of a run folder that has one.

    Of replicated shards those copies are asked that serve now. With `link` it is done behind a link
    like that. Raises BadInput for a file that is none, GiveUp where a coordinator turns us away.
    """
    _check_under_way(path)
    described = Cluster.load(path / CLUSTER if path.is_dir() else path)
    cluster, amiss = _as_it_is(described, patience_s)
    links, failed = [], []
    with ExitStack() as stack:
        endpoints: Sequence[str] = cluster.endpoints
        if link is not None:
            slow = stack.enter_context(closing(LinkEmulator(endpoints, link, "doctor")))
            endpoints = slow.endpoints
        for shard in range(cluster.map.shards):
            try:
                _check_listening(cluster, shard, patience_s)
                links.append(measure_link(cluster, shard, endpoints, patience_s))
            except Unreachable as error:
                failed.append(str(error))
            except DownpourError as error:
                failed.append(f"shard {shard} at {cluster.where(shard)}: {error}")
    shard_bytes = [
        _FLOAT_BYTES * sum(len(keys) for keys in ranges) for ranges in cluster.map.ranges
    ]
    told = advise(links, shard_bytes, cluster.endpoints, compute_s) if not failed else None
    return Diagnosis(
        job=short_id(cluster.job),
        bound=cluster.bound,
        endpoints=tuple(map(cluster.where, range(cluster.map.shards))),
        step_bytes=sum(shard_bytes),
        links=tuple(links),
        failed=tuple(failed),
        amiss=(*amiss, *remarks(links, build_id())),
        advice=told,
    )


def _as_it_is(cluster: Cluster, patience_s: float) -> tuple[Cluster, list[str]]:
    """Where its shards are by now, as clients find out; and what is amiss with that."""
    if cluster.coordinator is None:
        return cluster, []
    led = as_led(cluster, operator_key(cluster), patience_s)
    if led is not None:
        return led, []
    where = address_of(cluster.coordinator).plain
    silent = (
        f"coordinator at {where} has not answered for {patience_s:g} s: nothing fails over until it"
        " does, and shards are looked for where they were first"
    )
    return cluster, [silent]


def _check_under_way(path: Path) -> None:
    """Raise BadInput for the folder of a run that has ended since its shards started.

    That nobody holds its lock says nothing: the run may be another machine's.
    """
    summary, cluster = path / SUMMARY, path / CLUSTER
    if not summary.is_file() or not cluster.is_file() or writer_of(path) is not None:
        return
    if summary.stat().st_mtime >= cluster.stat().st_mtime:
        raise BadInput(
            f"--cluster {path}: expected a run under way, got one that has ended: {SUMMARY} is"
            f" newer than {CLUSTER}"
        )


def _check_listening(cluster: Cluster, shard: int, patience_s: float) -> None:
    """Raise BadInput where nothing listens at a shard's TCP address: a probe would wait for it."""
    kind, _, rest = cluster.where(shard).partition("://")
    host, _, port = rest.rpartition(":")
    if kind != "tcp":
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), patience_s).close()
    except OSError as error:
        raise BadInput(f"nothing listens there: {error.strerror or error}") from None


def report(found: Diagnosis) -> str:
    """The diagnosis as a person reads it: a table, what is amiss, and the advice."""
    parts = [_table(found)] if found.links else []
    lines = [*found.failed, *found.amiss]
    if lines:
        parts.append("\n".join(f"! {line}" for line in lines))
    if found.advice is not None:
        parts += [_explained(found, found.advice), _snippet(found.advice)]
    else:
        parts.append("No advice until every shard answers.")
    return "\n\n".join(parts)


def _table(found: Diagnosis) -> str:
    rows = [
        ("shard", "at", "round trip", "up", "down", "clock", "CPU s/GB here", "there", "build"),
        *(
            (
                str(link.shard),
                found.endpoints[link.shard],
                f"{_time(link.rtt_s)} ± {_time(link.jitter_s)}",
                _rate(link.up),
                _rate(link.down),
                f"{link.skew_s:+.3f} s",
                f"{link.own_cpu_s_per_gb:.2f}",
                f"{link.shard_cpu_s_per_gb:.2f}",
                "same" if link.build == build_id() else link.build,
            )
            for link in found.links
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _explained(found: Diagnosis, told: Advice) -> str:
    told_of = (
        f"A step moves {_size(found.step_bytes)} each way: {_time(told.push_s)} for the push,"
        f" {_time(told.pull_s)} for the pull, {_time(told.rtt_s)} for the way there and back.\n"
        f"With {_time(told.compute_s)} of computing that is {_time(told.plain_step_s)} a step, one"
        f" thing after another; {_time(told.step_s)} with these settings:"
    )
    return "\n".join([told_of, *(f"  {line}" for line in _reasons(told))])


def _reasons(told: Advice) -> list[str]:
    """Each recommended setting with its reason."""
    lines = []
    if told.push_codec != NONE:
        lines.append(f"compress pushes as {told.push_codec}: plain ones outlast a step")
    if told.pull_codec != NONE:
        lines.append(f"compress pulls as {told.pull_codec}: plain ones outlast a step")
        if Compression.parse(pull=told.pull_codec).pulls_changes:
            lines.append(
                f"pulls as {told.pull_codec} are changes to what a worker has: each shard keeps a"
                " copy of its weights for every worker"
            )
    if told.n_push > 1:
        lines.append(f"n_push {told.n_push}: one push occupies the line for so many steps")
    if told.n_fetch > 1:
        lines.append(f"n_fetch {told.n_fetch}: one pull occupies the line for so many steps")
    if told.prefetch:
        lines.append(
            f"prefetch, {told.ahead} ahead: round trip and pull take so many steps' computing"
        )
    why = "what is on its way" if told.prefetch else "workers that are not equally fast"
    lines.append(f"staleness {told.staleness}, or {NO_BOUND}: leaves room for {why}")
    lines.append(
        f"in flight: {told.pushes_in_flight} pushes, or {told.pieces_in_flight} pieces of 1 MiB,"
        " fill the pipe; clients find that by themselves"
    )
    if told.stripes > 1:
        lines.append(
            f"{told.stripes} connections to a shard, each of which carries its window a round trip;"
            " clients open them by themselves"
        )
    if told.window_bytes:
        lines.append(
            "the system's net.ipv4.tcp_wmem and tcp_rmem, at both ends: at least"
            f" {_size(told.window_bytes)}; TCP's window is short of the pipe"
        )
    lines.append(f"transport {told.transport}")
    return lines


def _snippet(told: Advice) -> str:
    """The settings to paste."""
    options = [f"--staleness {told.staleness}"]
    if told.n_push > 1:
        options.append(f"--n-push {told.n_push}")
    if told.n_fetch > 1:
        options.append(f"--n-fetch {told.n_fetch}")
    if told.prefetch:
        options.append("--prefetch")
    if told.push_codec != NONE:
        options.append(f"--compress {told.push_codec}")
    if told.pull_codec != NONE:
        options.append(f"--compress-pull {told.pull_codec}")
    return f"downpour train ... {' '.join(options)}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _rate(rate: float) -> str:
    return f"{rate / 1e6:.3g} MB/s"


def _size(size: int) -> str:
    return f"{size / 1e6:.3g} MB"
