"""`downpour deploy check`: collects the facts of a cluster's hosts before anything starts there.

The driver's host comes first, then a tiny job on Spark, if one is named, runs the same probe on
each host with an executor. While it runs this host listens on the ports of shards and copies, so
that executors can try them; Spark's own ports are those of its driver and its executors. Then a
task on each node of Ray, if one is named, runs the probe there.
"""

import inspect
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import msgspec

from deploy.clusters.probe import check_spark_url
from deploy.clusters.requirements import EXECUTOR, find_distributions, list_requirements
from deploy.doctor import host_probe
from deploy.doctor.findings import (
    Finding,
    HostFacts,
    decode_facts,
    from_error,
    judge_clock,
    judge_connection,
    judge_executor,
    judge_host,
    judge_ray_node,
    judge_silent_node,
    judge_spark_start,
    judge_start,
)
from deploy.run.disk_space import existing
from ps.storage import LocalStore, open_store
from ps.transport.addresses import HOST_NAME, check_listen, on_this_host
from ps.transport.advertised_address import (
    Advertised,
    check_advertised,
    own_address,
    parse_advertised,
)
from shards.errors import BadInput, DownpourError
from worker import spark
from worker.job.network import ClusterNetwork
from worker.spark import settings as spark_settings

Endpoint = tuple[str, str, int]
"""A server as host_probe.py tries it: its name, host and port."""
_TRIAL = "downpour-check"
_SHARD_RANGES = ("shards", "coordinator", "copies")


class CheckPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The requirements of a cluster.

    `spark` and `ray` are the addresses of a master and a head. `executors` are to come within the
    network's `start_s`. `store` is the place of snapshots. `secrets` are files besides those of Ray
    and Spark, `gpus` the devices of each executor's host. With `plaintext` neither Ray nor Spark
    needs to authenticate.
    """

    network: ClusterNetwork
    spark: str | None = None
    ray: str | None = None
    executors: int = 1
    store: str | None = None
    secrets: tuple[str, ...] = ()
    gpus: int = 0
    plaintext: bool = False


class Report(msgspec.Struct, frozen=True):
    """The findings, in order of hosts, and the facts of each host that answered."""

    findings: list[Finding]
    hosts: dict[str, HostFacts]

    def json(self) -> str:
        report = {"ready": not self.findings} | msgspec.to_builtins(self)
        return json.dumps(report, indent=2)

    def text(self) -> str:
        """The findings, a line each, and a line about the hosts."""
        hosts = ", ".join(self.hosts)
        last = f"checked {hosts}: {len(self.findings) or 'nothing'} missing"
        return "\n".join([*map(str, self.findings), last])


def check_cluster(plan: CheckPlan) -> Report:
    """Check this host, then those of the executors; nothing that is found raises an error.

    Raises BadInput for an invalid option.
    """
    refused: list[Finding] = []
    servers: list[tuple[str, int]] = []
    if plan.spark is not None:
        check_master(plan.spark)
        try:
            servers = check_spark_url(plan.spark)
        except BadInput as error:
            refused.append(from_error(HOST_NAME, "Spark", error))
    peer = servers[0][0] if servers else None
    facts = msgspec.convert(host_probe.read_facts(_request_for_driver(plan)), HostFacts)
    findings = [*judge_host(facts), *_judge_packages(plan), *_judge_store(plan.store)]
    ray_refused = list(_judge_ray(plan))
    findings += [*ray_refused, *refused]
    hosts = {f"{facts.host} (driver)": facts}
    remote: list[Finding] = []
    if plan.spark is not None and not refused and find_spec("pyspark") is not None:
        with ExitStack() as stack:
            try:
                session = stack.enter_context(_start_spark(plan))
            except DownpourError as error:
                remote.append(judge_spark_start(HOST_NAME, error, plan.network))
            else:
                peer = spark.master_host(session.range(1)) or peer
                endpoints, in_use = stack.enter_context(listen_for_shards(plan.network, peer))
                missing, answered = check_executors(session, plan, endpoints)
                remote += [*in_use, *_judge_guards(session, plan), *missing]
                hosts |= answered
    if plan.ray is not None and not ray_refused:
        missing, answered = check_ray_nodes(plan.ray, plan)
        remote += missing
        hosts |= answered
    findings += [*_judge_network(plan, peer), *remote]
    return Report(list(dict.fromkeys(findings)), hosts)  # a host may be in Spark and in Ray


def check_master(url: str) -> None:
    """Raise BadInput for an invalid URL, and for Spark Connect, which runs no plain programs."""
    if url.startswith("sc://"):
        raise BadInput(
            f"--spark {spark_settings.hide_url_options(url)}",
            expected="a master, such as spark://HOST:PORT, yarn, k8s://HOST:PORT or submitted",
            got="a server of Spark Connect",
        )
    if not spark_settings.parse_local_master(url, 1):
        spark_settings.addresses(url, os.environ)


def check_executors(
    session: "spark.SparkSession", plan: CheckPlan, endpoints: Sequence[Endpoint]
) -> tuple[list[Finding], dict[str, HostFacts]]:
    """Run the probe on each executor's host; returns what is missing there, and the facts.

    `endpoints` are the servers on this host that executors must reach.
    """
    requirements = list_requirements([EXECUTOR])
    managers = spark.await_executors(session, plan.executors, plan.network.start_s)
    findings = []
    executors = len(managers) - 1
    if 0 < executors < plan.executors:
        waited = f"{executors} in {plan.network.start_s:g} s"
        remedy = "see the pages of Spark's master and workers for hosts that lack one"
        findings.append(Finding(HOST_NAME, "executors", str(plan.executors), waited, remedy))
    servers = [_label(f"Spark's block manager ({name})", *end) for name, end in managers.items()]
    for name, host, port in servers:
        if error := host_probe.try_connection(host, port):
            findings.append(judge_connection(HOST_NAME, name, error))
    request = {
        "packages": [requirement.name for requirement in requirements],
        "folders": _local_folders(plan.store),
        "addresses": [*endpoints, *servers],
    }
    before_s = time.time()
    try:
        outputs = spark.run_on_executors(session, inspect.getsource(host_probe), request)
    except DownpourError as error:
        return [*findings, from_error(HOST_NAME, "Spark", error)], {}
    expected = {host for host, _ in spark.pick_executors(managers).values()}
    if len(outputs) < len(expected):
        answers = f"those of {len(outputs)}"
        remedy = "try again when each executor has a free core"
        findings.append(Finding(HOST_NAME, "answers", f"{len(expected)} hosts'", answers, remedy))
    after_s, hosts = time.time(), {}
    for output in outputs:
        facts, others = decode_facts(output.lines)
        findings += judge_start(output.host, others, output.status, output.error)
        if facts is not None:
            hosts[facts.host] = facts
            findings += judge_executor(facts, host_probe.PYTHON, requirements)
            findings += judge_clock(facts, before_s, after_s)
            findings += judge_host(facts, gpus=plan.gpus)
    return findings, hosts


def check_ray_nodes(address: str, plan: CheckPlan) -> tuple[list[Finding], dict[str, HostFacts]]:
    """Run the probe on each node of the Ray at `address`; returns what is missing, and the facts.

    A node has the network's `start_s` to answer.
    """
    from deploy.clusters import ray_cluster

    requirements = list_requirements([])
    names = ["ray", *(requirement.name for requirement in requirements)]
    request = {"packages": names, "folders": _local_folders(plan.store)}
    source, call = inspect.getsource(host_probe), host_probe.read_facts.__name__
    wait_s = plan.network.start_s
    before_s = time.time()
    try:
        outputs = ray_cluster.run_on_nodes(address, source, call, request, wait_s)
    except DownpourError as error:
        return [from_error(HOST_NAME, "Ray", error)], {}
    after_s, findings, hosts = time.time(), [], {}
    for node, result, fault in outputs:
        if not node.death and (refused := host_probe.try_connection(node.address, node.port)):
            label, *_ = _label(f"Ray's node {node.host}", node.address, node.port)
            findings.append(judge_connection(HOST_NAME, label, refused))
        if fault:
            findings.append(judge_silent_node(node.host, node.address, fault))
            continue
        facts = msgspec.convert(result, HostFacts)
        hosts[f"{facts.host} (Ray)"] = facts
        version = host_probe.find_version("ray") or "none"
        findings += judge_ray_node(facts, host_probe.PYTHON, version, requirements)
        findings += judge_clock(facts, before_s, after_s)
        findings += judge_host(facts)
    return findings, hosts


@contextmanager
def listen_for_shards(
    network: ClusterNetwork, peer: str | None
) -> Iterator[tuple[list[Endpoint], list[Finding]]]:
    """Listen on the ports of shards, coordinator and copies, the first and the last of each range.

    Gives the servers as executors connect to them, and a finding for each port in use.
    """
    advertised = network.advertise or network.driver_host
    host = parse_advertised("--advertise", advertised)[0] if advertised else own_address(peer)
    endpoints, findings = [], []
    with ExitStack() as stack:
        for ports in network.ranges():
            for port in sorted({ports.first, ports.last}) if ports.name in _SHARD_RANGES else ():
                try:
                    check_listen(network.bind, [port])
                    server = socket.create_server((network.bind, port))
                except (BadInput, OSError) as error:
                    findings.append(from_error(HOST_NAME, f"port of {ports.name}", error))
                    continue
                stack.enter_context(server)
                if host is not None:
                    endpoints.append(_label(ports.name, host, port))
        yield endpoints, findings


def _request_for_driver(plan: CheckPlan) -> dict[str, Any]:
    return {"folders": _local_folders(plan.store), "secrets": list(plan.secrets)}


def _judge_packages(plan: CheckPlan) -> Iterator[Finding]:
    """Yield what the Python of the driver lacks for Spark and Ray."""
    extras = [*([EXECUTOR] if plan.spark else []), *(["server"] if plan.ray else [])]
    if plan.spark and find_spec("pyspark") is None:  # spark-submit brings its own
        yield Finding(HOST_NAME, "this Python", "PySpark", "none", "install the extra `spark`")
    try:
        missing = find_distributions(extras)[1]
    except BadInput as error:
        yield from_error(HOST_NAME, "packages", error)
        return
    for line in missing:
        name, _, fault = line.partition(", ")
        yield Finding(
            HOST_NAME, "this Python", name, fault, f"install the extras {', '.join(extras)}"
        )


def _judge_network(plan: CheckPlan, peer: str | None) -> Iterator[Finding]:
    """Yield why this host would have no address to give to others."""
    network = plan.network
    host = parse_advertised("--advertise", network.advertise)[0] if network.advertise else None
    try:
        check_advertised(network.bind, Advertised(host=host, peer=peer))
    except BadInput as error:
        yield from_error(HOST_NAME, "route", error)


def _judge_store(store: str | None) -> Iterator[Finding]:
    """Yield why a store that is no local folder cannot be written; read_facts tries a folder."""
    if store is None or _local_folders(store):
        return
    try:
        folder = open_store(store).below(_TRIAL)
        folder.put(_TRIAL, [b"downpour"])
        folder.settle()
        folder.remove(_TRIAL)
        folder.drop()
    except (OSError, DownpourError) as error:
        yield from_error(HOST_NAME, f"--store {open_store(store).place}", error)


def _judge_ray(plan: CheckPlan) -> Iterator[Finding]:
    """Yield why a run could not use the Ray at an address."""
    if plan.ray is None:
        return
    try:
        from deploy.clusters.ray_cluster import check_address, check_token

        check_address(plan.ray)
        if not plan.plaintext:
            check_token(os.environ)
    except (ImportError, BadInput) as error:
        yield from_error(HOST_NAME, "Ray", error)


def _start_spark(plan: CheckPlan) -> "AbstractContextManager[spark.SparkSession]":
    network = plan.network
    conf, start_s = network.spark_conf(), network.start_s
    return spark.start_session(plan.spark, 1, app=_TRIAL, env={}, conf=conf, start_s=start_s)


def _judge_guards(session: "spark.SparkSession", plan: CheckPlan) -> Iterator[Finding]:
    """Yield why secrets could be intercepted between Spark's processes."""
    if not plan.plaintext and not on_this_host(plan.network.bind):
        try:
            spark.check_guarded(session.range(1))
        except BadInput as error:
            yield from_error(HOST_NAME, "Spark", error)


def _local_folders(store: str | None) -> list[str]:
    """The folder in which a run would make its store, if that is on a disk; else none."""
    opened = open_store(store) if store is not None else None
    return [str(existing(opened.path.absolute()))] if isinstance(opened, LocalStore) else []


def _label(name: str, host: str, port: int) -> Endpoint:
    return f"{name}, {host}:{port}", host, port
