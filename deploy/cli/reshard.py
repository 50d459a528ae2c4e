"""`downpour reshard`: changes the number of shards of a running job."""

from typing import Annotated

import typer

from worker.job.options import LONGEST_S


def reshard(
    run: Annotated[str, typer.Argument(help="The folder of a running job.", show_default=False)],
    shards: Annotated[
        int,
        typer.Option(min=1, max=2**31 - 1, help="The new number of shards.", show_default=False),
    ],
    wait_s: Annotated[
        float, typer.Option(min=0.1, max=LONGEST_S, help="Seconds to wait for the resharding.")
    ] = 300.0,
) -> None:
    """Change the number of shards of a run on this machine while it trains."""
    from deploy.run.requests import ask_run
    from deploy.run.snapshot_ref import origin_of
    from worker.job.run_control import ReshardOrder

    origin, order = origin_of(run), ReshardOrder(shards)
    ask_run(origin, order, wait_s)
    typer.echo(f"{origin.run} continues with {order}")
