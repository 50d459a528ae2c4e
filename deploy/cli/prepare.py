"""`downpour prepare`: what later starts on this machine read instead of making it."""

import os
import time

import typer


def prepare() -> None:
    """Write what makes Spark start sooner on this machine, once for an installation.

    It is a file of some 190 MB in your cache folder, and takes less than a minute. Java's classes
    are read from there by each `downpour train`, by your own sessions with
    `deploy.spark_environment()`, and by executors on machines where it has run, too.
    """
    from deploy.clusters.class_archive import write_archive
    from deploy.clusters.java import spark_environment

    environ = os.environ | spark_environment()
    began = time.monotonic()
    archive = write_archive(environ["JAVA_HOME"], environ)
    took_s = time.monotonic() - began
    typer.echo(f"{archive}: {archive.stat().st_size / 1e6:.0f} MB, in {took_s:.0f} s")
