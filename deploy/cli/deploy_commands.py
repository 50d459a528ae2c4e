"""`downpour deploy`: what a cluster needs before a run starts on it."""

import json
from typing import Any

import typer

from deploy.cli.train import declare, list_parameters
from worker.job.network import ClusterNetwork

app = typer.Typer(help="Prepare a cluster: its ports, and what its hosts lack.")


@app.command()
def network(**settings: Any) -> None:
    """Print a cluster's addresses, names and ports as JSON, in ranges for a firewall.

    With them are the arguments of `downpour train`, `ray start` and Spark that follow from them.
    Each option moves a port or a range.
    """
    values = {name: value for name, value in settings.items() if value is not None}
    typer.echo(json.dumps(ClusterNetwork(**values).describe(), indent=2))


declare(network, list_parameters(ClusterNetwork))
