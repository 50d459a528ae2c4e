"""`downpour reshard`: tells a run under way to go on with more shards, or fewer."""

from typing import Annotated

import typer

from deploy.settings import LONGEST_S


def reshard(
    run: Annotated[str, typer.Argument(help="The folder of a run under way.", show_default=False)],
    shards: Annotated[
        int,
        typer.Option(
            min=1, max=2**31 - 1, help="How many shards to go on with.", show_default=False
        ),
    ],
    wait_s: Annotated[
        float, typer.Option(min=0.1, max=LONGEST_S, help="Seconds that the move is waited for.")
    ] = 300.0,
) -> None:
    """Have a run under way on this machine go on with more shards, or fewer, while it trains."""
    from deploy.reshard_requests import resharded
    from deploy.snapshot_ref import origin_of
    from worker.job_shards import in_words

    origin = origin_of(run)
    resharded(origin, shards, wait_s)
    typer.echo(f"{origin.run} goes on with {in_words(shards)}")
