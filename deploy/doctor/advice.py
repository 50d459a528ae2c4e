"""`downpour doctor`: measures the links to a job's shards and recommends settings.

`ps.links.benchmark` measures and `ps.links.advisor` computes the advice; this module formats both
for the user.
"""

import socket
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

from deploy.clusters.requirements import missing_on_executor
from deploy.doctor.strategy_table import quote
from deploy.run.folder import CLUSTER, SUMMARY, writer_of
from ps.cluster import Cluster
from ps.links.advisor import Advice, advise, remarks
from ps.links.benchmark import LinkFigures, measure_link
from ps.links.fragment_advice import FragmentAdvice, advise_fragments
from ps.security.enrolment import operator_key
from ps.security.keys import address_of
from ps.session.compression import NONE, Compression
from ps.session.events import Unreachable
from ps.transport.link_emulator import LinkEmulator
from ps.transport.link_model import LinkModel
from ps.transport.primary_resolver import as_led
from shards.errors import BadInput, DownpourError
from shards.job_ids import short_id
from shards.plurals import format_count
from shards.schema_digest import differs
from worker.job.options import NO_BOUND

_FLOAT_BYTES = 4


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `diagnose`: `links` has the figures of the shards that answered.

    `failed` has a line for each other shard, `amiss` further warnings, both as text for the user.
    `advice` and `fragments` are None unless all shards answered. `step_bytes` is the size of one
    push or pull. `workers` is 0 where the job does not say how many it has.
    """

    job: str
    workers: int
    bound: int | None
    endpoints: tuple[str, ...]
    step_bytes: int
    links: tuple[LinkFigures, ...]
    failed: tuple[str, ...]
    amiss: tuple[str, ...]
    advice: Advice | None
    fragments: FragmentAdvice | None

    @property
    def healthy(self) -> bool:
        """True if workers on this machine could train: all shards answer and accept them."""
        return not self.failed and not any(
            differs(link.protocol, link.schema) for link in self.links
        )

    def json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self)).decode()


def diagnose(
    path: Path,
    *,
    compute_s: Sequence[float],
    link: LinkModel | None = None,
    patience_s: float = 10.0,
) -> Diagnosis:
    """Measure the links to the job of a cluster file, or of a run folder that has one.

    For replicated shards, it measures the links to the present primaries. `link` emulates a slow
    link in between; `compute_s` are the seconds of a step, of each worker or of all;
    `patience_s` is how long to wait for each shard. Raises BadInput for an invalid
    file, GiveUp if a coordinator refuses access.
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
    shard_bytes = [_FLOAT_BYTES * len(keys) for keys in cluster.map.ranges]
    advice = fragments = None
    if not failed:
        advice = advise(links, shard_bytes, cluster.endpoints, min(compute_s))
        fragments = advise_fragments(advice, compute_s)
    return Diagnosis(
        job=short_id(cluster.job),
        workers=cluster.workers,
        bound=cluster.bound,
        endpoints=tuple(map(cluster.where, range(cluster.map.shards))),
        step_bytes=sum(shard_bytes),
        links=tuple(links),
        failed=tuple(failed),
        amiss=(*amiss, *_missing_packages(), *remarks(links)),
        advice=advice,
        fragments=fragments,
    )


def _as_it_is(cluster: Cluster, patience_s: float) -> tuple[Cluster, list[str]]:
    """The cluster with its present primaries, as clients locate them; and warnings about that."""
    if cluster.coordinator is None:
        return cluster, []
    led = as_led(cluster, operator_key(cluster), patience_s)
    if led is not None:
        return led, []
    where = address_of(cluster.coordinator).plain
    silent = (
        f"coordinator at {where} has not answered for {patience_s:g} s: no shard fails over until"
        " it does; the addresses measured are those from the start of the job"
    )
    return cluster, [silent]


def _missing_packages() -> list[str]:
    """A line for each package that a worker in a Spark task would lack in this Python."""
    try:
        missing = missing_on_executor()
    except BadInput as error:
        return [str(error)]
    return [f"no executor could run here: {line}; install the extra `executor`" for line in missing]


def _check_under_way(path: Path) -> None:
    """Raise BadInput for the folder of a run that has ended since its shards started.

    A free lock does not prove that: the run may be on another machine.
    """
    summary, cluster = path / SUMMARY, path / CLUSTER
    if not summary.is_file() or not cluster.is_file() or writer_of(path) is not None:
        return
    if summary.stat().st_mtime >= cluster.stat().st_mtime:
        raise BadInput(
            f"--cluster {path}",
            expected="a run under way",
            got=f"one that has ended: {SUMMARY} is newer than {CLUSTER}",
        )


def _check_listening(cluster: Cluster, shard: int, patience_s: float) -> None:
    """Raise BadInput if nothing listens at a shard's TCP address, without waiting for a probe."""
    kind, _, rest = cluster.where(shard).partition("://")
    host, _, port = rest.rpartition(":")
    if kind != "tcp":
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), patience_s).close()
    except OSError as error:
        raise BadInput(f"nothing listens there: {error.strerror or error}") from None


def report(diagnosis: Diagnosis) -> str:
    """Format the diagnosis for the user: a table, the warnings, and the advice."""
    parts = [_table(diagnosis)] if diagnosis.links else []
    lines = [*diagnosis.failed, *diagnosis.amiss]
    if lines:
        parts.append("\n".join(f"! {line}" for line in lines))
    if diagnosis.advice is not None and diagnosis.fragments is not None:
        advice = diagnosis.advice
        exchange_s = advice.rtt_s + advice.push_s + advice.pull_s
        parts += [
            _explain_step(diagnosis, advice),
            _explain_fragments(diagnosis.fragments),
            quote(exchange_s, advice.compute_s),
            _suggest_sweep(diagnosis, advice),
            _snippet(advice),
        ]
    else:
        parts.append("No advice until every shard answers.")
    return "\n\n".join(part for part in parts if part)


def _table(diagnosis: Diagnosis) -> str:
    rows = [
        ("shard", "at", "round trip", "up", "down", "clock", "CPU s/GB here", "there", "schema"),
        *(
            (
                str(link.shard),
                diagnosis.endpoints[link.shard],
                f"{_time(link.rtt_s)} ± {_time(link.jitter_s)}",
                _rate(link.up),
                _rate(link.down),
                f"{link.skew_s:+.3f} s",
                f"{link.own_cpu_s_per_gb:.2f}",
                f"{link.shard_cpu_s_per_gb:.2f}",
                "same" if not differs(link.protocol, link.schema) else link.schema,
            )
            for link in diagnosis.links
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _explain_step(diagnosis: Diagnosis, advice: Advice) -> str:
    explanation = (
        f"A step moves {_size(diagnosis.step_bytes)} each way: {_time(advice.push_s)} for the push,"
        f" {_time(advice.pull_s)} for the pull, {_time(advice.rtt_s)} for the round trip.\n"
        f"With {_time(advice.compute_s)} of computing, a step takes {_time(advice.plain_step_s)} if"
        f" nothing overlaps, and {_time(advice.step_s)} with these settings:"
    )
    return "\n".join([explanation, *(f"  {line}" for line in _reasons(advice))])


def _explain_fragments(advice: FragmentAdvice) -> str:
    """The settings of a strategy that exchanges a model in parts."""
    tables, workers = format_count(advice.fragments, "table"), format_count(advice.quorum, "worker")
    codec = "" if advice.codec == NONE else f", reports and pulls as {advice.codec}"
    return (
        "With decoupled_diloco, which waits for nobody:\n"
        f"  a model in {tables}: an exchange takes {_time(advice.exchange_s)}{codec}\n"
        f"  h={advice.period},overlap={advice.overlap},k={advice.quorum}: the line is occupied"
        f" {advice.line_share:.0%} of the time; {workers} of these speeds in time for a quorum"
    )


def _suggest_sweep(diagnosis: Diagnosis, advice: Advice) -> str:
    """The command that ranks strategies on a cluster like the one that was measured."""
    bytes_s = min(min(link.up, link.down) for link in diagnosis.links)
    link = f"rtt={1e3 * advice.rtt_s:.3g}ms,rate={8 * bytes_s / 1e6:.3g}Mbit"
    return (
        "To rank strategies and bounds on a cluster like this one, by simulation:\n"
        f"  downpour exp advise --workers {diagnosis.workers or 'WORKERS'}"
        f" --step-s {advice.compute_s:g} --link {link}"
    )


def _reasons(advice: Advice) -> list[str]:
    """The recommended settings, each with its reason."""
    lines = []
    if advice.push_codec != NONE:
        lines.append(f"compress pushes as {advice.push_codec}: plain ones take longer than a step")
    if advice.pull_codec != NONE:
        lines.append(f"compress pulls as {advice.pull_codec}: plain ones take longer than a step")
        if Compression.parse(pull=advice.pull_codec).pulls_changes:
            lines.append(
                f"pulls as {advice.pull_codec} are changes to the worker's weights: each shard"
                " keeps a copy of its weights for every worker"
            )
    if advice.n_push > 1:
        lines.append(
            f"n_push {advice.n_push}: one push occupies the link for {advice.n_push} steps"
        )
    if advice.n_fetch > 1:
        lines.append(
            f"n_fetch {advice.n_fetch}: one pull occupies the link for {advice.n_fetch} steps"
        )
    if advice.prefetch:
        lines.append(
            f"prefetch, {advice.ahead} ahead: round trip and pull take as long as computing"
            f" {advice.ahead} steps"
        )
    why = "messages in transit" if advice.prefetch else "workers of different speed"
    lines.append(f"staleness {advice.staleness}, or {NO_BOUND}: leaves room for {why}")
    lines.append(
        f"in flight: {advice.pushes_in_flight} pushes, or {advice.pieces_in_flight} pieces of 1"
        " MiB, fill the link; clients measure this themselves"
    )
    if advice.stripes > 1:
        lines.append(
            f"{advice.stripes} connections to a shard, each of which carries one window in a round"
            " trip; clients open them themselves"
        )
    if advice.window_bytes:
        lines.append(
            "the system's net.ipv4.tcp_wmem and tcp_rmem, at both ends: at least"
            f" {_size(advice.window_bytes)}; TCP's window is too small to fill the link"
        )
    lines.append(f"transport {advice.transport}")
    return lines


def _snippet(advice: Advice) -> str:
    """The recommended settings as a command line to paste."""
    options = [f"--staleness {advice.staleness}"]
    if advice.n_push > 1:
        options.append(f"--n-push {advice.n_push}")
    if advice.n_fetch > 1:
        options.append(f"--n-fetch {advice.n_fetch}")
    if advice.prefetch:
        options.append("--prefetch")
    if advice.push_codec != NONE:
        options.append(f"--compress {advice.push_codec}")
    if advice.pull_codec != NONE:
        options.append(f"--compress-pull {advice.pull_codec}")
    return f"downpour train ... {' '.join(options)}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _rate(rate: float) -> str:
    return f"{rate / 1e6:.3g} MB/s"


def _size(size: int) -> str:
    return f"{size / 1e6:.3g} MB"
