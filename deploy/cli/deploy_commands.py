"""`downpour deploy`: what a cluster needs before a run starts on it."""

import inspect
import json
from typing import Annotated, Any

import typer

from deploy.cli.train import declare, list_parameters
from worker.job.network import ClusterNetwork
from worker.job.options import LONGEST_S

app = typer.Typer(help="Prepare a cluster: its ports, and what its hosts lack; empty a node.")


@app.command()
def network(**settings: Any) -> None:
    """Print a cluster's addresses, names and ports as JSON, in ranges for a firewall.

    With them are the arguments of `downpour train`, `ray start` and Spark that follow from them.
    Each option moves a port or a range.
    """
    typer.echo(json.dumps(_network(settings).describe(), indent=2))


declare(network, list_parameters(ClusterNetwork))


@app.command()
def check(
    spark: Annotated[
        str | None,
        typer.Option(
            help="Check the executors of this Spark, too: spark://HOST:PORT, yarn,"
            " k8s://HOST:PORT, or submitted for that of a spark-submit.",
            show_default="this host alone",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(help="Check the nodes of this Ray, too: HOST:PORT.", show_default=False),
    ] = None,
    executors: Annotated[
        int, typer.Option(min=1, max=4096, help="Wait for this many executors.")
    ] = 1,
    store: Annotated[
        str | None,
        typer.Option(help="The path or URI of the snapshots to come.", show_default=False),
    ] = None,
    secret: Annotated[
        list[str],
        typer.Option(
            help="A file with a secret, besides Ray's and Spark's; repeatable.", show_default=False
        ),
    ] = [],  # noqa: B006  # Typer takes no tuple of any length
    gpus: Annotated[
        int, typer.Option(min=0, max=64, help="GPUs that each executor's host must have.")
    ] = 0,
    plaintext: Annotated[
        bool, typer.Option("--plaintext", help="Ray and Spark need not authenticate.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with the facts of each host.")
    ] = False,
    **settings: Any,
) -> None:
    """Print what hosts lack before anything starts on them, each with its remedy.

    The exit status is 1 if something is missing. The other options are those of `network`.
    """
    from deploy.doctor.cluster_check import CheckPlan, check_cluster

    plan = CheckPlan(
        network=_network(settings),
        spark=spark,
        ray=ray,
        executors=executors,
        store=store,
        secrets=tuple(secret),
        gpus=gpus,
        plaintext=plaintext,
    )
    report = check_cluster(plan)
    typer.echo(report.json() if as_json else report.text())
    if report.findings:
        raise typer.Exit(1)


_PARAMETERS = inspect.signature(check).parameters.values()
declare(
    check,
    [
        *(
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in _PARAMETERS
            if parameter.name != "settings"
        ),
        *list_parameters(ClusterNetwork, "Ports and addresses"),
    ],
)


@app.command()
def drain(
    node: Annotated[
        str,
        typer.Argument(help="The node's address, host name or id in Ray.", show_default=False),
    ],
    ray: Annotated[
        str, typer.Option(help="The head of Ray: HOST:PORT, or auto.", show_default=False)
    ],
    wait_s: Annotated[
        float, typer.Option(min=0.1, max=LONGEST_S, help="Seconds to wait for its last shard.")
    ] = 600.0,
) -> None:
    """Have a node of Ray take nothing more, and wait until it is empty, before maintenance.

    Shards that are on it stay until their jobs end or are paused. Resumed jobs have theirs on other
    nodes. Ray stops on the node when it is empty; start it again to take it back.
    """
    from deploy.clusters.ray_cluster import drain_node

    drain_node(ray, node, wait_s, typer.echo)
    typer.echo(f"node {node} is empty, and has left Ray")


def _network(settings: dict[str, Any]) -> ClusterNetwork:
    values = {name: value for name, value in settings.items() if value is not None}
    return ClusterNetwork(**values)
