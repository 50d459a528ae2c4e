"""The command `downpour simulate`. The simulator is loaded when the command runs."""

from pathlib import Path
from typing import Annotated

import typer

from deploy.simulation_kinds import ClusterConfig, Profile


def simulate(
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, max=2**31 - 1, help="How many seeds to play.")] = 1,
    profile: Annotated[
        Profile | None,
        typer.Option(
            help="How much goes wrong: within what the system promises to survive, or beyond it.",
            show_default="within; every fourth batch of several seeds is beyond",
        ),
    ] = None,
    cluster: Annotated[
        ClusterConfig | None,
        typer.Option(help="The kind of cluster.", show_default="drawn by the seed"),
    ] = None,
    scenario: Annotated[
        Path | None, typer.Option(help="Play this file instead of seeds.", show_default=False)
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Where to write a failing run, reduced to few faults.")
    ] = Path("scenario.toml"),
    events: Annotated[
        bool, typer.Option("--events", help="Print every event with its time.")
    ] = False,
) -> None:
    """Run the protocol on a virtual clock, with faults drawn from a seed.

    If a promise is broken, the failing run is reduced and written to a scenario file, and the exit
    status is 1.
    """
    from deploy.cli.simulation_play import SimulateOptions
    from deploy.cli.simulation_play import simulate as play

    options = SimulateOptions(seed, seeds, profile, cluster, scenario, out, events)
    if not play(options, typer.echo):
        raise typer.Exit(1)
