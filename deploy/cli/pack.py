"""`downpour pack`: an archive with a Python for the machines of a cluster."""

from pathlib import Path
from typing import Annotated

import typer

from shards.errors import BadInput
from shards.plurals import format_count


def pack(
    archive: Annotated[
        Path, typer.Argument(help="The .tar.gz to write, or to check.", show_default=False)
    ],
    extra: Annotated[
        list[str],
        typer.Option(
            help="Add the packages of this extra to those of `executor`; repeatable. Drivers need"
            " cli, Ray's nodes server.",
            show_default=False,
        ),
    ] = [],  # noqa: B006  # Typer takes no tuple of any length
    wheelhouse: Annotated[
        Path | None,
        typer.Option(
            help="Install the packages from the wheels in this folder.",
            show_default="copied from this environment",
        ),
    ] = None,
    level: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=9,
            help="gzip's level: 1 packs sooner, 9 makes it smaller.",
            show_default="gzip's own",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Check that an archive runs on machines like this one."),
    ] = False,
) -> None:
    """Pack this Python and what a worker needs into an archive that runs wherever it is unpacked.

    Spark takes it as --archives. No network is used.
    """
    from deploy.clusters.archive import LEVEL
    from deploy.clusters.archive import pack as write_archive
    from deploy.clusters.archive_check import check_archive

    if check:
        if extra or wheelhouse is not None or level is not None or force:
            raise BadInput("--check", expected="no other option", got="one that builds an archive")
        facts = check_archive(archive)
        made_of = (
            f"Python {facts.manifest.python}, glibc {facts.manifest.glibc} or newer, build"
            f" {facts.manifest.build}"
            if facts.manifest is not None
            else "not made by downpour pack"
        )
        typer.echo(f"{archive}: for {facts.machine}; {made_of}; no link leaves it")
        return
    packed = write_archive(archive, extra, wheelhouse, force, level or LEVEL)
    contents, packages = packed.manifest, format_count(len(packed.manifest.packages), "package")
    typer.echo(
        f"{archive}: {archive.stat().st_size / 1e6:.0f} MB, {packed.unpacked_bytes / 1e6:.0f} MB"
        f" unpacked; Python {contents.python} with {packages} for {contents.machine},"
        f" glibc {contents.glibc} or newer"
    )
